"""Blocks in vLLM's paged cache: one page of every layer, copied whole.

A block in hicache is its pages in the order of the layers, each as it is in memory:

    [ layer 0: page bytes ][ layer 1: page bytes ] …

The order of heads and tokens within a page is the namespace's `layout`; a cache with another
layout has another namespace. Called from the threads that load and store.

On a GPU the pages may be shared with the daemon's GPU worker (common/page_sharing.py), which then
copies; otherwise they are copied here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.client.gpu_pages import SharedPages
from hicache.connectors.common.paged_blocks import shared_pages
from hicache.transfer.gpu_pages.cuda_ipc import NotShareable, cupy_for
from hicache.transfer.gpu_pages.page_kernels import PageLayout, Plane

log = logging.getLogger("hicache.vllm")

Bytes = npt.NDArray[np.uint8]


class UnsupportedLayout(ValueError):
    """This inference engine's cache cannot be stored; the text says why."""


def page_rows(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache as uint8 [num_blocks, page_bytes], in place. Raises UnsupportedLayout if a
    page is not contiguous, or the pages are not at equal distances."""
    if tensor.dim() < 2 or tensor.shape[0] != num_blocks:
        raise UnsupportedLayout(
            f"a layer's cache of the shape {list(tensor.shape)} does not begin with its "
            f"{num_blocks} blocks"
        )
    page = tensor[0]
    inner = sorted((s, n) for s, n in zip(page.stride(), page.shape, strict=True) if n > 1)
    expected = 1
    for stride, size in inner:
        if stride != expected:
            raise UnsupportedLayout(f"a page with the strides {list(page.stride())} has gaps")
        expected *= size
    item = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item,
        (num_blocks, page.numel() * item),
        (tensor.stride(0) * item, 1),
    )


class Pages(Protocol):
    """Copies between blocks in hicache's form and pages. Both calls return when the bytes have been
    copied."""

    block_bytes: int

    def shared(self) -> SharedPages | None:
        """For the daemon's GPU worker; None if they are not on a GPU. Raises NotShareable."""

    def write(self, pages: Sequence[int], views: Sequence[Bytes]) -> None:
        """Blocks into pages."""

    def reader(self, pages: Sequence[int]) -> Callable[[int, Bytes], None]:
        """`read(i, view)` copies the block in `pages[i]` into `view`."""

    def mark(self) -> Any:
        """A mark after the work started until now, for `wait`; None if it is done."""

    def wait(self, mark: Any) -> None:
        """Wait until that work is done."""


class HostPages:
    """In this process's memory: copied by numpy, which releases the GIL."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = [rows.numpy() for rows in layers]
        self._page_bytes = [rows.shape[1] for rows in self._layers]
        self.block_bytes = sum(self._page_bytes)

    def shared(self) -> SharedPages | None:
        return None

    def write(self, pages: Sequence[int], views: Sequence[Bytes]) -> None:
        for page, view in zip(pages, views, strict=True):
            start = 0
            for rows, size in zip(self._layers, self._page_bytes, strict=True):
                rows[page] = view[start : start + size]
                start += size

    def reader(self, pages: Sequence[int]) -> Callable[[int, Bytes], None]:
        def read(index: int, view: Bytes) -> None:
            start = 0
            for rows, size in zip(self._layers, self._page_bytes, strict=True):
                view[start : start + size] = rows[pages[index]]
                start += size

        return read

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass


class DevicePages:
    """In a GPU's memory: through pinned memory, many blocks at a time.

    Called from any thread: each call uses its own stream and waits for it. The caller first waits
    for vLLM's own stream (`mark`, `wait`).
    """

    CHUNK_BYTES = 64 << 20

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)
        self._device = layers[0].device
        self._bounds = np.cumsum([0, *(rows.shape[1] for rows in layers)]).tolist()
        self.block_bytes = int(self._bounds[-1])
        self._chunk = max(1, self.CHUNK_BYTES // self.block_bytes)

    def shared(self) -> SharedPages | None:
        return shared_pages(cupy_for(self._device.index), layout_of(self._layers))

    def write(self, pages: Sequence[int], views: Sequence[Bytes]) -> None:
        stream = torch.cuda.Stream(self._device)
        for start in range(0, len(pages), self._chunk):
            part = range(start, min(start + self._chunk, len(pages)))
            pinned = torch.empty((len(part), self.block_bytes), dtype=torch.uint8, pin_memory=True)
            rows = pinned.numpy()
            for row, index in zip(rows, part, strict=True):
                row[:] = views[index]
            with torch.cuda.stream(stream):
                ids = torch.tensor([pages[i] for i in part], device=self._device)
                blocks = pinned.to(self._device, non_blocking=True)
                for layer, first, last in self._split():
                    layer.index_copy_(0, ids, blocks[:, first:last])
            stream.synchronize()

    def reader(self, pages: Sequence[int]) -> Callable[[int, Bytes], None]:
        gathered: dict[int, Bytes] = {}

        def read(index: int, view: Bytes) -> None:
            chunk = index // self._chunk
            if chunk not in gathered:
                gathered.clear()
                start = chunk * self._chunk
                gathered[chunk] = self._gather(pages[start : start + self._chunk])
            view[:] = gathered[chunk][index % self._chunk]

        return read

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def _gather(self, pages: Sequence[int]) -> Bytes:
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            ids = torch.tensor(list(pages), device=self._device)
            blocks = torch.empty(
                (len(pages), self.block_bytes), dtype=torch.uint8, device=self._device
            )
            for layer, first, last in self._split():
                blocks[:, first:last] = layer.index_select(0, ids)
            pinned = torch.empty(blocks.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(blocks, non_blocking=True)
        stream.synchronize()
        rows: Bytes = pinned.numpy()
        return rows

    def _split(self) -> Sequence[tuple[torch.Tensor, int, int]]:
        return list(zip(self._layers, self._bounds[:-1], self._bounds[1:], strict=True))


def layout_of(layers: Sequence[torch.Tensor]) -> PageLayout:
    """Of rows made by `page_rows`, one plane per layer. Raises NotShareable."""
    page_bytes = layers[0].shape[1]
    if any(rows.shape[1] != page_bytes for rows in layers):
        raise NotShareable("its layers have pages of several sizes")
    planes = tuple(Plane(rows.data_ptr(), rows.stride(0), rows.shape[0]) for rows in layers)
    return PageLayout(planes, page_bytes, 1)


def share(pages: Pages, *, may_sleep: bool) -> SharedPages | None:
    """A rank's pages for the daemon's GPU worker; None if they cannot be shared, and the log says
    why. `may_sleep`: vLLM's sleep frees the cache's memory without notice, so where vLLM may sleep
    no other process maps it."""
    try:
        shared = pages.shared()
        if shared is not None and may_sleep:
            raise NotShareable("vLLM may sleep, which frees the memory of its cache")
    except NotShareable as why:
        log.info("hicache: blocks are copied by this process itself: %s", why)
        return None
    return shared


def pages_of(caches: Sequence[torch.Tensor], num_blocks: int) -> Pages:
    """For the layers' caches in their order. Raises UnsupportedLayout."""
    rows = [page_rows(tensor, num_blocks) for tensor in caches]
    kinds = {tensor.device.type for tensor in caches}
    if kinds == {"cpu"}:
        return HostPages(rows)
    if kinds == {"cuda"}:
        return DevicePages(rows)
    raise UnsupportedLayout(f"a cache on {' and '.join(sorted(kinds))} is not supported")
