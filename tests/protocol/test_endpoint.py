"""The rule by which clients and the daemon find each other."""

import pytest

from hicache.protocol.endpoint import default_endpoint, ipc_path, is_loopback, tcp_address


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, "ipc:///tmp/hicache-7/hicache.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "ipc:///run/user/7/hicache/hicache.sock"),
        ({"XDG_RUNTIME_DIR": "/r", "HICACHE_ENDPOINT": "tcp://127.0.0.1:5"}, "tcp://127.0.0.1:5"),
        ({"HICACHE_ENDPOINT": ""}, "ipc:///tmp/hicache-7/hicache.sock"),
    ],
)
def test_default_endpoint(environ: dict[str, str], endpoint: str) -> None:
    assert default_endpoint(environ, 7) == endpoint


def test_parts() -> None:
    assert ipc_path("ipc:///a/b") == "/a/b"
    assert ipc_path("tcp://h:1") is None
    assert tcp_address("tcp://h:1") == ("h", 1)
    assert tcp_address("tcp://[::1]:1") == ("::1", 1)
    assert tcp_address("tcp://h") is None
    assert tcp_address("tcp://h:99999") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "eth0", "127.evil.example.com", "10.0.0.1", "::"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
