"""What a right configuration becomes, and what every wrong one says."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from hicache.config import (
    Config,
    ConfigError,
    LiveDiff,
    Share,
    Surroundings,
    TiersConfig,
    diff_live,
    key_table,
    key_table_markdown,
    load_config,
    parse_config,
    shown_values,
    with_live,
)
from hicache.daemon.build import engine_settings, tier_specs
from hicache.tiers.block import TierSpec, TierTraits

ROOT = Path(__file__).resolve().parents[2]
AROUND = Surroundings(home="/home/op", endpoint="ipc:///run/user/7/hicache/hicache.sock")
LEAST = "tiers: {dram: {size: 1GiB}}\n"


def read(text: str) -> Config:
    return parse_config(text, "x.yaml", AROUND).config


def sentences(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "x.yaml", AROUND)
    return caught.value.sentences()


def test_least_configuration_has_every_default() -> None:
    config = read(LEAST)
    assert config.tiers.dram.size_bytes == 1 << 30
    assert config.tiers.hbm is None
    assert config.tiers.disk is None
    assert config.block_tokens == 16
    assert config.socket.endpoint == AROUND.endpoint
    assert config.limits.max_message_bytes == 64 << 20
    assert config.deadlines.put_s == 5.0
    assert config.limits.max_queued_bytes == 256 << 20


def test_values_are_frozen() -> None:
    config = read(LEAST)
    with pytest.raises(ValidationError, match="frozen"):
        config.block_tokens = 32


def test_units_and_paths_are_read() -> None:
    config = read(
        """
        tiers:
          hbm: {size: 256MiB, device: cuda:1}
          dram: {size: 25%}
          disk: {size: 10GB, path: ~/cache, batch: 8MiB, min_free: 0}
        deadlines: {fetch: 1m, put: 2.5}
        planner: {prior_per_token_squared: 1ns, prior_flop_rate: 1.2 PFLOP/s}
        """
    )
    disk = config.tiers.disk
    assert disk is not None
    assert (disk.size_bytes, disk.path, disk.batch_bytes) == (10**10, "/home/op/cache", 8 << 20)
    assert config.tiers.dram.size == Share(0.25)
    assert (config.deadlines.fetch_s, config.deadlines.put_s) == (60.0, 2.5)
    assert config.planner.prior_per_token_squared_s == 1e-9
    assert engine_settings(config).flop_per_s == 1.2e15
    with pytest.raises(LookupError, match="25%"):
        _ = config.tiers.dram.size_bytes


def test_links_can_be_throttled_and_stalled() -> None:
    debug = read(
        LEAST + "debug: {throttle_bytes_per_s: {disk_to_dram: 50MB}, stall: {dram_to_hbm: true}}"
    ).debug
    assert debug.bytes_per_s("disk_to_dram") == 50e6
    assert debug.bytes_per_s("dram_to_hbm") == 0.0
    assert debug.bytes_per_s("dram_to_disk") == float("inf")
    assert not debug.check
    assert read(LEAST + "debug: true").debug.check


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers: {dram: {size: 1GiB}, disk: {size: 1GiB, path: ../blocks}}\n")
    disk = load_config(file).config.tiers.disk
    assert disk is not None
    assert disk.path == str(tmp_path.parent / "blocks")


def test_every_value_says_where_it_came_from() -> None:
    environ = {"HICACHE_ENDPOINT": "ipc:///tmp/e.sock", "HOME": "/home/op"}
    loaded = parse_config(LEAST + "debug: true\n", "x.yaml", Surroundings.of(environ, 7))
    assert loaded.sources["debug.check"] == "x.yaml:2"
    assert loaded.sources["tiers.dram.size"] == "x.yaml:1"
    assert loaded.sources["limits.lease_ttl"] == "default"
    assert loaded.sources["socket.endpoint"] == "environment HICACHE_ENDPOINT"
    assert loaded.sources.keys() == dict(shown_values(loaded.config)).keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("block_tokens: many", "x.yaml:2: block_tokens: found 'many'; allowed: a whole number"),
        ("block_tokens: 0", "at least 1 and at most 4096"),
        ("block_tokens: true", "found true"),
        ("write_policy: write_bak", "write_through_selective; did you mean write_back?"),
        ("tires: 1", "x.yaml:2: tires: unknown key; allowed: socket, events, block_tokens"),
        ("tires: 1", "did you mean tiers?"),
        ("high_watermark: 0.5", "did you mean tiers.disk.high_watermark?"),
        ("deadlines: {fetch_s: 1}", "deadlines.fetch_s: unknown key"),
        ("deadlines: {fetch: soon}", "found 'soon'; allowed: a time such as 250ms, 2s or 1m"),
        ("deadlines: {fetch: 0}", "found 0; allowed: a time"),
        ("deadlines: {fetch: .inf}", "found inf; allowed: a time"),
        ("limits: {max_message: 1KiB}", "found '1KiB'; allowed: a size such as"),
        ("limits: 3", "limits: found 3; allowed: the keys max_message, "),
        ("planner: {recompute_band: 2}", "at least 0 and at most 1"),
        ("debug: {stall: {disk: true}}", "debug.stall.disk: unknown key; allowed: hbm_to_dram"),
        ("debug: {throttle_bytes_per_s: {disk_to_dram: 0}}", "found 0; allowed: a size such as"),
        (
            "socket: {endpoint: 'http://x'}",
            "allowed: ipc:///absolute/path.sock, or tcp://host:port",
        ),
        ("socket: {endpoint: 'ipc://rel.sock'}", "must be absolute"),
        ("socket: {endpoint: 'ipc:///" + "x" * 120 + "'}", "at most 107 bytes"),
        ("socket: {endpoint: 'tcp://0.0.0.0:99'}", "can be reached from other machines"),
        ("socket: {endpoint: 'tcp://*:99', curve_secret_key_file: /k}", "both keys are needed"),
        ("events: {endpoint: nowhere}", "allowed: ipc:///absolute/path.sock, or tcp://host:port"),
        ("events: {endpoint: 'tcp://0.0.0.0:99'}", "read the tokens of cached prompts"),
        (
            "socket: {endpoint: 'tcp://127.0.0.1:9'}\nevents: {endpoint: 'tcp://127.0.0.1:9'}",
            "events.endpoint is where clients connect",
        ),
        (
            "block_tokens: 1\nblock_tokens: 2",
            "x.yaml:3: block_tokens: the same key stands on line 2",
        ),
        ("debug: treu", "found 'treu'; allowed: true, false, or the keys check, "),
        ("debug: treu", "did you mean true?"),
        ("debug: [", "this is not YAML"),
        ("debug: !!python/name:os.system x", "debug: this value cannot be read"),
        ("debug: &a [*a]", "debug.0: this refers to itself"),
        ("? [a]\n: 1", "a key is not a plain word"),
    ],
)
def test_a_mistake_names_file_line_key_found_and_allowed(text: str, expected: str) -> None:
    assert any(expected in sentence for sentence in sentences(LEAST + text)), sentences(
        LEAST + text
    )


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ("{}", "tiers.dram: missing"),
        ("{dram: {}}", "tiers.dram.size: missing, and there is no default; allowed: a size"),
        ("{dram: {size: 8GB!}}", "found '8GB!'; allowed: a size such as 512MiB, 8GiB or 25%"),
        ("{dram: {size: 0}}", "found 0; this size is not possible; allowed: more than 0"),
        ("{dram: {size: -1}}", "found -1; this size is not possible"),
        ("{dram: {size: 9TiB}}", "at most 8TiB"),
        ("{dram: {size: 101%}}", "more than 0% and at most 100%"),
        ("{dram: {size: 1GiB, low_watermark: 0.97}}", "low_watermark 0.97 is not below"),
        ("{dram: {size: 1GiB}, disk: {size: 1GiB}}", "tiers.disk.path: missing"),
        ("{dram: {size: 1GiB}, disk: {size: 1MiB, path: /x}}", "less than four batches"),
        ("{dram: {size: 1GiB}, hbm: {size: 1GiB, device: gpu}}", "allowed: auto, host, or cuda:N"),
        ("{dram: {size: 1GiB, path: ~bob/x}}", "another user is not looked up"),
        ("{dram: auto}", "x.yaml:1: tiers.dram: found 'auto'; allowed: the keys size, "),
        ("{dram: {size: 1GiB}, disk: 5}", "tiers.disk: found 5; allowed: the keys size, "),
        ("{dram: {size: 1GiB}, hbm: autom}", "found 'autom'; allowed: auto, or the keys size, "),
        ("{dram: {size: 1GiB}, hbm: autom}", "; did you mean auto?"),
        ("{dram: {size: 1GiB}, hbm: [auto]}", "tiers.hbm: found ['auto']; allowed: auto, or the"),
    ],
)
def test_a_tiers_mistakes(tiers: str, expected: str) -> None:
    assert any(expected in sentence for sentence in sentences(f"tiers: {tiers}"))


def test_mistakes_are_reported_together_in_the_files_order() -> None:
    told = sentences(
        """\
tiers:
  dram: {size: 1}
  dram: {size: 2}
blok_tokens: 3
debug: maybe
deadlines: {put: never}
"""
    )
    assert [sentence.split(": ")[:2] for sentence in told] == [
        ["x.yaml:3", "tiers.dram"],
        ["x.yaml:4", "blok_tokens"],
        ["x.yaml:5", "debug"],
        ["x.yaml:6", "deadlines.put"],
    ]


@pytest.mark.parametrize(
    "text",
    ["", "# nothing", "- 1", "5", "a: [", "\x00", pytest.param("a: " + "[" * 9999, id="deep")],
)
def test_a_text_that_is_no_configuration_is_one_sentence(text: str) -> None:
    assert len(sentences(text)) == 1
    assert "\n" not in sentences(text)[0]


@pytest.mark.parametrize("place", ["deadlines: {match: *a30}", "? *a30\n: 1"])
def test_aliases_of_aliases_are_a_mistake(place: str) -> None:
    """Thirty lines that stand for 2³⁰ values ended the daemon, as a value or as a key."""
    levels = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 31)]
    (sentence,) = sentences("\n".join([LEAST + "a0: &a0 0", *levels, place]))
    assert re.match(r"x\.yaml:\d+: a\d+[.\d]*: with its aliases .* more than 10000", sentence)


def test_a_key_of_aliases_is_not_written_out() -> None:
    levels = [f"- &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 31)]
    key = "\n  ".join(["? - &a0 0", *levels])
    assert "x.yaml:2: a key is not a plain word" in sentences(f"{LEAST}{key}\n: 1")[0]


def test_a_few_aliases_are_welcome() -> None:
    config = read(LEAST + "deadlines: {put: &long 3s, fetch: *long}")
    assert config.deadlines.put_s == config.deadlines.fetch_s == 3.0


def test_a_retired_key_is_accepted_and_said_to_do_nothing() -> None:
    """Files of earlier versions hold them, with values of any kind."""
    text = LEAST + "deadlines:\n  match: 50ms\n  fetch: 2s\n  default: {a: b}\n"
    loaded = parse_config(text, "x.yaml", AROUND)
    assert loaded.config.deadlines.fetch_s == 2.0
    first, second = loaded.warnings
    assert first.startswith("x.yaml:3: deadlines.match has no effect: a match never waits")
    assert second.startswith("x.yaml:5: deadlines.default has no effect: ")
    assert parse_config(LEAST, "x.yaml", AROUND).warnings == ()
    assert "deadlines.match" not in {row.key for row in key_table()}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize("name", ["laptop.yaml", "gpu-server.yaml", "minimal.yaml"])
def test_examples_are_right(name: str) -> None:
    load_config(ROOT / "configs" / name)


def test_a_disks_writes_have_a_budget() -> None:
    disk = "tiers: {dram: {size: 1GiB}, disk: {path: /d, size: 9GiB, write_budget: 200GiB/day}}"
    config = read(disk)
    assert config.tiers.disk is not None
    assert config.tiers.disk.write_budget_bytes_per_day == 200 << 30
    (spec,) = tier_specs(config, [TierSpec("disk", 9 << 30, TierTraits(persistent=True))])
    assert spec.write_bytes_per_s == (200 << 30) / 86400
    less = read(disk.replace("200GiB/day", "8GiB/h, min_return: 0.2"))
    assert set(diff_live(config, less).live) == {
        "tiers.disk.write_budget",
        "tiers.disk.min_return",
    }
    for wrong in ("200GiB", "0", "none/day"):
        with pytest.raises(ConfigError, match="write_budget"):
            read(disk.replace("200GiB/day", wrong))


def test_diff_says_what_applies_live() -> None:
    old = read(LEAST)
    new = read(
        """
        tiers: {dram: {size: 2GiB, high_watermark: 0.99}, hbm: {size: 1GiB}}
        planner: {mode: always_reload}
        debug: true
        block_tokens: 32
        """
    )
    diff = diff_live(old, new)
    assert set(diff.live) == {"tiers.dram.high_watermark", "planner.mode", "debug.check"}
    assert set(diff.restart) == {"tiers.dram.size", "block_tokens", "tiers.hbm"}
    assert diff_live(old, old) == LiveDiff((), ())
    applied = with_live(old, new)
    assert set(diff_live(old, applied).live) == set(diff.live)
    assert set(diff_live(applied, new).restart) == set(diff.restart)
    assert not diff_live(old, applied).restart
    assert not diff_live(applied, new).live


def test_every_key_is_described() -> None:
    assert all(row.meaning and row.allowed for row in key_table())


def test_documentation_holds_the_table_of_keys() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert key_table_markdown() in page, "paste key_table_markdown() into docs/configuration.md"


def test_schema_knows_the_keys_as_written() -> None:
    schema = json.loads(json.dumps(Config.model_json_schema(mode="validation")))
    disk = schema["$defs"]["DiskConfig"]
    assert disk["additionalProperties"] is False
    assert "batch" in disk["properties"]
    assert disk["required"] == ["size", "path"]
    tiers = schema["$defs"]["TiersConfig"]["properties"]
    assert {"enum": ["auto"]} in tiers["hbm"]["anyOf"]
    assert {"enum": [True, False]} in schema["properties"]["debug"]["anyOf"]


def test_models_can_be_made_by_attribute_name() -> None:
    made = Config.model_validate(
        {"tiers": {"dram": {"size": 512}}, "deadlines": {"put_s": 1.0}}, by_name=True
    )
    assert made.deadlines.put_s == 1.0
    assert isinstance(made.tiers, TiersConfig)
