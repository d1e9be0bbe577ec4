"""What a router reads is of the documented form, or a WireError."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.protocol.kv_events import read_page
from hicache.protocol.messages import WireError

PAGE: dict[str, Any] = {
    "epoch": "e",
    "endpoint": "ipc:///events",
    "topic": "t",
    "sequence": 3,
    "tier_names": ["dram", "disk"],
    "keys": b"k" * 64,
    "tiers": b"\1\3",
    "next": None,
}


def test_a_page_says_where_each_block_is() -> None:
    assert list(read_page(PAGE, 0).blocks()) == [(b"k" * 32, 1), (b"k" * 32, 3)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tiers": b"\1\4"}, "a tier that is none of 2"),
        ({"tier_names": []}, "a tier that is none of 0"),
        ({"tiers": b"\1"}, "64 bytes of keys, 1 of tiers"),
        ({"next": 7}, "next: 7"),
        ({"sequence": -1}, "sequence"),
    ],
)
def test_a_page_that_is_none(changes: dict[str, Any], told: str) -> None:
    """What was asked for lay behind 7."""
    with pytest.raises(WireError, match=told):
        read_page(PAGE | changes, 7)
