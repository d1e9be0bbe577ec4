"""The moves in flight by number: the copies that they read, and the queue of each link.

Owned by the daemon's one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from hicache.engine.plan import Move, Priority

IN_FLIGHT_BYTES: Final = 32 << 20
"""The most bytes in flight over one link (`transfer/move_queue.py`)."""


class MovesInFlight(dict[int, Move]):
    """Moves by number. `of_block`: the moves of each block. `outbox`: moves for the next plan.
    `num_bytes`: by link and priority. `progress_s`: when a move over a link last ended, for links
    with moves in flight."""

    def __init__(self, tiers: Sequence[str], links: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.of_block: dict[int, list[Move]] = {}
        self.outbox: list[Move] = []
        self.num_bytes = {link: [0, 0, 0] for link in links}
        self.progress_s: dict[tuple[int, int], float] = {}
        self._names = tuple(tiers)
        self._serial = 0

    def next_id(self) -> int:
        """A number never used before in this run."""
        self._serial += 1
        return self._serial

    def issue(self, move: Move) -> None:
        """Add a move, and put it into the next plan."""
        self[move.id] = move
        self.of_block.setdefault(move.block, []).append(move)
        self.outbox.append(move)

    def end(self, number: int) -> Move | None:
        """Remove a move that has ended. Returns None where it is unknown."""
        move = self.pop(number, None)
        if move is not None:
            others = self.of_block[move.block]
            others.remove(move)
            if not others:
                del self.of_block[move.block]
        return move

    def arrived(self, link: tuple[int, int], move: Move, now_s: float) -> None:
        """A move over this link has ended."""
        queued = self.num_bytes[link]
        queued[move.priority] -= move.block_bytes
        if any(queued):
            self.progress_s[link] = now_s
        else:
            self.progress_s.pop(link, None)

    def bytes_over(self, link: tuple[int, int], at_most: Priority) -> int:
        """Bytes in the link's queue of this priority or a more urgent one."""
        return sum(self.num_bytes[link][: at_most + 1])

    def bytes_ahead(self, link: tuple[int, int]) -> int:
        """Bytes that a new demand waits for: other demands, and moves of any priority in flight."""
        demand, *others = self.num_bytes[link]
        return demand + min(sum(others), IN_FLIGHT_BYTES)

    def silent_s(self, link: tuple[int, int], now_s: float) -> float:
        """For how long a link with waiting demands has copied nothing."""
        return now_s - self.progress_s.get(link, now_s)

    def is_read(self, block: int, tier: int) -> bool:
        """Whether a move in flight reads (or deletes) the block's copy in the tier."""
        name = self._names[tier]
        return any(move.src == name for move in self.of_block.get(block, ()))

    def is_deleted(self, block: int, tier: int) -> bool:
        """Whether the block's record in the tier is being deleted, which cannot be cancelled."""
        name = self._names[tier]
        moves = self.of_block.get(block, ())
        return any(move.src == name and move.dst is None for move in moves)
