"""Somebody writes into the disk tier's file, while the daemon is away and while it serves.

Never wrong bytes, and the daemon never dies. At worst the worker does, the environment is set aside
with a sentence, and a fresh one serves.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hicache.client import Client
from tests.e2e.daemon_process import SPEC, DaemonProcess, blocks_of, prompt, read, store, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PAGE = 4096
SEEDS = range(24)
NUM_BLOCKS = 4
Damage = Callable[[Path, random.Random], None]


def places(file: Path, chance: random.Random, share: float) -> list[int]:
    """Random pages, the first two (LMDB's roots) among them now and then."""
    num_pages = file.stat().st_size // PAGE
    return [chance.randrange(num_pages) for _ in range(max(4, int(num_pages * share)))]


def flip_bits(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as data:
        for page in places(file, chance, 0.02):
            at = page * PAGE + chance.randrange(PAGE)
            data.seek(at)
            old = data.read(1)[0]
            data.seek(at)
            data.write(bytes([old ^ 1 << chance.randrange(8)]))


def zero_pages(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as data:
        for page in places(file, chance, 0.02):
            data.seek(page * PAGE)
            data.write(bytes(PAGE))


def swap_pages(file: Path, chance: random.Random) -> None:
    """Whole values and parts of trees change places."""
    length = SPEC.block_bytes + PAGE
    with file.open("r+b") as data:
        for size in (length, length, length, PAGE, PAGE):
            num_places = file.stat().st_size // PAGE - size // PAGE
            one, two = (chance.randrange(2, num_places) * PAGE for _ in range(2))
            held = []
            for at in (one, two):
                data.seek(at)
                held.append(data.read(size))
            for at, content in zip((two, one), held, strict=True):
                data.seek(at)
                data.write(content)


def cut(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as data:
        data.truncate(chance.randrange(file.stat().st_size))


def lay_back(file: Path, chance: random.Random) -> None:
    """What lay there some time ago, in part: the roots of then, or the pages of then."""
    old = file.with_name("old").read_bytes()
    with file.open("r+b") as data:
        if chance.random() < 0.5:
            data.write(old[: 2 * PAGE])
        else:
            data.seek(2 * PAGE)
            data.write(old[2 * PAGE :])


def is_durable(server: DaemonProcess, client: Client, seed: int) -> bool:
    tokens = prompt(seed, NUM_BLOCKS)
    if not server.ask("health")["healthy"]:
        return False
    if client.put(tokens, blocks_of(tokens), durable=True).durable:
        return True
    client.clear()
    return False


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("damage", [flip_bits, zero_pages, swap_pages, cut, lay_back])
def test_a_damaged_file(damage: Damage, is_open: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    with DaemonProcess(hbm=None, dram={"size": "12MiB"}) as server:
        client = server.client()
        for number in SEEDS:
            store(client, prompt(number, NUM_BLOCKS), durable=True)
            if number == len(SEEDS) // 2:
                (file,) = server.disk.glob("class-*/data.mdb")
                shutil.copy(file, file.with_name("old"))
        if not is_open:
            server.stop()
        damage(file, chance)
        if not is_open:
            server.start()
            server.forget_clients()
            client = server.client()
        pid = server.pid
        for _ in range(2):
            for number in SEEDS:
                read(client, prompt(number, NUM_BLOCKS))
            wait_for(partial(is_durable, server, client, 100), "a durable put")
        wait_for(lambda: server.ask("health")["healthy"], "a disk tier that is up")
        assert server.pid == pid
        server.stop()
        server.start()
        server.forget_clients()
        client = server.client()
        for number in SEEDS:
            read(client, prompt(number, NUM_BLOCKS))
        wait_for(partial(is_durable, server, client, 101), "a durable put")
        server.stop()
        server.start()
        server.forget_clients()
        assert read(server.client(), prompt(101, NUM_BLOCKS)) == NUM_BLOCKS
