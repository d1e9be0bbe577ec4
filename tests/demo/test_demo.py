"""The demo as a user runs it, on a small model of random weights; and when it can't run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.commands.demo import demo
from hicache.demo import demo_model as model
from hicache.demo.demo_daemon import DaemonFailed, PrivateDaemon
from tests.e2e.daemon_process import wait_for

SMALL = """
tiers:
  hbm: {{size: 96MiB}}
  dram: {{size: 128MiB, path: {shm}}}
  disk: {{size: {disk}, path: /nowhere, min_free: 0, batch: 8MiB}}
"""


def small_config(folder: Path, disk: str = "640MiB") -> Path:
    file = folder / "small.yaml"
    file.write_text(SMALL.format(shm=folder, disk=disk))
    return file


def test_a_missing_wheel_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WHEEL_PACKAGE", "no_such_wheel")
    with pytest.raises(model.ModelMissing, match="--random-weights"):
        model.load_smollm2()


def test_the_private_daemon_changes_where_things_are_and_nothing_else(tmp_path: Path) -> None:
    with PrivateDaemon(small_config(tmp_path)) as daemon:
        folder = Path(daemon.endpoint.removeprefix("ipc://")).parent
        written = (folder / "config.yaml").read_text()
        assert "/nowhere" not in written
        assert "exploration: 0.0" in written
        assert daemon.config.block_tokens == 16
        assert len(list(tmp_path.glob("hicache-demo-*"))) == 1
    assert not folder.exists()
    assert not list(tmp_path.glob("hicache-demo-*"))


@pytest.mark.thorough
def test_a_daemon_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    ends = r"Its log ends with:\n.*disk"
    config = small_config(tmp_path, disk="8TiB")
    with PrivateDaemon(config) as daemon, pytest.raises(DaemonFailed, match=ends):
        daemon.start()


def test_a_config_without_three_tiers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("tiers: {dram: {size: 64MiB}}")
    with pytest.raises(DaemonFailed, match="all three tiers"):
        PrivateDaemon(file)


def test_help_says_what_it_does() -> None:
    shown = CliRunner().invoke(demo, ["--help"])
    assert shown.exit_code == 0
    assert "--random-weights" in shown.output


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_every_tier_serves_and_all_outputs_are_equal(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install .[demo]")
    out = tmp_path / "demo.json"
    command = _command(tmp_path, "--json", str(out))
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    assert data["outputs_equal"] is True
    assert [turn["agent"] for turn in data["turns"]] == ["ada", "ben"] * 6
    for tier in ("hbm", "dram", "disk"):
        assert any(turn["hit_tokens"][tier] for turn in data["turns"]), done.stdout
    assert all(turn["hit_tokens"]["hbm"] == 0 for turn in data["turns"][:1])
    assert data["after_restart_hit_tokens"] > 3000
    assert data["demoted_blocks"] > 0
    assert not list(tmp_path.glob("hicache-demo-*"))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_sigterm_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install .[demo]")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(_command(tmp_path), stdout=subprocess.DEVNULL, env=environ)
    try:
        log = _wait_for(tmp_path, "hicache-demo-*/daemon.log")
        _wait_for(tmp_path, "hicache-demo-*/hicache.sock")
        assert log.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not list(tmp_path.glob("hicache-demo-*"))


def _command(folder: Path, *more: str) -> list[str]:
    config = str(small_config(folder))
    return [sys.executable, "-m", "hicache", "demo", "--random-weights", "--config", config, *more]


def _wait_for(folder: Path, pattern: str) -> Path:
    return wait_for(lambda: list(folder.glob(pattern)), pattern, patience_s=120.0)[0]
