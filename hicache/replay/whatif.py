"""What each tier would have hit at other sizes: a daemon's sample of requests, replayed here.

The sample (daemon/upkeep/request_sample.py) holds a share of the blocks of every request; tiers
of the same share of their blocks hit what the whole ones would. Each size is one replay through the
product's own cache engine, as in `hicache replay`: policies, demotion and promotion count too.
Blocks that every request begins with are in the sample or not: where it has fewer of them than its
share, they count as hits of the fastest tier all the same, where more, as none (SHARDS-adj, ibid.).
What was held before the sample begins is not known: until it is full, it begins with the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache.daemon.upkeep.request_sample import Hashes
from hicache.replay.simulate import replay
from hicache.replay.traces import Trace, TraceRequest, num_distinct
from hicache.tiers.catalog import kinds

SCALES: Final = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """With `tier` at `scale` times its size: the share of all tokens that it hits, and that all
    tiers hit together."""

    tier: str
    scale: float
    tier_hit: float
    all_hit: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A daemon's sample as a trace of its own. `tokens_told`: the share of all tokens that lie in
    whole blocks; `expected`: blocks that should be in the sample, for one that is; `blocks_of`:
    each tier's blocks in the sample, at its size of now."""

    trace: Trace
    share: float
    forgotten: int
    tokens_told: float
    expected: float
    blocks_of: dict[str, float]
    policies: dict[str, str]

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Sampled:
        """From the daemon's answer to `what_if`."""
        counts = np.frombuffer(reply["num_sampled"], "<u4")
        ids: Hashes = np.frombuffer(reply["ids"], "<u8")
        block_tokens = np.frombuffer(reply["block_tokens"], "<u4").astype(np.int64)
        block_bytes = np.frombuffer(reply["block_bytes"], "<u8").astype(np.int64)
        num_blocks = np.frombuffer(reply["num_blocks"], "<u4").astype(np.int64)
        ends = np.cumsum(counts).tolist()
        requests = [
            TraceRequest(at_s, (end - start) * each, 0, ids[start:end].tobytes())
            for at_s, start, end, each in zip(
                np.frombuffer(reply["at_s"], "<f8").tolist(),
                [0, *ends[:-1]],
                ends,
                block_tokens.tolist(),
                strict=True,
            )
            if end > start
        ]
        tokens = max(1, int(np.frombuffer(reply["tokens"], "<u4").sum()))
        mean_bytes = float(np.average(block_bytes, weights=counts)) if counts.any() else 1.0
        trace = Trace(
            "what-if",
            int(block_tokens.max(initial=1)),
            tuple(requests),
            num_distinct(requests),
        )
        return cls(
            trace,
            reply["share"],
            reply["forgotten"],
            float((num_blocks * block_tokens).sum()) / tokens,
            reply["share"] * float(num_blocks.sum()) / max(1, int(counts.sum())),
            {t["name"]: reply["share"] * t["bytes"] / mean_bytes for t in reply["tiers"]},
            {t["name"]: t["eviction"] for t in reply["tiers"]},
        )


def what_if(
    sampled: Sampled, warm: float = 0.0, step: Callable[[str, int], None] = lambda what, done: None
) -> list[Estimate]:
    """Each tier at each of SCALES, the others as they are. Reports on the requests after the first
    `warm` share; `step` is told the number of requests done, of each replay."""
    found: list[Estimate] = []
    names = [row.name for row in kinds() if row.name in sampled.blocks_of]
    as_it_is: dict[str, tuple[float, float]] = {}
    for tier in names:
        for scale in SCALES:
            if scale != 1.0 or not as_it_is:
                sizes = {
                    name: max(1, round(blocks * (scale if name == tier else 1.0)))
                    for name, blocks in sampled.blocks_of.items()
                }
                hits = _hits(sampled, sizes, warm, f"{tier} × {scale:g}", step)
                if scale == 1.0:
                    as_it_is = hits
            else:
                hits = as_it_is
            found.append(Estimate(tier, scale, *hits[tier]))
    return found


def _hits(
    sampled: Sampled,
    sizes: Mapping[str, int],
    warm: float,
    what: str,
    step: Callable[[str, int], None],
) -> dict[str, tuple[float, float]]:
    """Per tier, the share of tokens that it hits, and that all do."""
    tally = replay(
        sampled.trace,
        sizes,
        sampled.policies,
        warm=warm,
        step=lambda done: step(what, done),
    )
    expected = max(1.0, tally.tokens * sampled.expected)
    hits = {row.name: float(tally.hit_tokens[row.name]) for row in kinds() if row.name in sizes}
    hits[next(iter(hits))] += expected - tally.tokens
    told = sampled.tokens_told / expected
    together = sum(hits.values()) * told
    return {name: (hits[name] * told, together) for name in hits}
