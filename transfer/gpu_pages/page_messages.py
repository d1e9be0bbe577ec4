"""The messages between daemon and GPU worker about inference engines' pages: bytes ↔ structs.

    daemon → worker   map · load · save · unmap
    worker → daemon   mapped · unmapped · part* · copied

The daemon assigns the numbers. A client's description of its tensors is sent on unchecked: only the
worker can check it with the driver (engine_pages.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.transfer.gpu_pages.page_kernels import PageNumbers
from hicache.transfer.worker_messages import MalformedMessage, Message, pack

HANDLE_BYTES: Final = 64
PLANE_FIELDS: Final = 4
_WORD, _LONG = np.dtype("<i4"), np.dtype("<u8")
REPORTS: Final = frozenset({"mapped", "unmapped", "part", "copied"})


@dataclass(frozen=True, slots=True)
class Claim:
    """An inference engine's tensors as the client describes them, unchecked: CUDA IPC handles of
    allocations, and rows of (allocation, offset of page 0, bytes between pages, pages) in the order
    of a block's planes. `bus_id` is the PCI bus id of their GPU."""

    number: int
    bus_id: str
    handles: tuple[bytes, ...]
    planes: npt.NDArray[np.uint64]
    page_bytes: int
    pages_per_block: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of blocks in slots of some tiers, from or to a registration's pages [blocks, pages per
    block]. `runs` are (tier, slots) in the blocks' order. Progress is reported after every
    `planes_per_part` planes (0: only at the end)."""

    number: int
    registration: int
    to_blocks: bool
    block_bytes: int
    runs: tuple[tuple[str, PageNumbers], ...]
    pages: PageNumbers
    planes_per_part: int = 0


def claim_of(
    number: int, bus_id: str, handles: bytes, planes: bytes, page_bytes: int, pages_per_block: int
) -> Claim:
    """A Claim from a client's fields. Raises ValueError where handles or planes are incomplete."""
    if len(handles) % HANDLE_BYTES or len(planes) % (PLANE_FIELDS * _LONG.itemsize):
        raise ValueError(f"handles are {HANDLE_BYTES} bytes each, planes four u64 each")
    return Claim(
        number,
        bus_id,
        tuple(handles[at : at + HANDLE_BYTES] for at in range(0, len(handles), HANDLE_BYTES)),
        np.frombuffer(planes, _LONG).astype(np.uint64).reshape(-1, PLANE_FIELDS),
        page_bytes,
        pages_per_block,
    )


def pack_claim(claim: Claim) -> bytes:
    return pack(
        "map",
        n=claim.number,
        bus=claim.bus_id,
        handles=b"".join(claim.handles),
        planes=claim.planes.astype(_LONG).tobytes(),
        page_bytes=claim.page_bytes,
        pages_per_block=claim.pages_per_block,
    )


def unpack_claim(message: Message) -> Claim:
    bus = message.get("bus")
    if type(bus) is not str:
        raise MalformedMessage("map: the bus id is missing")
    packed = _bytes(message, "handles"), _bytes(message, "planes")
    sizes = _count(message, "page_bytes"), _count(message, "pages_per_block")
    try:
        return claim_of(_count(message, "n"), bus, *packed, *sizes)
    except ValueError as error:
        raise MalformedMessage(f"map: {error}") from error


def pack_copy(copy: PageCopy) -> bytes:
    return pack(
        "save" if copy.to_blocks else "load",
        n=copy.number,
        of=copy.registration,
        block_bytes=copy.block_bytes,
        runs=[[tier, slots.astype(_WORD).tobytes()] for tier, slots in copy.runs],
        pages=copy.pages.astype(_WORD).tobytes(),
        part=copy.planes_per_part,
    )


def unpack_copy(message: Message) -> PageCopy:
    runs = message.get("runs")
    if not isinstance(runs, list) or any([type(f) for f in run] != [str, bytes] for run in runs):
        raise MalformedMessage(f"{message['t']}: a run is [tier, slots]")
    read = tuple((tier, _words(slots)) for tier, slots in runs)
    num_blocks = sum(len(slots) for _, slots in read)
    pages = _words(_bytes(message, "pages"))
    if not num_blocks or len(pages) % num_blocks:
        raise MalformedMessage(f"{message['t']}: {len(pages)} pages for {num_blocks} blocks")
    return PageCopy(
        _count(message, "n"),
        _count(message, "of"),
        message["t"] == "save",
        _count(message, "block_bytes"),
        read,
        pages.reshape(num_blocks, -1),
        _count(message, "part"),
    )


@dataclass(frozen=True, slots=True)
class PageReport:
    """A worker's report. `kind`: mapped, unmapped, part (the first `planes` planes of a copy have
    arrived) or copied (the copy has ended, and no part of it is still running). `error`: "" or a
    sentence."""

    kind: str
    number: int
    error: str = ""
    planes: int = 0
    seconds: float = 0.0


def pack_report(report: PageReport) -> bytes:
    more = {"error": report.error, "planes": report.planes, "seconds": report.seconds}
    return pack(report.kind, n=report.number, **more)


def unpack_report(message: Message) -> PageReport:
    error, seconds = message.get("error"), message.get("seconds")
    if type(error) is not str or type(seconds) is not float:
        raise MalformedMessage(f"{message['t']}: an error and seconds")
    return PageReport(message["t"], _count(message, "n"), error, _count(message, "planes"), seconds)


def _words(packed: bytes) -> PageNumbers:
    if len(packed) % _WORD.itemsize:
        raise MalformedMessage("whole words")
    return np.frombuffer(packed, _WORD).astype(np.int32)


def _bytes(message: Message, name: str) -> bytes:
    value: Any = message.get(name)
    if type(value) is not bytes:
        raise MalformedMessage(f"{message['t']}: {name} must be bytes")
    return value


def _count(message: Message, name: str) -> int:
    value: Any = message.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"{message['t']}: {name} must be a count")
    return value
