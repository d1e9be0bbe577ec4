"""The demo's own daemon: a child process whose socket, memory and disk are in temporary folders, so
that a daemon of the user is not touched and no file is left.

Used from one thread, in a `with`, which always ends the child and removes its folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import yaml

from hicache.client import DaemonAbsent, DaemonError, admin_call
from hicache.config import Config, Surroundings, load_config

START_TIMEOUT_S = 120.0
STOP_MARGIN_S = 15.0
LOG_LINES = 15


class DaemonFailed(Exception):
    """The demo's daemon did not start, or ended; the text ends with the end of its log."""


class PrivateDaemon:
    """A daemon with the settings of `config_file`, except its socket and folders; not started.

    `hbm_device`: "host" emulates HBM on every machine. `own_group`: Ctrl-C does not reach the
    daemon; the caller stops it. `needs_hbm`: a file without an hbm tier is an error.
    """

    def __init__(
        self,
        config_file: Path,
        *,
        hbm_device: str = "host",
        own_group: bool = True,
        needs_hbm: bool = True,
        explores: bool = False,
    ) -> None:
        self._own_group = own_group
        around = Surroundings.of(os.environ, os.getuid())
        self.config: Config = load_config(config_file, around).config
        tiers = self.config.tiers
        if tiers.disk is None or (needs_hbm and tiers.hbm is None):
            raise DaemonFailed(f"{config_file}: the demo needs all three tiers: hbm, dram and disk")
        self._process: subprocess.Popen[bytes] | None = None
        with ExitStack() as cleanup:
            self._folder = _temporary_folder(cleanup, None)
            self.endpoint = f"ipc://{self._folder}/hicache.sock"
            self._file = self._folder / "config.yaml"
            self._log = self._folder / "daemon.log"
            values: dict[str, Any] = yaml.safe_load(config_file.read_text())
            values["socket"] = {**(values.get("socket") or {}), "endpoint": self.endpoint}
            if not explores:
                values["planner"] = {**(values.get("planner") or {}), "exploration": 0.0}
            own = values["tiers"]
            if tiers.hbm is not None:
                hbm_folder = _temporary_folder(cleanup, tiers.hbm.path)
                own["hbm"] |= {"device": hbm_device, "path": str(hbm_folder)}
            own["dram"] |= {"path": str(_temporary_folder(cleanup, tiers.dram.path))}
            own["disk"] |= {"path": str(self._folder / "disk")}
            self._file.write_text(yaml.safe_dump(values))
            self._cleanup = cleanup.pop_all()

    def start(self) -> float:
        """Returns the seconds until it was ready. Raises DaemonFailed."""
        started_s = time.monotonic()
        command = [sys.executable, "-m", "hicache", "serve", "--config", str(self._file)]
        with self._log.open("ab") as log:
            self._process = self._spawn(command, log)
        while not self._is_ready():
            code = self._process.poll()
            if code is not None:
                raise DaemonFailed(f"The daemon ended with status {code}.{self._log_end()}")
            if time.monotonic() - started_s > START_TIMEOUT_S:
                raise DaemonFailed(
                    f"The daemon was not ready within {START_TIMEOUT_S:.0f} s.{self._log_end()}"
                )
            time.sleep(0.05)
        return time.monotonic() - started_s

    def stop(self) -> float:
        """Send SIGTERM. Returns the seconds until it ended. Raises DaemonFailed if it had to be
        killed."""
        if self._process is None:
            return 0.0
        process, self._process = self._process, None
        started_s = time.monotonic()
        process.terminate()
        try:
            code = process.wait(self.config.deadlines.shutdown_s + STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            how = "had to be killed" if code is None else f"ended with status {code}"
            raise DaemonFailed(f"The daemon {how} after SIGTERM.{self._log_end()}")
        return time.monotonic() - started_s

    def stats(self) -> dict[str, Any]:
        """Raises DaemonFailed if it does not answer."""
        try:
            return admin_call(self.endpoint, "stats")
        except (DaemonAbsent, DaemonError) as error:
            raise DaemonFailed(f"{error}{self._log_end()}") from error

    def change(self, **sections: Any) -> None:
        """Change these sections of its configuration and reload it. Raises DaemonFailed."""
        values: dict[str, Any] = yaml.safe_load(self._file.read_text())
        self._file.write_text(yaml.safe_dump({**values, **sections}))
        try:
            admin_call(self.endpoint, "reload")
        except (DaemonAbsent, DaemonError) as error:
            raise DaemonFailed(f"{error}{self._log_end()}") from error

    def log_text(self) -> str:
        """Its whole log."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Kill it if it still runs, and remove its folders."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._cleanup.close()

    def __enter__(self) -> PrivateDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=self._own_group,
        )

    def _is_ready(self) -> bool:
        try:
            return bool(admin_call(self.endpoint, "ping", timeout_s=1.0)["ready"])
        except (DaemonAbsent, DaemonError):
            return False

    def _log_end(self) -> str:
        lines = self.log_text().splitlines()[-LOG_LINES:]
        if not lines:
            return " It wrote no log."
        return "\nIts log ends with:\n" + "\n".join(f"    {line}" for line in lines)


def _temporary_folder(cleanup: ExitStack, parent: str | None) -> Path:
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="hicache-demo-", dir=parent))
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
