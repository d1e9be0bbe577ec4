"""A kind of tier that the product does not know: its two files, its row and its section of the
configuration are in this folder (`archive_*.py`), its blocks stored by a codec of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq

from hicache.client import Client
from hicache.client.prefix_mirror import HeldPrefixes
from hicache.tiers.block import PAGE_BYTES
from tests.e2e.daemon_process import (
    ROOT,
    SPEC,
    DaemonProcess,
    blocks_of,
    prompt,
    read,
    store,
    wait_for,
)
from tests.transfer.media.sealed_codec import SEAL_BYTES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

MODULE = "tests.e2e.archive_daemon"
BLOCKS = 8
PROMPTS = 24
"""48 MiB, three times what memory holds."""
SLOT_BYTES = SPEC.block_bytes + PAGE_BYTES


class ArchiveProcess(DaemonProcess):
    """A daemon with a small memory and, below it, an archive."""

    def __init__(self, **more: Any) -> None:
        super().__init__(module=MODULE, **more)

    def configure(self, **changes: Any) -> None:
        """A path in the file is one in its folder."""
        small: dict[str, Any] = {"hbm": None, "disk": None, "dram": {"size": "16MiB"}}
        archive = {"archive": {"size": "256MiB", "path": "archive"}}
        super().configure(**{**small, **changes, "tiers": archive})

    @property
    def files(self) -> list[Path]:
        """One for each block in the archive."""
        folder = self.root / "archive"
        return sorted(file for file in folder.iterdir() if not file.suffix)


@pytest.fixture
def server() -> Iterator[ArchiveProcess]:
    with ArchiveProcess() as server:
        yield server


def fill(server: DaemonProcess, client: Client) -> None:
    """Store more than memory holds."""
    for seed in range(PROMPTS):
        assert store(client, prompt(seed, BLOCKS)) == BLOCKS
    server.settle()


def read_all(client: Client) -> list[int]:
    return [read(client, prompt(seed, BLOCKS)) for seed in range(PROMPTS)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line that knows the archive."""
    command = [sys.executable, "-m", MODULE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_what_memory_gives_up_is_demoted_and_comes_back(server: ArchiveProcess) -> None:
    client = server.client()
    fill(server, client)
    row = server.tier("archive")
    assert (row["medium"], row["state"]) == ("a shared folder", "up")
    assert row["blocks"] == row["demotions"] >= (PROMPTS - 8) * BLOCKS
    assert row["used_bytes"] == row["blocks"] * SLOT_BYTES, "a slot holds the block and its seal"
    assert len(server.files) == row["blocks"]
    assert client.match(prompt(0, BLOCKS)).runs == (("archive", BLOCKS),)
    assert read_all(client) == [BLOCKS] * PROMPTS
    row = server.tier("archive")
    assert row["hits"] > 0
    assert row["bytes_served"] >= (PROMPTS - 8) * BLOCKS * SPEC.block_bytes
    links = {(link["src"], link["dst"]): link for link in server.stats()["links"]}
    assert links["archive", "dram"]["measurements"] > 0
    assert links["dram", "archive"]["measurements"] > 0
    shown = run("stats", "--endpoint", server.endpoint).stdout
    assert "archive → dram" in shown
    assert "a shared folder" in shown


def test_the_codec_is_what_lies_in_the_files(server: ArchiveProcess) -> None:
    tokens = prompt(1, 1)
    assert server.client().put(tokens, blocks_of(tokens), durable=True).durable
    (file,) = server.files
    plain = blocks_of(tokens)[0]
    data = file.read_bytes()
    assert data[-SEAL_BYTES - SPEC.block_bytes : -SEAL_BYTES] == (~plain).tobytes()
    assert plain.tobytes() not in data


def test_the_planner_knows_its_price() -> None:
    """Reading from it is slow. What is dear to compute is reloaded all the same, and `explain` says
    from where and at what price; what is cheap is recomputed."""
    planner = {"mode": "measured", "exploration": 0, "min_deadline": "30s"}
    debug = {"throttle_bytes_per_s": {"archive_to_dram": "20MB"}}
    with ArchiveProcess(planner=planner, debug=debug) as server:
        client, expected_s = server.client(), BLOCKS * SPEC.block_bytes / 20e6
        fill(server, client)
        teach(client, 60.0)
        assert read(client, prompt(0, BLOCKS)) == BLOCKS
        assert read(client, prompt(1, BLOCKS)) == BLOCKS
        client.ping()  # a release is not waited for
        (decision,) = server.ask("explain", last=1)["decisions"]
        assert decision["runs"] == [["archive", BLOCKS]]
        assert f"Reload {BLOCKS * SPEC.block_tokens} tokens from archive" in decision["sentence"]
        assert decision["predicted"]["reload_s"] > 0.5 * expected_s
        assert decision["actual"]["reload_s"] > 0.9 * expected_s
        (link,) = (link for link in server.stats()["links"] if link["src"] == "archive")
        assert link["bytes_per_s"] < 30e6
        for _ in range(40):
            teach(client, expected_s / 1000)
        decided = client.match(prompt(2, BLOCKS)).decision
        assert (decided.name, decided.reason) == ("recompute", "slower")
        server.configure(planner=planner)
        assert "debug.throttle_bytes_per_s.archive_to_dram" in server.ask("reload")["live"]


def teach(client: Client, seconds: float) -> None:
    """What a prefill of a whole prompt takes."""
    tokens = len(prompt(0, BLOCKS))
    for _ in range(4):
        client.observe(sum_n=tokens, sum_nc=tokens**2 / 2, seconds=seconds)


def test_routers_hear_of_it() -> None:
    with ArchiveProcess(autostart=False) as server, zmq.Context() as context:
        server.configure(events={"endpoint": f"ipc://{server.root}/events"})
        server.start()
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(f"ipc://{server.root}/events")
        subscriber.subscribe(b"")
        client = server.client()
        with HeldPrefixes(server.endpoint, SPEC.digest(), SPEC.block_tokens) as router:
            fill(server, client)
            prompts = [prompt(seed, BLOCKS) for seed in range(PROMPTS)]

            def knows_all() -> bool:
                router.poll(0.05)
                told = [router.match(tokens) for tokens in prompts]
                return told == [list(score.runs) for score in client.score(prompts)]

            wait_for(knows_all, "a router that knows what is held")
            assert router.match(prompts[0]) == [("archive", BLOCKS)]
        media: dict[str, str] = {}
        while subscriber.poll(100):
            _, events, _ = msgpack.unpackb(subscriber.recv_multipart()[2])
            media |= {e["tier"]: e["medium"] for e in events if e["type"] == "BlockStored"}
        subscriber.close(0)
        assert media == {"dram": "CPU", "archive": "REMOTE"}


def test_its_worker_is_killed(server: ArchiveProcess) -> None:
    """For a moment its blocks are misses; the next worker finds them, and they are served again."""
    client = server.client()
    fill(server, client)
    held, epoch = server.tier("archive")["blocks"], server.stats()["epoch"]
    worker = server.worker("archive")
    psutil.Process(worker).kill()
    wait_for(lambda: server.tier("archive")["state"] != "up", "a tier that is down")
    assert read(client, prompt(0, BLOCKS)) == 0
    wait_for(lambda: server.worker("archive") != worker, "another worker")
    wait_for(lambda: server.ask("health")["healthy"], "the tier")
    assert server.tier("archive")["blocks"] == held
    assert read_all(client) == [BLOCKS] * PROMPTS
    assert server.stats()["epoch"] == epoch


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_it_is_restored_by_the_next_daemon(server: ArchiveProcess, how: str) -> None:
    client = server.client()
    fill(server, client)
    before = len(server.files)
    getattr(server, how)()
    kept = len(server.files)
    assert kept == PROMPTS * BLOCKS if how == "stop" else kept == before
    server.start()
    wait_for(lambda: server.ask("health")["healthy"], "the tier")
    assert server.tier("archive")["blocks"] == kept
    wait_for(lambda: client.match(prompt(0, BLOCKS)).is_answered, "the client's return")
    server.forget_clients()
    came = read_all(server.client())
    assert sum(came) == kept
    assert came[0] == BLOCKS


def test_a_scrub_finds_what_is_damaged(server: ArchiveProcess) -> None:
    fill(server, server.client())
    damaged = server.files[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    server.ask("verify", start=True, bytes_per_s=1e12)

    def finished() -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = server.ask("verify", start=False)["devices"]
        return [] if any(device["is_running"] for device in devices) else devices

    (device,) = wait_for(finished, "the end of the scrub")
    assert (device["tier"], device["num_bad"]) == ("archive", 1)
    assert not damaged.exists()


def test_another_host_removes_files(server: ArchiveProcess) -> None:
    """A miss, and never wrong bytes; what is stored anew is found."""
    client = server.client()
    fill(server, client)
    assert client.match(prompt(0, BLOCKS)).runs == (("archive", BLOCKS),)
    for file in server.files:
        file.unlink()
    assert read(client, prompt(0, BLOCKS)) == 0
    assert store(client, prompt(0, BLOCKS)) == BLOCKS
    assert read(client, prompt(0, BLOCKS)) == BLOCKS


def test_its_section_is_checked_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    start = "tiers: {dram: {size: 16MiB}, archive: {size: 1%, path: a, "
    file.write_text(start + "fsinc: true}}\ndebug: {stall: {dram_to_archiv: true}}\n")
    said = run("config", "check", str(file)).stderr
    assert "x.yaml:1: tiers.archive.fsinc: unknown key" in said
    assert "did you mean fsync?" in said
    assert "did you mean dram_to_archive?" in said
    file.write_text(start + "fsync: 1}}\n")
    assert (
        "tiers.archive.fsync: found 1; allowed: true or false"
        in run("config", "check", str(file)).stderr
    )
    file.write_text(start + "fsync: true}}\n")
    assert run("config", "check", str(file)).returncode == 0
    shown = json.loads(run("config", "show", "--json", str(file)).stdout)["values"]
    assert shown["tiers.archive.fsync"] == {"value": True, "from": f"{file}:1"}
    assert isinstance(shown["tiers.archive.size"]["value"], int), "a share of its volume"
    schema = json.loads(run("config", "schema").stdout)
    assert "fsync" in schema["$defs"]["ArchiveConfig"]["properties"]


def test_what_if_and_replay_know_it(server: ArchiveProcess, tmp_path: Path) -> None:
    client = server.client()
    fill(server, client)
    read_all(client)
    shown = run("stats", "--what-if", "--json", "--endpoint", server.endpoint).stdout
    assert {row["tier"] for row in json.loads(shown)["estimates"]} == {"dram", "archive"}
    trace = tmp_path / "trace.jsonl"
    ids = [list(range(n, n + 4)) for n in range(0, 80, 4)] * 2
    rows = [
        {"timestamp": 1000 * n, "input_length": 64, "output_length": 1, "hash_ids": hash_ids}
        for n, hash_ids in enumerate(ids)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = run("replay", str(trace), "--tiers", "dram=20%,archive=100%", "--json")
    (result,) = json.loads(ran.stdout)["runs"]
    assert result["hit_tokens"]["archive"] > 0


def test_it_is_a_second_persistent_tier_below_the_disk() -> None:
    """Both get what memory gives up, and both are restored; reads come from the faster one, and
    from the other where that has nothing."""
    disk = {"size": "128MiB", "batch": "4MiB"}
    with ArchiveProcess(disk=disk) as server:
        client = server.client()
        fill(server, client)
        least = (PROMPTS - 8) * BLOCKS
        held = {name: server.tier(name)["blocks"] for name in ("disk", "archive")}
        assert all(count >= least for count in held.values()), held
        assert client.match(prompt(0, BLOCKS)).runs == (("disk", BLOCKS),)
        assert {link["src"] for link in server.stats()["links"]} == {"dram", "disk", "archive"}
        assert read_all(client) == [BLOCKS] * PROMPTS
        server.stop()
        assert len(server.files) == PROMPTS * BLOCKS, "a clean stop writes to both"
        server.start()
        wait_for(lambda: server.ask("health")["healthy"], "both tiers")
        assert [server.tier(n)["blocks"] for n in ("disk", "archive")] == [PROMPTS * BLOCKS] * 2
        psutil.Process(server.worker("disk")).kill()
        wait_for(lambda: server.tier("disk")["state"] != "up", "a disk that is down")
        server.forget_clients()
        assert read_all(server.client()) == [BLOCKS] * PROMPTS, "the archive has all of it"
        wait_for(lambda: server.ask("health")["healthy"], "another worker")
        server.forget_clients()
        server.stop()
        server.configure(disk=None)
        server.start()
        wait_for(lambda: server.ask("health")["healthy"], "the archive")
        client = server.client()
        assert client.match(prompt(0, BLOCKS)).runs == (("archive", BLOCKS),)
        assert read_all(client) == [BLOCKS] * PROMPTS
        server.forget_clients()
        server.stop()
        server.configure(disk=disk)
        server.start()
        wait_for(lambda: server.ask("health")["healthy"], "both tiers")
        assert server.client().clear() == PROMPTS * BLOCKS
        wait_for(lambda: not server.files, "an empty archive")
        wait_for(lambda: not server.tier("disk")["used_bytes"], "an empty disk")
        server.ask("verify", start=True, bytes_per_s=1e12)
        devices = server.ask("verify", start=False)["devices"]
        assert {device["tier"] for device in devices} == {"disk", "archive"}
