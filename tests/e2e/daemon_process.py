"""A real daemon process with small tiers, and everything that belongs to it.

    with DaemonProcess(deadlines={"fetch": "1s"}) as server:    # starts it, waits until it is ready
        client = server.client()
        ...
    # leaving: stopped in order, nothing left behind, nothing bad in its log

The daemon runs with `debug: {check: true}`: it recomputes every counter of its cache engine at each
tick, and a difference ends it with a traceback, which `close` finds in the log.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import zmq

from hicache.client import Client, DaemonAbsent, LayerGroup, NamespaceSpec, admin_call
from hicache.protocol.messages import PROTOCOL, pack, unpack

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_S: Final = 40.0
MIB: Final = 1 << 20

Tokens = npt.NDArray[np.uint32]
Blocks = npt.NDArray[np.uint8]
T = TypeVar("T")

SPEC: Final = NamespaceSpec(
    model_digest="a model",
    weights_digest="its weights",
    dtype="float16",
    groups=(LayerGroup(layers=8, kv_heads=2, head_dim=64, layout="layer,kv,token,head,dim"),),
    block_tokens=4,
    block_bytes=256 << 10,
)


def wait_for(ask: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true answer. An event that the test cannot subscribe to; no timing is claimed."""
    give_up_s = time.monotonic() + patience_s
    while not (answer := ask()):
        assert time.monotonic() < give_up_s, f"waited {patience_s:.0f} s in vain for: {what}"
        time.sleep(0.02)
    return answer


def prompt(seed: int, num_blocks: int, block_tokens: int = SPEC.block_tokens) -> Tokens:
    """Whole blocks and one token more: the last token of a prompt is always computed."""
    ids = np.random.default_rng(seed).integers(0, 50_000, num_blocks * block_tokens + 1)
    return ids.astype(np.uint32)


def blocks_of(tokens: Tokens, spec: NamespaceSpec = SPEC) -> Blocks:
    """The bytes that this namespace's model makes of a prompt: each block's depend on its whole
    prefix, as in a real model."""
    step = spec.block_tokens
    rows = []
    for end in range(step, len(tokens) + 1, step):
        name = spec.digest() + tokens[:end].tobytes()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        rows.append(np.frombuffer(np.random.default_rng(seed).bytes(spec.block_bytes), np.uint8))
    return np.stack(rows) if rows else np.empty((0, spec.block_bytes), np.uint8)


def store(client: Client, tokens: Tokens, spec: NamespaceSpec = SPEC, **more: Any) -> int:
    """Put a whole prompt; the number of blocks that are held now."""
    result = client.put(tokens, blocks_of(tokens, spec), **more)
    return result.stored + result.present


def read(client: Client, tokens: Tokens, spec: NamespaceSpec = SPEC) -> int:
    """Match, fetch, compare, release: how many blocks came. Wrong bytes are never forgiven."""
    match = client.match(tokens)
    out = np.zeros((match.decision.reload_blocks, spec.block_bytes), np.uint8)
    fetched = client.fetch(match, out)
    client.release(match)
    expected = blocks_of(tokens[: fetched.blocks * spec.block_tokens], spec)
    assert np.array_equal(out[: fetched.blocks], expected), "WRONG BYTES"
    return fetched.blocks


class DaemonProcess:
    """One daemon's files, its process, and the clients of a test.

    `changes` are laid over the small configuration, section by section; a tier that is None is
    left out. `expected_errors`: texts that may stand in an ERROR line of the log. `patience_s`: how
    long the daemon may take to start or to stop.
    """

    def __init__(
        self,
        *,
        endpoint: str = "",
        autostart: bool = True,
        options: Sequence[str] = (),
        module: str = "hicache",
        patience_s: float = PATIENCE_S,
        **changes: Any,
    ) -> None:
        # Short, since a socket's path has at most 107 bytes, which pytest's folders may exceed.
        self.root = Path(tempfile.mkdtemp(prefix="hc-"))
        self.arena_folder = _arena_folder(self.root)
        self.disk = self.root / "disk"
        self.endpoint = endpoint or f"ipc://{self.root}/h.sock"
        self.file = self.root / "hicache.yaml"
        self.log = self.root / "daemon.log"
        self.options = list(options)
        self.module = module
        self.patience_s = patience_s
        self.expected_errors: list[str] = []
        self.clients: list[Client] = []
        self.peers: list[Peer] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self.configure(**changes)
        if autostart:
            try:
                self.start()
            except BaseException:
                self._clear_up()
                raise

    # --- the daemon -----------------------------------------------------------------------------

    def configure(self, **changes: Any) -> None:
        """Write the configuration file anew, at once: it may be read at this moment."""
        arena = str(self.arena_folder)
        tiers = {
            "hbm": {"size": "32MiB", "device": "host", "path": arena},
            "dram": {"size": "64MiB", "path": arena},
            "disk": {"size": "256MiB", "path": str(self.disk), "batch": "16MiB", "min_free": 0},
        }
        config: dict[str, Any] = {
            "socket": {"endpoint": self.endpoint},
            "tiers": tiers,
            "debug": {"check": True},
            "planner": {"mode": "always_reload", "probe_links": False},
        }
        for key, value in changes.items():
            if key in tiers:
                if value is None:
                    del tiers[key]
                else:
                    tiers[key] |= value
            elif isinstance(value, Mapping):
                config[key] = {**config.get(key, {}), **value}
            else:
                config[key] = value
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(config))
        new.replace(self.file)

    def start(self) -> None:
        """Start the daemon and wait until it is ready."""
        self.launch()
        try:
            wait_for(self.is_ready, "a daemon that is ready", self.patience_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.said()}") from None
        self.stats()

    def launch(self) -> None:
        """Start it without waiting."""
        with self.log.open("ab") as sink:
            command = [sys.executable, "-m", self.module, "serve", "--config", str(self.file)]
            command += self.options
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=ROOT)
        self._see(self.process.pid)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended:\n{self.said()}"
        try:
            reply = self.ask("ping")
        except DaemonAbsent:
            return False
        return bool(reply["ready"])

    def stop(self) -> None:
        """SIGTERM: it must end with status 0."""
        assert self.process is not None
        self.process.terminate()
        self.wait()

    def wait(self) -> None:
        """Until the daemon has ended by itself, with status 0."""
        assert self.process is not None
        assert self.process.wait(self.patience_s) == 0, f"it did not end well:\n{self.said()}"
        self.process = None

    def kill(self) -> None:
        """SIGKILL, and its workers die with it."""
        assert self.process is not None
        workers = [pid for pid in self._seen if pid != self.pid]
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process = None
        wait_for(lambda: not any(map(self._lives, workers)), "the end of the workers")

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    # --- questions ------------------------------------------------------------------------------

    def ask(self, op: str, **body: Any) -> dict[str, Any]:
        return admin_call(self.endpoint, op, body, timeout_s=10.0)

    def stats(self) -> dict[str, Any]:
        stats = self.ask("stats")
        for pid in stats["workers"].values():
            self._see(pid)
        for tier in stats["tiers"]:
            assert 0 <= tier["used_bytes"] <= tier["capacity_bytes"], tier
        return stats

    def tier(self, name: str) -> dict[str, Any]:
        row: dict[str, Any]
        (row,) = (tier for tier in self.stats()["tiers"] if tier["name"] == name)
        return row

    def used(self) -> dict[str, tuple[int, int]]:
        """Used and quarantined bytes of each tier."""
        tiers = self.stats()["tiers"]
        return {tier["name"]: (tier["used_bytes"], tier["quarantined_bytes"]) for tier in tiers}

    def worker(self, kind: str) -> int:
        """The pid of the worker whose device begins so, once it is there."""

        def pid() -> int:
            workers = self.stats()["workers"].items()
            return next((pid for device, pid in workers if device.startswith(kind)), 0)

        return wait_for(pid, f"a worker of {kind}")

    def settle(self) -> None:
        """Until nothing moves any more."""
        wait_for(lambda: not any(t["queue_depth"] for t in self.stats()["tiers"]), "quiet")

    # --- clients --------------------------------------------------------------------------------

    def client(self, spec: NamespaceSpec = SPEC, **more: Any) -> Client:
        """With timeouts that a busy machine keeps; closed with the daemon."""
        timeouts = {"timeout_s": 10.0, "fetch_timeout_s": 10.0, "put_timeout_s": 10.0}
        client = Client(spec, self.endpoint, **{**timeouts, **more})
        self.clients.append(client)
        return client

    def model(self, name: str, **changes: Any) -> tuple[Client, NamespaceSpec]:
        """A client of a model of its own, for tests that share a daemon."""
        spec = replace(SPEC, model_digest=name, **changes)
        return self.client(spec), spec

    def peer(self) -> Peer:
        peer = Peer(self.endpoint)
        self.peers.append(peer)
        return peer

    # --- the end --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            print(self.said())
            self._clear_up()

    def close(self) -> None:
        """Stop in order; nothing may be left behind, and the log must be clean."""
        try:
            self.forget_clients()
            if self.process is not None:
                self.stats()
                self.stop()
                assert not list(self.arena_folder.iterdir()), "arenas were left behind"
            wait_for(lambda: not any(map(self._lives, self._seen)), "the end of all processes")
            self.check_log()
        finally:
            self._clear_up()

    def check_log(self) -> None:
        said = self.said()
        bad = [
            line
            for line in said.splitlines()
            if ("Traceback" in line or " ERROR " in line)
            and not any(text in line for text in self.expected_errors)
        ]
        assert not bad, f"the daemon complained:\n{said}"

    def forget_clients(self) -> None:
        for client in self.clients:
            client.close()
        for peer in self.peers:
            peer.close()
        self.clients, self.peers = [], []

    def _clear_up(self) -> None:
        self.forget_clients()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        if self.process is not None:
            self.process.wait(PATIENCE_S)
        shutil.rmtree(self.arena_folder, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def _see(self, pid: int) -> None:
        if pid not in self._seen:
            try:
                self._seen[pid] = psutil.Process(pid)
            except psutil.NoSuchProcess:
                return

    def _lives(self, pid: int) -> bool:
        process = self._seen[pid]
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Peer:
    """Protocol 1 spoken by hand: whatever a stranger might send."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(PATIENCE_S * 1000)
        self.socket.connect(endpoint)
        self._id = 0

    def ask(self, op: str, parts: tuple[bytes, ...] = (), **fields: Any) -> dict[str, Any]:
        """The one reply to one request."""
        self._id += 1
        self.socket.send_multipart([pack({"op": op, "id": self._id, **fields}), *parts])
        reply = self.answer()
        assert reply["id"] == self._id, reply
        return reply

    def send(self, *frames: bytes) -> dict[str, Any]:
        """The one reply to any frames."""
        self.socket.send_multipart(frames)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        return unpack(self.socket.recv_multipart()[0])

    def hello(self, spec: NamespaceSpec = SPEC, **changes: Any) -> dict[str, Any]:
        fields = {"protocol": PROTOCOL, "spec": spec.to_wire(), "client": "a test", **changes}
        return self.ask("hello", **fields)

    def close(self) -> None:
        self._context.destroy(linger=0)


class KilledClient:
    """A client in a process of its own, to be killed at a chosen moment (`tests.e2e.victim`)."""

    def __init__(self, server: DaemonProcess, what: str, tokens: Tokens, transport: str = "arena"):
        command = [sys.executable, "-m", "tests.e2e.victim", what, server.endpoint, transport]
        self.process = subprocess.Popen(
            [*command, json.dumps(SPEC.to_wire()), json.dumps(tokens.tolist())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        assert line == word, f"the victim said {line!r}, not {word!r}"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """One that was stopped, or waits for a word, goes on from there."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go on\n")
        self.process.stdin.flush()
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def hicache(*arguments: str, patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """The command line as a process."""
    command = [sys.executable, "-m", "hicache", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience_s, check=False, cwd=ROOT
    )


def _arena_folder(root: Path) -> Path:
    """In memory where there is room, so that the tests run as fast as the real thing."""
    shared = Path("/dev/shm")
    if (
        shared.is_dir()
        and os.access(shared, os.W_OK)
        and shutil.disk_usage(shared).free > 512 * MIB
    ):
        return Path(tempfile.mkdtemp(prefix="hc-", dir=shared))
    folder = root / "arenas"
    folder.mkdir()
    return folder
