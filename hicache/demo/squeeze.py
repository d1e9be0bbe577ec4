"""Fills the tiers with random prompts, which push the conversation down to slower tiers.

at first             hbm [ conversation ]   dram [              ]   disk [              ]
squeeze hbm          hbm [ filler       ]   dram [ conversation ]   disk [              ]
squeeze hbm, dram    hbm [ filler       ]   dram [ filler       ]   disk [ conversation ]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.client import Client
from hicache.protocol.keys import NamespaceSpec

PROMPT_BLOCKS = 32
OVERFILL = 1.10
PATIENCE_S = 60.0


class Squeezer:
    """Fills tiers with blocks of the model's own size, in a namespace of its own.

    `stats` returns the daemon's counters.
    """

    def __init__(
        self, spec: NamespaceSpec, endpoint: str, stats: Callable[[], dict[str, Any]]
    ) -> None:
        apart = replace(spec, cache_salt="filler", name="demo filler")
        self._client = Client(apart, endpoint, name="demo filler", put_timeout_s=PATIENCE_S)
        self._spec = spec
        self._stats = stats
        self._rng = np.random.default_rng(0)
        self._block = self._rng.integers(0, 256, spec.block_bytes, dtype=np.uint8)

    def squeeze(self, *tiers: str) -> int:
        """Store more than these tiers can hold together, and wait until no moves are left.

        Returns the bytes stored; fewer than that if puts were refused for PATIENCE_S.
        """
        rows = {row["name"]: row["capacity_bytes"] for row in self._stats()["tiers"]}
        wanted = OVERFILL * sum(rows[tier] for tier in tiers)
        stored, give_up_s = 0, time.monotonic() + PATIENCE_S
        while stored < wanted and time.monotonic() < give_up_s:
            blocks = self._client.put(self._tokens(), self._fill).stored
            stored += blocks * self._spec.block_bytes
            if blocks:
                give_up_s = time.monotonic() + PATIENCE_S
            else:
                time.sleep(0.05)
        self.settle()
        return stored

    def settle(self) -> None:
        """Wait until no tier has moves to do, which would disturb the measurement."""
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s:
            if not any(row["queue_depth"] for row in self._stats()["tiers"]):
                return
            time.sleep(0.05)

    def close(self) -> None:
        self._client.close()

    def _tokens(self) -> npt.NDArray[np.uint32]:
        num_tokens = PROMPT_BLOCKS * self._spec.block_tokens
        return self._rng.integers(0, 1 << 32, num_tokens, dtype=np.uint32)

    def _fill(self, _: int, view: npt.NDArray[np.uint8]) -> None:
        view[:] = self._block
