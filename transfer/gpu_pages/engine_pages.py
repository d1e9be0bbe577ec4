"""Inference engines' own pages in the GPU worker: mapped by CUDA IPC, copied from and to slots.

When pages and slots may be used again:

    copy    enqueued part by part, an event behind each; told as copied once the last event has
            completed, or, where CUDA refused it half-way, once all of its stream has
    unmap   asked for by the daemon when it was told of every copy that names the registration:
            nothing is on its way, and nothing waits for anybody

Nothing that a client claimed is believed: how large an allocation is the driver says, once it is
mapped, and every plane must lie within (`_layout`). Every table of pages is checked before anything
is enqueued.

By the copy engines or by a kernel (page_paths.py), this is the same. Loads and saves have a stream
and a thread each (page_worker.py), mapping and unmapping a third thread; no lock is held by any of
them.
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
"""(base, bytes) of the allocation around an address. Raises NotShareable."""


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
        self._streams = {way: cuda.Stream(non_blocking=True) for way in (True, False)}
        self._cuda_error: type[Exception] = cuda.runtime.CUDARuntimeError

    def map(self, claim: Claim) -> None:
        """Raises NotShareable with the reason, and then nothing stays mapped."""
        if claim.bus_id.lower() != self._pool.bus_id:
            raise NotShareable(
                f"these tensors are on the GPU at {claim.bus_id}, and the cache's is at "
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
        """Nothing where it was never mapped. Raises TierDamaged."""
        registered = self._registered.pop(number, None)
        if registered is not None:
            self._pool.use()
            try:
                registered.mappings.close()
            except self._cuda_error as error:
                raise TierDamaged(f"GPU {self._pool.index}: unmapping: {error}") from error

    def copy(self, copy: PageCopy, came: Callable[[int], None]) -> None:
        """Returns, or raises, when nothing of it is on its way. `came(n)`: the first n planes have
        arrived, all but the last part. ValueError, CopyRefused, CUDA's own error: it failed;
        TierDamaged: the context is gone."""
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
            undo.callback(self._settle, stream)  # part of it may be on its way
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
        """Nothing is on its way any more."""
        for stream in self._streams.values():
            self._settle(stream)
        for number in list(self._registered):
            self.unmap(number)

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What `map` and `copy` raise when the rest goes on."""
        return ValueError, NotShareable, CopyRefused, self._cuda_error

    @property
    def trouble(self) -> str:
        """What has become of the way in which they are copied, for the operator; or empty."""
        return self._path.trouble

    def _layout(self, claim: Claim, mappings: Mappings) -> PageLayout:
        """The claim's planes as addresses here, each of them within its allocation."""
        if claim.page_bytes < 1 or claim.pages_per_block < 1:
            raise NotShareable("pages need bytes, and blocks pages")
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
        """ValueError: a slot is not there."""
        first = 0
        for tier, slots in copy.runs:
            if tier not in (self._near, self._far):
                raise ValueError(f"no tier of this GPU: {tier[:40]!r}")
            address = self._pinned.address if tier == self._near else self._pool.address
            blocks = _addresses(address, slots, copy.block_bytes)
            memory: Memory = "gpu"
            if tier == self._near:
                is_pinned = self._pinned.holds(blocks, copy.block_bytes)
                memory = "pinned" if is_pinned else "pageable"
            yield PageGroup(memory, blocks, copy.pages[first : first + len(blocks)])
            first += len(blocks)

    def _settle(self, awaited: Any) -> None:
        """Until this event, or all of this stream, has completed. Raises TierDamaged."""
        self._pool.use()
        try:
            awaited.synchronize()
        except self._cuda_error as error:
            raise TierDamaged(f"GPU {self._pool.index}: {error}") from error


def _addresses(address: Callable[[int, int], int], slots: PageNumbers, num_bytes: int) -> Addresses:
    """Of slots, as `address` of both tiers gives them: a slot's number counts pages of memory. One
    call for each would take longer than a kernel for all. ValueError as there."""
    if not len(slots):
        return np.empty(0, np.uint64)
    lowest = int(slots.min())
    start = address(lowest, num_bytes)
    address(int(slots.max()), num_bytes)
    return np.uint64(start) + (slots - np.int32(lowest)).astype(np.uint64) * np.uint64(PAGE_BYTES)
