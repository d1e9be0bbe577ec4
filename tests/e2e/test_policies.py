"""A daemon under each policy: tiers overflow, a model is fitted meanwhile, every byte is right."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.engine.policies.hazard.history import REFIT_REQUESTS
from tests.e2e.daemon_process import DaemonProcess, prompt, read, store
from tests.engine.policies.registry import PLUGIN, every_policy

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("policy", [name for name in every_policy() if name != "lru"])
def test_tiers_overflow_under(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))  # one policy comes from there
    chosen = {"eviction": policy}
    with DaemonProcess(hbm=chosen, dram=chosen, disk=chosen) as server:
        client = server.client()
        shared = prompt(0, 8)
        for number in range(REFIT_REQUESTS + 50 if policy == "hazard" else 60):
            tokens = np.concatenate((shared[:-1], prompt(1 + number % 60, 4)))
            read(client, tokens)
            store(client, tokens)
        assert read(client, shared) > 0
        assert all(tier["state"] == "up" for tier in server.stats()["tiers"])
