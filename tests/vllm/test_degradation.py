"""One real vLLM, started without a daemon, through everything that can become of one. What the
model says never changes, and nothing takes longer than the deadlines.

The model is a small one of random weights whose blocks are as large as a real one's, since most of
what it says here has to be computed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted_daemon import ScriptedDaemon
from tests.e2e.daemon_process import DaemonProcess, wait_for
from tests.vllm.driver import Driver, Said
from tests.vllm.small_models import write_model
from tests.vllm.test_reload import prompts, whole_blocks

pytestmark = pytest.mark.timeout(1800)

ASKED = prompts([400, 530, 660], seed=3)
OTHERS = prompts([1700], seed=4)
ALL = [whole_blocks(prompt) for prompt in ASKED]
WARNING = "vLLM goes on without it"


class Story:
    """vLLM and its daemon. The first answer is given without a daemon; all others must equal it."""

    def __init__(self, driver: Driver, daemon: DaemonProcess) -> None:
        self.driver, self.daemon = driver, daemon
        self.expected = driver.generate(ASKED)

    def ask(self) -> Said:
        """Again, with vLLM's own cache emptied."""
        self.driver.reset()
        return self.check(self.driver.generate(ASKED))

    def check(self, said: Said) -> Said:
        assert said.outputs == self.expected.outputs
        return said

    def ask_until_served(self) -> None:
        """The daemon is back: by itself vLLM comes to it again, and loads everything."""
        wait_for(lambda: self.ask().cached == ALL, "hits of everything", patience_s=200.0)

    def absent_at_start(self) -> None:
        assert self.driver.said().count(WARNING) == 1
        assert self.driver.metric("vllm:hicache_troubles") > 0

    def there(self) -> None:
        self.daemon.start()
        self.ask_until_served()

    def drive_to_disk(self) -> int:
        """Others fill the memory. The pid of the disk's worker."""
        self.daemon.settle()
        self.driver.generate(OTHERS)
        self.daemon.settle()
        return self.daemon.worker("disk")

    def disk_stands_still(self) -> None:
        """Each load ends by its deadline, and what did not come is computed."""
        disk = self.drive_to_disk()
        os.kill(disk, signal.SIGSTOP)
        try:
            assert self.ask().cached != ALL
        finally:
            os.kill(disk, signal.SIGCONT)
        self.ask_until_served()

    def dies_while_blocks_are_loading(self) -> None:
        """The disk's worker stands still: the load is under way for sure."""
        disk = self.drive_to_disk()
        os.kill(disk, signal.SIGSTOP)
        try:
            self.driver.reset()
            fetches = self.daemon.stats()["requests"].get("fetch", 0)
            self.driver.begin(ASKED)
            wait_for(lambda: self.daemon.stats()["requests"].get("fetch", 0) > fetches, "a fetch")
        finally:
            assert self.daemon.process is not None
            self.daemon.process.kill()
            os.kill(disk, signal.SIGCONT)
        said = self.check(self.driver.end())
        assert said.cached != ALL
        self.daemon.kill()

    def back_from_disk(self) -> None:
        self.daemon.start()
        self.ask_until_served()

    def stands_still(self) -> None:
        os.kill(self.daemon.pid, signal.SIGSTOP)
        try:
            said = self.ask()
            assert sum(said.cached) == 0
        finally:
            os.kill(self.daemon.pid, signal.SIGCONT)
        self.ask_until_served()

    def damaged_on_disk(self) -> None:
        """Every block of the file is bad: all are computed, and stored anew."""
        self.daemon.settle()
        self.daemon.stop()
        (file,) = self.daemon.disk.glob("class-*/data.mdb")
        with file.open("r+b") as data:
            for start in range(1 << 20, file.stat().st_size, 1 << 20):
                data.seek(start)
                data.write(b"\x55" * 64)
        self.daemon.start()
        assert sum(self.ask().cached) < sum(ALL)
        self.ask_until_served()

    def talks_garbage(self) -> None:
        self.daemon.stop()
        impostor = ScriptedDaemon(self.daemon.endpoint)
        for op in ("hello", "match", "put", "ping", "heartbeat"):
            impostor.on(op, b"\xc1 this is no message")
        impostor.start()
        try:
            assert sum(self.ask().cached) == 0
        finally:
            impostor.stop()

    def is_full(self) -> None:
        """Room for three blocks of the twelve."""
        self.daemon.configure(hbm=None, dram={"size": "14MiB"}, disk=None)
        self.daemon.start()
        self.ask()
        self.ask()
        assert self.daemon.stats()["leases"] == 0


CHAPTERS = (
    Story.absent_at_start,
    Story.there,
    Story.disk_stands_still,
    Story.dies_while_blocks_are_loading,
    Story.back_from_disk,
    Story.stands_still,
    Story.damaged_on_disk,
    Story.talks_garbage,
    Story.is_full,
)


def test_what_can_become_of_a_daemon(checkpoint: Path, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    model = write_model(tmp_path / "model", "llama", **heads)  # 4 MiB a block
    tiers: dict[str, Any] = {"dram": {"size": "56MiB"}, "disk": {"size": "1GiB"}}
    daemon = DaemonProcess(hbm=None, autostart=False, patience_s=300.0, **tiers)
    log = tmp_path / "vllm.log"
    options: dict[str, Any] = {
        "extra": {"lookup_s": 3.0, "load_s": 6.0, "store_s": 3.0},
        "tokenizer": str(checkpoint),
        "max_model_len": 4096,
    }
    with daemon, Driver(model, daemon.endpoint, log, **options) as driver:
        story = Story(driver, daemon)
        for chapter in CHAPTERS:
            print("now:", chapter.__name__)
            chapter(story)
