"""The hits of each tier at other sizes, estimated by a replay of a daemon's sample of requests.

The sample (daemon/upkeep/request_sample.py) has a share of the blocks of every request. Tiers with
the same share of their blocks have the hit rate of the whole ones. Each size is one replay through
the product's own cache engine, as in `hicache replay`, with policies, demotion and promotion.
Blocks with which every request begins are in the sample or not. If the sample has fewer blocks than
its share, the missing ones count as hits of the fastest tier; if it has more, they are subtracted
(SHARDS-adj). Blocks stored before the sample begins are not known; until it is full, the sample
begins with the daemon.
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
    """With `tier` at `scale` times its size: the share of all tokens that are hits in it, and in
    all tiers together."""

    tier: str
    scale: float
    tier_hit: float
    all_hit: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A daemon's sample as a trace. `whole_share`: the share of all tokens that are in whole
    blocks; `expected`: how many blocks the sample should have, per block that it has; `blocks_of`:
    each tier's size now, in blocks of the sample."""

    trace: Trace
    share: float
    forgotten: int
    whole_share: float
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
                [0, *ends][: len(ends)],
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
    `warm` share; `step` gets the number of requests done, of each replay."""
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
    """Per tier, the share of tokens that are hits in it, and in all tiers."""
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
    per_hit = sampled.whole_share / expected
    together = sum(hits.values()) * per_hit
    return {name: (hits[name] * per_hit, together) for name in hits}
