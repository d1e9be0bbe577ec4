"""An inference engine's tensors in "GPU memory" that is a memory file, and what they should hold.

    python -m tests.e2e.page_engine ENDPOINT SEED

is such a process: it stores a prompt from its pages, says "saving" first, and waits to be killed.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from hicache.bench.gpu_check.stand_in import BUS_ID, StandIn
from hicache.client import Client, NamespaceSpec, SharedPages
from hicache.connectors.common.paged_blocks import PagedCache
from hicache.transfer.gpu_pages.page_kernels import PageLayout, Plane
from tests.e2e.daemon_process import SPEC, Blocks, Tokens, blocks_of, prompt

PLANES, PAGES_PER_BLOCK, NUM_PAGES = 8, 2, 64
PAGE_BYTES = SPEC.block_bytes // (PLANES * PAGES_PER_BLOCK)
GAP_BYTES = 4096
PLANE_BYTES = NUM_PAGES * PAGE_BYTES + GAP_BYTES

Table = npt.NDArray[np.int32]


class PageEngine:
    """`tensors[p, n]` is page n of plane p."""

    def __init__(self) -> None:
        device = StandIn()
        self.memory = device.cuda.Memory(PLANES * PLANE_BYTES)
        whole = np.frombuffer(self.memory.buffer, np.uint8).reshape(PLANES, PLANE_BYTES)
        self.tensors = whole[:, GAP_BYTES:].reshape(PLANES, NUM_PAGES, PAGE_BYTES)
        handle = device.cuda.runtime.ipcGetMemHandle(self.memory.ptr)
        rows = [(0, p * PLANE_BYTES + GAP_BYTES, PAGE_BYTES, NUM_PAGES) for p in range(PLANES)]
        planes = np.array(rows, np.uint64)
        self.shared = SharedPages(BUS_ID, (handle,), planes, PAGE_BYTES, PAGES_PER_BLOCK)
        self.device = device
        bases = (int(self.memory.ptr) + row[1] for row in rows)
        self.layout = PageLayout(
            tuple(Plane(base, PAGE_BYTES, NUM_PAGES) for base in bases), PAGE_BYTES, PAGES_PER_BLOCK
        )

    def pages(self, num_blocks: int, seed: int) -> Table:
        """Of so many blocks, anywhere."""
        order = np.random.default_rng(seed).permutation(NUM_PAGES)[: num_blocks * PAGES_PER_BLOCK]
        return order.astype(np.int32).reshape(num_blocks, PAGES_PER_BLOCK)

    def write(self, pages: Table, tokens: Tokens, spec: NamespaceSpec = SPEC) -> None:
        """What the model makes of a prompt's first blocks, into these pages."""
        blocks = blocks_of(tokens, spec)[: len(pages)]
        blocks = blocks.reshape(-1, PLANES, PAGES_PER_BLOCK, PAGE_BYTES)
        self.tensors[:, pages] = blocks.swapaxes(0, 1)

    def load_by_layer(
        self,
        client: Client,
        cache: PagedCache,
        tokens: Tokens,
        pages: Table,
        spec: NamespaceSpec = SPEC,
    ) -> None:
        """A prompt's blocks into pages, two planes after the other, each compared when it came."""
        right = blocks_of(tokens, spec).reshape(len(pages), PLANES, -1)
        self.tensors[:] = 0
        match = client.match(tokens)
        with cache.load_by_part(match, pages, planes_per_part=2) as load:
            for planes in range(2, PLANES + 1, 2):
                assert load.wait(planes) == len(pages), client.last_error
                found = self.read(pages).reshape(right.shape)
                assert np.array_equal(found[:, :planes], right[:, :planes])
        loaded = load.end()
        assert (loaded.blocks, loaded.is_at_rest) == (len(pages), True)
        client.release(match)

    def read(self, pages: Table) -> Blocks:
        """The blocks in these pages."""
        found = self.tensors[:, pages].swapaxes(0, 1)
        return np.ascontiguousarray(found).reshape(len(pages), SPEC.block_bytes)


def main(endpoint: str, seed: int) -> None:
    engine, tokens = PageEngine(), prompt(seed, 8)
    with Client(SPEC, endpoint, put_timeout_s=60.0) as client:
        share = client.share_pages(engine.shared)
        assert share is not None, client.last_error
        pages = engine.pages(8, seed)
        engine.write(pages, tokens)
        print("saving", flush=True)
        print(client.save_pages(tokens, share, pages), client.last_error, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
