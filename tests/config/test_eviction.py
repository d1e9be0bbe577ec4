"""Eviction policies of other packages: found by entry point, and faults told as sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.config import Config, ConfigError, key_table, load_config, parse_config
from hicache.config.eviction import PolicyError, ignored_policies, policy_named, policy_names
from hicache.engine.policies.catalog import POLICIES
from hicache.engine.policies.lru import Lru
from tests.engine.policies.registry import PLUGIN, installed

LEAST = "tiers: {{dram: {{size: 1GiB, eviction: {name}}}}}"


def package(folder: Path, name: str, entry: str, code: str = "") -> Path:
    """A package as pip leaves it: its module `<name>_code`, and one entry point."""
    (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{name}-1.0.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    (folder / f"{name}-1.0.dist-info/entry_points.txt").write_text(f"[hicache.policies]\n{entry}\n")
    (folder / f"{name}_code.py").write_text(code)
    return folder


def mistake(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(LEAST.format(name=name), "x.yaml")
    (sentence,) = caught.value.sentences()
    return sentence


def test_a_policy_of_a_package_can_be_chosen() -> None:
    with installed(PLUGIN):
        assert policy_names() == [*POLICIES, "second-chance"]
        config = parse_config(LEAST.format(name="second-chance"), "x.yaml").config
        assert policy_named(config.tiers.dram.eviction).__name__ == "SecondChance"
        (row,) = [row for row in key_table() if row.key == "tiers.dram.eviction"]
        assert row.allowed == "one of lru, lfu, s3fifo, gdsf, hazard, second-chance"
        schema = Config.model_json_schema()["$defs"]["DramConfig"]["properties"]["eviction"]
        assert schema["enum"] == policy_names()
    assert policy_names() == [*POLICIES]


def test_a_name_that_nobody_offers_is_answered_by_those_there_are() -> None:
    assert mistake("second-chance").endswith(
        "tiers.dram.eviction: found 'second-chance'; allowed: one of lru, lfu, s3fifo, gdsf, hazard"
    )
    with installed(PLUGIN):
        assert mistake("second-chanse").endswith("did you mean second-chance?")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("", "cannot be imported: AttributeError"),
        ("Mru = 3", "is no subclass of hicache.engine.policies.base.EvictionPolicy"),
        ("class Mru: pass", "is no subclass of hicache.engine.policies.base.EvictionPolicy"),
        (
            "from hicache.engine.policies.base import EvictionPolicy as E\nclass Mru(E): pass",
            "lacks join, take",
        ),
    ],
)
def test_a_policy_that_cannot_be_used(tmp_path: Path, code: str, told: str) -> None:
    sys.modules.pop("mru_code", None)
    with installed(package(tmp_path, "mru", "mru = mru_code:Mru", code)):
        sentence = mistake("mru")
    assert "eviction policy 'mru' of package mru (mru_code:Mru)" in sentence
    assert told in sentence
    assert "allowed: one of lru, " in sentence


def test_two_packages_offer_one_name(tmp_path: Path) -> None:
    first = package(tmp_path / "1", "one", "mru = one_code:Mru")
    second = package(tmp_path / "2", "two", "mru = two_code:Mru")
    with installed(first, second), pytest.raises(PolicyError) as caught:
        policy_named("mru")
    assert str(caught.value) == (
        "eviction policy 'mru' is offered by package one (one_code:Mru) and package two "
        "(two_code:Mru); uninstall one"
    )


def test_hicaches_own_policy_is_not_replaced(tmp_path: Path) -> None:
    """A package that came along with another one changes nothing of a configuration."""
    with installed(package(tmp_path, "thief", "lru = thief_code:Lru", "raise SystemExit")):
        assert policy_named("lru") is Lru
        loaded = parse_config(LEAST.format(name="lru"), "x.yaml")
        assert list(loaded.warnings) == ignored_policies()
    (sentence,) = loaded.warnings
    assert sentence.startswith("eviction policy 'lru' of package thief (thief_code:Lru) is ignored")


def hicache(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.e2e
def test_replay_by_a_policy_of_a_package(tmp_path: Path) -> None:
    """Two blocks of room. The one that is asked for again survives by its second chance."""
    trace = tmp_path / "trace.jsonl"
    asked = [[1], [2], [1], [3], [1]]
    lines = [
        {"timestamp": 1000 * n, "input_length": 512, "output_length": 1, "hash_ids": ids}
        for n, ids in enumerate(asked)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--policy", "second-chance", "--tiers", "dram=67%", "--json")
    done = hicache("replay", trace, *options, folder=PLUGIN)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["policy"] == "second-chance"
    assert run["hit_tokens"]["dram"] == 2 * 512, run


@pytest.mark.e2e
def test_commands_tell_of_a_broken_package_in_a_sentence(tmp_path: Path) -> None:
    folder = package(tmp_path, "mru", "mru = mru_code:Mru", "import nothing_of_this_name")
    file = tmp_path / "x.yaml"
    file.write_text(LEAST.format(name="mru"))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    told = "of package mru (mru_code:Mru) cannot be imported: ModuleNotFoundError"
    for command in (
        ("config", "check", file),
        ("replay", trace, "--policy", "mru", "--tiers", "dram=100%"),
    ):
        done = hicache(*command, folder=folder)
        assert done.returncode == 2
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_says_it_by_line(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("tiers:\n  dram:\n    size: 1GiB\n    eviction: lruu\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:4: .*did you mean lru\?"):
        load_config(file)
