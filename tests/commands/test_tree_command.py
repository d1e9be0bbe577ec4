"""`hicache tree` against a daemon with scripted replies: the text, to the letter."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec import structs
from rich.cells import cell_len

from hicache.cli import cli
from hicache.commands.index_tree import TreeReader
from hicache.commands.tree import tree
from hicache.commands.tree_drawing import draw
from hicache.engine.index.snapshot import TreeRun
from tests.client.scripted_daemon import DIE, ScriptedDaemon, Seen, refuse

LLAMA = {
    "digest": "3f0a62d1" + "ab" * 28,
    "name": "llama",
    "block_tokens": 512,
    "block_bytes": 64 << 20,
    "slot_bytes": 64 << 20,
}
TINY = {
    "digest": "c0ffee00" + "cd" * 28,
    "name": "",
    "block_tokens": 4,
    "block_bytes": 5000,
    "slot_bytes": 8192,
}
EMPTY = {**TINY, "digest": "e" * 64, "name": "nothing\x1b[2Jhere"}
SPACES = [LLAMA, TINY, EMPTY]


def run(number: int, parent: int | None, depth: int, blocks: int, *rest: Any) -> TreeRun:
    space, tiers, idle_s, leased, first = rest
    tokens = np.arange(first, first + (8 if space == 0 else 4), dtype="<u4").tobytes()
    return TreeRun(number, parent, space, depth, blocks, tiers, 0, idle_s, leased, tokens)


RUNS = [
    # A prompt of 16 blocks that goes on in three ways; its first half is in one more tier.
    run(2, None, 0, 8, 0, 3, 3.2, True, 101),
    run(9, 2, 8, 8, 0, 2, 3.2, False, 700),
    run(3, 9, 16, 24, 0, 2, 3.2, True, 200),
    run(4, 9, 16, 2, 0, 3, 250.0, False, 300),
    run(5, 9, 16, 1, 0, 2, None, False, 400),
    # Nothing but a block that is being written, and one of another prompt.
    run(6, None, 0, 1, 0, 0, 5.0, False, 500),
    run(7, None, 0, 1, 0, 2, 4e6, False, 600),
    run(8, None, 0, 1, 1, 1, 90.0, False, 1),
]
TEXT = """\
llama (3f0a62d1abababab)  5 branches  2.8 GiB  dram 640 MiB, disk 2.8 GiB  used 3 s ago, leased
├─ 8,192 tokens, then 3 branches  2.7 GiB  dram 640 MiB, disk 2.7 GiB  used 3 s ago, leased  \
[101, 102, 103, 104, 105, 106, 107, 108, …]
│  ├─ 12,288 tokens  1.5 GiB  disk 1.5 GiB  used 3 s ago, leased  \
[200, 201, 202, 203, 204, 205, 206, 207, …]
│  ├─ 1,024 tokens  128 MiB  dram 128 MiB, disk 128 MiB  used 4 min ago  \
[300, 301, 302, 303, 304, 305, 306, 307, …]
│  └─ 512 tokens  64.0 MiB  disk 64.0 MiB  not expected again  \
[400, 401, 402, 403, 404, 405, 406, 407, …]
├─ 512 tokens  64.0 MiB  disk 64.0 MiB  used 46 days ago  \
[600, 601, 602, 603, 604, 605, 606, 607, …]
└─ 512 tokens  0 B  in no tier  used 5 s ago  [500, 501, 502, 503, 504, 505, 506, 507, …]
c0ffee00cdcdcdcd  1 branch  8.0 KiB  dram 8.0 KiB  used 90 s ago
└─ 4 tokens  8.0 KiB  dram 8.0 KiB  used 90 s ago  [1, 2, 3, 4]
nothing[2Jhere (eeeeeeeeeeeeeeee)  nothing
"""


def pages(
    runs: list[TreeRun] = RUNS,
    spaces: list[dict[str, Any]] = SPACES,
    most: int = 3,
    **changes: Any,
) -> Callable[[Seen], dict[str, Any]]:
    """What a daemon with these nodes answers, a few at a time."""

    def answer(seen: Seen) -> dict[str, Any]:
        digest, after = seen.body["namespace"], seen.body["after"]
        named = [s for s in spaces if bytes.fromhex(s["digest"]).startswith(digest)]
        nodes = []
        for one in sorted(runs, key=lambda r: r.number):
            if after <= one.number < after + most and spaces[one.namespace] in named:
                fields = [getattr(one, name) for name in one.__struct_fields__]
                fields[2] = named.index(spaces[one.namespace])
                nodes.append(fields)
        end = max((one.number for one in runs), default=0) + 1
        return {
            "epoch": "e1",
            "tiers": ["dram", "disk"],
            "namespaces": named,
            "nodes": nodes,
            "next": after + most if after + most < end else None,
            "end": end,
            **changes,
        }

    return answer


@pytest.fixture
def daemon() -> Iterator[ScriptedDaemon]:
    folder = tempfile.mkdtemp(prefix="hc-")
    with ScriptedDaemon(f"ipc://{folder}/s") as daemon:
        daemon.on("tree", pages())
        yield daemon
    shutil.rmtree(folder)


def ask(daemon: ScriptedDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(tree, ["--endpoint", daemon.endpoint, *arguments])


def test_the_whole_text(daemon: ScriptedDaemon) -> None:
    result = ask(daemon)
    assert result.exit_code == 0
    assert result.stdout == TEXT
    assert result.stderr == ""
    assert [seen.body["after"] for seen in daemon.seen] == [0, 3, 6, 9]


def test_few_of_it(daemon: ScriptedDaemon) -> None:
    """One branch of every fork and one namespace; then no fork at all."""
    assert ask(daemon, "--top", "1", "--depth", "2").stdout.splitlines() == [
        TEXT.splitlines()[0],
        "├─ " + TEXT.splitlines()[1][3:],
        "│  ├─ " + TEXT.splitlines()[2][6:],
        "│  └─ … and 2 more branches, 192 MiB",
        "└─ … and 2 more branches, 64.0 MiB",
        "… and 2 more namespaces, 8.0 KiB",
    ]
    assert len(ask(daemon, "--depth", "1").stdout.splitlines()) == len(TEXT.splitlines()) - 3


def test_other_orders(daemon: ScriptedDaemon) -> None:
    def firsts(order: str) -> list[str]:
        lines = ask(daemon, "--depth", "1", "--by", order).stdout.splitlines()
        return [line.partition("[")[2].partition(",")[0] for line in lines if "[" in line[9:]]

    assert firsts("bytes") == ["101", "600", "500", "1"]
    assert firsts("recent") == ["101", "500", "600", "1"]
    assert firsts("branches") == ["101", "600", "500", "1"]


@pytest.mark.parametrize("width", [1, 2, 10, 20, 40, 60, 80, 100, 130])
def test_lines_fit_in_any_width(width: int) -> None:
    reading = TreeReader()
    wide = [{**LLAMA, "name": "模型的名字" * 9}, TINY, EMPTY]
    reading.take(pages(spaces=wide, most=99)(_seen()))
    forest = reading.forest()
    lines = list(draw(forest, 3, 8, width))
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) == len(TEXT.splitlines())


def test_a_narrow_line_ends_behind_what_fits() -> None:
    reading = TreeReader()
    reading.take(pages(most=99)(_seen()))
    lines = [list(draw(reading.forest(), 3, 8, width))[2] for width in (120, 70, 64, 40, 21, 12)]
    assert lines == [
        TEXT.splitlines()[2],
        "│  ├─ 12,288 tokens  1.5 GiB  disk 1.5 GiB  used 3 s ago, leased",
        "│  ├─ 12,288 tokens  1.5 GiB  disk 1.5 GiB  used 3 s ago, leased",
        "│  ├─ 12,288 tokens  1.5 GiB  …",
        "│  ├─ 12,288 tokens",
        "│  ├─ 12,28…",
    ]


def _seen() -> Any:
    """The reply to a request that was not sent."""
    return SimpleNamespace(body={"namespace": b"", "after": 0})


def test_as_data(daemon: ScriptedDaemon) -> None:
    """All of it, whatever the depth, parents first; a branch a line."""
    result = ask(daemon, "--json", "--depth", "1", "--top", "1")
    data = json.loads(result.stdout)
    assert data["tiers"] == ["dram", "disk"]
    assert data["loose"] == 0
    assert [space["digest"] for space in data["namespaces"]] == [s["digest"] for s in SPACES]
    assert data["namespaces"][0]["branches"] == 5
    assert data["namespaces"][0]["bytes"] == 44 * (64 << 20)
    assert data["namespaces"][2]["idle_s"] is None
    rows = {row["number"]: row for row in data["branches"]}
    assert {row["parent"] for row in data["branches"]} == {None, 9}
    assert rows[9] == {
        "number": 9,
        "parent": None,
        "namespace": LLAMA["digest"],
        "first_token": 0,
        "tokens": 8192,
        "nodes": 2,
        "bytes": 43 * (64 << 20),
        "tiers": {"dram": 10 * (64 << 20), "disk": 43 * (64 << 20)},
        "own": {"bytes": 1 << 30, "tiers": {"dram": 512 << 20, "disk": 1 << 30}},
        "branches": 3,
        "idle_s": 3.2,
        "leased": True,
        "token_ids": list(range(101, 109)),
    }
    assert rows[3]["first_token"] == 8192
    met: set[int | None] = {None}
    for line in result.stdout.splitlines()[1:-1]:
        row = json.loads(line.rstrip(","))
        assert row["parent"] in met
        met.add(row["number"])


@pytest.mark.parametrize("prefix", ["3f0a", "3F0A6", "llama", "ll", LLAMA["digest"]])
def test_one_namespace(daemon: ScriptedDaemon, prefix: str) -> None:
    result = ask(daemon, "--namespace", prefix)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == TEXT.splitlines()[:7]


def test_the_daemon_is_asked_for_no_more_than_is_wanted(daemon: ScriptedDaemon) -> None:
    ask(daemon, "--namespace", "3f0a6")
    assert {seen.body["namespace"] for seen in daemon.seen} == {bytes.fromhex("3f0a")}


def test_a_name_that_could_be_a_digest(daemon: ScriptedDaemon) -> None:
    daemon.on("tree", pages(spaces=[{**LLAMA, "name": "beef"}, TINY, EMPTY]))
    assert ask(daemon, "--namespace", "bee").stdout.startswith("beef (3f0a62d1abababab)  5 ")


@pytest.mark.parametrize(
    ("prefix", "first"),
    [("lama", "llama (3f0a62d1abababab)"), ("c0ffee11", "c0ffee00cdcdcdcd"), ("zz", "")],
)
def test_an_unknown_namespace(daemon: ScriptedDaemon, prefix: str, first: str) -> None:
    """The nearest is named first."""
    result = ask(daemon, "--namespace", prefix)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"no namespace begins with {prefix!r}; there are {first}")
    assert "nothing[2Jhere (eeeeeeeeeeeeeeee)" in result.stderr


def test_an_unknown_namespace_of_many(daemon: ScriptedDaemon) -> None:
    spaces = [{**TINY, "digest": f"{number:064x}", "name": f"m{number}"} for number in range(12)]
    daemon.on("tree", pages([], spaces))
    said = ask(daemon, "--namespace", "m-11").stderr
    assert "and 4 more" in said
    assert said.count("(") == 8


@pytest.mark.parametrize(
    ("spaces", "arguments", "code", "said"),
    [
        ([], [], 0, "Nothing is held yet.\n"),
        ([EMPTY], [], 0, "Nothing is held of 1 namespace.\n"),
        ([EMPTY, TINY], [], 0, "Nothing is held of 2 namespaces.\n"),
        ([], ["--namespace", "x"], 2, ""),
    ],
)
def test_an_empty_index(
    daemon: ScriptedDaemon, spaces: list[Any], arguments: list[str], code: int, said: str
) -> None:
    daemon.on("tree", pages([], spaces))
    result = ask(daemon, *arguments)
    assert (result.exit_code, result.stdout) == (code, said)
    assert ("knows none yet" in result.stderr) == bool(code)


def test_an_empty_index_as_data(daemon: ScriptedDaemon) -> None:
    daemon.on("tree", pages([], []))
    data = json.loads(ask(daemon, "--json").stdout)
    assert data == {"tiers": ["dram", "disk"], "loose": 0, "namespaces": [], "branches": []}


def test_a_tree_that_changes_while_it_is_read(daemon: ScriptedDaemon) -> None:
    """After the first page the long prompt's second half is split, and its number goes on with the
    lower part, which begins later: it was the parent of what hangs there, and still is."""
    later = [one for one in RUNS if one.number != 9]
    later += [run(9, 10, 12, 4, 0, 2, 3.2, False, 700), run(10, 2, 8, 4, 0, 2, 3.2, False, 650)]
    before, after = pages(), pages(later)
    daemon.on("tree", lambda seen: (after if seen.body["after"] else before)(seen))
    lines = ask(daemon).stdout.splitlines()
    assert lines[1] == TEXT.splitlines()[1]

    del later[-1]  # and where its upper part was taken in by what is gone from the index
    daemon.on("tree", lambda seen: (after if seen.body["after"] else before)(seen))
    result = ask(daemon)
    assert "2,048 tokens from token 6,144 on, then 3 branches" in result.stdout
    assert "place in it is not known: 1\n" in result.stderr
    assert result.exit_code == 0


def test_a_daemon_without_tokens(daemon: ScriptedDaemon) -> None:
    daemon.on("tree", pages([structs.replace(one, tokens=b"") for one in RUNS]))
    lines = [line.rpartition("  [")[0] or line for line in TEXT.splitlines()]
    assert ask(daemon).stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (refuse("unsupported"), "does not serve that operation"),
        (DIE, "no answer in time"),
        (b"garbage", "garbage"),
        ({"nodes": 7}, "not a page of its tree"),
        (pages(next=0), "do not follow"),
    ],
)
def test_troubles(daemon: ScriptedDaemon, script: Any, said: str) -> None:
    daemon.on("tree", script)
    result = ask(daemon, "--timeout", "2")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert said in result.stderr or "has gone" in result.stderr


def test_of_nobody() -> None:
    result = CliRunner().invoke(tree, ["--endpoint", "ipc:///tmp/hicache-nobody.sock"])
    assert result.exit_code == 1
    assert result.stderr == "no daemon answers at ipc:///tmp/hicache-nobody.sock\n"


def test_the_help_lists_it_after_stats() -> None:
    said = CliRunner().invoke(cli, ["--help"]).output
    names = [line.split()[0] for line in said.splitlines() if line.startswith("  ")]
    assert names[names.index("stats") + 1] == "tree"
