"""Where a mapped file's memory lies: the kernel's own table, and tables of machines not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.tiers.arena import Arena
from hicache.tiers.numa import MAPS, bytes_by_node, describe, node_of, num_nodes, sampled_by_node

TABLE = """\
00400000 default file=/usr/bin/x mapped=7 N0=7 kernelpagesize_kB=4
7f000000 default file=/dev/shm/an\\040arena dirty=30 active=0 N0=10 N1=20 kernelpagesize_kB=4
7f100000 default file=/dev/shm/an\\040arena huge dirty=1 N1=1 kernelpagesize_kB=2048
7f200000 default file=/dev/shm/an\\040arena2 dirty=9 N0=9 kernelpagesize_kB=4
7f300000 default
"""


def test_only_this_file_is_counted_in_its_own_page_sizes(tmp_path: Path) -> None:
    table = tmp_path / "numa_maps"
    table.write_text(TABLE)
    found = bytes_by_node(Path("/dev/shm/an arena"), table)
    assert found == {0: 10 * 4096, 1: 20 * 4096 + (2 << 20)}
    assert bytes_by_node(Path("/dev/shm/none"), table) == {}
    assert bytes_by_node(Path("/dev/shm/an arena"), tmp_path / "no kernel with NUMA") == {}


@pytest.mark.parametrize(
    ("by_node", "wanted", "said"),
    [
        ({}, 0, ""),
        ({0: 100}, 0, "100% on the GPU's NUMA node 0"),
        ({0: 75, 1: 25}, 1, "25% on the GPU's NUMA node 1 (start hicache under numactl"),
        ({0: 75}, 1, "0% on the GPU's NUMA node 1 (start hicache under numactl"),
        ({1: 25, 0: 75}, -1, "NUMA: 75% on node 0, 25% on node 1"),
    ],
)
def test_what_the_operator_reads(by_node: dict[int, int], wanted: int, said: str) -> None:
    assert describe(by_node, wanted).startswith(said)
    assert bool(describe(by_node, wanted)) == bool(said)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "0000:81:00.0").mkdir()
    (tmp_path / "0000:81:00.0" / "numa_node").write_text("1\n")
    assert node_of("0000:81:00.0", tmp_path) == 1
    assert node_of("0000:82:00.0", tmp_path) == -1
    assert num_nodes() >= 1


def test_an_arena_on_this_machine(tmp_path: Path) -> None:
    if not MAPS.exists():
        pytest.skip("needs /proc/self/numa_maps: a kernel with CONFIG_NUMA")
    arena = Arena.create(tmp_path / "arena", 1 << 20)
    try:
        found = sampled_by_node(arena.path)
        assert 0 < sum(found.values()) <= 2 << 20
        assert "100%" in describe(found, next(iter(found))) or len(found) > 1
        arena.data[:] = 1
        assert sum(bytes_by_node(arena.path).values()) >= 1 << 20
    finally:
        arena.close()
