"""For every test: on a busy machine an example may take as long as it takes. And what tests in
several folders need of the stand-in GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.daemon_process import DaemonProcess
from tests.e2e.stand_in_gpu import compiled_driver, daemon_process

settings.register_profile("hicache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hicache")


@pytest.fixture(scope="session")
def stand_in_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is locked, the GPU worker's copies stand still half-way."""
    file = tmp_path / "gate"
    file.touch()
    return file


@pytest.fixture
def gpu_daemon(
    stand_in_driver: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DaemonProcess]:
    with daemon_process(monkeypatch, stand_in_driver, gate) as server:
        yield server
