"""An event loop in a separate thread, for programs without one. All synchronous clients of a process share it.

Promises: each call ends with its result or its error, or is cancelled when the waiting caller is interrupted (Ctrl-C).
In a forked child process, an inherited client raises an error on use.
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
        """`run` a closing. In a child process it does nothing, as the objects belong to the parent."""
        if self._origin.is_here:
            self.run(work)
        else:
            work.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop, and return its result. Raises its errors."""
        try:
            self.check_caller()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect unless the caller was interrupted
            raise

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call `call` on the loop, and do not wait for it."""
        self._loop.call_soon_threadsafe(call)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task for `work`; call this on the loop."""
        return self._loop.create_task(work)

    def check_caller(self) -> None:
        """Check that the caller may wait for the loop. Raises `InvalidArgument` and `ClosedError`."""
        if threading.get_ident() == self._thread.ident:
            raise InvalidArgument(
                "callbacks run on the client's own thread and must not wait for it: call the client from another thread"
            )
        self.check_process()

    def check_process(self) -> None:
        """Check that this process made it. Raises `ClosedError` if it was inherited by a fork."""
        self._origin.check()


_shared: LoopThread | None = None
_sharing = threading.Lock()


def loop_thread() -> LoopThread:
    """Return the loop thread of this process."""
    global _shared  # noqa: PLW0603 - there is one per process
    with _sharing:
        if _shared is None:
            _shared = LoopThread()
        return _shared


def _forget() -> None:
    global _shared, _sharing
    _shared, _sharing = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
