"""CURVE keys of both ends: read from ZeroMQ's certificates, checked, set on a socket.

    NAME.key          public key: may be copied, goes into the daemon's folder of allowed clients
    NAME.key_secret   both keys: stays on its machine, mode 0600 (`hicache config keys` makes them)

Few imports: a client imports it. `daemon/curve_auth.py` decides which clients are admitted. An
unusable file or key raises ValueError with a sentence for the operator, which never contains a
secret.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A client's keys: the daemon's public key and its own pair, each 40 characters of Z85."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _checked("the daemon's public key", self.server_public)
        check_pair("the client's keys", self.public, self.secret)

    @classmethod
    def load(cls, client_secret_file: str | Path, server_public_file: str | Path) -> CurveKeys:
        """Read a client's own `.key_secret` and the daemon's `.key`."""
        public, secret = read_pair(client_secret_file)
        return cls(read_public(server_public_file), public, secret)

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Set the keys on a socket. Call it before the socket connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def read_pair(file: str | Path) -> tuple[bytes, bytes]:
    """Public and secret key of a `.key_secret`, which only its owner may be able to read."""
    public, secret = _read(file)
    if secret is None:
        raise ValueError(f"{file} holds no secret key: give the .key_secret, not the .key")
    mode = stat.S_IMODE(Path(file).stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"{file} can be used by others (mode {mode:04o}): chmod 600 {file}")
    check_pair(str(file), public, secret)
    return public, secret


def read_public(file: str | Path) -> bytes:
    """The public key of a `.key` (or of a `.key_secret`)."""
    return _checked(str(file), _read(file)[0])


def check_pair(where: str, public: bytes, secret: bytes) -> None:
    _checked(where, public)
    if zmq.curve_public(_checked(where, secret)) != public:
        raise ValueError(f"{where}: the public and the secret key do not belong together")


def _read(file: str | Path) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate  # not needed by a client without keys

    try:
        return load_certificate(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or 'no such file'}") from None
    except (ValueError, IndexError):
        raise ValueError(f"{file} is no CURVE certificate: it holds no public key") from None


def _checked(where: str, key: bytes) -> bytes:
    if not zmq.has("curve"):
        raise ValueError("this machine's ZeroMQ was built without CURVE")
    try:
        if len(z85.decode(key)) == 32:
            return key
    except (ValueError, KeyError):
        pass
    raise ValueError(f"{where}: a CURVE key has 40 characters of Z85")
