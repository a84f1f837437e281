"""An event loop in a thread of its own, for those who have none. All synchronous clients of a process share one.

Promises: what is run ends, with its result or its error, or is cancelled when who waits for it is interrupted
(Ctrl-C). What a child process that was forked has inherited says that it cannot be used there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kera.core.base.forks import Origin
from kera.core.errors import InvalidArgument

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread. A call returns its result or its error, and an interrupt cancels it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._origin = Origin()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kera-client", daemon=True)
        self._thread.start()

    def end(self, work: Coroutine[Any, Any, None]) -> None:
        """`run` what closes something. In a child process there is nothing to be closed: that is the parent's."""
        if self._origin.is_here:
            self.run(work)
        else:
            work.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have it done on the loop, and wait for it. Raises what it raises."""
        try:
            self.check_caller()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # who waits was interrupted; else it is done
            raise

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have it called on the loop, and do not wait."""
        self._loop.call_soon_threadsafe(call)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have it done on the loop by a task; to be called there."""
        return self._loop.create_task(work)

    def check_caller(self) -> None:
        """Whether who calls may wait for the loop. Raises `InvalidArgument` and `ClosedError`."""
        if threading.get_ident() == self._thread.ident:
            raise InvalidArgument(
                "callbacks run on the client's own thread and must not wait for it: call the client from another thread"
            )
        self.check_process()

    def check_process(self) -> None:
        """Whether this process made it, or has inherited it by a fork. Raises `ClosedError`."""
        self._origin.check()


_shared: LoopThread | None = None
_sharing = threading.Lock()


def loop_thread() -> LoopThread:
    """That of this process."""
    global _shared  # noqa: PLW0603 - there is one
    with _sharing:
        if _shared is None:
            _shared = LoopThread()
        return _shared


def _forget() -> None:
    global _shared, _sharing
    _shared, _sharing = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
