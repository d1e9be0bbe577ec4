"""The NUMA nodes of a mapped file's memory, from /proc/self/numa_maps.

A copy between a GPU and memory of another socket crosses the link between the sockets, which on
many machines is slower than PCIe and is shared by all processes. So the GPU worker logs how much of
the arena lies on its GPU's node, and `hicache doctor` prints it for every arena that it finds.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from hicache.tiers.block import PAGE_BYTES

MAPS: Final = Path("/proc/self/numa_maps")
NODES: Final = Path("/sys/devices/system/node")
DEVICES: Final = Path("/sys/bus/pci/devices")
_SAMPLES: Final = 2048


def num_nodes() -> int:
    """The machine's number of NUMA nodes; 1 on a kernel without NUMA."""
    return len(list(NODES.glob("node[0-9]*"))) or 1


def node_of(bus_id: str, devices: Path = DEVICES) -> int:
    """The NUMA node of a PCI device; -1 where unknown."""
    try:
        return int((devices / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def bytes_by_node(path: Path, maps: Path = MAPS) -> dict[int, int]:
    """Node → bytes of a mapped file that this process has touched. Empty on a kernel without NUMA,
    or where the file is not mapped."""
    found: Counter[int] = Counter()
    for words in _mappings_of(str(path), maps):
        pages = {int(w[1:].split("=")[0]): int(w.split("=")[1]) for w in words if _is_node(w)}
        sizes = [int(word.split("=")[1]) for word in words if word.startswith("kernelpagesize_kB")]
        page_bytes = sizes[0] << 10 if sizes else PAGE_BYTES
        found.update({node: count * page_bytes for node, count in pages.items()})
    return dict(found)


def sampled_by_node(path: Path) -> dict[int, int]:
    """As `bytes_by_node` for a file that this process has not mapped: maps it and reads up to about
    2,048 of its pages. Raises OSError, and ValueError on an empty file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        step = max(PAGE_BYTES, len(mapped) // _SAMPLES // PAGE_BYTES * PAGE_BYTES)
        for at in range(0, len(mapped), step):
            mapped[at]
        return bytes_by_node(path)


def describe(by_node: Mapping[int, int], wanted: int) -> str:
    """A phrase for the operator; `wanted` is the GPU's node, -1 where unknown. "" if `by_node` is
    empty."""
    total = sum(by_node.values())
    if not total:
        return ""
    if wanted < 0:
        shares = ", ".join(f"{n / total:.0%} on node {node}" for node, n in sorted(by_node.items()))
        return f"NUMA: {shares}"
    share = by_node.get(wanted, 0) / total
    said = f"{share:.0%} on the GPU's NUMA node {wanted}"
    if share < 0.95:
        said += f" (start hicache under numactl --cpunodebind={wanted} --preferred={wanted})"
    return said


def _mappings_of(path: str, maps: Path) -> Iterator[list[str]]:
    """The lines for this file, split into words."""
    escaped = path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    try:
        with maps.open() as lines:
            yield from (words for line in lines if f"file={escaped}" in (words := line.split()))
    except OSError:  # a kernel without NUMA
        return


def _is_node(word: str) -> bool:
    return word[:1] == "N" and word[1:].split("=")[0].isdecimal() and "=" in word
