"""Time to first token with a real vLLM: cold, on its own hit, and from each of hicache's tiers.

    make ttft-vllm

Medians of a few prompts each, one at a time, in bf16; the last columns are what a hit through the
daemon takes beside vLLM's own: the lookup, the copies, and one scheduling step more. Reported only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.household import Household
from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.driver import Driver
from tests.vllm.test_reload import prompts, whole_blocks

LENGTHS = (512, 1024, 2048, 4096)
REPEATS = 3


def median_ms(driver: Driver, asked: list[list[int]], cached: bool) -> float:
    seconds = []
    for prompt in asked:
        said = driver.generate([prompt], max_tokens=1)
        assert said.cached == [whole_blocks(prompt) if cached else 0], said.cached
        seconds.append(said.seconds)
    return 1e3 * statistics.median(seconds)


def main(model: Path, log: Path) -> None:
    asked = {n: prompts([n + 1] * REPEATS, seed=n) for n in LENGTHS}
    rows: dict[int, dict[str, float]] = {n: {} for n in LENGTHS}
    tiers: dict[str, Any] = {
        "hbm": {"size": "1GiB"},
        "dram": {"size": "1GiB"},
        "disk": {"size": "4GiB"},
    }
    with Household(**tiers) as house, Driver(model, house.endpoint, log, dtype="bfloat16") as vllm:
        vllm.generate(prompts([4097], seed=1), max_tokens=2)  # the first call of a shape is slow
        for column in ("cold", "local", "hbm (emulated)", "disk", "dram"):
            if column == "dram":
                house.stop()
                house.configure(**{**tiers, "hbm": None})
                house.start()
                for n in LENGTHS:  # up from disk
                    for prompt in asked[n]:
                        vllm.generate([prompt], max_tokens=1)
            elif column == "disk":
                house.stop()
                house.start()
            for n in LENGTHS:
                if column not in ("cold", "local"):
                    house.settle()
                    vllm.reset()
                rows[n][column] = median_ms(vllm, asked[n], cached=column != "cold")
    columns = list(rows[LENGTHS[0]])
    print(
        "| tokens | " + " | ".join(f"{name}, ms" for name in columns) + " | dram over local, ms |"
    )
    print("| " + "--- | " * (len(columns) + 2))
    for n, row in rows.items():
        over = row["dram"] - row["local"]
        print(f"| {n} | " + " | ".join(f"{row[c]:.0f}" for c in columns) + f" | {over:.0f} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("HICACHE_TEST_CHECKPOINT") or Path(scratch) / "model")
        if not folder.exists():
            write_checkpoint(folder)
        main(folder, Path(scratch) / "vllm.log")
