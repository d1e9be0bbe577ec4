"""The daemon that is measured: a running one, or one started here in a temporary folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from hicache.bench.report import BenchError
from hicache.client import Client, DaemonAbsent, DaemonError, admin_call
from hicache.client.session import Transport
from hicache.protocol.curve import CurveKeys
from hicache.protocol.keys import NamespaceSpec

START_S = 120.0
STOP_S = 20.0
PATIENCE_S: Final = 60.0
"""Timeout of the measuring clients: long, so that a slow machine gives figures as well."""


class Running(NamedTuple):
    """A daemon that answers, and the keys to reach it."""

    endpoint: str
    curve: CurveKeys | None = None

    def client(self, spec: NamespaceSpec, name: str, transport: Transport = "auto") -> Client:
        return Client(
            spec,
            self.endpoint,
            transport=transport,
            name=name,
            curve=self.curve,
            timeout_s=PATIENCE_S,
            fetch_timeout_s=PATIENCE_S,
            put_timeout_s=PATIENCE_S,
        )


class Launched(NamedTuple):
    """A daemon that was started here and may not answer yet."""

    process: subprocess.Popen[bytes]
    running: Running
    log: Path


@contextmanager
def launched(folder: Path, config: Mapping[str, Any]) -> Iterator[Launched]:
    """Starts a daemon in this folder, and stops it in order afterwards."""
    own = Running(f"ipc://{folder}/hicache.sock")
    file = folder / "bench.yaml"
    socket = {**config.get("socket", {}), "endpoint": own.endpoint}
    file.write_text(json.dumps({**config, "socket": socket}))
    log = folder / "daemon.log"
    with log.open("wb") as sink:
        command = [sys.executable, "-m", "hicache", "serve", "--config", str(file)]
        daemon = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            yield Launched(daemon, own, log)
        finally:
            _stop(daemon)


@contextmanager
def measured_daemon(
    running: Running | None, config: Mapping[str, Any]
) -> Iterator[tuple[Running, Path]]:
    """(the daemon, a folder for more sockets). Without `running`, a daemon is started with `config`
    and stopped afterwards. Raises BenchError with the end of its log if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        folder = Path(name)
        if running is not None:
            _ping(running)
            yield running, folder
            return
        with launched(folder, config) as daemon:
            _wait(daemon)
            yield daemon.running, folder


def tiers_of(running: Running) -> dict[str, str]:
    """The state of each of its tiers; empty while it does not answer."""
    try:
        states: dict[str, str] = _ping(running)["tiers"]
    except BenchError:
        return {}
    return states


def _ping(running: Running) -> dict[str, Any]:
    try:
        return admin_call(running.endpoint, "ping", timeout_s=2.0, curve=running.curve)
    except (DaemonAbsent, DaemonError) as error:
        raise BenchError(str(error)) from None


def _wait(daemon: Launched) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and daemon.process.poll() is None:
        states = tiers_of(daemon.running)
        if states and "starting" not in states.values():
            return
        time.sleep(0.05)
    log_end = "\n".join(daemon.log.read_text(errors="replace").splitlines()[-12:])
    raise BenchError(f"the daemon to be measured did not start; its log ends with:\n{log_end}")


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
