"""One client of a soak: matches, fetches, compares and stores until SIGTERM or a failure.

    python -m tests.soak.client ENDPOINT SEED TRANSPORT JUDGES

A line of JSON on stdout reports its counts every second. Wrong bytes end it with status 3. A call
that outlasts its deadline is counted too, unless this process may be stopped (`JUDGES` is 0): then
its own times mean nothing.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections import Counter
from typing import Any, Final, Literal, cast

import numpy as np

from hicache.client import Client, Match
from tests.e2e.daemon_process import Tokens
from tests.soak import load

CALL_S: Final = 1.0
FETCH_S: Final = 2.0
PUT_S: Final = 3.0
GRACE_S: Final = 2.0
"""How much a loaded machine may add to a deadline before a call counts as late."""
AT_ONCE_S: Final = 0.05
REPORT_S: Final = 1.0
PREFILL_S: Final = 0.01
PIN_S: Final = 5.0
"""Some are unpinned before; the last ones expire before the soak checks for leaks."""
WRONG_BYTES: Final = 3


class SoakClient:
    def __init__(self, endpoint: str, seed: int, transport: str, judges: bool) -> None:
        self.rng = random.Random(seed)
        self.judges = judges
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.spec = load.MODELS[self.rng.randrange(len(load.MODELS))]
        self.client = Client(
            self.spec,
            endpoint,
            transport=cast(Literal["arena", "frames"], transport),
            timeout_s=CALL_S,
            fetch_timeout_s=FETCH_S,
            put_timeout_s=PUT_S,
            name=f"soak {seed}",
        )

    def turn(self) -> None:
        """One request of an inference engine, from its prompt to its new blocks."""
        number = min(int(self.rng.expovariate(0.08)), load.NUM_CONVERSATIONS - 1)
        tokens = load.prompt(number, self.rng.randint(1, load.MAX_TURNS))
        started_s = time.monotonic()
        match = self.client.match(tokens, request=self.rng.choice(["", str(number)]))
        waited_s = time.monotonic() - started_s
        self.judge("match", started_s, CALL_S)
        self.counts["matches"] += 1
        if not match.is_answered:  # at once: for a while after a failure, calls do not wait
            self.counts["unanswered at once" if waited_s < AT_ONCE_S else "unanswered"] += 1
        have = self.fetch(match, tokens) if match.lease else 0
        if self.rng.random() < 0.95:  # some forget to: their leases run out
            self.client.release(match, hop_bytes=1e6, hop_s=1e-3, total_s=0.01)
        if self.rng.random() < 0.2:
            self.client.observe(sum_n=len(tokens), sum_nc=1e3, seconds=0.05)
        time.sleep(self.rng.uniform(0.0, 2 * PREFILL_S))
        self.put(tokens, have)
        if self.rng.random() < 0.04:
            self.warm_or_pin(load.prompt(number, load.MAX_TURNS))

    def fetch(self, match: Match, tokens: Tokens) -> int:
        started_s = time.monotonic()
        if self.rng.random() < 0.05:  # gives up half-way
            for run in self.client.fetch_runs(match):
                self.counts["runs left"] += run.num_blocks
                return 0
        out = np.zeros((match.decision.reload_blocks, self.spec.block_bytes), np.uint8)
        fetched = self.client.fetch(match, out)
        self.judge("fetch", started_s, FETCH_S)
        expected = load.blocks(self.spec, tokens, 0, fetched.blocks)
        if not np.array_equal(out[: fetched.blocks], expected):
            self.counts["wrong"] += 1
            self.report()
            sys.exit(WRONG_BYTES)
        self.counts["fetched"] += fetched.blocks
        self.counts["missing"] += match.decision.reload_blocks - fetched.blocks
        return fetched.blocks

    def warm_or_pin(self, tokens: Tokens) -> None:
        """As a gateway does for prompts that will come."""
        wait_s = self.rng.choice([0.0, 0.3])
        started_s = time.monotonic()
        if self.rng.random() < 0.5:
            warmed = self.client.warm(tokens, wait_s=wait_s)
            self.judge("warm", started_s, CALL_S + wait_s)
            self.counts["warmed"] += warmed.warm_blocks
            return
        pinned = self.client.pin(tokens, ttl_s=self.rng.uniform(1.0, PIN_S), name="soak")
        self.judge("pin", started_s, CALL_S)
        self.counts["pinned"] += pinned.blocks
        if pinned and self.rng.random() < 0.5:
            self.client.unpin(pinned)

    def put(self, tokens: Tokens, first: int) -> None:
        last = (len(tokens) - 1) // self.spec.block_tokens
        if first == last:
            return
        new = load.blocks(self.spec, tokens, first, last)
        durable = self.rng.random() < 0.1
        started_s = time.monotonic()
        result = self.client.put(tokens, new, first=first, last=last, durable=durable)
        self.judge("put", started_s, PUT_S)
        self.counts["stored"] += result.stored
        self.counts["refused"] += result.refused

    def judge(self, what: str, started_s: float, deadline_s: float) -> None:
        took_s = time.monotonic() - started_s
        if self.judges:
            self.slowest_s = max(self.slowest_s, took_s)
            self.counts[f"late {what}"] += took_s > deadline_s + GRACE_S

    def report(self) -> None:
        counts: dict[str, Any] = {**self.counts, "slowest_s": round(self.slowest_s, 3)}
        print(json.dumps(counts), flush=True)


def main(endpoint: str, seed: str, transport: str, judges: str) -> None:
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    soak = SoakClient(endpoint, int(seed), transport, judges == "1")
    report_s = time.monotonic()
    while not ended:
        soak.turn()
        if time.monotonic() >= report_s:
            report_s = time.monotonic() + REPORT_S
            soak.report()
    soak.client.close()
    soak.report()


if __name__ == "__main__":
    main(*sys.argv[1:])
