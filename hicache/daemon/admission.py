"""Checks whether a daemon with these tiers can hold a namespace."""

from __future__ import annotations

from hicache.config.units import format_size
from hicache.engine.core import CacheEngine
from hicache.protocol.keys import NamespaceSpec
from hicache.protocol.messages import WireError
from hicache.tiers.block import MAX_BLOCK_TOKENS


def check_spec(spec: NamespaceSpec, engine: CacheEngine) -> None:
    """Raises WireError('spec') with the reason where the namespace cannot be held."""
    if len(spec.groups) > 1:
        raise WireError("spec", "protocol 1 holds models with one layer group, not several")
    if spec.groups[0].window:
        raise WireError("spec", "protocol 1 holds full attention, not a sliding window")
    if spec.tp_rank >= spec.tp_size or spec.pp_rank >= spec.pp_size:
        raise WireError("spec", "tp_rank and pp_rank count from 0 to below tp_size and pp_size")
    if spec.block_tokens > MAX_BLOCK_TOKENS:
        raise WireError(
            "spec", f"a block of {spec.block_tokens} tokens: at most {MAX_BLOCK_TOKENS} are held"
        )
    mapped = [tier for tier in engine.queries.tiers() if tier.mapped]
    too_small = engine.too_small_for(spec.block_bytes)
    if all(tier in too_small for tier in mapped):
        rooms = " and ".join(f"{t.name} ({format_size(t.capacity_bytes)})" for t in mapped)
        raise WireError(
            "spec",
            f"a block of {spec.block_bytes} bytes does not fit in {rooms}; "
            "use fewer tokens per block or larger tiers",
        )
