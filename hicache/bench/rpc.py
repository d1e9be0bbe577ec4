"""Round trips: ping, and match of prompts that are stored completely or not at all.

Batches of calls through the client alternate with as many bare echoes of the same bytes, both over
`ipc://` to a server in another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.bench.daemon_process import Running, measured_daemon
from hicache.bench.echo_floor import Echo
from hicache.bench.report import BenchError, ProgressStep
from hicache.client import Client, LayerGroup, Match, NamespaceSpec
from hicache.protocol.messages import pack

TOKENS = (8192, 512, 32768, 131072)
BLOCK_BYTES = 4096
BATCH = 20
WARM_UP = 100

Prompt = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class RpcRow:
    """One kind of call: microseconds of `n` calls, beside a bare echo of the same payload."""

    op: str
    tokens: int
    p50_us: float
    p99_us: float
    floor_p50_us: float
    ratio: float
    n: int

    @classmethod
    def of(cls, op: str, tokens: int, seconds: list[float], floor: list[float]) -> RpcRow:
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
        floor_p50 = float(np.median(floor)) * 1e6
        ratio = round(float(p50) / floor_p50, 3)
        p50_us, p99_us = round(float(p50), 2), round(float(p99), 2)
        return cls(op, tokens, p50_us, p99_us, round(floor_p50, 2), ratio, len(seconds))


def run(
    running: Running | None, block_tokens: int, num_calls: int, step: ProgressStep
) -> list[RpcRow]:
    """The rows, at least `num_calls` calls each. Raises BenchError."""
    config = {"block_tokens": block_tokens, "tiers": {"dram": {"size": "128MiB"}}}
    with measured_daemon(running, config) as (daemon, folder):
        floor = f"ipc://{folder}/floor.sock"
        with daemon.client(_spec(block_tokens), "bench rpc") as client, Echo(floor) as echo:
            return _Rpc(client, echo, block_tokens, num_calls, step).rows()


def _spec(block_tokens: int) -> NamespaceSpec:
    return NamespaceSpec(
        model_digest="bench",
        weights_digest=f"bench {time.time_ns()}",
        dtype="uint8",
        groups=(LayerGroup(1, 1, BLOCK_BYTES // block_tokens, "bench"),),
        block_tokens=block_tokens,
        block_bytes=BLOCK_BYTES,
        name="bench rpc",
    )


class _Rpc:
    def __init__(
        self, client: Client, echo: Echo, block_tokens: int, num_calls: int, step: ProgressStep
    ) -> None:
        self._client = client
        self._echo = echo
        self._block_tokens = block_tokens
        self._num_batches = -(-num_calls // BATCH)
        self._step = step
        self._rng = np.random.default_rng(1)

    def rows(self) -> list[RpcRow]:
        rows = [self._measure("ping", 0, _payload("ping"), self._ping, _nothing)]
        for num_tokens in TOKENS:
            for op, prompt in (
                ("match", self._stored(num_tokens)),
                ("match_miss", self._random(num_tokens)),
            ):
                wanted = num_tokens // self._block_tokens if op == "match" else 0

                def call(prompt: Prompt = prompt, wanted: int = wanted) -> Match:
                    match = self._client.match(prompt)
                    if not match.is_answered or match.hit_blocks != wanted:
                        raise BenchError(f"a match went wrong: {match.decision.sentence}")
                    return match

                payload = _payload("match", tokens=prompt.tobytes())
                rows.append(self._measure(op, num_tokens, payload, call, self._release))
        return rows

    def _measure(
        self,
        op: str,
        num_tokens: int,
        payload: bytes,
        call: Callable[[], Any],
        undo: Callable[[Any], object],
    ) -> RpcRow:
        """`undo` (which releases leases) is not timed."""
        for _ in range(WARM_UP):
            undo(call())
            self._echo.call(payload)
        seconds: list[float] = []
        floor: list[float] = []
        clock = time.perf_counter
        for batch in range(self._num_batches):
            self._step(f"{op}, {num_tokens:,} tokens", batch, self._num_batches)
            for _ in range(BATCH):
                start = clock()
                answer = call()
                seconds.append(clock() - start)
                undo(answer)
            for _ in range(BATCH):
                start = clock()
                self._echo.call(payload)
                floor.append(clock() - start)
        return RpcRow.of(op, num_tokens, seconds, floor)

    def _release(self, match: Match) -> None:
        """A release has no reply; the ping waits until it is done, so the next match does not."""
        self._client.release(match)
        self._ping()

    def _ping(self) -> None:
        if self._client.ping() is None:
            raise BenchError(f"a ping went wrong: {self._client.last_error}")

    def _random(self, num_tokens: int) -> Prompt:
        return self._rng.integers(0, 2**32, num_tokens, np.uint32)

    def _stored(self, num_tokens: int) -> Prompt:
        """Store a prompt's blocks, as the only ones."""
        self._client.clear()
        prompt = self._random(num_tokens)
        blocks = np.ones((num_tokens // self._block_tokens, BLOCK_BYTES), np.uint8)
        result = self._client.put(prompt, blocks)
        if result.stored != len(blocks):
            raise BenchError(f"the prompt could not be stored: {result}; {self._client.last_error}")
        return prompt


def _payload(op: str, **body: bytes) -> bytes:
    """A request as the client sends it."""
    head = {"op": op, "id": 12345, "sent_s": time.monotonic(), "deadline_s": 0.9, **body}
    return pack({**head, "s": bytes(16)} if op == "match" else head)


def _nothing(_: object) -> None:
    pass
