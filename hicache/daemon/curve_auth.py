"""CURVE authentication of a `tcp://` endpoint: admits the clients whose public keys are in
`socket.curve_allowed_clients_dir`.

    client ──handshake──▶ ZeroMQ's thread ──ZAP request──▶ CurveAuth ──▶ yes or no

Everything runs in the daemon's loop, between two polls: there is one request per connection, none
per message. The folder is checked at each request, so an added or removed key counts from the next
connection on (open connections stay open). Without a reply ZeroMQ refuses the connection: the
socket enforces its ZAP domain.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils import z85

from hicache.config import Problem, SocketConfig
from hicache.daemon.upkeep.supervised import Faults
from hicache.protocol.curve import read_pair, read_public

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
COMPLAINT_S: Final = 5.0
"""Refused connections are logged at most this often."""

log = logging.getLogger("hicache")

_Signature = tuple[tuple[str, int, int], ...]


def check_keys(config: SocketConfig) -> list[Problem]:
    """Problems of the key files, found before the start; empty without CURVE."""
    problems = []
    if config.curve_secret_key_file and config.curve_allowed_clients_dir:
        try:
            read_pair(config.curve_secret_key_file)
        except ValueError as error:
            problems.append(Problem("socket.curve_secret_key_file", str(error)))
        try:
            read_allowed(Path(config.curve_allowed_clients_dir))
        except ValueError as error:
            problems.append(Problem("socket.curve_allowed_clients_dir", str(error)))
    return problems


def read_allowed(folder: Path) -> dict[bytes, str]:
    """The public keys in a folder's `*.key` files, each with its file's name. Raises ValueError
    with a sentence if there is none, or if one cannot be used."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    allowed = {read_public(file): file.stem for file in sorted(folder.glob("*.key"))}
    if not allowed:
        raise ValueError(f"{folder} has no client's public key (NAME.key): no client could connect")
    return allowed


class CurveAuth:
    """Answers ZeroMQ's ZAP requests (RFC 27). Raises ValueError if a key file cannot be used."""

    def __init__(self, context: zmq.Context[Any], key_file: str, allowed_dir: str) -> None:
        self._secret = read_pair(key_file)[1]
        self._folder = Path(allowed_dir)
        self._allowed = read_allowed(self._folder)
        self._signature = self._sign()
        self._complained_s = -COMPLAINT_S
        self.faults = Faults("CURVE authentication")
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server. Call it before it binds."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"hicache")
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """Answer all waiting requests."""
        while self.socket.poll(0):
            question = self.socket.recv_multipart()
            is_known = False
            try:
                is_known = self._lets_in(question)
            except (OSError, ValueError, IndexError) as error:  # the folder, or the request
                self.faults.record_failure(error, time.monotonic())
            else:
                self.faults.record_success()
            verdict = (b"200", b"OK") if is_known else (b"400", b"this key is not listed")
            self.socket.send_multipart([*question[:2], *verdict, b"", b""])

    def _lets_in(self, question: list[bytes]) -> bool:
        _, _, _, address, _, mechanism, *credentials = question
        is_known = mechanism == b"CURVE" and self._knows(z85.encode(credentials[0]))
        if not is_known:
            self._complain(address.decode(errors="replace"))
        return is_known

    def _knows(self, key: bytes) -> bool:
        signature = self._sign()
        if signature != self._signature:
            self._read_again(signature)
        return key in self._allowed

    def _read_again(self, signature: _Signature) -> None:
        """Read all keys again. An unusable file is skipped with a warning."""
        self._allowed = {}
        for file in sorted(self._folder.glob("*.key")):
            try:
                self._allowed[read_public(file)] = file.stem
            except ValueError as error:
                log.warning("this client is not admitted: %s", error)
        self._signature = signature
        log.info("clients admitted now: %s", ", ".join(self._allowed.values()) or "none")

    def _sign(self) -> _Signature:
        """A value that changes when a file is added, replaced, rewritten or removed."""
        try:
            stats = [(file.name, file.stat()) for file in sorted(self._folder.glob("*.key"))]
        except OSError:
            return ()
        return tuple((name, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)

    def _complain(self, address: str) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAINT_S:
            self._complained_s = now_s
            log.warning(
                "a client from %s was refused: its public key is not in %s",
                address,
                self._folder,
            )
