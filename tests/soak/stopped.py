"""What clients that are stopped (SIGSTOP) with leases and slots cost the other clients.

    make soak-stopped           python -m tests.soak.stopped [--rounds 6] [--cycles 200]

One is stopped in the middle of a put, one with a lease, one while frames are sent to it. Meanwhile
another client matches, fetches, releases and stores. Rounds with and without the stopped clients
alternate. Exit status 1 if they add more than LIMIT_S to the 99th percentile of a whole cycle. The
daemon's own processor time per cycle is reported as well: other work on the machine hardly changes
it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from hicache.client import Client
from tests.e2e.daemon_process import (
    SPEC,
    DaemonProcess,
    KilledClient,
    blocks_of,
    prompt,
    read,
    store,
)

LIMIT_S: Final = 0.010
HELD: Final = (("late-put", "writing", "arena"), ("match", "leased", "arena"))
NUM_BLOCKS: Final = 4


def cycles(client: Client, count: int, first: int) -> list[float]:
    """Seconds of each: match, fetch, compare, release, then store what is new."""
    seconds = []
    for number in range(count):
        known, new = prompt(number % 16, NUM_BLOCKS), prompt(first + number, NUM_BLOCKS)
        blocks = blocks_of(new)
        started_s = time.perf_counter()
        match = client.match(known)
        assert match.is_answered
        out = np.empty((match.decision.reload_blocks, SPEC.block_bytes), np.uint8)
        client.fetch(match, out)
        client.release(match)
        client.put(new, blocks)
        seconds.append(time.perf_counter() - started_s)
    return seconds


def stop_some(server: DaemonProcess, stack: ExitStack, number: int) -> None:
    """Each with its own prompt, which it holds until the end of the round."""
    for position, (what, word, transport) in enumerate(HELD):
        tokens = prompt(1_000_000 + 10 * number + position, 6)
        if what == "match":
            store(server.client(), tokens)
        victim = stack.enter_context(KilledClient(server, what, tokens, transport))
        victim.wait_for(word)
        victim.freeze()
    tokens = prompt(1_000_000 + 10 * number + 9, 6)
    store(server.client(), tokens)
    victim = stack.enter_context(KilledClient(server, "fetch", tokens, "frames"))
    victim.wait_for("fetching")
    victim.freeze()


def used_s(server: DaemonProcess) -> float:
    """Processor time of the daemon's main thread so far."""
    schedstat = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text()
    return int(schedstat.split()[0]) / 1e9


def figures(seconds: list[float]) -> dict[str, float]:
    at = {"p50_ms": 50, "p99_ms": 99, "max_ms": 100}
    return {name: round(1e3 * float(np.percentile(seconds, q)), 2) for name, q in at.items()}


def run(num_rounds: int, num_cycles: int) -> dict[str, Any]:
    alone: list[float] = []
    beside: list[float] = []
    used = {"alone": 0.0, "beside": 0.0}
    limits = {"lease_ttl": "1s"}
    with DaemonProcess(hbm=None, debug={"check": False}, limits=limits) as server:
        client = server.client()
        for number in range(16):
            store(client, prompt(number, NUM_BLOCKS))
        cycles(client, num_cycles, 50_000)
        for number in range(num_rounds):
            first = 100_000 + 2 * number * num_cycles
            before_s = used_s(server)
            alone += cycles(client, num_cycles, first)
            used["alone"] += used_s(server) - before_s
            with ExitStack() as stack:
                stop_some(server, stack, number)
                before_s = used_s(server)
                beside += cycles(client, num_cycles, first + num_cycles)
                used["beside"] += used_s(server) - before_s
        assert read(client, prompt(100_000, NUM_BLOCKS)) >= 0
    cost_s = (figures(beside)["p99_ms"] - figures(alone)["p99_ms"]) / 1e3
    return {
        "cycles": len(alone),
        "alone": figures(alone),
        "beside_stopped_clients": figures(beside),
        "daemon_ms_per_cycle": {k: round(1e3 * s / len(alone), 3) for k, s in used.items()},
        "p99_cost_ms": round(1e3 * cost_s, 2),
        "is_kept": cost_s <= LIMIT_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak-stopped", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cycles", type=int, default=200)
    options = parser.parse_args()
    result = run(options.rounds, options.cycles)
    print(json.dumps(result, indent=1))
    return 0 if result["is_kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
