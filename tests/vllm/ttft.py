"""Time to first token with a real vLLM: cold, on its own hit, and from each of hicache's tiers.

    make ttft-vllm

Medians of a few prompts each, one at a time, in bf16, scheduler and worker in one process. The
last columns tell what a hit from memory costs beside vLLM's own hit and whose time that is: `over
local` all of it, one empty scheduling step with it; `load` from the worker's first word to the
daemon to the last byte in vLLM's pages; `daemon CPU` what the daemon's process computed. Reported
only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.daemon_process import DaemonProcess, wait_for
from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.driver import Driver
from tests.vllm.test_reload import prompts, whole_blocks

LENGTHS = (512, 1024, 2048, 4096)
REPEATS = 5
ROOM = "1536MiB"


@dataclass(frozen=True)
class Cell:
    """Medians of the prompts of one length, in milliseconds; the CPU time is a mean."""

    first_token_ms: float
    load_ms: float = 0.0
    daemon_ms: float = 0.0


def measure(daemon: DaemonProcess, vllm: Driver, asked: list[list[int]], column: str) -> Cell:
    seconds = []
    daemon_ns = cpu_ns(daemon.pid)
    for prompt in asked:
        said = vllm.generate([prompt], max_tokens=1)
        expected = 0 if column == "cold" else whole_blocks(prompt)
        assert said.cached == [expected], f"{column}: {said.cached}, not {expected}"
        seconds.append(said.seconds)
    first_token_ms = 1e3 * statistics.median(seconds)
    if column in ("cold", "local"):
        return Cell(first_token_ms)
    daemon_ms = (cpu_ns(daemon.pid) - daemon_ns) / 1e6 / len(asked)
    loads = wait_for(lambda: load_seconds(daemon, len(asked)), "what the loads took")
    return Cell(first_token_ms, 1e3 * statistics.median(loads), daemon_ms)


def cpu_ns(pid: int) -> int:
    """Processor time of a process's threads."""
    schedules = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(schedule.read_text().split()[0]) for schedule in schedules)


def load_seconds(daemon: DaemonProcess, last: int) -> list[float]:
    """What the last loads took; nothing until vLLM has told of all of them."""
    rows = daemon.ask("explain", last=last)["decisions"]
    seconds = [row["actual"]["reload_s"] for row in rows]
    return [] if None in seconds else seconds


def main(model: Path, log: Path) -> None:
    asked = {n: prompts([n + 1] * REPEATS, seed=n) for n in LENGTHS}
    cells: dict[int, dict[str, Cell]] = {n: {} for n in LENGTHS}
    tiers: dict[str, Any] = {
        "hbm": {"size": ROOM},
        "dram": {"size": ROOM},
        "disk": {"size": "4GiB"},
    }
    with (
        DaemonProcess(**tiers) as daemon,
        Driver(model, daemon.endpoint, log, dtype="bfloat16") as vllm,
    ):
        vllm.generate(prompts([4097], seed=1), max_tokens=2)  # the first call of a shape is slow
        for column in ("cold", "local", "hbm (emulated)", "disk", "dram"):
            if column == "dram":
                daemon.stop()
                daemon.configure(**{**tiers, "hbm": None})
                daemon.start()
                vllm.reset()
                for n in LENGTHS:  # up from disk
                    for prompt in asked[n]:
                        vllm.generate([prompt], max_tokens=1)
            elif column == "disk":
                daemon.stop()
                daemon.start()
            for n in LENGTHS:
                daemon.settle()
                if column not in ("cold", "local"):
                    vllm.reset()
                cells[n][column] = measure(daemon, vllm, asked[n], column)
    report(cells)


def report(cells: dict[int, dict[str, Cell]]) -> None:
    columns = ["cold", "local", "hbm (emulated)", "dram", "disk"]
    own = ["over local", "load", "daemon CPU"]
    print(f"ms, n = {REPEATS}\n")
    print("| tokens | " + " | ".join([*columns, *own]) + " |")
    print("| " + "--- | " * (1 + len(columns) + len(own)))
    for n, row in cells.items():
        dram = row["dram"]
        over = dram.first_token_ms - row["local"].first_token_ms
        values = [f"{row[name].first_token_ms:.0f}" for name in columns]
        values += [f"{over:.0f}", f"{dram.load_ms:.1f}", f"{dram.daemon_ms:.1f}"]
        print(f"| {n} | " + " | ".join(values) + " |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("HICACHE_TEST_CHECKPOINT") or Path(scratch) / "model")
        if not folder.exists():
            write_checkpoint(folder)
        main(folder, Path(scratch) / "vllm.log")
