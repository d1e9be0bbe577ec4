"""The KV tensors of inference engines and the bytes of a block of them: the reference for the page
kernels, by NumPy's own indexing of the tensors' shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.transfer.gpu_pages.page_kernels import (
    PageLayout,
    split_pages,
    token_pages,
    whole_pages,
)

Tensor = npt.NDArray[np.uint8]
"""An engine's tensor as bytes: its dtype's width is part of the last axis."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """One engine's cache of one model. `dim` is a head's, or the latent's where heads is 1."""

    layers: int = 3
    num_pages: int = 24
    page_tokens: int = 16
    heads: int = 2
    dim: int = 16
    item_bytes: int = 2
    pages_per_block: int = 2

    @property
    def row_bytes(self) -> int:
        return self.heads * self.dim * self.item_bytes


@dataclass(frozen=True, slots=True)
class Kind:
    """An arrangement: the shapes of its tensors, the layout of their addresses, and the parts of
    page `n` in the order of a block's planes."""

    name: str
    shapes: Callable[[Shape], list[tuple[int, ...]]]
    layout: Callable[[Shape, Sequence[int]], PageLayout]
    parts: Callable[[Shape, Sequence[Tensor], int], list[Tensor]]


def _page_bytes(s: Shape) -> int:
    return s.page_tokens * s.row_bytes


def _tokens(s: Shape, tensor: Tensor, page: int) -> Tensor:
    return tensor[page * s.page_tokens : (page + 1) * s.page_tokens]


KINDS = (
    Kind(
        "vLLM, K and V side by side",
        lambda s: [(s.num_pages, s.page_tokens, s.heads, 2 * s.dim * s.item_bytes)] * s.layers,
        lambda s, at: whole_pages(at, s.num_pages, 2 * _page_bytes(s), s.pages_per_block),
        lambda s, tensors, page: [tensor[page] for tensor in tensors],
    ),
    Kind(
        "vLLM, K and V in one page",
        lambda s: [(s.num_pages, 2, s.page_tokens, s.heads, s.dim * s.item_bytes)] * s.layers,
        lambda s, at: whole_pages(at, s.num_pages, 2 * _page_bytes(s), s.pages_per_block),
        lambda s, tensors, page: [tensor[page] for tensor in tensors],
    ),
    Kind(
        "vLLM, split",
        lambda s: [(2, s.num_pages, s.page_tokens, s.heads, s.dim * s.item_bytes)] * s.layers,
        lambda s, at: split_pages(at, s.num_pages, _page_bytes(s), s.pages_per_block),
        lambda s, tensors, page: [tensor[half, page] for tensor in tensors for half in (0, 1)],
    ),
    Kind(
        "SGLang",
        lambda s: [(s.num_pages * s.page_tokens, s.heads, s.dim * s.item_bytes)] * (2 * s.layers),
        lambda s, at: token_pages(
            at[::2], at[1::2], s.num_pages, _page_bytes(s), s.pages_per_block
        ),
        lambda s, tensors, page: [_tokens(s, tensor, page) for tensor in tensors],
    ),
    Kind(
        "MLA latent",
        lambda s: [(s.num_pages, s.page_tokens, s.heads * s.dim * s.item_bytes)] * s.layers,
        lambda s, at: whole_pages(at, s.num_pages, _page_bytes(s), s.pages_per_block),
        lambda s, tensors, page: [tensor[page] for tensor in tensors],
    ),
)


def gathered(kind: Kind, s: Shape, tensors: Sequence[Tensor], pages: Sequence[int]) -> Tensor:
    """The bytes of the block of these pages: plane by plane, page by page."""
    by_page = [kind.parts(s, tensors, page) for page in pages]
    return np.concatenate(
        [part.reshape(-1) for plane in zip(*by_page, strict=True) for part in plane]
    )


def scattered(
    kind: Kind, s: Shape, tensors: Sequence[Tensor], pages: Sequence[int], block: Tensor
) -> None:
    """Writes a block into the tensors' own pages."""
    by_page = [kind.parts(s, tensors, page) for page in pages]
    at = 0
    for plane in zip(*by_page, strict=True):
        for part in plane:
            part[...] = block[at : at + part.size].reshape(part.shape)
            at += part.size
