"""A daemon's index, assembled from the pages of `tree`: branches with their sums.

A branch is a chain of nodes without forks. The index may change between two pages: a node whose
parent has changed is placed directly below its namespace (`TreeForest.num_loose`), and blocks that
changed meanwhile may be counted twice or not at all. No function recurses: a conversation stored
turn by turn, with a second try at each turn, is as deep as it has turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from hicache.engine.index.snapshot import TreeRun

Order = Literal["bytes", "recent", "branches"]


class TreeNamespace(msgspec.Struct, frozen=True):
    """A namespace in the reply of `tree`. `slot_bytes`: the room that a block takes."""

    digest: str
    name: str
    block_tokens: int
    block_bytes: int
    slot_bytes: int


class TreeAnswer(msgspec.Struct, frozen=True):
    """One page. Fields and items that a newer daemon adds are ignored."""

    epoch: str
    tiers: list[str]
    namespaces: list[TreeNamespace]
    nodes: list[TreeRun]
    next: int | None
    end: int


class Unreadable(ValueError):
    """A reply is not a page of `tree`, or does not follow the one before."""


@dataclass(slots=True)
class Sum:
    """Counts of blocks of one size. `blocks`: readable in some tier. `per_tier`: in each tier; a
    block in two tiers counts in both."""

    per_tier: list[int]
    blocks: int = 0

    def add(self, other: Sum) -> None:
        self.blocks += other.blocks
        self.per_tier = [a + b for a, b in zip(self.per_tier, other.per_tier, strict=True)]

    def add_run(self, run: TreeRun) -> None:
        if run.tiers:
            self.blocks += run.blocks
        for tier in range(len(self.per_tier)):
            if run.tiers >> tier & 1:
                self.per_tier[tier] += run.blocks


@dataclass(slots=True, eq=False, repr=False)
class Branch:
    """`number`: of its last node. `parent`: None directly below the namespace. `depth`, `blocks`:
    its first block and its length, in blocks. `own`: sums of itself. `all`, `idle_s`, `is_leased`
    and `ends` (the number of leaf branches) include all branches below it. `idle_s` is None if none
    of it is expected to be requested again."""

    number: int
    parent: Branch | None
    depth: int
    tokens: list[int]
    own: Sum
    all: Sum
    blocks: int = 0
    nodes: int = 0
    idle_s: float | None = None
    is_leased: bool = False
    ends: int = 0
    children: list[Branch] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Trunk:
    """A namespace. `branches`: all of them, parents first; `children`: those directly below it."""

    space: TreeNamespace
    all: Sum
    branches: list[Branch] = field(default_factory=list)
    children: list[Branch] = field(default_factory=list)
    idle_s: float | None = None
    is_leased: bool = False
    ends: int = 0


@dataclass(slots=True)
class TreeForest:
    """All namespaces. `num_loose`: branches whose parent had changed meanwhile."""

    tiers: list[str]
    trunks: list[Trunk]
    num_loose: int


class TreeReader:
    """Takes pages; after the last one, `forest` assembles them."""

    def __init__(self) -> None:
        self.after: int | None = 0
        self.end = 0
        self._epoch = ""
        self._tiers: list[str] = []
        self._spaces: dict[str, TreeNamespace] = {}
        self._runs: dict[int, tuple[str, TreeRun]] = {}

    def take(self, reply: Mapping[str, Any]) -> None:
        """Take one reply; `after` is then the position of the next page. Raises Unreadable."""
        try:
            page = msgspec.convert(reply, TreeAnswer)
            found = [(page.namespaces[run.namespace].digest, run) for run in page.nodes]
        except (msgspec.ValidationError, IndexError) as error:
            raise Unreadable(f"the daemon's reply is not a page of its tree: {error}") from None
        if self._epoch and page.epoch != self._epoch:
            raise Unreadable("the daemon was started again while its tree was read")
        if page.next is not None and page.next <= (self.after or 0):
            raise Unreadable("the daemon's pages do not follow each other")
        self._epoch, self._tiers = page.epoch, page.tiers
        self.after, self.end = page.next, page.end
        self._spaces.update((space.digest, space) for space in page.namespaces)
        self._runs.update((run.number, (digest, run)) for digest, run in found if run.blocks > 0)

    def forest(self, wants: Callable[[TreeNamespace], bool] = lambda space: True) -> TreeForest:
        """The branches of the namespaces for which `wants` is true, with their sums."""
        chosen = (space for space in self._spaces.values() if wants(space))
        trunks = {space.digest: Trunk(space, self._sum()) for space in chosen}
        runs = [(digest, run) for digest, run in self._runs.values() if digest in trunks]
        runs.sort(key=lambda found: (found[1].depth, found[1].number))
        parents = {run.number: self._parent_of(digest, run) for digest, run in runs}
        num_children: dict[int | None, int] = {}
        for parent in parents.values():
            num_children[parent] = num_children.get(parent, 0) + 1
        branches: dict[int, Branch] = {}
        num_loose = 0
        for digest, run in runs:
            parent = parents[run.number]
            above = branches[parent] if parent is not None else None
            if above is None or num_children[parent] > 1:
                above = self._begin(trunks[digest], above, run)
                num_loose += parent is None and run.depth > 0
            _lengthen(above, run)
            branches[run.number] = above
        for trunk in trunks.values():
            _sum_up(trunk)
        return TreeForest(self._tiers, list(trunks.values()), num_loose)

    def spaces(self) -> list[TreeNamespace]:
        """The namespaces of all pages."""
        return list(self._spaces.values())

    def _parent_of(self, digest: str, run: TreeRun) -> int | None:
        """The node above a run, if it still ends where the run begins. (So parents are less deep
        than their children, and there are no cycles.)"""
        if run.parent is None:
            return None
        digest_above, above = self._runs.get(run.parent, ("", run))
        is_above = digest_above == digest and above.depth + above.blocks == run.depth
        return run.parent if is_above else None

    def _begin(self, trunk: Trunk, above: Branch | None, run: TreeRun) -> Branch:
        tokens = np.frombuffer(run.tokens, "<u4").tolist() if len(run.tokens) % 4 == 0 else []
        branch = Branch(run.number, above, run.depth, tokens, self._sum(), self._sum())
        (trunk if above is None else above).children.append(branch)
        trunk.branches.append(branch)
        return branch

    def _sum(self) -> Sum:
        return Sum([0] * len(self._tiers))


def _lengthen(branch: Branch, run: TreeRun) -> None:
    branch.number = run.number
    branch.blocks += run.blocks
    branch.nodes += 1
    branch.own.add_run(run)
    branch.idle_s = _younger(branch.idle_s, run.idle_s)
    branch.is_leased |= run.is_leased


def _sum_up(trunk: Trunk) -> None:
    """Leaves first: `branches` is ordered by depth."""
    for branch in reversed(trunk.branches):
        branch.all.add(branch.own)
        branch.ends = branch.ends or 1
        above = branch.parent or trunk
        above.all.add(branch.all)
        above.ends += branch.ends
        above.idle_s = _younger(above.idle_s, branch.idle_s)
        above.is_leased |= branch.is_leased


def _younger(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def sort(forest: TreeForest, by: Order) -> None:
    """Sort namespaces, and the branches of each parent: most bytes, last used, or most branches
    first. Equal ones are in the daemon's order."""
    key = _KEYS[by]
    forest.trunks.sort(key=key)
    for trunk in forest.trunks:
        trunk.children.sort(key=key)
        for branch in trunk.branches:
            branch.children.sort(key=key)


def _by_bytes(item: Branch | Trunk) -> tuple[float, ...]:
    size = item.space.slot_bytes if isinstance(item, Trunk) else 1
    return (-item.all.blocks * size, -sum(item.all.per_tier) * size, *_last(item))


def _by_age(item: Branch | Trunk) -> tuple[float, ...]:
    return (float("inf") if item.idle_s is None else item.idle_s, *_last(item))


def _by_branches(item: Branch | Trunk) -> tuple[float, ...]:
    return (-item.ends, -item.all.blocks, *_last(item))


def _last(item: Branch | Trunk) -> tuple[float, ...]:
    return (item.number,) if isinstance(item, Branch) else ()


_KEYS: dict[Order, Callable[[Branch | Trunk], tuple[float, ...]]] = {
    "bytes": _by_bytes,
    "recent": _by_age,
    "branches": _by_branches,
}
