"""On which NUMA nodes a file's memory lies: the kernel tells it of each process' own mapping.

A copy between a GPU and memory of the other socket crosses the link between the sockets, which is
slower than PCIe on many machines and shared with everybody. So the GPU worker says how much of the
arena lies on its GPU's node, and `hicache doctor` says it of every arena that it finds.
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
    """1 where the kernel knows of none."""
    return len(list(NODES.glob("node[0-9]*"))) or 1


def node_of(bus_id: str, devices: Path = DEVICES) -> int:
    """Of a PCI device; -1 where the system does not say."""
    try:
        return int((devices / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def bytes_by_node(path: Path, maps: Path = MAPS) -> dict[int, int]:
    """Bytes of a mapped file on each node, as far as this process has touched them. Empty where
    the kernel does not tell, or nothing of the file is mapped."""
    found: Counter[int] = Counter()
    for words in _mappings_of(str(path), maps):
        pages = {int(w[1:].split("=")[0]): int(w.split("=")[1]) for w in words if _is_node(w)}
        sizes = [int(word.split("=")[1]) for word in words if word.startswith("kernelpagesize_kB")]
        page_bytes = sizes[0] << 10 if sizes else PAGE_BYTES
        found.update({node: count * page_bytes for node, count in pages.items()})
    return dict(found)


def sampled_by_node(path: Path) -> dict[int, int]:
    """The same for a file of somebody else's, by some of its pages, which are read for it. Raises
    OSError, and ValueError on an empty file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        step = max(PAGE_BYTES, len(mapped) // _SAMPLES // PAGE_BYTES * PAGE_BYTES)
        for at in range(0, len(mapped), step):
            mapped[at]
        return bytes_by_node(path)


def told(by_node: Mapping[int, int], wanted: int) -> str:
    """For the operator; `wanted` is the GPU's node, -1 where it is not known. Empty where there is
    nothing to say."""
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
    """The words of the lines that are about this file."""
    escaped = path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    try:
        with maps.open() as lines:
            yield from (words for line in lines if f"file={escaped}" in (words := line.split()))
    except OSError:  # a kernel without NUMA
        return


def _is_node(word: str) -> bool:
    return word[:1] == "N" and word[1:].split("=")[0].isdecimal() and "=" in word
