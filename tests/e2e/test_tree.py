"""What is in a real daemon's index, as `tree` and `hicache tree` tell it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hicache.client import AdminLine
from hicache.commands.index_tree import TreeReader
from hicache.protocol.operations import MAX_TREE_NODES
from tests.e2e.daemon_process import (
    ROOT,
    SPEC,
    DaemonProcess,
    Tokens,
    free_port,
    hicache,
    prompt,
    read,
    store,
)

pytestmark = pytest.mark.e2e

SMALL = replace(SPEC, model_digest="small", name="small", block_tokens=8, block_bytes=5000)
NAMED = replace(SPEC, name="llama")


def with_tail(beginning: Tokens, seed: int, num_blocks: int) -> Tokens:
    return np.concatenate([beginning[:-1], prompt(seed, num_blocks)])


def tree_of(server: DaemonProcess, *more: str) -> Any:
    ran = hicache("tree", "--json", "--endpoint", server.endpoint, *more)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_sums_are_those_of_stats() -> None:
    """Two models with slots of two sizes, and more blocks than memory holds: what the tree tells of
    each tier is what `stats` says is used of it, and distinct blocks are those of the index."""
    with DaemonProcess(
        hbm={"size": "2MiB"}, dram={"size": "4MiB"}, disk={"size": "64MiB"}
    ) as server:
        client, small = server.client(NAMED), server.client(SMALL)
        beginning = prompt(1, 3)
        for seed in range(2, 10):
            assert store(client, with_tail(beginning, seed, 3), NAMED) == 6
            assert store(small, prompt(seed, 5, SMALL.block_tokens), SMALL) == 5
        server.settle()
        told, stats = tree_of(server), server.stats()
        used = {tier["name"]: tier["used_bytes"] for tier in stats["tiers"]}
        sums = [space["tiers"] for space in told["namespaces"]]
        assert {name: sum(one[name] for one in sums) for name in used} == used
        assert all(used.values())
        held = {space["digest"]: space["blocks"] for space in stats["namespaces"]}
        for space in told["namespaces"]:
            assert space["bytes"] == held[space["digest"]] * space["slot_bytes"]
        by_name = {space["name"]: space for space in told["namespaces"]}
        assert (by_name["llama"]["branches"], by_name["small"]["branches"]) == (8, 8)
        assert by_name["small"]["slot_bytes"] == 8192
        nodes = sum(branch["nodes"] for branch in told["branches"])
        assert nodes + len(told["namespaces"]) == stats["index"]["nodes"]
        tops = [b for b in told["branches"] if b["parent"] is None and b["branches"] == 8]
        assert [top["token_ids"] for top in tops] == [beginning[: SPEC.block_tokens].tolist()]
        assert read(client, with_tail(beginning, 2, 3), NAMED) == 6


def test_the_text() -> None:
    with DaemonProcess(hbm=None, disk=None) as server:
        client = server.client(NAMED)
        beginning = np.arange(2001, 2001 + 3 * SPEC.block_tokens + 1, dtype=np.uint32)
        for first, num_blocks in ((301, 4), (401, 2), (501, 1)):
            tail = np.arange(first, first + num_blocks * SPEC.block_tokens + 1, dtype=np.uint32)
            store(client, np.concatenate([beginning[:-1], tail]), NAMED)
        longest = np.concatenate([beginning[:-1], np.arange(301, 318, dtype=np.uint32)])
        match = client.match(longest)
        assert match.hit_blocks == 7
        ran = hicache("tree", "--endpoint", server.endpoint, "--top", "2")
        assert re.sub(r"used \d+ s ago", "used N s ago", ran.stdout) == (
            f"llama ({NAMED.digest().hex()[:16]})  3 branches  2.5 MiB  dram 2.5 MiB  "
            "used N s ago, leased\n"
            "└─ 12 tokens, then 3 branches  2.5 MiB  dram 2.5 MiB  used N s ago, leased  "
            "[2001, 2002, 2003, 2004, …]\n"
            "   ├─ 16 tokens  1.0 MiB  dram 1.0 MiB  used N s ago, leased  "
            "[301, 302, 303, 304, …]\n"
            "   ├─ 8 tokens  512 KiB  dram 512 KiB  used N s ago  [401, 402, 403, 404, …]\n"
            "   └─ … and 1 more branch, 256 KiB\n"
        )
        client.release(match)
        client.ping()  # answered behind the release
        assert "leased" not in hicache("tree", "--endpoint", server.endpoint).stdout
        nobody = hicache("tree", "--endpoint", server.endpoint, "--namespace", "lama")
        assert (nobody.returncode, nobody.stdout) == (2, "")
        assert "there are llama (" in nobody.stderr


def test_an_empty_one_and_none() -> None:
    with DaemonProcess(hbm=None, disk=None) as server:
        assert hicache("tree", "--endpoint", server.endpoint).stdout == "Nothing is held yet.\n"
        assert server.client().match(prompt(1, 2)).hit_blocks == 0
        said = hicache("tree", "--endpoint", server.endpoint).stdout
        assert said == "Nothing is held of 1 namespace.\n"
        server.stop()
        ran = hicache("tree", "--endpoint", server.endpoint)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "no daemon answers" in ran.stderr


def test_a_page_asks_for_nothing_and_moves_nothing(server: DaemonProcess) -> None:
    """Neither a session nor a use; what is asked in between goes on."""
    client, spec = server.model("tree: unmoved")
    store(client, prompt(31, 4), spec)
    server.settle()
    before = server.used()
    with AdminLine(server.endpoint) as line:
        for most in (1, 7, MAX_TREE_NODES):
            reply = line.call("tree", {"namespace": spec.digest()[:9], "after": 0, "most": most})
            assert reply["end"] >= len(reply["nodes"])
        assert line.call("ping")["ready"]
    assert server.used() == before
    assert read(client, prompt(31, 4), spec) == 4


def test_a_tree_that_grows_and_shrinks_while_it_is_read(server: DaemonProcess) -> None:
    """One number a page, while another client stores, splits, reads and clears: what nobody touches
    is told as it is, every time."""
    client, spec = server.model("tree: quiet", block_bytes=4096)
    for seed in range(4):
        store(client, prompt(seed, 3), spec)
    server.settle()
    is_over = threading.Event()

    def disturb() -> None:
        loud, its = server.model("tree: loud", block_bytes=4096)
        beginning = prompt(77, 6)
        seed = 100
        while not is_over.is_set():
            for end in (25, 17, 9):  # splits the chain ever higher up
                store(loud, with_tail(beginning[:end], seed, 2), its)
                seed += 1
            assert read(loud, beginning, its) <= 6
            if seed % 5 == 0:
                loud.clear()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(5):
            reading = TreeReader()
            with AdminLine(server.endpoint) as line:
                while reading.after is not None:
                    reading.take(line.call("tree", {"after": reading.after, "most": 1}))
            forest = reading.forest()
            (quiet,) = (t for t in forest.trunks if t.space.digest == spec.digest().hex())
            firsts = sorted(branch.tokens for branch in quiet.branches)
            assert firsts == sorted(prompt(seed, 3)[:4].tolist() for seed in range(4))
            assert [branch.blocks for branch in quiet.branches] == [3] * 4
    finally:
        is_over.set()
        thread.join()


def test_over_tcp_without_keys_no_tokens_are_told() -> None:
    """Anybody on this machine may connect there."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with DaemonProcess(endpoint=endpoint, hbm=None, disk=None) as server:
        store(server.client(), prompt(1, 3))
        (row,) = tree_of(server)["branches"]
        assert (row["tokens"], row["token_ids"]) == (12, [])


def test_on_a_terminal() -> None:
    """Lines fit in it, and how far it is shows on stderr where there are several pages."""
    with DaemonProcess(hbm=None, disk=None) as server:
        client, spec = server.model("tree: wide", block_bytes=4096)
        for seed in range(MAX_TREE_NODES + 20):
            store(client, prompt(seed, 1), spec)
        out, errors = on_a_terminal(["tree", "--endpoint", server.endpoint], columns=36)
        lines = out.splitlines()
        assert max(map(len, lines)) <= 36
        assert lines[-1] == "└─ … and 524 more branches, 2.0 MiB"
        assert len(lines) == 1 + 8 + 1
        assert "reading the index" in errors


@pytest.mark.parametrize("as_json", [False, True])
def test_into_a_pipe_that_nobody_reads_any_more(server: DaemonProcess, as_json: bool) -> None:
    """As with `| head`: it ends, and complains of nothing."""
    client, spec = server.model("tree: piped")
    store(client, prompt(5, 2), spec)
    readable, writable = os.pipe()
    os.close(readable)
    command = [sys.executable, "-m", "hicache", "tree", "--endpoint", server.endpoint]
    ran = subprocess.run(
        [*command, "--json"] if as_json else command,
        stdout=writable,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    os.close(writable)
    assert (ran.returncode, ran.stderr) == (1, b"")


def on_a_terminal(arguments: list[str], columns: int) -> tuple[str, str]:
    """What the command line says on stdout and on stderr, each a terminal of this width."""
    masters, slaves = zip(*(pty.openpty() for _ in range(2)), strict=True)
    for slave in slaves:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "hicache", *arguments],
        stdin=slaves[0],
        stdout=slaves[0],
        stderr=slaves[1],
        cwd=ROOT,
        env={**environment, "TERM": "xterm"},
    )
    for slave in slaves:
        os.close(slave)
    said = ["", ""]

    def listen(number: int) -> None:
        parts = []
        try:
            while part := os.read(masters[number], 4096):
                parts.append(part)
        except OSError:  # so a terminal ends whose other side is closed
            pass
        said[number] = b"".join(parts).decode()

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    assert process.wait(60) == 0
    for thread in threads:
        thread.join()
    for master in masters:
        os.close(master)
    return said[0], said[1]
