"""From the configuration to the daemon's parts: what is written is what counts."""

from __future__ import annotations

import pytest

from hicache.config import parse_config
from hicache.daemon.build import engine_settings


@pytest.mark.parametrize(
    ("written", "num_bytes"), [("", 256 << 20), ("128MiB", 128 << 20), ("16GiB", 16 << 30)]
)
def test_bytes_waiting_per_link_are_not_cut_down(written: str, num_bytes: int) -> None:
    limits = f"limits: {{max_queued_bytes: {written}}}\n" if written else ""
    config = parse_config(f"tiers: {{dram: {{size: 1GiB}}}}\n{limits}", "x.yaml").config
    assert engine_settings(config).max_moving_bytes == num_bytes
