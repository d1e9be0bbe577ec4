"""A daemon's start on a disk tier with many small blocks: the cost of the metadata.

stored    conversations of 48 blocks of 16 tokens, eight with the same 16 blocks in front;
          written by the tier itself, and closed
started   a daemon on that device, which is asked for the conversation that was stored last,
          again and again, until everything is known
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from hicache.bench.daemon_process import START_S, Launched, launched, tiers_of
from hicache.bench.report import BenchError, ProgressStep
from hicache.client import Client
from hicache.engine.plan import BlockIdentity
from hicache.protocol.keys import LayerGroup, NamespaceSpec
from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.disk.disk_tier import DiskTier
from hicache.tiers.disk.format import derive_key, record_pages

BLOCK_TOKENS, BLOCK_BYTES = 16, 64
SHARED, OWN, SHARERS = 16, 32, 8
ROWS_A_COMMIT = 4000
ASK_EVERY_S = 0.02
SPEC = NamespaceSpec(
    model_digest="bench",
    weights_digest="bench",
    dtype="float16",
    groups=(LayerGroup(layers=1, kv_heads=1, head_dim=1, layout="layer,kv,token,head,dim"),),
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_BYTES,
)
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class RestartRow:
    """A start of the daemon, in seconds from its launch: until it answers, until the first hit is
    served, until all blocks are known again; the longest round trip of a match meanwhile."""

    blocks: int
    answers_s: float
    first_hit_s: float
    all_s: float
    longest_match_s: float
    num_matches: int

    @classmethod
    def of(
        cls, blocks: int, seconds: tuple[float, float, float, float], num_matches: int
    ) -> RestartRow:
        answers_s, first_hit_s, all_s, longest_s = (round(s, 3) for s in seconds)
        return cls(blocks, answers_s, first_hit_s, all_s, longest_s, num_matches)


def run(folder: Path | None, num_blocks: int, step: ProgressStep) -> RestartRow:
    """Files are made in a temporary folder below `folder` and removed."""
    with TemporaryDirectory(prefix="hicache-bench-", dir=folder) as name:
        root = Path(name)
        capacity = num_blocks * record_pages(PAGE_BYTES) * PAGE_BYTES * 3 // 2 + (256 << 20)
        hot = _fill(root / "disk", capacity, num_blocks, step)
        config = {
            "tiers": {
                "dram": {"size": "64MiB"},
                "disk": {"size": capacity, "path": str(root / "disk"), "min_free": 0},
            },
            "planner": {"mode": "always_reload", "probe_links": False},
            "block_tokens": BLOCK_TOKENS,
        }
        step("starting the daemon", 0, 1)
        start_s = time.monotonic()
        with launched(root, config) as daemon:
            return _watch(daemon, start_s, num_blocks, hot)


def _fill(path: Path, capacity: int, num_blocks: int, step: ProgressStep) -> Tokens:
    """Store these blocks. Returns the tokens of the last whole conversation, and one more."""
    content = np.arange(BLOCK_BYTES, dtype=np.uint8)
    rows: list[BlockIdentity] = []
    done = 0
    with DiskTier(path, capacity, durability="fast") as tier:
        for tokens, conversation in _conversations(SPEC.digest()):
            rows += conversation
            is_end = done + len(rows) >= num_blocks
            if is_end or len(rows) >= ROWS_A_COMMIT:
                rows = sorted(rows[: num_blocks - done], key=lambda row: row.key)
                tier.put(PAGE_BYTES, [(row, content) for row in rows])
                done += len(rows)
                rows = []
                step("storing blocks", done, num_blocks)
            if is_end:
                return tokens
    raise AssertionError("there is no end of conversations")


def _conversations(namespace: bytes) -> Iterator[tuple[Tokens, list[BlockIdentity]]]:
    """Endless: a conversation's tokens, and its blocks that no other had before."""
    rng = np.random.default_rng(0)
    root = bytes(32)
    while True:
        front = rng.integers(0, 50_000, SHARED * BLOCK_TOKENS, np.uint32)
        stem = _chain(namespace, root, front, 0)
        for number in range(SHARERS):
            own = rng.integers(0, 50_000, OWN * BLOCK_TOKENS, np.uint32)
            tail = _chain(namespace, stem[-1].key, own, SHARED)
            tokens = np.concatenate((front, own, front[:1]))
            yield tokens, (tail if number else stem + tail)


def _chain(namespace: bytes, parent: bytes, tokens: Tokens, depth: int) -> list[BlockIdentity]:
    rows: list[BlockIdentity] = []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        symbols = tokens[start : start + BLOCK_TOKENS].astype("<u4").tobytes()
        key = derive_key(namespace, parent, symbols)
        rows.append(BlockIdentity(namespace, key, parent, symbols, depth + len(rows), 0))
        parent = key
    return rows


def _watch(daemon: Launched, start_s: float, num_blocks: int, hot: Tokens) -> RestartRow:
    answers_s = first_hit_s = longest_s = 0.0
    num_matches = 0
    client: Client | None = None
    try:
        while time.monotonic() - start_s < START_S and daemon.process.poll() is None:
            states = tiers_of(daemon.running)
            now_s = time.monotonic() - start_s
            if states and client is None:
                answers_s = now_s
                client = daemon.running.client(SPEC, "bench", "frames")
            if states.get("disk") == "up":
                seconds = (answers_s, first_hit_s, now_s, longest_s)
                return RestartRow.of(num_blocks, seconds, num_matches)
            if client is not None:
                asked_s = time.monotonic()
                match = client.match(hot)
                longest_s = max(longest_s, time.monotonic() - asked_s)
                num_matches += 1
                out = np.zeros((match.decision.reload_blocks, BLOCK_BYTES), np.uint8)
                if client.fetch(match, out).blocks and not first_hit_s:
                    first_hit_s = time.monotonic() - start_s
                client.release(match)
            time.sleep(ASK_EVERY_S)
    finally:
        if client is not None:
            client.close()
    raise BenchError("the daemon did not come up with its disk tier")
