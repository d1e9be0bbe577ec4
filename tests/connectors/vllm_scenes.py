"""What tests of the vLLM connector's two sides begin with: prompts, requests, clients of a real
daemon, and scenes that more than one of them plays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hicache.client import AsyncClient
from hicache.protocol.keys import NamespaceSpec
from tests.connectors.vllm_engine import Engine, Request, expected_output

Make = Callable[..., Engine]

_serial = itertools.count()


def tokens(seed: int, count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    return drawn


def request(name: str, prompt: list[int], **more: Any) -> Request:
    return Request(name, prompt, **more)


def check(requests: list[Request], num_ranks: int = 1) -> None:
    for one in requests:
        assert one.output == expected_output(one, num_ranks), one.request_id


def connecting(
    endpoint: str, *, timeout_s: float, load_s: float, store_s: float
) -> Callable[..., AsyncClient]:
    """Makes clients for either side of an Engine."""

    def connect(spec: NamespaceSpec, group: bytes = b"") -> AsyncClient:
        return AsyncClient(
            spec,
            endpoint,
            timeout_s=timeout_s,
            fetch_timeout_s=load_s,
            put_timeout_s=store_s,
            group=group,
        )

    return connect


def until(engine: Engine, asked: Request, status: str) -> None:
    while asked.status != status:
        engine.step()


def repeated(engine: Engine, prompt: list[int]) -> Iterator[Request]:
    """Again and again, until all of it comes from the daemon: after a failure the circuit breakers
    wait a little."""
    cached = 0
    while cached < len(prompt) - 1:
        engine.forget_local()
        (again,) = engine.run(request(f"again {next(_serial)}", prompt))
        check([again])
        cached = again.num_cached
        yield again


def store_and_load(one: Engine, two: Engine) -> None:
    """What one engine stored serves another, which has the front of one prompt itself."""
    num_ranks = len(one.ranks)
    prompts = [tokens(seed, 30 + 11 * seed) for seed in range(3)]
    check(one.run(*(request(f"a{i}", p) for i, p in enumerate(prompts))), num_ranks)
    two.run(request("b", prompts[2][:25]))
    again = two.run(*(request(f"c{i}", p) for i, p in enumerate(prompts)))
    check(again, num_ranks)
    assert [r.num_cached for r in again] == [(len(p) - 1) // 4 * 4 for p in prompts]
    assert two.num_loads_failed == 0
