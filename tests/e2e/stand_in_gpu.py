"""A daemon whose GPU is the stand-in: GPU memory is host memory, and IPC handles name memory files.

While the gate, a file, is locked, copies stand still half-way (tests/e2e/stand_in/cupy.py).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from hicache.bench.gpu_check.stand_in_host import DRIVER
from tests.e2e.daemon_process import DaemonProcess, wait_for
from tests.shared_library import compiled

STAND_IN: Final = Path(__file__).parent / "stand_in"


def compiled_driver(folder: Path) -> Path:
    """The library of that name in this folder."""
    return compiled(DRIVER, folder / "libcuda.so.1")


def use_stand_in(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    """For every process that is started from now on."""
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.parent))


@contextmanager
def daemon_process(
    monkeypatch: pytest.MonkeyPatch, driver: Path, gate: Path, **more_of_hbm: str
) -> Iterator[DaemonProcess]:
    use_stand_in(monkeypatch, driver)
    monkeypatch.setenv("STAND_IN_GATE", str(gate))
    hbm, dram = {"size": "24MiB", "device": "cuda:0", **more_of_hbm}, {"size": "16MiB"}
    with DaemonProcess(hbm=hbm, dram=dram, patience_s=120.0) as server:
        wait_for(lambda: server.ask("health")["healthy"], "the GPU worker", patience_s=120.0)
        yield server


@contextmanager
def held(gate: Path) -> Iterator[None]:
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
