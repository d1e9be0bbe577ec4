"""A thread with an event loop, in which everything that waits for the daemon runs.

vLLM's own threads submit tasks and read their results; they never wait for one. A task that fails
is a miss and a warning (at most one per WARN_EVERY_S); the loop goes on.
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
"""Time for tasks to end, in addition to the patience for the last one."""


class Trouble:
    """Counts failures, and logs one of them per WARN_EVERY_S."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        self._warned_s = float("-inf")
        self._is_away = False

    def note(self, sentence: str, *, is_away: bool = False) -> None:
        """`is_away`: the daemon does not answer at all."""
        self.count += 1
        self.last = sentence
        self._is_away |= is_away
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.warning("hicache: vLLM goes on without it for now: %s", sentence)

    def over(self) -> None:
        """The daemon answers again."""
        if self._is_away:
            self._is_away = False
            self._warned_s = float("-inf")
            log.warning("hicache: the daemon answers again")

    @contextmanager
    def harmless(self, what: str) -> Iterator[None]:
        """Turns any exception of this connector or the daemon into a note."""
        try:
            yield
        except Exception as error:  # the boundary: vLLM must go on without hicache
            self.note(f"{what}: {error or type(error).__name__}")
            log.debug("hicache: %s", what, exc_info=True)


class Background:
    """Runs tasks from any thread concurrently in one thread. That thread starts with the first
    task, and ends after `close` when no task is under way."""

    def __init__(self, name: str, trouble: Trouble) -> None:
        self.trouble = trouble
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    def submit(self, task: Task) -> None:
        """Start a task soon; after `close` it is dropped. Returns at once."""
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
        """Run one last task for at most `patience_s`, and cancel all others. Returns when they have
        ended, or ENDING_S after that: a copy in a thread cannot be cancelled, and its task keeps
        its memory until the copy has ended."""
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
        self._is_over = True  # tasks submitted by ending tasks are dropped
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        # Submitted tasks first: they wait for their copies in threads. A copy cancelled before its
        # task would go on in memory that the task then releases.
        await _ended({task for task in self._tasks if task is not this})
        await _ended({task for task in asyncio.all_tasks() if task is not this})
        await loop.shutdown_asyncgens()
        loop.stop()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
