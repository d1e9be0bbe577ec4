"""How a worker ends when its daemon no longer reads its messages."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from hicache.transfer import worker_process as process
from hicache.transfer.worker import EXIT_BROKEN
from tests.e2e.faulty_worker import CONTROL, mark_beside
from tests.transfer.rig import DISK, Rig


def test_a_disk_that_cannot_be_left_in_order_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """1. Every sync fails. 2. The daemon hangs up. 3. The worker cannot close the disk in order
    or tell it so: a sentence on its standard error, and no traceback."""
    control = tmp_path / "fault"
    fault = {"kind": "sync", "nth": 1, "errno": errno.EIO, "at_start": False, "for_good": True}
    control.write_text(json.dumps({"folder": str(tmp_path / "disk"), **fault}))
    monkeypatch.setenv(CONTROL, str(control))
    monkeypatch.setattr(process, "_MODULE", "tests.e2e.faulty_worker")
    rig = Rig(tmp_path, devices=[DISK])
    rig.fill("dram", 1)
    assert rig.run(rig.move("dram", "disk", 1))[0].ok
    worker = rig.mover._devices[DISK].worker.process
    assert worker is not None
    os.kill(worker.pid, signal.SIGUSR1)
    worker.sock.shutdown(socket.SHUT_RDWR)
    assert worker._process.wait(60) == EXIT_BROKEN
    assert mark_beside(control).exists()
    said = capfd.readouterr().err
    assert said == "hicache-disk-0: sync: mdb_env_sync: Input/output error\n"
    rig.close()
