"""The daemon with a GPU host's worker, whose CuPy is a stand-in that copies host memory as late
as a GPU may: clients cannot map this HBM, so every block in it travels through DRAM."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.e2e.daemon_process import DaemonProcess, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(autouse=True)
def _cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_down_to_the_disk_and_back_and_its_worker_killed() -> None:
    hbm, dram = {"size": "24MiB", "device": "cuda:0"}, {"size": "16MiB"}
    with DaemonProcess(hbm=hbm, dram=dram) as server:
        client = server.client()
        wait_for(lambda: server.ask("health")["healthy"], "the GPU worker")
        assert "pinned" in server.tier("hbm")["note"]
        assert server.tier("hbm")["medium"] == "GPU 0"
        for number in range(30):  # 60 MiB
            store(client, prompt(number, 8))
            read(client, prompt(max(0, number - 2), 8))
        server.settle()
        assert server.tier("hbm")["used_bytes"] > 0
        assert server.tier("disk")["used_bytes"] > 0
        came = sum(read(client, prompt(number, 8)) for number in range(30))
        assert came == 30 * 8
        assert server.tier("hbm")["hits"] > 0

        pid = server.worker("gpu")
        psutil.Process(pid).kill()
        wait_for(lambda: server.worker("gpu") != pid, "another worker")
        wait_for(lambda: server.ask("health")["healthy"], "the tier")
        for number in range(30):
            read(client, prompt(number, 8))
        fresh = prompt(100, 8)
        assert store(client, fresh) == 8
        assert read(client, fresh) == 8
        server.settle()
