"""A daemon that records: its trace replays, and says of other sizes what the daemon says itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hicache.commands.stats import stats
from hicache.replay.simulate import replay
from hicache.replay.traces import read_trace
from tests.e2e.daemon_process import SPEC, DaemonProcess, prompt, store

pytestmark = pytest.mark.e2e


def test_the_record_and_what_if_agree_and_hints_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with DaemonProcess(options=["--record", str(path)]) as server:
        client = server.client()
        for number in range(60):
            tokens = np.concatenate((prompt(number % 7, 6)[:-1], prompt(100 + number, 2)))
            match = client.match(tokens, conversation=f"talk {number}")
            client.release(match)
            store(client, tokens)
            client.hint(conversation=f"talk {number}", ended="tool_call", answer_tokens=7)
        client.hint(conversation="talk 59", ended="conversation", return_s=2.0, keep=False)
        asked = ["--endpoint", server.endpoint, "--what-if", "--json"]
        told = json.loads(CliRunner().invoke(stats, asked).stdout)
        capacities = {tier["name"]: tier["capacity_bytes"] for tier in server.stats()["tiers"]}
    trace = read_trace(path)
    assert (trace.block_tokens, trace.block_bytes) == (SPEC.block_tokens, SPEC.block_bytes)
    assert told["requests"] == len(trace.requests) == 60
    assert [request.stop for request in trace.requests] == ["tool_call"] * 59 + ["conversation"]
    assert [request.output_tokens for request in trace.requests] == [7] * 60
    sizes = {name: num_bytes / SPEC.block_bytes for name, num_bytes in capacities.items()}
    for row in told["estimates"]:
        changed = {**sizes, row["tier"]: sizes[row["tier"]] * row["scale"]}
        rounded = {name: round(blocks) for name, blocks in changed.items()}
        tally = replay(trace, rounded, "lru", hints=False)
        hit = tally.hit_tokens.total() / tally.tokens
        assert row["all_hit"] == pytest.approx(hit, abs=0.02), row
