"""Counts uses of prefixes by class and age: the data that the hazard model is fitted to.

For each request the history walks the ghost index and counts, for every run it finds, a use of the
run's class at the time since its last use; then it sets the class of all runs of the path. A class
(`kind`, a small number) stands for the levels of these features:

    role      trunk: several requests have continued from it in different ways; partial: a block
              that is not full (the next turn will not request it again); tail: everything else,
              requested by one conversation only
    turn      the number of requests, each extending the one before, that led here
    blocks    of a tail: the length of the prompt (for a trunk it predicts nothing)
    gap       seconds between the conversation's turns (a geometric mean with forgetting)
    new       of a tail: the blocks that had not been requested before
    stop      why the inference engine's last answer ended, where reported
    answer    how long that answer was, where reported without a reason: with both, the length would
              only make the classes smaller
    touches   of a trunk: its uses
    due       how soon the inference engine expects the next turn, where reported

There are at most MAX_KINDS classes; rarer combinations share one (`_kind_of`). The nodes of the
radix index get their kind and uses from here (`marks`). Only used for ranking, never for
correctness. Owned by the daemon's one loop.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.engine.policies.hazard.ghost import SYMBOL, Ghost, GhostRun, Mark
from hicache.engine.policies.hazard.model import (
    NUM_BINS,
    Before,
    Fate,
    Model,
    Snapshot,
    bin_of,
    bins_of,
)
from hicache.tiers.block import MAX_BLOCK_TOKENS

MAX_KINDS: Final = 256
_KIND_LIMITS: Final = (160, 180, 200, 240, MAX_KINDS)
"""With more classes than each of these, one more step of levels is left out (`_kind_of`)."""
_MAX_REMEMBERED: Final = 4096

MAX_GHOST_BLOCKS: Final = 1 << 20
REFIT_REQUESTS: Final = 200
"""Requests between two fits."""

MAX_TURN: Final = 4
_BLOCKS_CUTS: Final = (6, 16, 48, 128)
_GAP_CUTS_S: Final = (10.0, 25.0, 60.0, 150.0)
_NEW_CUTS: Final = (2, 6, 20)
_ANSWER_CUTS_TOKENS: Final = (64, 256, 1024)
_TOUCHES_CUTS: Final = (3, 9, 33, 129)
_GAP_KEPT: Final = 0.6
MAX_STOP: Final = 7
"""The largest reason to stop. Reasons are small numbers; 0: unknown."""

_TAIL, _TRUNK, _PARTIAL = range(3)


class Levels(NamedTuple):
    """The level of each feature: a row of the fit's matrix. 0: not distinguished."""

    role: int
    turn: int = 0
    blocks: int = 0
    gap: int = 0
    new: int = 0
    stop: int = 0
    touches: int = 0
    due: int = 0
    answer: int = 0


_MULTIPLIERS: Final = np.random.default_rng(1).integers(
    1, 1 << 63, MAX_BLOCK_TOKENS, np.uint64
) | np.uint64(1)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


def symbols_of(tokens: bytes, step: int) -> bytes:
    """8 bytes for each whole block of `step` bytes: the block itself, or a hash (multilinear, then
    mixed). A collision costs hits, not correctness."""
    num_blocks = len(tokens) // step
    if step == SYMBOL:
        return tokens[: num_blocks * step]
    words = np.frombuffer(tokens, "<u4", num_blocks * step // 4).reshape(num_blocks, step // 4)
    summed = words.astype(np.uint64) @ _MULTIPLIERS[: step // 4]
    hashed: npt.NDArray[np.uint64] = (summed ^ summed >> np.uint64(32)) * _MIX
    return hashed.tobytes()


class Context(NamedTuple):
    """The features of a request."""

    turn: int
    num_blocks: int
    gap_s: float
    num_new: int
    stop: int = 0
    due_s: float = 0.0
    answer_tokens: int = 0

    def levels(self, role: int, touches: int) -> Levels:
        """The levels of a run of this request."""
        if role == _PARTIAL:
            return Levels(_PARTIAL)
        is_trunk = role == _TRUNK
        return Levels(
            role=role,
            turn=min(self.turn, MAX_TURN),
            blocks=0 if is_trunk else 1 + bisect_right(_BLOCKS_CUTS, self.num_blocks),
            gap=1 + bisect_right(_GAP_CUTS_S, self.gap_s) if self.turn > 1 else 0,
            new=0 if is_trunk else 1 + bisect_right(_NEW_CUTS, self.num_new),
            stop=self.stop,
            touches=1 + bisect_right(_TOUCHES_CUTS, touches) if is_trunk else 0,
            due=1 + bisect_right(_GAP_CUTS_S, self.due_s) if self.due_s else 0,
            answer=self._answer_level(),
        )

    def _answer_level(self) -> int:
        if self.stop or not self.answer_tokens:
            return 0
        return 1 + bisect_right(_ANSWER_CUTS_TOKENS, self.answer_tokens)


class History:
    """The ghost index, the classes, and the counts that a fit needs. `wants_fits`: whether a policy
    ranks by the model, and so a fit is needed. `num_fits`: fits that have ended, with or without a
    model; `is_fitting`: a fit is running. `num_held(tier)`: the blocks in this tier and those above
    it, set by the cache engine."""

    def __init__(self, max_ghost_blocks: int = MAX_GHOST_BLOCKS) -> None:
        self.ghost = Ghost(max_ghost_blocks, self._forgotten)
        self.now_s = 0.0
        self.wants_fits = False
        self.num_held: Callable[[int], int] = lambda tier: 0
        self.model: Model | None = None
        self.num_requests = 0
        self.num_fits = 0
        self.is_fitting = False
        self._fitted_at = 0
        self._kinds: dict[Levels, int] = {}
        self._levels: list[Levels] = []
        self._events = np.zeros((MAX_KINDS, NUM_BINS))
        self._censored = np.zeros((MAX_KINDS, NUM_BINS))
        self._blocks_used = np.zeros((MAX_KINDS, NUM_BINS))
        self._blocks_forgotten = np.zeros((MAX_KINDS, NUM_BINS))
        self._at_last_fit: Fate | None = None

    # --- requests -----------------------------------------------------------------------------

    def used(
        self, namespace: int, symbols: bytes, now_s: float, is_partial: bool = False
    ) -> list[GhostRun]:
        """Record a request. `symbols`: 8 bytes for each block of its prompt; `is_partial`: the last
        of these is not full. Returns its path in the ghost index, top first."""
        self.now_s = now_s
        self.num_requests += 1
        num_blocks = len(symbols) // SYMBOL
        walk = self.ghost.walk(namespace, symbols, num_blocks - is_partial, now_s)
        for run in walk.found:
            self._events[run.kind, bin_of(now_s - run.last_s)] += run.weight
            self._blocks_used[run.kind, bin_of(now_s - run.last_s)] += len(run)
        path = walk.found + walk.added
        context = self._context(path, num_blocks, num_blocks - walk.found_blocks, now_s)
        for run in path:
            run.touches += 1
            run.last_s = now_s
            run.is_partial = is_partial and run is path[-1]
        ends = [run for run in path if not run.is_partial]
        if ends:
            ends[-1].context = context
        self._classify(path, context)
        self.ghost.trim()
        return path

    def hinted(
        self,
        namespace: int,
        symbols: bytes,
        stop: int,
        due_s: float = 0.0,
        answer_tokens: int = 0,
    ) -> list[GhostRun]:
        """Record the end of a request's answer: its reason, its length (0: as reported before, if
        it was), and the expected seconds until the next turn (0: unknown). Returns its path."""
        path = self.ghost.find(namespace, symbols)
        ends = [run for run in path if run.context is not None]
        if ends and (before := ends[-1].context) is not None:
            answer_tokens = answer_tokens or before.answer_tokens
            context = before._replace(stop=stop, due_s=due_s, answer_tokens=answer_tokens)
            ends[-1].context = context
            self._classify(path, context)
        return path

    def marks(self, path: Sequence[GhostRun]) -> Iterator[Mark]:
        """A mark for each run of a path. Uses from 4 on are rounded down to a power of two, so that
        neighbours with similar uses can be one node."""
        end = 0
        for run in path:
            end += len(run)
            touches = run.touches
            uses = touches if touches < 4 else 1 << touches.bit_length() - 1
            yield end, run.kind, uses, run

    def marks_of(self, namespace: int, symbols: bytes) -> list[Mark]:
        """The marks of a prompt's blocks, as far as the ghost index has them."""
        return list(self.marks(self.ghost.find(namespace, symbols)))

    # --- fits ---------------------------------------------------------------------------------

    def is_fit_due(self) -> bool:
        """Whether another fit is due."""
        return self.wants_fits and self.num_requests - self._fitted_at >= REFIT_REQUESTS

    def snapshot(self) -> Snapshot:
        """Everything that a fit needs, as of now."""
        return next(found for found in self.snapshot_in_slices() if found is not None)

    def snapshot_in_slices(self, runs_each: int = 250) -> Iterator[Snapshot | None]:
        """Everything that a fit needs, as the last item; None after every `runs_each` runs before
        it. Requests may be recorded between items; their runs are counted before or after them."""
        self._fitted_at = self.num_requests
        self.is_fitting = True
        censored, unused = self._censored.copy(), self._blocks_forgotten.copy()
        runs = self.ghost.each()
        while some := list(islice(runs, runs_each)):
            ages_s = self.now_s - np.array([run.last_s for run in some])
            cells = np.array([run.kind for run in some]), bins_of(ages_s)
            np.add.at(censored, cells, [run.weight for run in some])
            np.add.at(unused, cells, [len(run) for run in some])
            if len(some) == runs_each:
                yield None
        size = len(self._levels)
        fate = Fate(self.now_s, self._blocks_used[:size].copy(), unused[:size])
        model, before = self.model, self._at_last_fit
        self._at_last_fit = fate
        yield Snapshot(
            np.array(self._levels, np.int64),
            self._events[:size].copy(),
            censored[:size],
            fate,
            Before(model.ranks, model.default_ranks, model.hits, before)
            if model and before
            else None,
        )

    def adopt(self, model: Model | None) -> None:
        """A fit has ended: use its model from now on. None (too little data) keeps the old one."""
        self.num_fits += 1
        self.is_fitting = False
        if model is not None:
            self.model = model

    def _forgotten(self, run: GhostRun) -> None:
        cell = run.kind, bin_of(self.now_s - run.last_s)
        self._censored[cell] += run.weight
        self._blocks_forgotten[cell] += len(run)

    def _context(
        self, path: Sequence[GhostRun], num_blocks: int, num_new: int, now_s: float
    ) -> Context:
        """The features of a request. It is the next turn of the longest earlier request that it
        extends, unless others have extended that one already: then that is a common beginning (for
        example a system prompt that was once sent alone), or an answer that was generated again."""
        below: GhostRun | None = None
        for run in reversed(path):
            before = run.context
            if before is not None and not run.leads_elsewhere(below):
                gap_s = now_s - run.last_s
                if before.turn > 1:
                    mean = _GAP_KEPT * math.log1p(before.gap_s)
                    gap_s = math.expm1(mean + (1 - _GAP_KEPT) * math.log1p(gap_s))
                return Context(before.turn + 1, num_blocks, gap_s, num_new)
            below = run
        return Context(1, num_blocks, 0.0, num_new)

    def _classify(self, path: Sequence[GhostRun], context: Context) -> None:
        """Set the class of a path's runs. Inner runs together have the weight of one run, and so
        have trunks: a long conversation counts once, however many turns it was stored in."""
        inner: list[GhostRun] = []
        trunk: list[GhostRun] = []
        for run in path:
            role = _TAIL
            if run.is_partial:
                role = _PARTIAL
            elif run.is_trunk:
                role = _TRUNK
                trunk.append(run)
            elif run.context is not context:
                inner.append(run)
            run.kind = self._kind_of(context.levels(role, run.touches))
            run.weight = 1.0
        for alike in (inner, trunk):
            num_blocks = sum(len(run) for run in alike)
            for run in alike:
                run.weight = len(run) / num_blocks

    def _kind_of(self, levels: Levels) -> int:
        """The class of these levels, a new one if there is room; else one with the less important
        levels left out (0)."""
        kind = self._kinds.get(levels)
        if kind is not None:
            return kind
        untouched = levels._replace(touches=0)
        short = untouched._replace(blocks=0)
        plain = short._replace(new=0)
        coarser = levels, untouched, short, plain, Levels(levels.role, levels.turn)
        for rough, limit in zip(coarser, _KIND_LIMITS, strict=True):
            known = self._kinds.get(rough, len(self._levels))
            if known < len(self._levels) or known < limit:
                break
        if known == len(self._levels):
            self._levels.append(rough)
            self._kinds[rough] = known
        if len(self._kinds) < _MAX_REMEMBERED:
            self._kinds[levels] = known
        return known
