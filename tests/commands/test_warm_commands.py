"""`hicache warm`, `pin`, `unpin`, `pins` against a daemon with scripted replies."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hicache.commands.warm import pin, pins, unpin, warm
from tests.client.scripted_daemon import ScriptedDaemon, refuse

MODEL, OTHER = "ab" * 32, "ac" * 32
STATS: dict[str, Any] = {
    "namespaces": [{"digest": MODEL, "name": "a model"}, {"digest": OTHER, "name": ""}]
}
TOKENS = [1, 2, 2**32 - 1]


@pytest.fixture
def daemon() -> Iterator[ScriptedDaemon]:
    folder = tempfile.mkdtemp(prefix="hc-")
    with ScriptedDaemon(f"ipc://{folder}/s") as daemon:
        daemon.on("stats", STATS)
        yield daemon
    shutil.rmtree(folder)


def run(command: Any, daemon: ScriptedDaemon, *arguments: str, tokens: object = TOKENS) -> Result:
    asked = ["--endpoint", daemon.endpoint, *arguments]
    return CliRunner().invoke(command, asked, input=json.dumps(tokens), standalone_mode=False)


def asked(daemon: ScriptedDaemon) -> Any:
    return daemon.seen[-1].body


def test_warm_says_what_has_come(daemon: ScriptedDaemon) -> None:
    daemon.on("warm", {"held_blocks": 5, "warm_blocks": 3, "refused_blocks": 0})
    result = run(warm, daemon, "-", "--namespace", "ab")
    assert result.output == "3 of 5 blocks are in memory\n2 are on their way\n"
    assert asked(daemon)["namespace"].hex() == MODEL
    assert np.frombuffer(asked(daemon)["tokens"], "<u4").tolist() == TOKENS
    assert asked(daemon)["wait"] is False
    daemon.on("warm", {"held_blocks": 5, "warm_blocks": 3, "refused_blocks": 2})
    result = run(warm, daemon, "-", "--namespace", "a model", "--wait", "2m")
    assert result.output.splitlines()[1] == "2 will not come: there is no room for them"
    assert asked(daemon)["wait"] is True
    assert daemon.seen[-1].request.deadline_s == pytest.approx(120.1 / 0.95)


def test_pin_prints_what_unpin_takes(daemon: ScriptedDaemon) -> None:
    daemon.on("pin", {"pin": "e-7", "blocks": 5, "epoch": "e"})
    result = run(pin, daemon, "-", "--namespace", MODEL, "--for", "8h", "--name", "the tools")
    assert result.stdout == "e-7\n"
    assert "5 blocks are kept for 8h" in result.stderr
    assert (asked(daemon)["ttl_s"], asked(daemon)["name"]) == (8 * 3600, "the tools")
    daemon.on("unpin", {"unpinned": True})
    assert run(unpin, daemon, "e-7").return_value == 0
    assert asked(daemon)["pin"] == "e-7"
    daemon.on("unpin", {"unpinned": False})
    result = run(unpin, daemon, "e-7")
    assert (result.return_value, "no such pin" in result.stderr) == (1, True)


def test_what_is_not_held_cannot_be_pinned(daemon: ScriptedDaemon) -> None:
    daemon.on("pin", {"pin": "", "blocks": 0, "epoch": "e"})
    result = run(pin, daemon, "-", "--namespace", "ab")
    assert (result.return_value, result.stdout) == (1, "")
    daemon.on("pin", refuse("refused"))
    result = run(pin, daemon, "-", "--namespace", "ab")
    assert "the daemon cannot take this now" in str(result.exception)


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        ("a", "names several of"),
        ("A", "names several of"),
        ("zz", "is none of"),
        ("A model", "is none of"),
    ],
)
def test_a_namespace_has_to_be_one(daemon: ScriptedDaemon, namespace: str, message: str) -> None:
    result = run(warm, daemon, "-", "--namespace", namespace)
    assert message in str(result.exception)
    assert daemon.ops() == ["stats"]


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [[1]], {"a": 1}, "abc", None])
def test_tokens_have_to_be_ids(daemon: ScriptedDaemon, tokens: object) -> None:
    result = run(warm, daemon, "-", "--namespace", "ab", tokens=tokens)
    assert "no JSON array of token ids" in str(result.exception)
    assert daemon.ops() == []


@pytest.mark.parametrize(
    ("command", "flag", "time", "message"),
    [
        (pin, "--for", "long", "a time such as"),
        (pin, "--for", "0s", "0s is outside 1s … 720h"),
        (pin, "--for", "721h", "721h is outside"),
        (pin, "--for", "0.5", "0.5 is outside 1s"),
        (pin, "--for", "1e400", "1e400 is outside"),
        (warm, "--wait", "nan", "nan is outside"),
        (warm, "--wait", "-1", "-1 is outside"),
        (warm, "--wait", "1h", "1h is outside 0s … 0.998611h"),
    ],
)
def test_a_time_has_a_unit_and_bounds(
    daemon: ScriptedDaemon, command: Any, flag: str, time: str, message: str
) -> None:
    result = run(command, daemon, "-", "--namespace", "ab", flag, time)
    assert message in str(result.exception)
    assert daemon.ops() == []


def test_a_number_is_seconds(daemon: ScriptedDaemon) -> None:
    daemon.on("pin", {"pin": "e-7", "blocks": 5, "epoch": "e"})
    run(pin, daemon, "-", "--namespace", "ab", "--for", "90")
    assert asked(daemon)["ttl_s"] == 90


def test_a_name_has_to_be_text(daemon: ScriptedDaemon) -> None:
    """What a shell passes on that is no UTF-8."""
    result = run(pin, daemon, "-", "--namespace", "ab", "--name", "\udcff")
    assert "not valid UTF-8" in str(result.exception)
    assert "not valid UTF-8" in str(run(unpin, daemon, "\udcff").exception)
    assert daemon.ops() == []


def test_what_a_terminal_would_obey_in_a_name_is_left_out(daemon: ScriptedDaemon) -> None:
    """A client chose it."""
    row = {"pin": "e-7", "name": "a\n\x1b[2Jb", "namespace": MODEL, "blocks": 5, "ends_in_s": 9.0}
    daemon.on("stats", {**STATS, "pins": [row]})
    assert run(pins, daemon).output == "e-7  5 blocks of abababababab for 9 s  a[2Jb\n"


def test_pins_are_listed(daemon: ScriptedDaemon) -> None:
    assert run(pins, daemon).output == "nothing is pinned\n"
    rows = [
        {"pin": "e-7", "name": "the tools", "namespace": MODEL, "blocks": 5, "ends_in_s": 7199.6}
    ]
    daemon.on("stats", {**STATS, "pins": rows})
    assert run(pins, daemon).output == "e-7  5 blocks of abababababab for 2 h  the tools\n"
    assert json.loads(run(pins, daemon, "--json").output) == rows
