"""`hicache ping` and `hicache stats` against a daemon with scripted replies."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hicache.commands.explain import explain
from hicache.commands.health import health
from hicache.commands.ping import ping
from hicache.commands.stats import stats
from hicache.commands.tree import tree
from hicache.daemon.sessions import Group, Session
from hicache.daemon.upkeep.request_sample import Sample
from hicache.protocol.keys import LayerGroup, NamespaceSpec
from tests.client.scripted_daemon import ScriptedDaemon, refuse

TIER = {
    "name": "dram",
    "medium": "host memory",
    "state": "up",
    "note": "",
    "capacity_bytes": 64 << 30,
    "used_bytes": 16 << 30,
    "quarantined_bytes": 2 << 20,
    "blocks": 123_456,
    "hits": 98_765,
    "hit_tokens": 12_345_678,
    "bytes_served": 7 << 40,
    "seconds_saved": 98_765.4,
    "promotions": 1_234,
    "demotions": 56_789,
    "evictions": 4_321,
    "removed": 17,
    "queue_depth": 42,
    "queue_bytes": 84 << 20,
}
FULL: dict[str, Any] = {
    "uptime_s": 90_061.0,
    "epoch": "e1",
    "pid": 4242,
    "version": "0.1.0",
    "sessions": 3,
    "leases": 7,
    "namespaces": [
        {
            "digest": "ab" * 32,
            "name": "SmolLM2-135M-Instruct",
            "block_tokens": 16,
            "block_bytes": 368_640,
            "blocks": 123_456,
        }
    ],
    "index": {"blocks": 123_456, "nodes": 789, "tokens": 1_975_296},
    "tiers": [
        {**TIER, "name": "hbm", "medium": "emulated", "note": "emulated in host memory"},
        TIER,
        {**TIER, "name": "disk", "medium": "lmdb"},
    ],
    "links": [
        {
            "src": "disk",
            "dst": "dram",
            "bytes_per_s": 2.5e9,
            "latency_s": 0.0004,
            "moves": 1000,
            "failed": 1,
        }
    ],
    "planner": {
        "mode": "measured",
        "decisions": {"reload": 11, "partial": 22, "recompute": 33},
        "mean_abs_error_s": 0.0123,
        "mean_relative_error": 0.087,
        "prefill_tokens_per_s": 1234.5,
    },
    "requests": {"match": 1001, "put": 0},
    "errors": {"expired": 2},
    "puts": {"stored": 3000, "present": 20, "busy": 0, "refused": 1},
}
WORDS = (
    "emulated in host memory",
    "123,456",
    "98,765",
    "12,345,678",
    "7.0 TiB",
    "27 h 26 min",
    "1,234",
    "56,789",
    "4,321",
    "42 (84.0 MiB)",
    "64.0 GiB",
    "25%",
    "disk → dram",
    "2.3 GiB/s",
    "12.3 ms",
    "8.7%",
    "SmolLM2-135M-Instruct",
    "match 1,001",
    "expired 2",
    "refused 1",
)


@pytest.fixture
def daemon() -> Iterator[ScriptedDaemon]:
    folder = tempfile.mkdtemp(prefix="hc-")
    with ScriptedDaemon(f"ipc://{folder}/s") as daemon:
        yield daemon
    shutil.rmtree(folder)


def run(command: Any, daemon: ScriptedDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--endpoint", daemon.endpoint, *arguments])


def test_a_pipe_gets_whole_tables_of_100_columns(daemon: ScriptedDaemon) -> None:
    daemon.on("stats", FULL)
    result = run(stats, daemon)
    assert result.exit_code == 0, result.output
    assert [word for word in WORDS if word not in result.output] == []
    assert "…" not in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 100


def test_a_gate_says_what_it_demands(daemon: ScriptedDaemon) -> None:
    daemon.on("stats", {**FULL, "gate": {"demanded_return": 0.35, "refused_blocks": 1234}})
    assert "a probability of 35% or more; 1,234 blocks forgotten" in run(stats, daemon).output


def test_stats_as_data(daemon: ScriptedDaemon) -> None:
    daemon.on("stats", FULL)
    assert json.loads(run(stats, daemon, "--json").output) == FULL


@pytest.mark.parametrize(
    "reply", [{}, {"tiers": [{}]}, {"planner": {"decisions": {}}}, {"tiers": [{"name": "dram"}]}]
)
def test_absent_keys_are_dashes(daemon: ScriptedDaemon, reply: dict[str, Any]) -> None:
    daemon.on("stats", reply)
    result = run(stats, daemon)
    assert result.exit_code == 0, result.output


def test_watching_ends_with_the_daemon(daemon: ScriptedDaemon) -> None:
    answers = iter([FULL, {**FULL, "pid": 4343}])
    daemon.on("stats", lambda seen: next(answers, refuse("stopping")))
    result = run(stats, daemon, "--json", "--watch", "0.05")
    *lines, last = result.output.splitlines()
    assert [json.loads(line)["pid"] for line in lines] == [4242, 4343]
    assert "stopping" in last
    assert result.exit_code == 1


def sampled() -> dict[str, Any]:
    """What a daemon that was asked for two prompts, four times each, says to `what_if`."""
    sample = Sample(4096)
    spec = NamespaceSpec("m", "w", "float16", (LayerGroup(1, 1, 1, "layer"),), 16, 4096)
    session = Session(b"s" * 16, Group(1, b"g" * 16), 0, spec, "arena", "", 0, 0.0)
    for number in range(8):
        tokens = np.full(16 * 10, number % 2, "<u4").tobytes()
        sample.asked(session, tokens, "", float(number))
    tiers = [{"name": "dram", "bytes": 4096 * 12, "eviction": "lru"}]
    return {"tiers": tiers, **sample.report()}


def test_what_if_as_a_table_and_as_data(daemon: ScriptedDaemon) -> None:
    """One prompt at a time has room in half of the tier's twice, both in four times as much."""
    daemon.on("what_if", sampled())
    table = run(stats, daemon, "--what-if").output
    assert "8 requests" in table
    assert "75.0 (75.0)" in table
    data = json.loads(run(stats, daemon, "--what-if", "--json").stdout)
    assert (data["requests"], data["sampled_share"]) == (8, 1.0)
    by_scale = {row["scale"]: row["all_hit"] for row in data["estimates"]}
    assert by_scale[4.0] == 0.75
    assert by_scale[0.5] <= by_scale[1.0] <= by_scale[2.0]
    warm = json.loads(run(stats, daemon, "--what-if", "--warm", "0.5", "--json").stdout)
    assert {row["scale"]: row["all_hit"] for row in warm["estimates"]}[4.0] == 1.0


def test_what_if_of_a_daemon_that_was_told_not_to_remember(daemon: ScriptedDaemon) -> None:
    daemon.on("what_if", refuse("refused"))
    assert run(stats, daemon, "--what-if").exit_code == 1


def test_stats_of_nobody() -> None:
    result = CliRunner().invoke(stats, ["--endpoint", "ipc:///tmp/hicache-nobody.sock"])
    assert result.exit_code == 1
    assert "no daemon answers at ipc:///tmp/hicache-nobody.sock" in result.output


PONG = {
    "epoch": "e1",
    "version": "0.1.0",
    "pid": 4242,
    "uptime_s": 1.0,
    "ready": True,
    "tiers": {"dram": "up", "disk": "starting"},
}


def test_ping(daemon: ScriptedDaemon) -> None:
    daemon.on("ping", PONG)
    result = run(ping, daemon)
    assert result.exit_code == 0
    assert "pid 4242" in result.output
    assert "is ready: dram up, disk starting" in result.output
    data = json.loads(run(ping, daemon, "--json").output)
    assert data["ready"] is True
    assert data["seconds"] > 0


def test_ping_of_a_daemon_that_is_not_ready(daemon: ScriptedDaemon) -> None:
    daemon.on("ping", {**PONG, "ready": False})
    result = run(ping, daemon)
    assert result.exit_code == 1
    assert "not ready yet" in result.output


def test_ping_of_nobody() -> None:
    nobody = ["--endpoint", "ipc:///tmp/hicache-nobody.sock"]
    result = CliRunner().invoke(ping, nobody)
    assert result.exit_code == 1
    assert "no daemon answers" in result.output
    as_data = CliRunner().invoke(ping, [*nobody, "--json"])
    assert as_data.exit_code == 1
    assert json.loads(as_data.output)["ready"] is False


@pytest.mark.parametrize("command", [ping, stats, tree, health, explain])
@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "1e9", "2h"])
def test_a_timeout_is_a_time(daemon: ScriptedDaemon, command: Any, timeout: str) -> None:
    arguments = ["--endpoint", daemon.endpoint, f"--timeout={timeout}"]
    result = CliRunner().invoke(command, arguments)
    assert (result.exit_code, "Error: Invalid value for '--timeout'" in result.output) == (2, True)
    assert daemon.ops() == []
