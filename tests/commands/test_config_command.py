"""`hicache config` and the command table, as typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.cli import COMMANDS, cli, main
from hicache.config import ConfigError

GOOD = "tiers: {dram: {size: 1MiB}}\n"


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from hicache.cli import cli\n"
        "print(CliRunner().invoke(cli, ['--help']).output)\n"
        "heavy = {'pydantic', 'rich', 'lmdb', 'zmq', 'numpy', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)


def test_an_unknown_command_names_the_known_ones() -> None:
    result = CliRunner().invoke(cli, ["srve"])
    assert result.exit_code == 2
    assert "serve, stats" in result.output


def test_check_good_and_bad(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    assert CliRunner().invoke(cli, ["config", "check", str(file)]).output == f"{file}: good\n"
    file.write_text(GOOD + "blok_tokens: 1\n")
    result = CliRunner().invoke(cli, ["config", "check", "--json", str(file)])
    assert result.exit_code == 2
    [mistake] = json.loads(result.output)["mistakes"]
    assert (mistake["line"], mistake["key"], mistake["nearest"]) == (
        2,
        "blok_tokens",
        "block_tokens",
    )


def test_check_says_what_has_no_effect(tmp_path: Path) -> None:
    """A file of an earlier version is good all the same."""
    file = tmp_path / "c.yaml"
    file.write_text(GOOD + "deadlines: {match: 50ms}\n")
    result = CliRunner().invoke(cli, ["config", "check", str(file)])
    assert result.exit_code == 0
    warning, good = result.output.splitlines()
    assert warning.startswith(f"{file}:2: deadlines.match has no effect: ")
    assert good == f"{file}: good"
    as_data = CliRunner().invoke(cli, ["config", "check", "--json", str(file)]).output
    assert json.loads(as_data)["warnings"] == [warning]


def test_check_compares_with_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers: {dram: {size: 7TiB}}\n")
    assert CliRunner().invoke(cli, ["config", "check", str(file)]).exit_code == 2
    alone = CliRunner().invoke(cli, ["config", "check", "--no-machine", str(file)])
    assert alone.exit_code == 0


def test_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "[c].yaml"
    file.write_text(GOOD)
    lines = CliRunner().invoke(cli, ["config", "show", str(file)]).output.splitlines()
    assert any(line.split() == ["tiers.dram.size", "1MiB", f"{file}:1"] for line in lines)
    shown = CliRunner().invoke(cli, ["config", "show", "--json", str(file)]).output
    assert json.loads(shown)["values"]["tiers.dram.size"]["value"] == 1 << 20


def test_reload_names_what_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def answer(*request: object) -> dict[str, object]:
        asked.append(request)
        return {"live": ["debug"], "restart": ["block_tokens"]}

    monkeypatch.setattr("hicache.client.admin_call", answer)
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    result = CliRunner().invoke(cli, ["config", "reload", "--endpoint", "ipc:///x", str(file)])
    assert result.output == "applied: debug\nneeds a restart: block_tokens\n"
    assert asked == [("ipc:///x", "reload", {"file": str(file)}, 10.0, None)]


def test_a_wrong_file_never_reaches_the_daemon(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("debug: maybe\n")
    result = CliRunner().invoke(cli, ["config", "reload", "--endpoint", "ipc:///x", str(file)])
    assert isinstance(result.exception, ConfigError)


def test_reload_without_a_daemon_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = f"ipc://{tmp_path}/none.sock"
    monkeypatch.setattr("hicache.commands.config.RELOAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sys, "argv", ["hicache", "config", "reload", "--endpoint", nowhere])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_schema_is_json() -> None:
    schema = json.loads(CliRunner().invoke(cli, ["config", "schema"]).output)
    assert schema["properties"]["block_tokens"]["default"] == 16


def test_a_wrong_file_prints_sentences_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hicache", "config", "show", "/nowhere.yaml"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "/nowhere.yaml: cannot be read: No such file or directory\n"
