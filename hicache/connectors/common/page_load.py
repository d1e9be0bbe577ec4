"""A load on its way into an inference engine's pages, awaited layer by layer.

    with cache.load_by_part(match, pages, planes_per_part=2) as load:     # K and V of a layer
        for layer in range(num_layers):
            blocks = load.wait(2 * (layer + 1))     # fewer than wanted: recompute the others
            attention(layer)                        # while the next layers load
    loaded = load.end()

The daemon's GPU worker and a copy by this process report the same way: how many planes of how many
blocks have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from types import TracebackType

import numpy as np

from hicache.client.gpu_pages import LoadedPages, LoadedPart


class PageLoad:
    """`parts` are those of `wanted` blocks of `num_planes` planes each. When they have ended,
    `is_at_rest` returns whether no copy is under way.

    The load starts with the first `wait`. Call `end`, or leave its `with`, in every case.
    """

    def __init__(
        self,
        parts: Generator[LoadedPart, None, None],
        wanted: int,
        num_planes: int,
        is_at_rest: Callable[[], bool],
    ) -> None:
        self._parts, self._is_at_rest = parts, is_at_rest
        self._num_planes = num_planes
        self._came = np.zeros(wanted, np.int64)  # planes, per block
        self._started_s = time.monotonic()
        self._ended: LoadedPages | None = None

    def wait(self, planes: int) -> int:
        """Wait until the first `planes` planes of all blocks are in their pages, or the load has
        ended. Returns how many blocks, from the first on, have them."""
        while self._num_with(planes) < len(self._came):
            part = next(self._parts, None)
            if part is None:
                break
            self._came[part.first : part.first + part.blocks] = part.planes
        return self._num_with(planes)

    def end(self) -> LoadedPages:
        """Wait for the rest. Later calls return the same result."""
        if self._ended is None:
            blocks = self.wait(self._num_planes)
            self._parts.close()
            seconds = time.monotonic() - self._started_s
            is_at_rest = blocks == len(self._came) or self._is_at_rest()
            self._ended = LoadedPages(blocks, seconds, is_at_rest)
        return self._ended

    def give_up(self) -> LoadedPages:
        """End without the rest. Copies that the GPU worker has started go on: their pages are in
        doubt."""
        self._parts.close()
        return self.end()

    def __enter__(self) -> PageLoad:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end() if error is None else self.give_up()

    def _num_with(self, planes: int) -> int:
        lacking = self._came < planes
        return int(lacking.argmax()) if lacking.any() else len(self._came)
