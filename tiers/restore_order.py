"""Orders a namespace's stored blocks for a restart: hottest paths first, parents before children.

A scan returns rows in key order, and keys are hashes. The forest gathers the rows in flat arrays,
finds every row's parent, and cuts the trees into chains: a row is followed by the child whose
subtree was used last; each other child begins another chain.

    a ── b ── c ── d      used last: d      chains, in order:   a b c d
         └─── x ── y                                            x y      (below b)

So a restarted daemon serves the most recently used prefixes before the scan has ended, and adds
whole runs of blocks to its index at once. A million rows take 1–2 s and about 150 bytes each.
Pure; called by the scanning thread of a persistent tier's worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.tiers.block import Counts, Ids, StoredRows

KEY_BYTES = 32
MAX_ROWS, MAX_CHAINS = 500, 16
"""Limits of one message: the daemon's loop is busy with it for 2–3 ms."""

_Order = npt.NDArray[np.int64]


@dataclass(slots=True)
class Scanned:
    """Rows of one namespace, block size and number of tokens, in key order: `keys` and `parents` 32
    bytes each, `tokens` `step` bytes each."""

    namespace: bytes
    block_bytes: int
    step: int
    keys: bytes
    parents: bytes
    tokens: bytes
    hits: Counts
    used_s: Counts

    def __len__(self) -> int:
        return len(self.hits)


class StoredForest:
    """Rows of one namespace and block size, added in any order. After `in_order`, `orphans` holds
    the keys of the rows without a complete path to the root."""

    def __init__(self, namespace: bytes, block_bytes: int, step: int) -> None:
        self.namespace, self.block_bytes, self.step = namespace, block_bytes, step
        self.orphans: list[bytes] = []
        self._keys, self._parents, self._tokens = bytearray(), bytearray(), bytearray()
        self._hits, self._used_s = array("I"), array("I")

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, rows: Scanned) -> None:
        """Add rows of this namespace, block size and number of tokens."""
        self._keys += rows.keys
        self._parents += rows.parents
        self._tokens += rows.tokens
        self._hits.frombytes(rows.hits.tobytes())
        self._used_s.frombytes(rows.used_s.tobytes())

    def in_order(self, first: int, total: int, max_rows: int = MAX_ROWS) -> Iterator[StoredRows]:
        """All rows that reach the root, numbered from `first` on (of `total` on the device), at
        most `max_rows` at a time."""
        count = len(self)
        keys = np.frombuffer(self._keys, np.uint8).reshape(count, KEY_BYTES)
        parents = np.frombuffer(self._parents, np.uint8).reshape(count, KEY_BYTES)
        above = _rows_above(keys, parents)
        depth = _depths(above)
        lost = np.flatnonzero(depth < 0)
        self.orphans = [keys[row].tobytes() for row in lost.tolist()]
        used_s = _with_those_below(np.array(self._used_s, np.uint32), above, depth)
        heads, order, starts = _chains(above, depth, used_s)
        if not len(order):
            return
        number = np.full(count + 2, -1, np.int32)
        number[order] = np.arange(first, first + len(order), dtype=np.int32)
        tokens = np.frombuffer(self._tokens, np.uint8).reshape(count, self.step)[order]
        hits, used_s = np.array(self._hits, np.uint32)[order], used_s[order]
        up, up_keys = number[above[heads]], parents[heads]
        for begin, end, chains in _portions(starts, len(order), max_rows):
            lengths, cut = chains
            ups, names = up[cut[0] : cut[1]].copy(), up_keys[cut[0] : cut[1]].copy()
            if starts[cut[0]] < begin:  # the rest of a chain that began earlier
                ups[0], names[0] = first + begin - 1, keys[order[begin - 1]]
            yield StoredRows(
                namespace=self.namespace,
                block_bytes=self.block_bytes,
                step=self.step,
                first=first + begin,
                total=total,
                lengths=lengths,
                parents=ups,
                parent_keys=names.tobytes(),
                tokens=tokens[begin:end].tobytes(),
                hits=hits[begin:end],
                used_s=used_s[begin:end],
            )


def _portions(
    starts: Ids, count: int, max_rows: int
) -> Iterator[tuple[int, int, tuple[Counts, tuple[int, int]]]]:
    """(begin, end, (lengths, (first, last))): rows begin … end-1 of the order, and the lengths of
    the parts of chains first … last-1 among them."""
    ends = np.append(starts[1:], count)
    begin = chain = 0
    while begin < count:
        end, last = begin, chain
        while last < len(starts) and last - chain < MAX_CHAINS and end < begin + max_rows:
            end = min(int(ends[last]), begin + max_rows)
            last += 1
        bounds = np.clip(np.append(starts[chain:last], end), begin, end)
        yield begin, end, (np.diff(bounds).astype(np.uint32), (chain, last))
        chain = last if end == int(ends[last - 1]) else last - 1
        begin = end


def _rows_above(keys: npt.NDArray[np.uint8], parents: npt.NDArray[np.uint8]) -> _Order:
    """Each row's parent as a position; `count` stands for the root, `count + 1` for a missing
    parent. Each of these two is its own parent. The first eight bytes of a key find the row, all 32
    confirm it."""
    count = len(keys)
    names, wanted = _prefixes(keys), _prefixes(parents)
    order = np.argsort(names, kind="stable")
    found = order[np.minimum(np.searchsorted(names[order], wanted), count - 1)] if count else order
    is_there = (keys[found] == parents).all(axis=1)
    is_root = ~parents.any(axis=1)
    above = np.where(is_root, count, np.where(is_there, found, count + 1))
    return np.append(above, [count, count + 1])


def _prefixes(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64).ravel()


def _depths(above: _Order) -> _Order:
    """Each row's number of ancestors, -1 where the path to the root is incomplete. By pointer
    doubling: rows in a cycle never reach the root."""
    count = len(above) - 2
    steps = (np.arange(count + 2) < count).astype(np.int64)
    ahead = above
    for _ in range(count.bit_length() + 1):
        if (ahead >= count).all():
            break
        steps += steps[ahead]
        ahead = ahead[ahead]
    return np.where(ahead == count, steps - 1, -1)[:count]


def _with_those_below(used_s: Counts, above: _Order, depth: _Order) -> Counts:
    """The last use of each row or of any row below it."""
    order = np.argsort(depth, kind="stable")
    order = order[np.searchsorted(depth[order], 1) :]  # those that have a row above
    bounds = np.append(np.flatnonzero(np.diff(depth[order], prepend=-1)), len(order))
    for level in range(len(bounds) - 2, -1, -1):
        rows = order[bounds[level] : bounds[level + 1]]
        np.maximum.at(used_s, above[rows], used_s[rows])
    return used_s


def _chains(above: _Order, depth: _Order, used_s: Counts) -> tuple[_Order, _Order, Ids]:
    """The first row of every chain; all rows, chain after chain; each chain's start in them. Chains
    used later come first, and a chain comes after the one it branches from."""
    count = len(depth)
    reached = np.flatnonzero(depth >= 0)
    by_parent = reached[np.lexsort((used_s[reached], above[reached]))]
    is_last = np.append(np.diff(above[by_parent]) != 0, np.ones(min(1, len(by_parent)), bool))
    heirs = by_parent[is_last]
    heirs = heirs[above[heirs] < count]
    head = np.arange(count)
    head[heirs] = above[heirs]
    for _ in range(count.bit_length() + 1):
        further = head[head]
        if (further == head).all():
            break
        head = further
    heads = reached[head[reached] == reached]
    heads = heads[np.lexsort((depth[heads], -used_s[heads].astype(np.int64)))]
    rank = np.empty(count, np.int64)
    rank[heads] = np.arange(len(heads))
    ranks = rank[head[reached]]
    by_chain = np.lexsort((depth[reached], ranks))
    starts = np.searchsorted(ranks[by_chain], np.arange(len(heads))).astype(np.int32)
    return heads, reached[by_chain], starts
