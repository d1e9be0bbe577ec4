"""What was learned about speeds survives a restart, as far as it can be believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache.engine import plan as p
from tests.engine.world import BLOCK_BYTES, DIGEST, World


def taught() -> World:
    """A machine that prefills 10,000 tokens in a second, with a disk of 1 GB/s."""
    world = World()
    for n in (500, 1000, 2000, 4000) * 3:
        world.do(p.Observe(0, 1, n, n * n / 2, n / 1e4))
    for size in (1 << 20, 4 << 20, 16 << 20) * 3:
        world.do(p.LinkMeasured("disk", "dram", size, 0.001 + size / 1e9))
    return world


def restarted(known: Any) -> World:
    world = World()
    world.engine.memory.recall(json.loads(json.dumps(known)))
    return world


def test_estimates_survive() -> None:
    before = taught()
    after = restarted(before.engine.memory.snapshot())
    old, new = (world.engine.links[2, 1] for world in (before, after))
    assert new.seconds(1 << 30) == pytest.approx(old.seconds(1 << 30), rel=0.1)
    assert new.doubt_s(1 << 20) > 0
    assert not after.engine.prefill[0].is_known, "the namespace was open already"
    number = after.open(b"m" * 32, BLOCK_BYTES)
    assert not after.engine.prefill[number].is_known, "another one was taught"


def test_a_namespace_is_remembered_by_its_digest() -> None:
    known = taught().engine.memory.snapshot()
    known["namespaces"]["6d" * 32] = known["namespaces"].pop(DIGEST.hex())
    after = restarted(known)
    cost = after.engine.prefill[after.open(b"m" * 32, BLOCK_BYTES)]
    assert cost.is_known
    assert cost.seconds(3000, 0) == pytest.approx(0.3, rel=0.1)
    after.do(p.Observe(1, 1, 3000, 3000**2 / 2, 0.9))
    assert cost.seconds(3000, 0) > 0.31, "it can still learn"


def test_what_waits_for_its_namespace_is_kept_on() -> None:
    known = taught().engine.memory.snapshot()
    known["namespaces"]["6d" * 32] = known["namespaces"].pop(DIGEST.hex())
    assert "6d" * 32 in restarted(known).engine.memory.snapshot()["namespaces"]


DAMAGE: dict[str, Any] = {
    "another version": {"version": 2},
    "no version": {},
    "no links": {"version": 1, "namespaces": {}},
    "a link that is a word": {"version": 1, "namespaces": {}, "links": {"disk to dram": "fast"}},
    "a link of another size": {
        "version": 1,
        "namespaces": {},
        "links": {"disk to dram": {"info": [[1.0]], "vector": [1.0], "shape": [1.0]}},
    },
    "a link that takes no time": {
        "version": 1,
        "namespaces": {},
        "links": {
            "disk to dram": {
                "info": [[1.0, 0.0], [0.0, 1.0]],
                "vector": [1.0, 1.0],
                "shape": [0.0, 0.0],
            }
        },
    },
    "not a number": {
        "version": 1,
        "namespaces": {},
        "links": {
            "disk to dram": {
                "info": [[float("nan"), 0.0], [0.0, 1.0]],
                "vector": [1.0, 1.0],
                "shape": [1.0, 1.0],
            }
        },
    },
}


@pytest.mark.parametrize("known", DAMAGE.values(), ids=DAMAGE)
def test_what_makes_no_sense_is_refused(known: Any) -> None:
    world = World()
    guess = world.engine.links[2, 1].seconds(1 << 20)
    with pytest.raises(ValueError, match=r".+"):
        world.engine.memory.recall(known)
    assert world.engine.links[2, 1].seconds(1 << 20) == guess


@pytest.mark.parametrize("known", ["fast", {}, {"prefill": 3}, {"prefill": {"info": []}}])
def test_a_namespace_whose_record_is_damaged_is_learned_anew(known: Any) -> None:
    world = World()
    world.engine.memory.recall({"version": 1, "links": {}, "namespaces": {"6d" * 32: known}})
    assert not world.engine.prefill[world.open(b"m" * 32, BLOCK_BYTES)].is_known
