"""One queue of one device (queues.py): waiting moves, and batches in flight. Owned by the mover;
pure.

queued by priority:  demand … | prefetch … | demotion …
             take ↓  one batch of one priority, all copies or all deletions
in flight:           at most a few batches, so that a new demand does not wait long

A batch is limited in bytes and in blocks: a demand waits only for the batches in flight. On a slow
link a batch is also limited in time, since its blocks arrive together: at its deadline a request
continues with the batches that have arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hicache.engine.plan import Move, Outcome, Priority
from hicache.transfer.worker_messages import Batch


@dataclass(frozen=True, slots=True)
class Limits:
    """The most moves and bytes of a batch, and the most batches in flight."""

    moves: int = 32
    num_bytes: int = 16 << 20
    in_flight: int = 2


LIMITS: Final = Limits()
GPU_LIMITS: Final = Limits(moves=128, in_flight=4)
"""A GPU copies 16 MiB in 0.3 ms, as long as it takes to report a batch and to send another: with
few in flight it is idle at times (of an H200's PCIe peak, with 2 MiB blocks: one 0.61, three 0.88,
four 0.90). Each block costs the driver about 3 µs, whatever its size. So a demand waits for at most
64 MiB or 512 blocks of other demands, about 1.5 ms; less urgent moves use other queues."""


BATCH_S: Final = 0.5
"""A batch should take no longer, at the speed of the last one. After a delayed batch the next one
is small, and measures the link's speed again."""


class MoveQueue:
    """The moves of one queue. `backlog`: bytes by priority, waiting and in flight."""

    def __init__(self, max_queued: int, limits: Limits = LIMITS) -> None:
        self.in_flight: dict[int, tuple[Batch, float]] = {}  # batch → (batch, when it was sent)
        self.backlog = dict.fromkeys(Priority, 0)
        self._max_queued, self._limits = max_queued, limits
        self._most_bytes = limits.num_bytes
        self._queues: dict[Priority, OrderedDict[int, Move]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._num_queued = 0

    @property
    def num_queued(self) -> int:
        """The number of waiting moves, without those in flight."""
        return self._num_queued

    def push(self, move: Move) -> bool:
        """Queue a move. Returns False, and changes nothing, when the queue is full."""
        if self._num_queued >= self._max_queued:
            return False
        self._queues[move.priority][move.id] = move
        self._num_queued += 1
        self.backlog[move.priority] += _weight(move)
        return True

    def take(self, now_s: float) -> tuple[list[Move], list[Outcome]]:
        """The next batch's moves (none when enough are in flight), and the failed outcomes of moves
        whose deadline has passed."""
        batch: list[Move] = []
        late: list[Outcome] = []
        if len(self.in_flight) >= self._limits.in_flight:
            return batch, late
        for priority in Priority:
            queue = self._queues[priority]
            num_bytes = 0
            while queue and len(batch) < self._limits.moves:
                move = next(iter(queue.values()))
                if _is_late(move, now_s):
                    late.append(self._give_up(move, "its deadline passed while it waited"))
                    continue
                if batch and (batch[0].src, batch[0].dst) != (move.src, move.dst):
                    break
                num_bytes += move.block_bytes
                if batch and num_bytes > self._most_bytes:
                    break
                del queue[move.id]
                self._num_queued -= 1
                batch.append(move)
            if batch:
                break
        return batch, late

    def sent(self, batch: Batch, now_s: float) -> None:
        self.in_flight[batch.number] = (batch, now_s)

    def timed(self, num_bytes: int, seconds: float) -> None:
        """A batch of `num_bytes` took `seconds`: adapt the size of the next one."""
        if num_bytes > 0 and seconds > 0.0:
            self._most_bytes = min(self._limits.num_bytes, int(BATCH_S * num_bytes / seconds))

    def done(self, number: int) -> Batch | None:
        """A batch came back. Returns None when it is not in flight here."""
        batch, _ = self.in_flight.pop(number, (None, 0.0))
        for move in batch.moves if batch is not None else ():
            self.backlog[move.priority] -= _weight(move)
        return batch

    def drop(self, move: Move, error: str) -> Outcome:
        """The failed outcome of a move that was taken but not sent."""
        self.backlog[move.priority] -= _weight(move)
        return Outcome(move.id, ok=False, error=error)

    def cancel(self, ids: Iterable[int]) -> list[Outcome]:
        """Remove these moves. Returns the outcomes of those that were still waiting; moves in
        flight cannot be cancelled."""
        outcomes = []
        for move_id in ids:
            for queue in self._queues.values():
                if move_id in queue:
                    outcomes.append(self._give_up(queue[move_id], "cancelled"))
        return outcomes

    def cancel_all(self) -> list[Outcome]:
        return self.cancel([move_id for queue in self._queues.values() for move_id in queue])

    def expire(self, now_s: float) -> list[Outcome]:
        """Remove all waiting moves whose deadline has passed. Returns their outcomes."""
        moves = [move for queue in self._queues.values() for move in queue.values()]
        error = "its deadline passed while it waited"
        return [self._give_up(move, error) for move in moves if _is_late(move, now_s)]

    def fail_all(self, error: str, corrupt_in_flight: bool = False) -> list[Outcome]:
        """The worker has died: remove all moves, waiting and in flight. Returns their outcomes."""
        outcomes = []
        for number in list(self.in_flight):
            batch = self.done(number)
            for move in batch.moves if batch is not None else ():
                failure = Outcome(move.id, ok=False, error=error, corrupt=corrupt_in_flight)
                outcomes.append(failure)
        for queue in self._queues.values():
            outcomes += [self._give_up(move, error) for move in list(queue.values())]
        return outcomes

    def oldest_s(self) -> float | None:
        """When the oldest batch in flight was sent; None if there is none."""
        return min((sent_s for _, sent_s in self.in_flight.values()), default=None)

    def _give_up(self, move: Move, error: str) -> Outcome:
        del self._queues[move.priority][move.id]
        self._num_queued -= 1
        return self.drop(move, error)


def _weight(move: Move) -> int:
    """A move's bytes to copy; 0 for a deletion."""
    return 0 if move.dst is None else move.block_bytes


def _is_late(move: Move, now_s: float) -> bool:
    return move.deadline_s is not None and move.deadline_s <= now_s
