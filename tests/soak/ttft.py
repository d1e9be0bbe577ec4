"""Time to first token of a real model while its daemon is killed, stopped and restarted at random.

    make soak-ttft              python -m tests.soak.ttft [--requests 200] [--seed N] [--json FILE]

SmolLM2 in bf16 answers prompts that grow turn by turn, through hicache with the client's deadlines
set to MATCH_S and FETCH_S. The same prompts are answered without hicache and without a daemon,
before and after. Exit status 1 if the 99th percentile with hicache is more than 1.02 times that
without it, plus the deadlines. Times are wall clock: on a machine with other work, compare figures
of one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from hicache.client import Client, DaemonAbsent
from hicache.connectors.transformers import CachedModel
from hicache.demo.conversation import SCRIPTS, shared_tokens
from hicache.demo.demo_model import DemoModel, load_smollm2
from tests.e2e.daemon_process import DaemonProcess

MATCH_S: Final = 0.25
FETCH_S: Final = 0.5
ALLOWED: Final = 1.02
FIRST_TOKENS, TURN_TOKENS, MAX_TURNS = 96, 16, 8
QUIET_S: Final = (0.5, 4.0)
"""Time between two actions, at least and at most."""


class Chaos:
    """A thread that kills, stops and restarts the daemon at random. `actions` counts by name."""

    def __init__(self, server: DaemonProcess, seed: int) -> None:
        self.actions: Counter[str] = Counter()
        self._server, self._rng = server, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos")

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        actions: list[Callable[[], None]] = [self.kill, self.stop, self.restart, self.stop_worker]
        while not self._over.wait(self._rng.uniform(*QUIET_S)):
            action = self._rng.choice(actions)
            with suppress(DaemonAbsent, psutil.NoSuchProcess, ProcessLookupError):
                action()
                self.actions[action.__name__] += 1

    def kill(self) -> None:
        self._server.kill()
        self._over.wait(self._rng.uniform(0.0, 2.0))
        self._server.start()

    def stop(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)
        self._over.wait(self._rng.uniform(0.1, 3.0))
        os.kill(self._server.pid, signal.SIGCONT)

    def restart(self) -> None:
        self._server.stop()
        self._server.start()

    def stop_worker(self) -> None:
        worker = self._server.worker("disk")
        os.kill(worker, signal.SIGSTOP)
        self._over.wait(self._rng.uniform(0.1, 3.0))
        os.kill(worker, signal.SIGCONT)


def prompts(model: DemoModel, num_requests: int, seed: int) -> list[list[int]]:
    """Conversations that share a beginning, with their turns interleaved at random."""
    rng = random.Random(seed)
    shared = shared_tokens(model.encode)[:FIRST_TOKENS]
    script = model.encode(" ".join(line for script in SCRIPTS.values() for line in script))
    requests: list[list[int]] = []
    turns: Counter[int] = Counter()
    while len(requests) < num_requests:
        number = rng.randrange(8)
        turns[number] = turns[number] % MAX_TURNS + 1
        own = [script[(number * 37 + n) % len(script)] for n in range(turns[number] * TURN_TOKENS)]
        requests.append(shared + own)
    return requests


def measured(model: CachedModel, requests: list[list[int]], what: str) -> tuple[list[float], int]:
    """Seconds to the first token of each, and the tokens that were reloaded."""
    seconds, hit_tokens = [], 0
    for number, tokens in enumerate(requests):
        answer = model.generate(tokens, 1)
        seconds.append(answer.ttft_s)
        hit_tokens += sum(answer.hit_tokens.values())
        if sys.stderr.isatty():
            print(f"\r{what}: {number + 1} of {len(requests)} ", end="", file=sys.stderr)
    return seconds, hit_tokens


def figures(seconds: list[float]) -> dict[str, float]:
    names = {"p50_s": 50, "p99_s": 99, "max_s": 100}
    found = {name: round(float(np.percentile(seconds, at)), 4) for name, at in names.items()}
    return {**found, "mean_s": round(float(np.mean(seconds)), 4)}


def run(num_requests: int, seed: int) -> dict[str, Any]:
    model = load_smollm2("bfloat16")
    torch.set_num_threads(1)  # leaves processors to the daemon
    requests = prompts(model, num_requests, seed)
    bare = CachedModel(model.model, None)
    bare.warm_up(requests[-1], TURN_TOKENS)
    half = len(requests) // 2
    began_s = time.monotonic()
    without, _ = measured(bare, requests[:half], "without, before")
    tiers: dict[str, Any] = {"hbm": None, "dram": {"size": "256MiB"}, "disk": {"size": "1GiB"}}
    with DaemonProcess(**tiers, planner={"mode": "measured"}, debug={"check": False}) as server:
        server.expected_errors = ["worker", "disk", "host"]

        def connect(spec: Any) -> Client:
            return Client(spec, server.endpoint, timeout_s=MATCH_S, fetch_timeout_s=FETCH_S)

        served = CachedModel(model.model, connect)
        with Chaos(server, seed) as chaos:
            with_it, hit_tokens = measured(served, requests, "with hicache, under chaos")
        served.close()
        if server.process is None:
            server.start()
    without += measured(bare, requests[half:], "without, after")[0]
    bound_s = ALLOWED * figures(without)["p99_s"] + MATCH_S + FETCH_S
    return {
        "requests": num_requests,
        "seed": seed,
        "duration_s": round(time.monotonic() - began_s),
        "prompt_tokens": round(float(np.mean([len(tokens) for tokens in requests]))),
        "reloaded_share": round(hit_tokens / sum(map(len, requests)), 3),
        "actions": dict(chaos.actions),
        "deadlines_s": {"match": MATCH_S, "fetch": FETCH_S},
        "without": figures(without),
        "with_hicache": figures(with_it),
        "bound_p99_s": round(bound_s, 4),
        "is_kept": figures(with_it)["p99_s"] <= bound_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak-ttft", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", default="", help="write the result to this file")
    options = parser.parse_args()
    result = run(options.requests, options.seed)
    text = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    print(text)
    return 0 if result["is_kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
