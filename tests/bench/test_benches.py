"""The developers' benchmarks run, and measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hicache.engine.planner.planner import PlannerSettings
from tests.bench import planner
from tests.bench.synthetic_tree import LONG, PROMPT, TURN, SyntheticTree


def bench(*arguments: str, patience_s: float = 300) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench", *arguments, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert isinstance(rows, list)
    return rows


@pytest.mark.thorough
def test_what_the_index_is_measured_on_is_a_sound_cache() -> None:
    planted = SyntheticTree(16, 60 * PROMPT)
    prompts = planted.plant(60, lambda *_: None, "")
    branched = planted.plant_long(TURN, branched=True)
    planted.ask(branched)
    path, runs, spans = planted.hit(branched)
    assert path.num_blocks == sum(run.num_blocks for run in runs) == LONG // 16
    assert len(path.nodes) > LONG // TURN, "turns with a second try stay nodes of their own"
    assert sum(span.stop - span.start if isinstance(span, slice) else len(span) for span in spans)
    tree, everything = planted.weigh()
    assert 4.0 < tree < everything < 8.0
    used = planted.pool.num_used(4096)
    planted.make_room(4 * PROMPT)
    assert planted.pool.num_used(4096) == used - 4 * PROMPT // 16
    assert planted.insert(planted.random(PROMPT)) == PROMPT // 16
    planted.occupy(PROMPT // 16)
    assert planted.hit(prompts[-1])[0].num_blocks == PROMPT // 16
    planted.engine.validate()


@pytest.mark.e2e
@pytest.mark.timeout(320)
@pytest.mark.parametrize("what", ["index", "engine"])
def test_bench_of_the_index_and_of_the_decision(what: str) -> None:
    rows = bench(what, "--repeat", "10")
    expected = {"hit", "hit_turns_branched", "insert", "evict"} if what == "index" else {"decision"}
    assert expected <= {row["op"] for row in rows if row["p50_us"] > 0}
    assert all(0 <= row["p50_us"] <= row["p99_us"] for row in rows)


@pytest.mark.thorough
def test_the_planner_is_right_on_simulated_machines() -> None:
    """A sample of the grid; `make bench-planner BENCH_ARGS=--full` is all of it."""
    settings = PlannerSettings(exploration=0.01)
    figures = planner.run(lambda *_: None, settings, sample=60)
    assert figures["mean_regret"] < 0.03 < figures["always_reload"]
    assert figures["mean_regret"] < figures["threshold"] < figures["always_recompute"]
    assert figures["worst_regret"] < 0.15, figures["worst_cell"]
    assert 0 < figures["recovery_decisions"] <= 10
    assert figures["explored_share"] < 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_reload() -> None:
    """On disks that are not worth it and those that are, as wide apart as they can be."""
    pytest.importorskip("transformers", reason="needs the extra: pip install .[demo]")
    of = ("--speeds", "0.02,free", "--prefixes", "256", "--rounds", "2")
    slow, free = bench("reload", "--random-weights", *of, patience_s=500)
    assert (slow["reloads"], free["reloads"]) == (0, 2)
    assert slow["reload_ms"] > slow["recompute_ms"] > free["reload_ms"]


@pytest.mark.e2e
@pytest.mark.timeout(320)
def test_bench_restart() -> None:
    (row,) = bench("restart", "--blocks", "20000")
    assert row["blocks"] == 20_000
    assert 0 < row["answers_s"] <= row["all_s"]


@pytest.mark.e2e
@pytest.mark.timeout(320)
def test_bench_refit() -> None:
    (row,) = bench("refit", "--runs", "300", "--refits", "2")
    assert row["fits"] >= 2
    assert row["idle_n"] >= row["n"] > 0
    assert 0 < row["p50_us"] <= row["p99_us"] <= row["longest_us"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_blocks_are_served_before_all_are_known() -> None:
    (row,) = bench("restart", patience_s=1500)
    print(row)
    assert 0 < row["first_hit_s"] < row["all_s"]
