"""Fixtures of the tests with a real vLLM. They need an environment of their own (`make test-vllm`);
in any other there is nothing here to collect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon_process import DaemonProcess
from tests.vllm.checkpoint import write_checkpoint

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder; HICACHE_TEST_CHECKPOINT names one that is kept between runs."""
    kept = os.environ.get("HICACHE_TEST_CHECKPOINT")
    folder = Path(kept).absolute() if kept else tmp_path_factory.mktemp("model")
    if not kept:
        write_checkpoint(folder)
    elif not folder.exists():
        unfinished = folder.with_suffix(".part")
        write_checkpoint(unfinished)
        unfinished.rename(folder)
    return folder


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A daemon whose memory holds most prompts, so that leases do not fill it, and its disk all."""
    tiers: dict[str, Any] = {"dram": {"size": "1GiB"}, "disk": {"size": "4GiB"}}
    with DaemonProcess(hbm=None, patience_s=300.0, deadlines={"fetch": "2m"}, **tiers) as daemon:
        yield daemon
