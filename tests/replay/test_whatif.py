"""A daemon's record and its sample of the same requests: what they say of other sizes agrees."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hicache.daemon.sessions import Group, Session
from hicache.daemon.upkeep import trace as recording
from hicache.daemon.upkeep.request_sample import FULL, Sample
from hicache.daemon.upkeep.trace import TraceRecorder
from hicache.protocol.keys import LayerGroup, NamespaceSpec
from hicache.replay.simulate import replay
from hicache.replay.traces import Trace, read_trace
from hicache.replay.whatif import Sampled, what_if

pytestmark = pytest.mark.thorough

BLOCK_TOKENS = 16
SPEC = NamespaceSpec(
    model_digest="m",
    weights_digest="w",
    dtype="float16",
    groups=(LayerGroup(1, 1, 1, "layer"),),
    block_tokens=BLOCK_TOKENS,
    block_bytes=4096,
)
THREE_TIERS = {"hbm": 80, "dram": 240, "disk": 800}
ONE_TIER = {"dram": 2400}


def session_of(spec: NamespaceSpec = SPEC) -> Session:
    return Session(b"s" * 16, Group(1, b"g" * 16), 0, spec, "arena", "", 0, 0.0)


def load(num_requests: int, seed: int = 1) -> Iterator[tuple[float, bytes, str]]:
    """Conversations over a few system prompts, that go on, pause or end: (time, tokens, name)."""
    rng = np.random.default_rng(seed)
    fronts = [rng.integers(0, 9999, 16 * int(rng.integers(2, 8))).astype("<u4") for _ in range(5)]
    talks: list[list[npt.NDArray[np.uint32]]] = []
    now_s = 0.0
    for number in range(num_requests):
        now_s += float(rng.exponential(1.0))
        if talks and rng.random() < 0.7:
            which = len(talks) - 1 - min(len(talks) - 1, int(rng.exponential(12.0)))
        else:
            talks.append([fronts[number % 5]])
            which = len(talks) - 1
        talks[which].append(rng.integers(0, 9999, int(rng.integers(16, 128))).astype("<u4"))
        yield now_s, np.concatenate(talks[which]).tobytes(), f"talk {which}"


def replayed(trace: Trace, sizes: Mapping[str, int], tier: str, eviction: str) -> list[float]:
    tally = replay(trace, sizes, eviction, hints=False)
    return [hits / tally.tokens for hits in (tally.hit_tokens[tier], tally.hit_tokens.total())]


@pytest.mark.parametrize(
    ("sizes", "eviction", "num_requests", "max_blocks"),
    [
        (THREE_TIERS, "lru", 240, 1 << 20),
        (ONE_TIER, "lru", 1500, 18_000),
        (ONE_TIER, "hazard", 1200, 1 << 20),
    ],
)
def test_what_if_agrees_with_replaying_the_record(
    tmp_path: Path, sizes: Mapping[str, int], eviction: str, num_requests: int, max_blocks: int
) -> None:
    """Within two points at every size, from all blocks and from a part of them."""
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    sample = Sample(4096 * 4000, max_blocks)
    session = session_of()
    for now_s, tokens, name in load(num_requests):
        for observer in (recorder, sample):
            observer.asked(session, tokens, name, now_s)
    recorder.close()
    trace = read_trace(tmp_path / "trace.jsonl")
    assert len(trace.requests) == num_requests
    tiers = [{"name": n, "bytes": 4096 * b, "eviction": eviction} for n, b in sizes.items()]
    ours = Sampled.of({"tiers": tiers, **sample.report()})
    assert (ours.share < 1) == (max_blocks < 1 << 20)
    same = replace(trace, requests=trace.requests[ours.forgotten :])
    for found in what_if(ours):
        changed = {**sizes, found.tier: round(sizes[found.tier] * found.scale)}
        right = replayed(same, changed, found.tier, eviction)
        assert [found.tier_hit, found.all_hit] == pytest.approx(right, abs=0.02), found


def test_a_sample_stays_small_and_thins_itself_out() -> None:
    sample = Sample(4096 * 1_000_000, max_blocks=4000, min_requests=1000)
    session = session_of()
    for now_s, tokens, name in load(800):
        sample.asked(session, tokens, name, now_s)
        assert sample._num_blocks <= 4000
        assert sample._num_blocks == sum(len(asked.ids) for asked in sample._requests)
    assert sample.threshold < FULL
    whole = np.frombuffer(sample.report()["ids"], "<u8")
    assert (whole >> np.uint64(32) < sample.threshold).all()


def test_a_sample_is_not_thinned_out_where_the_smallest_tier_would_vanish() -> None:
    sample = Sample(4096 * 500, max_blocks=4000, min_requests=1000)
    session = session_of()
    for now_s, tokens, name in load(200):
        sample.asked(session, tokens, name, now_s)
    assert sample.threshold == FULL


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_equal_blocks_after_different_ones_are_told_apart(block_tokens: int) -> None:
    sample, step = Sample(4096), 4 * block_tokens
    tokens = np.random.default_rng(5).integers(0, 9999, 50 * block_tokens).astype("<u4")
    same = sample.hashes(0, tokens.tobytes(), step)
    assert (sample.hashes(0, tokens[: 20 * block_tokens].tobytes(), step) == same[:20]).all()
    tokens[7 * block_tokens] += 1
    other = sample.hashes(0, tokens.tobytes(), step)
    assert (other[:7] == same[:7]).all()
    assert not (other[7:] == same[7:]).any()
    assert not (sample.hashes(1, tokens.tobytes(), step) == other).any()


@pytest.mark.parametrize("block_tokens", [2, 16])
def test_a_prompt_shorter_than_a_block_has_no_hashes(block_tokens: int) -> None:
    """It was an error with a traceback in the daemon's log."""
    tokens = np.arange(block_tokens - 1, dtype="<u4")
    assert len(Sample(4096).hashes(0, tokens.tobytes(), 4 * block_tokens)) == 0


# --- the record ---------------------------------------------------------------------------------


def test_a_record_tells_hashes_and_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    session = session_of()
    tokens = np.arange(50, dtype="<u4").tobytes()
    recorder.asked(session, tokens, "a secret name", 1.0)
    recorder.asked(session, tokens[:64] + bytes(64), "", 2.0)
    recorder.hinted(session, "a secret name", "tool_call", 7, 3.0)
    recorder.hinted(session, "never heard of", "stop", 7, 3.0)
    recorder.close()
    assert path.stat().st_mode & 0o777 == 0o600
    header, first, second, *_ = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {"block_tokens": 16, "block_bytes": 4096}
    assert first["input_length"] == 50
    assert len(first["hash_ids"]) == 3
    assert first["hash_ids"][0] == second["hash_ids"][0]
    assert first["hash_ids"][1] != second["hash_ids"][1]
    assert "secret" not in path.read_text()
    trace = read_trace(path)
    assert (trace.block_tokens, trace.block_bytes) == (16, 4096)
    said = [(request.stop, request.output_tokens) for request in trace.requests]
    assert said == [("tool_call", 7), ("", 0)]
    again = TraceRecorder(path)
    again.asked(session, tokens, "", 1.0)
    again.close()
    assert (tmp_path / "trace.jsonl.1").exists()
    assert json.loads(path.read_text().splitlines()[1])["hash_ids"] != first["hash_ids"]


def test_a_record_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, max_bytes=2000)
    for number in range(200):
        recorder.asked(session_of(), np.arange(160, dtype="<u4").tobytes(), "", number)
    recorder.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.jsonl", "trace.jsonl.1"]
    assert all(file.stat().st_size <= 2000 for file in tmp_path.iterdir())
    assert read_trace(tmp_path / "trace.jsonl.1").block_tokens == 16


def test_a_row_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    recorder.asked(session_of(), np.arange(50, dtype="<u4").tobytes(), "", 1.0)
    recorder.asked(session_of(), np.arange(50, dtype="<u4").tobytes(), "", 2.0)
    recorder.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert len(read_trace(path).requests) == 1


def test_trouble_with_the_file_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full takes nothing."""
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    recorder = TraceRecorder(path)
    recorder.asked(session_of(), np.arange(50, dtype="<u4").tobytes(), "", 1.0)
    recorder.close()
    assert "the recording has ended" in caplog.text
    recorder.asked(session_of(), np.arange(50, dtype="<u4").tobytes(), "", 2.0)
    assert not recorder._lines


def test_rows_that_the_file_system_keeps_waiting_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are kept up to a bound until the thread has written the last lot."""
    monkeypatch.setattr(recording, "MAX_PENDING_BYTES", 1000)
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    for number in range(20):
        recorder.asked(session_of(), np.arange(160, dtype="<u4").tobytes(), "", number)
    assert recorder.num_lost > 0
    assert caplog.text.count("rows are lost") == 1
    recorder.close()
    assert len(read_trace(path).requests) == 20 - recorder.num_lost
