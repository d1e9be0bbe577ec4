"""A real daemon with HBM on the GPU: blocks go to disk and back and are compared; its GPU worker is
killed during traffic; it is stopped in order."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from hicache.bench.gpu_check.check import Check
from hicache.client import Client, LayerGroup, NamespaceSpec
from hicache.demo.demo_daemon import PrivateDaemon

BLOCKS = 8
BLOCK_TOKENS = 16
WAIT_S = 30.0
_WORKER = "gpu:0"

Prompt = npt.NDArray[np.uint32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Settings of a daemon that must have a GPU or the stand-in."""

    page_kernels: str = "auto"


@contextmanager
def daemon(check: Check, gpu: GpuUse | None = None, /, **mib: int) -> Iterator[PrivateDaemon]:
    """A running daemon with tiers of these sizes, which recomputes its counters at each tick. Its
    log goes to the check's folder. In a dry run it has a GPU only if `gpu` is given."""
    has_gpu = gpu is not None or not check.is_dry
    file = check.folder / f"{check.name}.yaml"
    tiers: dict[str, dict[str, Any]] = {name: {"size": f"{size}MiB"} for name, size in mib.items()}
    tiers["hbm"] |= {"device": "host", "page_kernels": (gpu or GpuUse()).page_kernels}
    tiers["disk"] |= {"path": "disk", "min_free": 0, "durability": "fast", "batch": "16MiB"}
    config = {
        "tiers": tiers,
        "block_tokens": BLOCK_TOKENS,
        "debug": True,
        "planner": {"mode": "always_reload"},
        "deadlines": {"fetch": "10s", "put": "10s"},
    }
    file.write_text(yaml.safe_dump(config))
    device = "auto" if has_gpu else "host"
    server = PrivateDaemon(file, hbm_device=device, own_group=False)
    try:
        server.start()
        wait_for(lambda: _pid(server), "the GPU worker")
        wait_for(lambda: all(t["state"] == "up" for t in server.stats()["tiers"]), "all tiers")
        if has_gpu:
            (hbm,) = (tier for tier in server.stats()["tiers"] if tier["name"] == "hbm")
            assert hbm["medium"] == "GPU 0", f"auto chose {hbm}"
        yield server
    finally:
        with (check.folder / f"{check.name}-daemon.log").open("a") as log:
            log.write(server.log_text())
        server.close()


def run(check: Check) -> None:
    size, block_bytes = (64, 256 << 10) if check.is_dry else (512, 2 << 20)
    with check.step("a daemon with the GPU's memory") as step:
        started_s = time.monotonic()
        with daemon(check, hbm=size, dram=size // 2, disk=4 * size) as server:
            notes = [
                f"{t['name']}: {t.get('note') or t['medium']}" for t in server.stats()["tiers"]
            ]
            check.note("ready after", f"{time.monotonic() - started_s:.1f} s; {'; '.join(notes)}")
            traffic = DaemonTraffic(server, block_bytes)
            with check.step("stored, promoted, read back") as part:
                part.value = _promoted(server, traffic)
            with check.step("squeezed through all tiers and back") as part:
                part.value = _squeezed(server, traffic, size + size // 2)
            with check.step("its GPU worker killed in the middle of the traffic") as part:
                part.value = _killed(server, traffic)
            with check.step("stopped by SIGTERM") as part:
                traffic.client.close()
                seconds = server.stop()
                bad = [line for line in server.log_text().splitlines() if _is_bad(line)]
                assert not bad, bad[0]
                part.value = f"in {seconds:.1f} s, nothing bad in its log"
        step.value = "ran to its end"


class DaemonTraffic:
    """Prompts by number; the number determines their bytes. `by_tier`: the blocks that `read`
    found, by the tier of their fastest copy."""

    def __init__(self, server: PrivateDaemon, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.num_prompts = 0
        shape = (BLOCKS, block_bytes)
        self._noise = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self.by_tier: Counter[str] = Counter()
        spec = NamespaceSpec(
            model_digest="gpu-check",
            weights_digest="none",
            dtype="uint8",
            groups=(LayerGroup(1, 1, block_bytes // BLOCK_TOKENS, "bench"),),
            block_tokens=BLOCK_TOKENS,
            block_bytes=block_bytes,
        )
        self.client = Client(
            spec, server.endpoint, timeout_s=5.0, fetch_timeout_s=12.0, put_timeout_s=12.0
        )

    def store(self) -> int:
        """Store a new prompt. Returns how many of its blocks are stored."""
        number, self.num_prompts = self.num_prompts, self.num_prompts + 1
        result = self.client.put(self._prompt(number), self._bytes(number))
        return result.stored + result.present

    def read(self, number: int) -> int:
        """Returns how many of its blocks came. Raises AssertionError on a wrong byte."""
        match = self.client.match(self._prompt(number))
        out = np.zeros((match.decision.reload_blocks, self.block_bytes), np.uint8)
        fetched = self.client.fetch(match, out)
        self.client.release(match)
        for tier, blocks in match.runs:
            self.by_tier[tier] += blocks
        right = self._bytes(number)[: fetched.blocks]
        assert np.array_equal(out[: fetched.blocks], right), f"WRONG BYTES of prompt {number}"
        return fetched.blocks

    def _prompt(self, number: int) -> Prompt:
        rng = np.random.default_rng(number)
        return rng.integers(0, 50_000, BLOCKS * BLOCK_TOKENS + 1).astype(np.uint32)

    def _bytes(self, number: int) -> npt.NDArray[np.uint8]:
        """Every block begins with its prompt and position, so swapped blocks are detected."""
        rows = np.roll(self._noise, number, axis=1)
        rows[:, :8] = np.frombuffer(np.uint64(number).tobytes(), np.uint8)
        rows[:, 8] = np.arange(BLOCKS)
        return rows


def _promoted(server: PrivateDaemon, traffic: DaemonTraffic) -> str:
    for number in range(4):
        assert traffic.store() == BLOCKS
        assert traffic.read(number) == BLOCKS
    wait_for(lambda: _used(server)["hbm"] >= 4 * BLOCKS * traffic.block_bytes, "promotions")
    assert all(traffic.read(number) == BLOCKS for number in range(4))
    return f"used MiB: {_mib(_used(server))}"


def _squeezed(server: PrivateDaemon, traffic: DaemonTraffic, both_mib: int) -> str:
    """Store 1.5 times what both memory tiers hold, with reads in between; then read all."""
    want = both_mib * 3 // 2 * (1 << 20) // (BLOCKS * traffic.block_bytes)
    held = 0
    while traffic.num_prompts < want:
        held += traffic.store()
        traffic.read(max(0, traffic.num_prompts - 3))
    traffic.by_tier.clear()
    came = [traffic.read(number) for number in range(traffic.num_prompts)]
    came += [traffic.read(number) for number in reversed(range(traffic.num_prompts))]
    found = dict(traffic.by_tier)
    assert found.get("disk"), f"nothing came back from disk: {found}"
    assert found.get("hbm"), f"nothing came back from HBM: {found}"
    return (
        f"{sum(came)} of {len(came) * BLOCKS} blocks came, found in {found}; used MiB: "
        f"{_mib(_used(server))}; batches {_moved(server)}"
    )


def _killed(server: PrivateDaemon, traffic: DaemonTraffic) -> str:
    """Its blocks are misses and never wrong bytes; the next worker serves."""
    pids = []
    for _ in range(2):
        pid = wait_for(lambda: _pid(server), "the GPU worker")
        for step in range(12):
            traffic.store()
            traffic.read(traffic.num_prompts - 1 - step % 5)
            if step == 6:
                os.kill(pid, signal.SIGKILL)
        pids.append(pid)
        wait_for(lambda old=pid: _pid(server) not in (0, old), "another GPU worker")  # type: ignore[misc]
        wait_for(lambda: all(t["state"] == "up" for t in server.stats()["tiers"]), "all tiers")
    came = sum(traffic.read(number) for number in range(traffic.num_prompts))
    first = traffic.num_prompts
    for number in range(first, first + 4):
        assert traffic.store() == BLOCKS
        assert traffic.read(number) == BLOCKS
    wait_for(lambda: _used(server)["hbm"] > 0, "promotions into the new pool")
    return (
        f"twice (pids {pids}); {came} of {first * BLOCKS} blocks were still there; used MiB: "
        f"{_mib(_used(server))}"
    )


def wait_for(ask: Callable[[], T], what: str) -> T:
    """Returns the first true result."""
    give_up_s = time.monotonic() + WAIT_S
    while not (answer := ask()):
        assert time.monotonic() < give_up_s, f"{what} did not come within {WAIT_S:.0f} s"
        time.sleep(0.02)
    return answer


def _pid(server: PrivateDaemon) -> int:
    return int(server.stats()["workers"].get(_WORKER, 0))


def _used(server: PrivateDaemon) -> dict[str, int]:
    return {tier["name"]: tier["used_bytes"] for tier in server.stats()["tiers"]}


def _mib(used: dict[str, int]) -> str:
    return ", ".join(f"{name} {num_bytes >> 20}" for name, num_bytes in used.items())


def _moved(server: PrivateDaemon) -> str:
    """The number of batches per link."""
    links = server.stats()["links"]
    return ", ".join(f"{link['src']}-{link['dst']} {link['measurements']}" for link in links)


def _is_bad(line: str) -> bool:
    return "Traceback" in line or " ERROR " in line
