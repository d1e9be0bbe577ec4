"""Fixtures of the end-to-end tests. A daemon that no test harms is shared by the tests of a file,
each with a model of its own; whoever kills, stops or fills one makes one of its own."""

from collections.abc import Iterator

import pytest

from tests.e2e.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(limits={"max_message": "1MiB", "max_sessions": 40}) as server:
        yield server


@pytest.fixture
def server(shared_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The shared daemon; its clients are gone after each test, and it must still serve."""
    yield shared_daemon
    shared_daemon.forget_clients()
    assert shared_daemon.is_ready()
