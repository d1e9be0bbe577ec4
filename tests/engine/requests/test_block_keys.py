"""Keys of blocks that leave for a durable tier: what is kept of them."""

from __future__ import annotations

from hicache.engine import plan as p
from tests.engine.world import MAPPED, ON_DISK, World, tokens_of

TIERS = (("dram", 256, MAPPED), ("disk", 512, ON_DISK))


def write_down(w: World, first: int, count: int) -> None:
    """Prompts of two blocks each, written to disk."""
    for number in range(first, first + count):
        w.store(tokens_of(number, number))
    while w.do(p.Flush(w.now_s)):
        w.finish_all()


def test_chains_of_nodes_that_are_gone_are_not_kept() -> None:
    """A daemon kept 109 of them beside 8 others, each with its node and keys: they filled for as
    long as numbers of nodes came up that had not been used before."""
    w = World(TIERS)
    chains = w.engine.identities.chains
    write_down(w, 0, 60)
    assert len(chains) == 60
    w.do(p.Clear(0, w.now_s))
    w.finish_all()
    write_down(w, 100, 20)
    nodes = w.engine.residency.index.nodes
    gone = [number for number, chain in chains.items() if nodes[number] is not chain.node]
    assert len(chains) - len(gone) == 20
    assert len(gone) <= 20
