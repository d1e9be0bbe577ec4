"""Inference engines' own pages in the GPU worker: maps them by CUDA IPC, copies them from and to
slots.

When pages and slots may be used again:

    copy    enqueued part by part, each followed by an event; reported as copied once the last event
            has completed, or, if CUDA refused a part, once the whole stream has
    unmap   sent by the daemon after all copies of the registration were reported as copied: no copy
            is running, so it waits for nothing

Clients' descriptions are checked: the size of a mapped allocation comes from the driver, and every
plane must lie within it (`_layout`). Every table of pages is checked before anything is enqueued.

The same for copies by the copy engines and by a kernel (page_paths.py). Loads and saves have a
stream and a thread each (page_worker.py), mapping and unmapping a third thread; none holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache.tiers.block import PAGE_BYTES
from hicache.tiers.errors import TierDamaged
from hicache.tiers.hbm import CudaPool
from hicache.transfer.gpu_pages.cuda_ipc import Mappings, NotShareable, SharedRange, allocation
from hicache.transfer.gpu_pages.page_kernels import Addresses, PageLayout, PageNumbers, Plane
from hicache.transfer.gpu_pages.page_messages import Claim, PageCopy
from hicache.transfer.gpu_pages.page_paths import Memory, PageGroup, PagePath
from hicache.transfer.media.cuda_copy import CopyRefused
from hicache.transfer.media.pinned_memory import PinnedArena

SizeOf = Callable[[int], tuple[int, int]]
"""(base, bytes) of the allocation that contains an address. Raises NotShareable."""


@dataclass(frozen=True, slots=True)
class _Registered:
    layout: PageLayout
    mappings: Mappings


class EnginePages:
    """All registrations of one GPU. `near` and `far` are the tiers of the arena and the pool."""

    def __init__(
        self,
        near: str,
        far: str,
        pinned: PinnedArena,
        pool: CudaPool,
        path: PagePath,
        size_of: SizeOf = allocation,
    ) -> None:
        self._near, self._far = near, far
        self._pinned, self._pool, self._path = pinned, pool, path
        self._size_of = size_of
        self._registered: dict[int, _Registered] = {}
        pool.use()
        cuda = pool.cupy.cuda
        self._streams = {to_blocks: cuda.Stream(non_blocking=True) for to_blocks in (True, False)}
        self._cuda_error: type[Exception] = cuda.runtime.CUDARuntimeError

    def map(self, claim: Claim) -> None:
        """Map a registration. Raises NotShareable, and leaves nothing mapped."""
        if claim.bus_id.lower() != self._pool.bus_id:
            raise NotShareable(
                f"these tensors are on the GPU at {claim.bus_id}, but the cache uses the GPU at "
                f"{self._pool.bus_id}"
            )
        self._pool.use()
        mappings = Mappings(self._pool.cupy)
        with ExitStack() as undo:
            undo.callback(mappings.close)
            layout = self._layout(claim, mappings)
            undo.pop_all()
        self._registered[claim.number] = _Registered(layout, mappings)

    def unmap(self, number: int) -> None:
        """Unmap a registration; nothing where it is not mapped. Raises TierDamaged."""
        registered = self._registered.pop(number, None)
        if registered is not None:
            self._pool.use()
            try:
                registered.mappings.close()
            except self._cuda_error as error:
                raise TierDamaged(f"GPU {self._pool.index}: unmapping: {error}") from error

    def copy(self, copy: PageCopy, came: Callable[[int], None]) -> None:
        """Copy, and return or raise only when no part of it is still running. `came(n)` is called
        when the first n planes have arrived, except after the last part. Raises ValueError,
        CopyRefused or CUDA's error where the copy failed, TierDamaged where the context is lost."""
        registered = self._registered.get(copy.registration)
        if registered is None:
            raise ValueError("these pages are not registered")
        layout = registered.layout
        layout.check(len(copy.pages), copy.pages, to_blocks=copy.to_blocks)
        if layout.block_bytes != copy.block_bytes:
            raise ValueError(f"blocks of {copy.block_bytes} bytes, pages of {layout.block_bytes}")
        groups = list(self._groups(copy))
        self._pool.use()
        stream = self._streams[copy.to_blocks]
        parts: list[tuple[int, Any]] = []
        with ExitStack() as undo:
            undo.callback(self._settle, stream)  # parts of it may be running
            for planes in layout.parts(copy.planes_per_part):
                event = self._pool.cupy.cuda.Event(block=True, disable_timing=True)
                for group in groups:
                    more = (layout, planes, group, stream)
                    self._path.enqueue(*more, to_blocks=copy.to_blocks)
                event.record(stream)
                parts.append((planes.stop, event))
            undo.pop_all()
        for stop, event in parts:
            self._settle(event)
            if stop < len(layout.planes):
                came(stop)

    def close(self) -> None:
        """Wait for all copies, and unmap everything."""
        for stream in self._streams.values():
            self._settle(stream)
        for number in list(self._registered):
            self.unmap(number)

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """The exceptions of `map` and `copy` after which the worker can continue."""
        return ValueError, NotShareable, CopyRefused, self._cuda_error

    @property
    def trouble(self) -> str:
        """A sentence for the operator if the path of copies has changed, or ""."""
        return self._path.trouble

    def _layout(self, claim: Claim, mappings: Mappings) -> PageLayout:
        """The claim's planes as addresses in this process. Raises NotShareable where one is not
        within its allocation."""
        if claim.page_bytes < 1 or claim.pages_per_block < 1:
            raise NotShareable("pages need at least one byte, and blocks at least one page")
        mapped = []
        for handle in claim.handles:
            base = mappings.address(SharedRange(handle, 0, 0))
            start, size = self._size_of(base)
            mapped.append((base, start + size - base))
        planes = []
        for number, fields in enumerate(claim.planes.tolist()):
            which, offset, stride, num_pages = fields
            if which >= len(mapped) or not num_pages:
                raise NotShareable(f"plane {number} has no allocation, or no pages")
            base, room = mapped[which]
            end = offset + (num_pages - 1) * stride + claim.page_bytes
            if end > room:
                raise NotShareable(
                    f"plane {number} ends {end - room} bytes beyond its allocation of {room}"
                )
            planes.append(Plane(base + offset, stride, num_pages))
        try:
            return PageLayout(tuple(planes), claim.page_bytes, claim.pages_per_block)
        except ValueError as error:
            raise NotShareable(str(error)) from error

    def _groups(self, copy: PageCopy) -> Iterator[PageGroup]:
        """The copy's blocks, grouped by memory. Raises ValueError for a slot outside its tier."""
        first = 0
        for tier, slots in copy.runs:
            if tier not in (self._near, self._far):
                raise ValueError(f"this GPU has no tier {tier[:40]!r}")
            address = self._pinned.address if tier == self._near else self._pool.address
            blocks = _addresses(address, slots, copy.block_bytes)
            memory: Memory = "gpu"
            if tier == self._near:
                is_pinned = self._pinned.holds(blocks, copy.block_bytes)
                memory = "pinned" if is_pinned else "pageable"
            yield PageGroup(memory, blocks, copy.pages[first : first + len(blocks)])
            first += len(blocks)

    def _settle(self, awaited: Any) -> None:
        """Wait until this event, or this whole stream, has completed. Raises TierDamaged."""
        self._pool.use()
        try:
            awaited.synchronize()
        except self._cuda_error as error:
            raise TierDamaged(f"GPU {self._pool.index}: {error}") from error


def _addresses(address: Callable[[int, int], int], slots: PageNumbers, num_bytes: int) -> Addresses:
    """The slots' addresses. `address`: of the tier; called only for the lowest and highest slot,
    since a call for each would take longer than a kernel for all. Raises ValueError as it does."""
    if not len(slots):
        return np.empty(0, np.uint64)
    lowest = int(slots.min())
    start = address(lowest, num_bytes)
    address(int(slots.max()), num_bytes)
    return np.uint64(start) + (slots - np.int32(lowest)).astype(np.uint64) * np.uint64(PAGE_BYTES)
