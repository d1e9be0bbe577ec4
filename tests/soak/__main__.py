"""Run a soak and judge it.

    python -m tests.soak [--duration 10m] [--clients 6] [--seed N] [--json FILE]

Exit status 1 where anything was wrong: wrong bytes, a call past its deadline, a client that ended
or hung, a lease, slot, file descriptor, thread, process or shared file left behind, memory that
grows, or a complaint in the daemon's log. It runs with `debug: {check: true}`, so that the daemon
checks all its invariants ten times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from hicache.config.units import parse_seconds
from tests.e2e.daemon_process import DaemonProcess, prompt, read, store, wait_for
from tests.soak import load
from tests.soak.chaos import Chaos, SoakDaemon
from tests.soak.clock import CLOCK

SETTLED_S: Final = 300.0
"""Memory is judged from this age of a daemon on: before, everything is used for the first time."""
MAX_GROWTH: Final = 0.01
LOOK_S: Final = 5.0


class Soak:
    def __init__(self, duration_s: float, num_clients: int, seed: int) -> None:
        self.duration_s = duration_s
        self.num_clients = num_clients
        self.seed = seed
        self.memory: list[tuple[float, int]] = []
        self.troubles: list[str] = []

    def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="hicache-soak-") as folder:
            server = SoakDaemon(Path(folder))
            result: dict[str, Any] = {"seed": self.seed, "troubles": self.troubles}
            try:
                server.start()
                with server:
                    result |= self._run(server, Path(folder))
            except (
                AssertionError
            ) as error:  # what the daemon was found to do wrong, also when it closed
                self.troubles.append(str(error))
            with suppress(AssertionError):
                wait_for(lambda: not _left_running(server), "the end of all processes")
            self.troubles += [f"still runs: {process}" for process in _left_running(server)]
            return result

    def _run(self, server: SoakDaemon, folder: Path) -> dict[str, Any]:
        _warm_up(server)
        before = _holdings(server)
        with Chaos(server, self.num_clients, folder, self.seed) as chaos:
            return self._soak(server, chaos, before)

    def _soak(
        self, server: DaemonProcess, chaos: Chaos, before: Mapping[str, int]
    ) -> dict[str, Any]:
        began_s = time.monotonic()
        # A long soak has a second half in which one daemon lives on and its memory is looked at.
        spare_after_s = self.duration_s / 3 if self.duration_s > 2 * SETTLED_S else self.duration_s
        rng = random.Random(self.seed)
        look_s = daemon_s = began_s
        pid = server.pid
        while (now_s := time.monotonic()) < began_s + self.duration_s:
            chaos.step(spare_daemon=now_s > began_s + spare_after_s)
            if server.pid != pid:
                pid, daemon_s = server.pid, now_s
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                self._look(server, now_s - daemon_s)
                _show(chaos, began_s, self.duration_s)
            time.sleep(rng.uniform(0.05, 1.0))
            chaos.watch()
        chaos.finish()
        self.troubles += chaos.troubles
        totals, slowest_s = _totals(chaos.files)
        self._judge_totals(totals)
        self._judge_leaks(server, chaos, before)
        growth = self._judge_memory()
        return {
            "seed": self.seed,
            "duration_s": round(time.monotonic() - began_s),
            "clients": self.num_clients,
            "actions": dict(chaos.actions),
            "totals": totals,
            "slowest_call_s": slowest_s,
            "memory_growth": growth,
            "memory_mib": [
                [round(age_s), round(num / 2**20, 1)] for age_s, num in self.memory[::6]
            ],
            "troubles": self.troubles,
        }

    def _look(self, server: DaemonProcess, age_s: float) -> None:
        try:
            self.memory.append((age_s, _private_bytes(server.pid)))
        except psutil.NoSuchProcess:
            return

    def _judge_totals(self, totals: Mapping[str, int]) -> None:
        for what in ("late match", "late fetch", "late put", "late warm", "late pin", "wrong"):
            if totals.get(what):
                self.troubles.append(f"{totals[what]} × {what}")
        for what in ("fetched", "stored", "warmed", "pinned"):
            if not totals.get(what):
                self.troubles.append(f"nothing was {what}: the soak proved nothing")

    def _judge_leaks(self, server: DaemonProcess, chaos: Chaos, before: Mapping[str, int]) -> None:
        """After the end of all clients no lease or slot may be left, and all blocks must be right.
        `before`: counts of the first daemon when it was ready and no client had come."""
        wait_for(lambda: server.ask("health")["healthy"], "all tiers up")
        for spec in load.MODELS:
            with server.client(spec) as client:
                for number in range(load.NUM_CONVERSATIONS):
                    tokens = load.prompt(number, load.MAX_TURNS)
                    match = client.match(tokens)
                    out = np.zeros((match.decision.reload_blocks, spec.block_bytes), np.uint8)
                    came = client.fetch(match, out).blocks
                    client.release(match)
                    if not np.array_equal(out[:came], load.blocks(spec, tokens, 0, came)):
                        self.troubles.append(f"wrong bytes at the end, {spec.model_digest}")

        with suppress(AssertionError):
            wait_for(lambda: not chaos.wrong_routers(), "routers with the right blocks")
        self.troubles += [f"a router is wrong: {what}" for what in chaos.wrong_routers()]
        chaos.end_routers()
        with suppress(AssertionError):
            wait_for(lambda: not _held(server), "no leases or slots left")
        if held := _held(server):
            self.troubles.append(f"still held after all clients have ended: {held}")
        with suppress(AssertionError):
            wait_for(lambda: not _left_over(server, before), "nothing left over")
        for what, count in _left_over(server, before).items():
            self.troubles.append(f"{what}: {before[what]} at the start, {count} at the end")

    def _judge_memory(self) -> float | None:
        """Growth of the last daemon's private memory, from its fifth minute to its end."""
        lives: list[list[tuple[float, int]]] = [[]]
        for age_s, num_bytes in self.memory:
            if lives[-1] and age_s < lives[-1][-1][0]:
                lives.append([])
            lives[-1].append((age_s, num_bytes))
        old = [num_bytes for age_s, num_bytes in lives[-1] if age_s >= SETTLED_S]
        if len(old) * LOOK_S < 2 * SETTLED_S:
            return None  # a fifth of it is too short: bursts last for a minute
        fifth = len(old) // 5
        growth = float(np.median(old[-fifth:]) / np.median(old[:fifth]) - 1.0)
        if growth > MAX_GROWTH:
            self.troubles.append(f"memory grew by {growth:.1%}")
        return round(growth, 4)


def _held(server: DaemonProcess) -> dict[str, int]:
    """Counts of what clients hold, by kind."""
    stats = server.stats()
    held = {what: stats[what] for what in ("sessions", "leases", "tickets", "waiting")}
    held["pins"] = len(stats["pins"])
    for tier in stats["tiers"]:
        held[f"{tier['name']} given back"] = tier["given_back_bytes"]
        held[f"{tier['name']} quarantined"] = tier["quarantined_bytes"]
        held[f"{tier['name']} moves"] = tier["queue_depth"]
    return {what: count for what, count in held.items() if count}


def _warm_up(server: DaemonProcess) -> None:
    """Causes what is made only once: the first reply in frames starts a thread of ZeroMQ."""
    with server.client(transport="frames") as client:
        store(client, prompt(1, 4))
        read(client, prompt(1, 4))
        client.clear()
    wait_for(lambda: not _held(server), "no leases or slots")


def _holdings(server: DaemonProcess) -> dict[str, int]:
    process = psutil.Process(server.pid)
    return {"file descriptors": process.num_fds(), "threads": process.num_threads()}


def _left_over(server: DaemonProcess, before: Mapping[str, int]) -> dict[str, int]:
    """Counts that are higher than at the start."""
    return {what: count for what, count in _holdings(server).items() if count > before[what]}


def _left_running(server: SoakDaemon) -> list[str]:
    """Every process that was started for this soak, by any process."""
    mark = {CLOCK: str(server.clock)}.items()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and mark <= process.environ().items():
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def _private_bytes(pid: int) -> int:
    """Anonymous memory: neither the arenas nor the disk tier's mapped file."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise psutil.NoSuchProcess(pid)


def _totals(files: list[Path]) -> tuple[dict[str, int], float]:
    """The sums of the clients' last reports, and their slowest call."""
    totals: Counter[str] = Counter()
    slowest_s = 0.0
    for file in files:
        lines = [line for line in file.read_text().splitlines() if line.startswith("{")]
        for line in reversed(lines):
            try:
                report = json.loads(line)
            except ValueError:  # it was killed while it wrote
                continue
            slowest_s = max(slowest_s, report.pop("slowest_s"))
            totals.update(report)
            break
    return dict(totals), slowest_s


def _show(chaos: Chaos, began_s: float, duration_s: float) -> None:
    if sys.stderr.isatty():
        done_s = time.monotonic() - began_s
        text = f"soak: {done_s:.0f} of {duration_s:.0f} s, {sum(chaos.actions.values())} actions"
        print(f"\r{text}, {len(chaos.troubles)} troubles ", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--duration", default="10m", help="like 120s or 30m")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", default="", help="write the result to this file")
    options = parser.parse_args()
    # By an exception, so that every started process is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("soak: ended by SIGTERM"))
    print(f"soak: {options.duration}, {options.clients} clients, seed {options.seed}", flush=True)
    soak = Soak(parse_seconds(options.duration), options.clients, options.seed)
    result = soak.run()
    if options.json:
        Path(options.json).write_text(json.dumps(result) + "\n")
    shown = {name: value for name, value in result.items() if name != "memory_mib"}
    print(json.dumps(shown, indent=1))
    for trouble in result["troubles"]:
        print(f"TROUBLE: {trouble}")
    return 1 if result["troubles"] else 0


if __name__ == "__main__":
    sys.exit(main())
