"""Random failures of the daemon, its workers and its clients while they work.

Every entry of `ACTIONS` is one kind of failure and how often it is chosen. Those of `FATAL` end or
stop the daemon itself, so its memory cannot show a leak; a long soak leaves them out in its second
half.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Self

import psutil
import zmq

from hicache.client import DaemonAbsent
from hicache.client.prefix_mirror import HeldPrefixes
from tests.e2e.daemon_process import ROOT, DaemonProcess, Peer
from tests.e2e.faulty_worker import CONTROL, mark_beside
from tests.soak import load
from tests.soak.client import WRONG_BYTES
from tests.soak.clock import CLOCK

LEASE_TTL_S: Final = 3.0
DAY_S: Final = 86400.0
START_S: Final = 120.0
"""With six clients, on two processors that may have other work."""


class ClientProcess:
    """A client process and its output."""

    def __init__(self, server: DaemonProcess, number: int, serial: int, folder: Path) -> None:
        self.may_be_stopped = number % 3 == 2
        transport = "frames" if number % 4 == 3 else "arena"
        self.output = folder / f"client-{serial}.jsonl"
        self._sink: IO[bytes] = self.output.open("wb")
        command = [sys.executable, "-m", "tests.soak.client", server.endpoint, str(serial)]
        self.process = subprocess.Popen(
            [*command, transport, str(int(not self.may_be_stopped))],
            stdout=self._sink,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )

    def ended(self) -> int | None:
        return self.process.poll()

    def wait(self) -> None:
        self.process.wait(30)
        self._sink.close()


class SoakDaemon(DaemonProcess):
    """A daemon whose disk can be made to fail, and whose wall clock can jump. Both are controlled
    by files in `folder`, which the processes find by environment variables."""

    def __init__(self, folder: Path) -> None:
        self.fault, self.clock = folder / "fault.json", folder / "clock"
        os.environ[CONTROL], os.environ[CLOCK] = str(self.fault), str(self.clock)
        self.clock.write_text("0")
        super().__init__(autostart=False, module="tests.soak.daemon", **CONFIG)
        self.patience_s = START_S
        self.will_fail("sync", 1, errno.EIO, for_good=False)

    def configure(self, **changes: Any) -> None:
        super().configure(events={"endpoint": f"ipc://{self.root}/events"}, **changes)

    def will_fail(self, kind: str, nth: int, error: int, for_good: bool) -> None:
        """In effect in the disk's process from SIGUSR1 until SIGUSR2."""
        fault = {"kind": kind, "nth": nth, "errno": error, "for_good": for_good, "at_start": False}
        self.fault.write_text(json.dumps({"folder": str(self.disk), **fault}))
        mark_beside(self.fault).unlink(missing_ok=True)


class Chaos:
    """`actions` counts the actions by name."""

    def __init__(self, server: SoakDaemon, num_clients: int, folder: Path, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.actions: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.files: list[Path] = []
        self._folder = folder
        self._serial = 0
        self._to_wake: list[tuple[float, int]] = []
        self._to_heal: list[tuple[float, int]] = []
        self.clients = [self._start_client(number) for number in range(num_clients)]
        self.routers = [
            HeldPrefixes(server.endpoint, spec.digest(), spec.block_tokens, request_s=0.1)
            for spec in load.MODELS
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all clients and routers in every case."""
        for client in self.clients:
            client.process.kill()
            client.wait()
        self.end_routers()

    def end_routers(self) -> None:
        for router in self.routers:
            router.close()
        self.routers = []

    def wrong_routers(self) -> list[str]:
        """Prompts for which a router's copy differs from the daemon, once no moves are left."""
        found = []
        for spec, router in zip(load.MODELS, self.routers, strict=True):
            router.poll(0.1)
            prompts = [load.conversation(number) for number in range(load.NUM_CONVERSATIONS)]
            with self.server.client(spec) as client:
                scores = client.score(prompts)
            for number, (tokens, score) in enumerate(zip(prompts, scores, strict=True)):
                believed = sum(count for _, count in router.match(tokens))
                if not score.is_answered or believed != score.hit_blocks:
                    what = f"{spec.model_digest} {number}: {believed} of {score.hit_blocks} blocks"
                    found.append(f"{what}, {router.state} {router.error}".strip())
        return found

    def step(self, spare_daemon: bool) -> None:
        """Do one action, then check all processes."""
        actions = [action for action in ACTIONS if not (spare_daemon and action in FATAL)]
        (action,) = self.rng.choices(actions, [ACTIONS[action] for action in actions])
        self.actions[action.__name__.strip("_")] += 1
        with suppress(DaemonAbsent, psutil.NoSuchProcess, ProcessLookupError):
            action(self)  # its target may be absent at the moment
        self.watch()

    def watch(self) -> None:
        """Continue stopped processes that are due, replace ended clients, note unexpected ends."""
        now_s = time.monotonic()
        for wake_s, pid in self._to_wake:
            if now_s >= wake_s and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
        self._to_wake = [entry for entry in self._to_wake if now_s < entry[0]]
        self._heal([pid for heal_s, pid in self._to_heal if now_s >= heal_s])
        self._to_heal = [entry for entry in self._to_heal if now_s < entry[0]]
        for router in self.routers:
            router.poll()
        for number, client in enumerate(self.clients):
            status = client.ended()
            if status is not None:
                if status != -signal.SIGKILL:
                    what = "read wrong bytes" if status == WRONG_BYTES else f"ended with {status}"
                    self.troubles.append(f"a client {what}: {client.output.read_text()[-2000:]}")
                client.wait()
                self.clients[number] = self._start_client(number)

    def finish(self) -> None:
        """Continue all processes, end all failures, and end the clients."""
        self._heal([pid for _, pid in self._to_heal])
        self.server.clock.write_text("0")
        self._configure()
        for _, pid in self._to_wake:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
        self._to_wake = []
        for client in self.clients:
            client.process.terminate()
        for client in self.clients:
            try:
                client.wait()
            except subprocess.TimeoutExpired:
                self.troubles.append(f"a client hangs: {client.output.read_text()[-2000:]}")
                client.process.kill()
                client.wait()

    def _start_client(self, number: int) -> ClientProcess:
        self._serial += 1
        client = ClientProcess(self.server, number, self._serial, self._folder)
        self.files.append(client.output)
        return client

    def _stop_for_a_while(self, pid: int, least_s: float, most_s: float) -> None:
        if all(pid != sleeper for _, sleeper in self._to_wake):
            os.kill(pid, signal.SIGSTOP)
            self._to_wake.append((time.monotonic() + self.rng.uniform(least_s, most_s), pid))

    # --- actions ----------------------------------------------------------------------------------

    def _kill_client(self) -> None:
        self.rng.choice(self.clients).process.kill()

    def _stop_client(self) -> None:
        """Sometimes for longer than its leases last."""
        client = self.rng.choice([client for client in self.clients if client.may_be_stopped])
        self._stop_for_a_while(client.process.pid, 0.2, 2 * LEASE_TTL_S)

    def _kill_worker(self) -> None:
        os.kill(self._worker(), signal.SIGKILL)

    def _stop_worker(self) -> None:
        self._stop_for_a_while(self._worker(), 0.2, 3.0)

    def _worker(self) -> int:
        workers = self.server.stats()["workers"]
        if not workers:
            raise ProcessLookupError
        return int(self.rng.choice(list(workers.values())))

    def _garbage(self) -> None:
        """From a peer without a session: no message, no operation, or too large."""
        peer = Peer(self.server.endpoint)
        peer.socket.rcvtimeo = 200
        frames = [self.rng.randbytes(self.rng.randint(0, 200)) for _ in range(3)]
        try:
            peer.send(*frames)
            peer.socket.send(bytes(80 << 20))
        except zmq.ZMQError:
            pass
        finally:
            peer.close()

    def _reload(self) -> None:
        """Another configuration, which ends the failures of the last one."""
        low = self.rng.choice([0.6, 0.8])
        dram = {**CONFIG["dram"], "low_watermark": low}
        self._configure(dram=dram, write_policy=self._policy())

    def _slow_disk(self) -> None:
        """Until the next reload: a disk that is very slow, or whose reads stall."""
        debug: dict[str, Any] = {"check": True}
        if self.rng.random() < 0.5:
            debug["throttle_bytes_per_s"] = {"disk_to_dram": "500KB", "dram_to_disk": "2MB"}
        else:
            debug["stall"] = {"disk_to_dram": True}
        self._configure(debug=debug)

    def _fail_disk(self) -> None:
        """For some seconds a write or sync fails, once or every time."""
        disk = self.server.worker("disk")
        kind, error = self.rng.choice(["write", "sync"]), self.rng.choice([errno.EIO, errno.ENOSPC])
        self.server.will_fail(kind, self.rng.randint(1, 6), error, self.rng.random() < 0.5)
        os.kill(disk, signal.SIGUSR1)
        self._to_heal.append((time.monotonic() + self.rng.uniform(0.5, 4.0), disk))

    def _heal(self, disks: Sequence[int]) -> None:
        """Send SIGUSR2 to those that still run."""
        for pid in disks:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if "tests.soak.worker" in psutil.Process(pid).cmdline():
                    os.kill(pid, signal.SIGUSR2)

    def _squeeze_memory(self) -> None:
        """Until the next reload: the machine seems to have too little memory left."""
        self._configure(limits={**CONFIG["limits"], "min_available": "100%"})

    def _jump_clock(self) -> None:
        """The wall clock is set."""
        self.server.clock.write_text(str(self.rng.uniform(-DAY_S, DAY_S)))

    def _configure(self, **changes: Any) -> None:
        self.server.configure(**{**CONFIG, **changes})
        if self.server.process is not None:
            self.server.process.send_signal(signal.SIGHUP)

    def _policy(self) -> str:
        return self.rng.choice(["write_back", "write_through", "write_through_selective"])

    def _clear(self) -> None:
        """The reply comes when the records are deleted, at the latest by the deadline of a put. A
        peer that ends before would leave its session behind."""
        peer = Peer(self.server.endpoint)
        peer.socket.rcvtimeo = 10_000
        try:
            spec = self.rng.choice(load.MODELS)
            session = peer.ask("hello", protocol=1, spec=spec.to_wire(), client="clear")["session"]
            peer.ask("clear", s=session)
            peer.ask("bye", s=session)
        except (zmq.ZMQError, KeyError):
            pass
        finally:
            peer.close()

    def _stop_daemon(self) -> None:
        pid = self.server.pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.1, 2.0))
        os.kill(pid, signal.SIGCONT)

    def _kill_daemon(self) -> None:
        self._to_wake = [e for e in self._to_wake if e[1] in {h.process.pid for h in self.clients}]
        self.server.kill()
        self.server.start()

    def _restart_daemon(self) -> None:
        self.watch()
        self.server.stop()
        self.server.start()


CONFIG: Final[dict[str, Any]] = {
    "hbm": {"size": "12MiB"},
    "dram": {"size": "24MiB"},
    "disk": {"size": "96MiB"},
    "limits": {"lease_ttl": f"{LEASE_TTL_S:.0f}s", "session_ttl": "6s"},
    "deadlines": {"fetch": "2s", "put": "3s"},
    # The sample of requests grows for a long time up to its bound (tests/replay/test_whatif.py).
    # That is not a leak, and would hide a small one.
    "what_if": False,
}

ACTIONS: Final[dict[Callable[[Chaos], None], float]] = {
    Chaos._kill_client: 6,
    Chaos._stop_client: 5,
    Chaos._kill_worker: 3,
    Chaos._stop_worker: 3,
    Chaos._garbage: 3,
    Chaos._reload: 4,
    Chaos._slow_disk: 2,
    Chaos._fail_disk: 3,
    Chaos._squeeze_memory: 2,
    Chaos._jump_clock: 2,
    Chaos._clear: 1,
    Chaos._stop_daemon: 1,
    Chaos._kill_daemon: 1,
    Chaos._restart_daemon: 1,
}
FATAL: Final = (Chaos._stop_daemon, Chaos._kill_daemon, Chaos._restart_daemon)
