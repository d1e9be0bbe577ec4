"""`hicache serve --record FILE`: records requests as a trace for `hicache replay`.

    {"block_tokens": 16, "block_bytes": 2097152}
    {"timestamp": 1764463406123, "input_length": 812, "output_length": 0, "hash_ids": [81…, 17…, …]}
    {"timestamp": 1764463409876, "session": "5b…", "stop": "tool_call", "output_length": 112}

Hashes, not prompts: an id is the block's key (BLAKE2b over its prefix) keyed with a secret that is
never written, so prompts cannot be guessed from a file, and ids of two runs of the daemon cannot be
compared; the same for names of conversations. Whole blocks only, times in milliseconds since 1970.
The second kind of row is a hint about its session's request before it. Requests of namespaces with
another number of tokens per block than the first one are left out.

Limited in size: when FILE is full, or exists when a daemon starts, it replaces FILE.1. A full disk,
or any other problem with the file, ends only the recording. A thread writes about every 0.1 s; if
the file system is slow, rows beyond `MAX_PENDING_BYTES` are dropped, counted and logged. Called
from the daemon's loop only, after the reply was sent.
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
from hicache.daemon.upkeep.supervised import WorkThread
from hicache.protocol.keys import ROOT_KEY, chain_keys

MAX_FILE_BYTES: Final = 256 << 20
MAX_PENDING_BYTES: Final = 16 << 20
CLOSE_S: Final = 2.0
_ID_BITS: Final = 53
"""Every JSON reader keeps this many; a million blocks have a collision once in 20,000 cases."""

log = logging.getLogger(__name__)
_encoder: Final = msgspec.json.Encoder()


class TraceRecorder:
    """Turns requests into rows. Call `close` at the end."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Open the file. Raises OSError where it cannot be written."""
        self.num_lost = 0
        self._file = _TraceFile(path, max_bytes)
        self.work_thread = WorkThread("the record of requests", self._file.write, max_waiting=2)
        self._lines: list[bytes] = []
        self._num_pending = 0
        self._secret = secrets.token_bytes(32)
        self._wall_s = time.time() - time.monotonic()
        self._block_tokens = 0

    def asked(self, session: Session, tokens: bytes, conversation: str, now_s: float) -> None:
        """See Observer."""
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
        """See Observer."""
        if conversation and (stop or answer_tokens) and self._block_tokens:
            alias = self._alias(session, conversation)
            row = {"timestamp": self._at(now_s), "session": alias, "stop": stop}
            if answer_tokens:
                row["output_length"] = answer_tokens
            self._note(_encoder.encode(row) + b"\n")

    def tick(self, now_s: float) -> None:
        """Write the rows recorded so far, unless the last ones are still being written."""
        self.work_thread.tick(now_s)
        if self._lines and not self.work_thread.num_waiting:
            self._hand_over()

    def close(self) -> None:
        """End the recording."""
        self._hand_over()
        self.work_thread.close(CLOSE_S)
        self._file.close()

    def _hand_over(self) -> None:
        lines, self._lines, self._num_pending = self._lines, [], 0
        self.work_thread.give(lines)

    def _note(self, line: bytes) -> None:
        if self._num_pending + len(line) > MAX_PENDING_BYTES:
            if not self.num_lost:
                log.error("%s: the file system is too slow: rows are lost", self._file.path)
            self.num_lost += 1
            return
        self._lines.append(line)
        self._num_pending += len(line)

    def _at(self, now_s: float) -> int:
        return round(1000 * (self._wall_s + now_s))

    def _alias(self, session: Session, conversation: str) -> str:
        """A pseudonym that distinguishes conversations."""
        name = f"{session.namespace}/{conversation}".encode()
        return hashlib.blake2b(name, key=self._secret, digest_size=8).hexdigest()


class _TraceFile:
    """The file and its rotation; each file begins with `header`. Used from the recorder's thread,
    except at the start and the end."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.header = b""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file: BinaryIO | None = self._open()

    @property
    def is_open(self) -> bool:
        """Whether it still takes rows."""
        return self._file is not None

    def write(self, lines: list[bytes]) -> None:
        """Append rows, and flush them. An OSError ends the recording."""
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
            log.error("%s: the recording has ended: %s", self.path, error.strerror or error)
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
