"""How much memory can be had: what the kernel's files say, as version 1 and 2 of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.daemon.upkeep.available_memory import Headroom, look

KIB = 1024
GIB = 1 << 30


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n")
    write(proc / "self", cgroup="0::/a/b\n")
    return proc, groups


def test_the_host(machine: tuple[Path, Path]) -> None:
    assert look(*machine) == [Headroom("the host", 400 * KIB, 1000 * KIB)]


def test_this_machine() -> None:
    host = look()[0]
    assert 0 < host.available_bytes < host.total_bytes


def test_version_2_with_limits_at_two_levels(machine: tuple[Path, Path]) -> None:
    """File pages are not counted as used: the kernel takes them back."""
    _, groups = machine
    stat = "anon 5\ninactive_file 300\nactive_file 200\nshmem 77\n"
    write(groups / "a" / "b", memory__max="max\n", memory__current="900\n")
    write(
        groups / "a",
        memory__max="2000\n",
        memory__high="1500\n",
        memory__current="1200\n",
        memory__stat=stat,
    )
    found = look(*machine)[1:]
    assert found == [Headroom(f"the control group {groups}/a", 1500 - 1200 + 500, 1500)]


def test_version_1(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    write(proc / "self", cgroup="4:memory:/x\n9:name=systemd:/\n0::/\n")
    stat = "cache 9\ntotal_inactive_file 30\ntotal_active_file 20\n"
    write(
        groups / "memory" / "x",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="990\n",
        memory__stat=stat,
    )
    unlimited = "9223372036854771712\n"
    write(groups / "memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes="5\n")
    found = look(*machine)[1:]
    assert found == [Headroom(f"the control group {groups}/memory/x", 60, 1000)]


def test_in_a_container_the_groups_own_folder_is_the_root(machine: tuple[Path, Path]) -> None:
    _, groups = machine
    write(groups, memory__max=f"{GIB}\n", memory__current="0\n")
    assert look(*machine)[1:] == [Headroom(f"the control group {groups}", GIB, GIB)]


def test_over_its_limit_nothing_is_available(machine: tuple[Path, Path]) -> None:
    _, groups = machine
    write(groups, memory__max="100\n", memory__current="150\n")
    assert look(*machine)[1].available_bytes == 0


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert look(tmp_path / "no proc", tmp_path) == []
