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
from typing import Any, Final, TypeVar

log = logging.getLogger("hicache.vllm")

T = TypeVar("T")
Task = Callable[[], Coroutine[Any, Any, None]]

WARN_EVERY_S: Final = 60.0


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
    """Tasks from any thread, run side by side in one. The thread starts with the first of them."""

    def __init__(self, name: str, trouble: Trouble) -> None:
        self.trouble = trouble
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, task: Task) -> None:
        """Begin a task soon. Returns at once."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, task)

    def close(self, last: Task, patience_s: float) -> None:
        """End the thread after one last task, or when patience is over."""
        if self._loop is None or self._thread is None:
            return
        loop = self._loop

        async def finish() -> None:
            with self.trouble.harmless("closing"):
                async with asyncio.timeout(patience_s):
                    await last()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=1.0)
            loop.stop()

        self.submit(finish)
        self._thread.join(patience_s + 2.0)
        if not loop.is_running():
            loop.close()
        self._loop = None

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, task: Task) -> None:
        running = asyncio.ensure_future(self._guarded(task))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    async def _guarded(self, task: Task) -> None:
        with self.trouble.harmless("a task"):
            await task()


async def in_thread(work: Callable[[], T]) -> T:
    """Run something that copies; on cancellation it has ended before this returns, so that nobody
    writes into memory that has been given back."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
