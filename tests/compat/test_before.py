"""What was written for the commit before the rooms were redesigned still works.

The fixtures beside this file were made by that commit (e63f8df): `wire.json`, what its client sent
to its daemon and the shape of each reply; `disk.tar.gz`, a disk folder that it left;
`all-keys.yaml` with `all-keys.json`, a configuration file with every key and the values it read;
`commands.json`, its commands with their options.
"""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgpack
import numpy as np
import pytest
import zmq
from click.testing import CliRunner

from hicache.cli import cli
from hicache.client import LayerGroup, NamespaceSpec
from hicache.config.loading import RETIRED
from tests.e2e.daemon_process import DaemonProcess, Tokens

HERE: Final = Path(__file__).parent
PATIENCE_MS: Final = 60_000
SPEC: Final = NamespaceSpec(
    model_digest="a model",
    weights_digest="its weights",
    dtype="float16",
    groups=(LayerGroup(layers=2, kv_heads=2, head_dim=16, layout="layer,kv,token,head,dim"),),
    block_tokens=4,
    block_bytes=1024,
)
MOVED: Final = ("engine", "index", "planner", "refit", "reload", "restart")
"""Developers' benchmarks: `make bench-NAME` now; the command says so."""


def shape(value: Any) -> Any:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, dict):
        return {str(key): shape(item) for key, item in value.items()}
    return [shape(value[0])] if value else []


def missing(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Where `now` lacks something that a reader of `before` relies on."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, item in before.items():
            if key in now:
                yield from missing(item, now[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(now, list):
        if before and now:
            yield from missing(before[0], now[0], f"{path}[0]")
    elif "null" not in (before, now) and before != now:
        yield f"{path}: {now} instead of {before}"


class OldClient:
    """Sends what the old client sent, with this daemon's tokens and numbers in place of the old."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._now: dict[tuple[str, Any], Any] = {}

    def send(self, step: dict[str, Any]) -> None:
        head = {key: self._current(key, item) for key, item in step["send"].items()}
        head["sent_s"] = time.monotonic()
        parts = [bytes.fromhex(part) for part in step["parts"]]
        self._socket.send_multipart([msgpack.packb(head), *parts])

    def receive(self, before: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        assert self._socket.poll(PATIENCE_MS), "no reply"
        message, *parts = self._socket.recv_multipart()
        reply: dict[str, Any] = msgpack.unpackb(message)
        for key, old in before["references"].items():
            if key in reply:
                self._now[key, _value(old)] = reply[key]
        return reply, [len(part) for part in parts]

    def _current(self, key: str, item: Any) -> Any:
        """`s` is how a request names the session that `hello` gave it."""
        value = _value(item)
        name = "session" if key == "s" else key
        known = isinstance(value, bytes | str | int) and (name, value) in self._now
        return self._now[name, value] if known else value

    def close(self) -> None:
        self._context.destroy(linger=0)


def _value(item: Any) -> Any:
    if isinstance(item, dict):
        if set(item) == {"hex"}:
            return bytes.fromhex(item["hex"])
        return {key: _value(inner) for key, inner in item.items()}
    return [_value(inner) for inner in item] if isinstance(item, list) else item


@pytest.mark.e2e
def test_the_client_of_before_is_served() -> None:
    """Each request of its vocabulary, over frames and through memory, bad ones too."""
    steps = json.loads((HERE / "wire.json").read_text())
    with DaemonProcess(
        hbm={"size": "4MiB"}, dram={"size": "8MiB"}, disk={"size": "64MiB"}
    ) as server:
        client = OldClient(server.endpoint)
        for number, step in enumerate(steps):
            where = f"step {number}, {step['send']['op']}"
            client.send(step)
            for before in step["replies"]:
                reply, parts = client.receive(before)
                assert reply["id"] == step["send"]["id"], where
                assert (reply["ok"], reply.get("error")) == (before["ok"], before["error"]), where
                now = shape({key: value for key, value in reply.items() if key != "id"})
                assert list(missing(before["shape"], now)) == [], where
                assert parts == before["parts"], where
        client.close()


@pytest.mark.e2e
def test_the_disk_folder_of_before_is_served() -> None:
    with DaemonProcess(
        hbm=None, dram={"size": "8MiB"}, disk={"size": "64MiB"}, autostart=False
    ) as server:
        server.disk.mkdir(exist_ok=True)
        with tarfile.open(HERE / "disk.tar.gz") as archive:
            archive.extractall(server.disk, filter="data")
        server.start()
        client = server.client(SPEC)
        for seed in (1, 2, 3):
            chance = np.random.default_rng(1000 + seed)
            blocks = chance.integers(0, 256, (6, SPEC.block_bytes)).astype(np.uint8)
            match = client.match(_tokens(seed, 6))
            assert match.hit_blocks == 6
            out = np.zeros((match.decision.reload_blocks, SPEC.block_bytes), np.uint8)
            assert client.fetch(match, out).blocks == len(out) > 0
            client.release(match)
            assert np.array_equal(out, blocks[: len(out)])


def _tokens(seed: int, num_blocks: int) -> Tokens:
    count = num_blocks * SPEC.block_tokens + 1
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.uint32)


def test_the_configuration_of_before_means_the_same() -> None:
    file = HERE / "all-keys.yaml"
    ran = CliRunner().invoke(cli, ["config", "show", str(file), "--json"], catch_exceptions=False)
    now = {key: row["value"] for key, row in json.loads(ran.stdout)["values"].items()}
    before = json.loads((HERE / "all-keys.json").read_text())
    for section, key in RETIRED:  # accepted without an effect: see the file's `config check`
        del before[f"{section}.{key}"]
    assert {key: now.get(key, "no such key") for key in before} == before


def test_every_command_of_before_is_there_with_its_options() -> None:
    before = json.loads((HERE / "commands.json").read_text())
    now = dict(_commands(cli, "hicache"))
    lost = {
        name: sorted(set(options) - now.get(name, set()))
        for name, options in before.items()
        if name not in now or not set(options) <= now[name]
    }
    moved = {f"hicache bench {name}" for name in MOVED}
    assert set(lost) == moved, lost
    assert moved <= set(now), "a moved benchmark says where it is"


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, set[str]]]:
    yield name, {text for param in command.params for text in (*param.opts, *param.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from _commands(found, f"{name} {child}")
