"""The daemon's default endpoint, and helpers for endpoints.

The rule by which a client and the daemon find each other without configuration. Few imports: a
client imports it. Pure: the environment is passed in, so only command lines and applications read
it.

    HICACHE_ENDPOINT, if set
    ipc://$XDG_RUNTIME_DIR/hicache/hicache.sock, if XDG_RUNTIME_DIR is set
    ipc:///tmp/hicache-<uid>/hicache.sock otherwise
"""

from collections.abc import Mapping

ENDPOINT_VARIABLE = "HICACHE_ENDPOINT"
# struct sockaddr_un holds 108 bytes with the NUL at the end; ZeroMQ fails only later on a long one.
MAX_IPC_PATH_BYTES = 107


def default_endpoint(environ: Mapping[str, str], uid: int) -> str:
    """The endpoint for this user; never empty."""
    chosen = environ.get(ENDPOINT_VARIABLE)
    if chosen:
        return chosen
    runtime_dir = environ.get("XDG_RUNTIME_DIR")
    folder = f"{runtime_dir}/hicache" if runtime_dir else f"/tmp/hicache-{uid}"
    return f"ipc://{folder}/hicache.sock"


def ipc_path(endpoint: str) -> str | None:
    """The socket's path of an `ipc://` endpoint, None for any other."""
    return endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None


def tcp_address(endpoint: str) -> tuple[str, int] | None:
    """Host and port of a `tcp://` endpoint, None for any other or for one without a port."""
    if not endpoint.startswith("tcp://"):
        return None
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 65536):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a TCP host can be reached from this machine only."""
    if host in ("localhost", "::1"):
        return True
    parts = host.split(".")
    return len(parts) == 4 and parts[0] == "127" and all(part.isdecimal() for part in parts)
