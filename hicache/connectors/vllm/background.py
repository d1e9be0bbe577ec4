"""A thread with an event loop, in which everything that waits for the daemon happens.

vLLM's own threads only hand tasks over and look at what has come of them; they never wait for one.
A task that fails is a miss and a warning, at most one in a while: the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

log = logging.getLogger("hicache.vllm")

Task = Callable[[], Coroutine[Any, Any, None]]

WARN_EVERY_S: Final = 60.0
ENDING_S: Final = 2.0
"""For tasks to end, beyond the patience for the last one."""


class Trouble:
    """Says what went wrong, once in a while; counts it always."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        self._told_s = float("-inf")
        self._is_away = False

    def note(self, sentence: str, *, is_away: bool = False) -> None:
        """`is_away`: the daemon does not answer at all."""
        self.count += 1
        self.last = sentence
        self._is_away |= is_away
        now_s = time.monotonic()
        if now_s - self._told_s >= WARN_EVERY_S:
            self._told_s = now_s
            log.warning("hicache: vLLM goes on without it for now: %s", sentence)

    def over(self) -> None:
        """The daemon answers again."""
        if self._is_away:
            self._is_away = False
            self._told_s = float("-inf")
            log.warning("hicache: the daemon answers again")

    @contextmanager
    def harmless(self, what: str) -> Iterator[None]:
        """A fault of ours or of the daemon's, whatever it is, is no fault of vLLM's."""
        try:
            yield
        except Exception as error:  # the boundary: an engine must go on without us
            self.note(f"{what}: {error or type(error).__name__}")
            log.debug("hicache: %s", what, exc_info=True)


class Background:
    """Tasks from any thread, run side by side in one. The thread starts with the first of them, and
    ends when it was closed and nothing is under way any more."""

    def __init__(self, name: str, trouble: Trouble) -> None:
        self.trouble = trouble
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    def submit(self, task: Task) -> None:
        """Begin a task soon; none after `close`. Returns at once."""
        if self._is_over:
            return
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=[self._loop], name=self._name, daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, task)

    def close(self, last: Task, patience_s: float) -> None:
        """Run one last task, as far as patience goes, and end all others. Returns when they have
        ended, or a little after patience is over: a copy in a thread cannot be ended, and its task
        gives nothing back before it has."""
        if self._loop is not None and self._thread is not None and not self._is_over:
            self.submit(partial(self._finish, last, patience_s))
            self._thread.join(patience_s + ENDING_S)
        self._is_over = True

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.close()

    def _begin(self, task: Task) -> None:
        if self._is_over:
            return
        running = asyncio.ensure_future(self._guarded(task))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    async def _guarded(self, task: Task) -> None:
        with self.trouble.harmless("a task"):
            await task()

    async def _finish(self, last: Task, patience_s: float) -> None:
        with self.trouble.harmless("closing"):
            async with asyncio.timeout(patience_s):
                await last()
        self._is_over = True  # some begin another when they end
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        # First those that were submitted, which end what they have begun: a copy in a thread would
        # go on if it were cancelled under its task, in memory that the task then gives back.
        await _ended({task for task in self._tasks if task is not this})
        await _ended({task for task in asyncio.all_tasks() if task is not this})
        await loop.shutdown_asyncgens()
        loop.stop()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
