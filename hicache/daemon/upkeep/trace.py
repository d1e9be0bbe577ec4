"""`hicache serve --record FILE`: what was asked for, as a trace that `hicache replay` reads.

    {"block_tokens": 16, "block_bytes": 2097152}
    {"timestamp": 1764463406123, "input_length": 812, "output_length": 0, "hash_ids": [81…, 17…, …]}
    {"timestamp": 1764463409876, "session": "5b…", "stop": "tool_call", "output_length": 112}

Hashes, not prompts: an id is the block's key (BLAKE2b over all before it) under a secret that is
never written, so nobody can try prompts against a file, and ids of two runs of the daemon do not
compare; neither do the names of conversations. Whole blocks only, in milliseconds since 1970. The
second kind of row is a hint, about the request of its session before it. Requests of namespaces
whose blocks have another number of tokens than the first one's are left out.

Bounded: when FILE is full, or there when a daemon starts, it becomes FILE.1 in place of an older
one. A full disk, or any other trouble with the file, ends the recording and nothing else. A thread
writes, about every tenth of a second; rows that a file system keeps waiting beyond
`MAX_PENDING_BYTES` are left out, counted and told. Called from the daemon's loop only, when the
answer has left.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from hicache.daemon.sessions import Session
from hicache.daemon.upkeep.supervised import Hand
from hicache.protocol.keys import ROOT_KEY, chain_keys

MAX_FILE_BYTES: Final = 256 << 20
MAX_PENDING_BYTES: Final = 16 << 20
CLOSE_S: Final = 2.0
_ID_BITS: Final = 53
"""As many as every reader of JSON keeps; among a million blocks two are alike once in 20,000."""

log = logging.getLogger(__name__)
_encoder: Final = msgspec.json.Encoder()


class TraceRecorder:
    """Turns what was asked for into rows. `close` at the end."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises OSError where the file cannot be written."""
        self.num_lost = 0
        self._file = _TraceFile(path, max_bytes)
        self.hand = Hand("the record of requests", self._file.write, max_waiting=2)
        self._lines: list[bytes] = []
        self._num_pending = 0
        self._secret = secrets.token_bytes(32)
        self._wall_s = time.time() - time.monotonic()
        self._block_tokens = 0

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        """A prompt came."""
        spec = session.spec
        if not self._block_tokens:
            self._block_tokens = spec.block_tokens
            sizes = {"block_tokens": spec.block_tokens, "block_bytes": spec.block_bytes}
            self._file.header = _encoder.encode(sizes) + b"\n"
        if not self._file.is_open or spec.block_tokens != self._block_tokens:
            return
        namespace = hashlib.blake2b(
            session.namespace.to_bytes(8, "little"), key=self._secret
        ).digest()
        step = 4 * spec.block_tokens
        ids = [
            int.from_bytes(key[:8], "little") >> 64 - _ID_BITS
            for key in chain_keys(namespace, ROOT_KEY, tokens, step)
        ]
        row: dict[str, Any] = {
            "timestamp": self._at(now_s),
            "input_length": len(tokens) // 4,
            "output_length": 0,
            "hash_ids": ids,
        }
        if conversation:
            row["session"] = self._alias(session, conversation)
        self._note(_encoder.encode(row) + b"\n")

    def hinted(
        self, session: Session, conversation: str, stop: str, answer_tokens: int, now_s: float
    ) -> None:
        """An answer of a conversation ended, for this reason, after so many tokens."""
        if conversation and (stop or answer_tokens) and self._block_tokens:
            alias = self._alias(session, conversation)
            row = {"timestamp": self._at(now_s), "session": alias, "stop": stop}
            if answer_tokens:
                row["output_length"] = answer_tokens
            self._note(_encoder.encode(row) + b"\n")

    def tick(self, now_s: float) -> None:
        """Have written what was recorded so far, unless the last lot is still being written."""
        self.hand.tick(now_s)
        if self._lines and not self.hand.num_waiting:
            self._hand_over()

    def close(self) -> None:
        """End the recording."""
        self._hand_over()
        self.hand.close(CLOSE_S)
        self._file.close()

    def _hand_over(self) -> None:
        lines, self._lines, self._num_pending = self._lines, [], 0
        self.hand.give(lines)

    def _note(self, line: bytes) -> None:
        if self._num_pending + len(line) > MAX_PENDING_BYTES:
            if not self.num_lost:
                log.error("%s: the file system keeps rows waiting: some are lost", self._file.path)
            self.num_lost += 1
            return
        self._lines.append(line)
        self._num_pending += len(line)

    def _at(self, now_s: float) -> int:
        return round(1000 * (self._wall_s + now_s))

    def _alias(self, session: Session, conversation: str) -> str:
        """A name that only tells conversations apart."""
        name = f"{session.namespace}/{conversation}".encode()
        return hashlib.blake2b(name, key=self._secret, digest_size=8).hexdigest()


class _TraceFile:
    """The file and its rotation; `header` begins each. Used from the recorder's thread, but for
    its making and its end."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.header = b""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file: BinaryIO | None = self._open()

    @property
    def is_open(self) -> bool:
        """Whether it takes rows, still."""
        return self._file is not None

    def write(self, lines: list[bytes]) -> None:
        """Append rows, and let others read them. OSError ends the recording."""
        if self._file is None:
            return
        try:
            for line in lines:
                if not self._num_bytes:
                    self._num_bytes += self._file.write(self.header)
                elif self._num_bytes + len(line) > self._max_bytes:
                    self._file.close()
                    self._file = self._open()
                    self._num_bytes += self._file.write(self.header)
                self._num_bytes += self._file.write(line)
            self._file.flush()
        except OSError as error:
            log.error("%s: nothing more is recorded: %s", self.path, error.strerror or error)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        if self.path.exists() and self.path.stat().st_size:
            self.path.replace(f"{self.path}.1")
        self._num_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.fdopen(os.open(self.path, flags, 0o600), "wb", buffering=1 << 20)
