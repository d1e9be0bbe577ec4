"""Replaying small traces whose right answers can be counted by hand, and through the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hicache.commands.replay import replay as replay_command
from hicache.replay.bound import hit_blocks
from hicache.replay.simulate import ReplayedEngine, replay
from hicache.replay.traces import Trace, TraceError, TraceRequest, read_trace
from tests.engine.policies.registry import PLUGIN, every_policy, installed


def trace_of(*prompts: Sequence[int], tail_tokens: int = 512) -> Trace:
    """One request a second; `tail_tokens` of each prompt's last block are there."""
    requests = [
        TraceRequest(
            float(number),
            512 * (len(blocks) - 1) + tail_tokens,
            10,
            np.array(blocks, np.uint64).tobytes(),
        )
        for number, blocks in enumerate(prompts)
    ]
    footprint = len({block for blocks in prompts for block in blocks})
    return Trace("made", 512, tuple(requests), footprint)


def random_trace(seed: int, num_requests: int = 60) -> Trace:
    """Conversations that go on, with a prefix in common."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    fresh = 1
    for _ in range(num_requests):
        if prompts and rng.random() < 0.6:
            prompt = list(prompts[int(rng.integers(max(0, len(prompts) - 8), len(prompts)))])
        else:
            prompt = [0]
        for _ in range(int(rng.integers(1, 4))):
            prompt.append(fresh)
            fresh += 1
        prompts.append(prompt)
    return trace_of(*prompts)


@pytest.mark.parametrize("hints", [True, False])
def test_hints_are_left_out_and_how_long_answers_were_is_not(hints: bool) -> None:
    request = replace(trace_of([1, 2]).requests[0], stop="tool_use")
    replayed = ReplayedEngine({"hbm": 8}, ["hazard"], 512)
    replayed.serve(request, hints)
    history = replayed.engine.history
    assert history is not None
    (run,) = history.ghost.runs()
    assert run.context is not None
    assert (run.context.stop > 0, run.context.answer_tokens) == (hints, 10)


def test_lru_by_hand() -> None:
    trace = trace_of([1, 2, 3], [4, 5, 6], [1, 2, 3, 7], tail_tokens=100)
    tally = replay(trace, {"hbm": 7}, "lru")
    assert tally.hit_tokens == {"hbm": 3 * 512}
    assert tally.tokens == 2 * (1024 + 100) + 1536 + 100
    whole = replay(trace_of([1, 2], [1, 2], tail_tokens=100), {"hbm": 4}, "lru")
    assert whole.hit_tokens == {"hbm": 612}  # a partial block counts for its tokens


def test_without_tiers_nothing_hits() -> None:
    assert replay(trace_of([1], [1]), {}, "lru").hit_tokens.total() == 0


def test_warm_requests_are_not_reported() -> None:
    trace = trace_of([1, 2], [1, 2], [1, 2], [1, 2])
    tally = replay(trace, {"hbm": 4}, "lru", warm=0.5)
    assert tally.tokens == tally.hit_tokens["hbm"] == 4 * 512


def best_by_search(trace: Trace, capacity: int) -> int:
    """The most blocks that any choice of prefix-closed contents could hit, over all choices."""
    states = {frozenset[int](): 0}
    for request in trace.requests:
        blocks = np.frombuffer(request.symbols, np.uint64).tolist()
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            count = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
            for keep in product((False, True), repeat=len(held | set(blocks))):
                kept = frozenset(
                    b for b, k in zip(sorted(held | set(blocks)), keep, strict=True) if k
                )
                if len(kept) <= capacity:
                    after[kept] = max(after.get(kept, 0), hits + count)
        states = after
    return max(states.values())


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_bound_is_the_optimum(capacity: int) -> None:
    trace = trace_of([1, 2], [3], [1, 2, 4], [3, 5], [1, 2], [3])
    assert sum(hit_blocks(trace, capacity)) == best_by_search(trace, capacity)


@pytest.mark.parametrize("policy", every_policy())
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_bound(policy: str, seed: int) -> None:
    trace = random_trace(seed)
    bound = replay(trace, {"hbm": 12}, "min").hit_tokens.total()
    with installed(PLUGIN):
        tally = replay(trace, {"hbm": 12}, policy)
        tiers = replay(trace, {"hbm": 6, "dram": 12, "disk": 24}, policy)
    assert 0 < tally.hit_tokens.total() <= bound
    assert tiers.hit_tokens.total() <= replay(trace, {"hbm": 42}, "min").hit_tokens.total()


@pytest.mark.parametrize("seed", range(3))
def test_an_lru_stack_hits_what_nested_caches_hit(seed: int) -> None:
    trace = random_trace(seed)
    sizes = {"hbm": 6, "dram": 12, "disk": 24}
    tiers = replay(trace, sizes, "lru-stack", warm=0.5)
    for size, names in ((6, ["hbm"]), (18, ["hbm", "dram"]), (42, ["hbm", "dram", "disk"])):
        alone = replay(trace, {"hbm": size}, "lru-stack", warm=0.5).hit_tokens.total()
        assert sum(tiers.hit_tokens[name] for name in names) == alone


def test_an_lru_stack_writes_what_is_pushed_out() -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [5])
    tally = replay(trace, {"hbm": 2, "dram": 2}, "lru-stack")
    assert tally.hit_tokens == {"hbm": 0, "dram": 2 * 512}
    assert tally.written_blocks == {"hbm": 7, "dram": 5}
    assert tally.moved_blocks == {"hbm-dram": 5, "dram-hbm": 2}
    assert tally.evictions == {"hbm": 5, "dram": 1}


def test_hazard_beats_lru_where_turns_tell() -> None:
    """Half of the prompts are asked once only, and can be told by their length."""
    prompts: list[list[int]] = []
    for number in range(3000):
        base = 100_000 + 100 * (number - 40 if number % 2 else number)
        size = 20 if number % 2 else 4
        prompts.append(
            [*range(base, base + size)] if number % 4 < 2 or number < 40 else prompts[-40]
        )
    trace = trace_of(*prompts)
    lru, hazard = (
        replay(trace, {"hbm": 300}, policy, warm=0.5).hit_tokens["hbm"]
        for policy in ("lru", "hazard")
    )
    assert hazard > 1.2 * lru


def write_trace(path: Path) -> Path:
    rows = [
        {
            "timestamp": 1000 * n,
            "input_length": 700,
            "output_length": 5,
            "hash_ids": [n % 2, 2 + n % 2],
        }
        for n in range(8)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_traces_are_read(tmp_path: Path, name: str) -> None:
    trace = read_trace(write_trace(tmp_path / name))
    assert (trace.name, len(trace.requests), trace.footprint_blocks) == ("a", 8, 4)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [1]}\nnonsense\n')
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path)


def test_the_command_as_data(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.jsonl.gz")
    plot = tmp_path / "plot.html"
    options = "--tiers hbm=100% --policy lru --policy min --warm 0.5 --json"
    ran = CliRunner().invoke(
        replay_command,
        [str(path), *options.split(), "--plot", str(plot)],
    )
    assert ran.exit_code == 0, ran.output
    runs = json.loads(ran.stdout)["runs"]
    assert len(runs) == 10
    whole = [run for run in runs if run["tiers"]["hbm"]["blocks"] == 4]
    assert [run["policy"] for run in whole] == ["lru", "min"]
    for run in whole:
        assert run["hit_tokens"] == {"hbm": 2800, "dram": 0, "disk": 0}
        assert run["tokens"] == 2800
    assert "<polyline" in plot.read_text()


def test_a_wrong_size_is_said(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.jsonl")
    ran = CliRunner().invoke(replay_command, [str(path), "--tiers", "hbm=much"])
    assert ran.exit_code == 2
    assert "hbm=much" in ran.output
