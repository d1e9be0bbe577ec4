"""A daemon to measure: the caller's, or one of our own in a temporary folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hicache.bench.report import BenchError
from hicache.client import DaemonAbsent, DaemonError, admin_call

START_S = 120.0
STOP_S = 20.0


@contextmanager
def lodging(endpoint: str | None, config: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """(the daemon's endpoint, a folder for more sockets). A daemon of our own runs `config`, has no
    disk tier, and is gone afterwards. Raises BenchError with its last words if it will not start.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        folder = Path(name)
        if endpoint is not None:
            _ping(endpoint)
            yield endpoint, folder
            return
        own = f"ipc://{folder}/hicache.sock"
        file = folder / "bench.yaml"
        file.write_text(
            json.dumps({**config, "socket": {**config.get("socket", {}), "endpoint": own}})
        )
        log = folder / "daemon.log"
        with log.open("wb") as sink:
            command = [sys.executable, "-m", "hicache", "serve", "--config", str(file)]
            daemon = subprocess.Popen(command, stdout=sink, stderr=sink)
            try:
                _wait(daemon, own, log)
                yield own, folder
            finally:
                _stop(daemon)


def _ping(endpoint: str) -> dict[str, Any]:
    try:
        return admin_call(endpoint, "ping", timeout_s=2.0)
    except (DaemonAbsent, DaemonError) as error:
        raise BenchError(str(error)) from None


def _wait(daemon: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and daemon.poll() is None:
        try:
            if _ping(endpoint).get("ready"):
                return
        except BenchError:
            pass
        time.sleep(0.05)
    last_words = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    raise BenchError(f"the daemon to be measured did not start; it said:\n{last_words}")


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
