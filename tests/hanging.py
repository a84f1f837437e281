"""Says where a test hangs, before pytest-timeout ends its process: where each thread is, and each task of each loop.

pytest-timeout says it of threads, to the output of a process that has none if it is a worker of pytest-xdist, and of a
loop only that it waits. This writes to the error output that the run began with.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

EARLIER_S = 2.0
"""So long before the test's time is up."""
DEEPEST = 40
"""So many awaits of a task are told."""


class Hanging:
    """A plugin of pytest, for the processes that run tests; to be made before their output is captured."""

    def __init__(self) -> None:
        self._to = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Have a watch on the test."""
        seconds = time_of(item)
        timer = threading.Timer(max(seconds - EARLIER_S, seconds / 2), self._tell, [item.nodeid, seconds])
        timer.daemon = True
        if seconds:
            timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()

    def _tell(self, name: str, seconds: float) -> None:
        self._to.write(f"\n{name} is not done after almost {seconds:g} s\n")
        for loop in [each for each in gc.get_objects() if isinstance(each, asyncio.AbstractEventLoop)]:
            for task in asyncio.all_tasks(loop):
                self._to.write(f"task {task.get_name()}\n{''.join(awaits_of(task))}")
        self._to.flush()
        faulthandler.dump_traceback(self._to)


def time_of(item: pytest.Item) -> float:
    """How many seconds pytest-timeout lets a test run; 0: as long as it takes."""
    marker = item.get_closest_marker("timeout")
    asked = item.config.getoption("timeout", None)
    if marker is not None and asked is None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    return float(asked if asked is not None else item.config.getini("timeout") or 0)


def awaits_of(task: asyncio.Task[Any]) -> Iterator[str]:
    """A line for each coroutine that awaits the next one, from the task's own to the one that waits."""
    awaits: Any = task.get_coro()
    for _ in range(DEEPEST):
        frame = getattr(awaits, "cr_frame", None) or getattr(awaits, "gi_frame", None)
        if frame is None:
            return
        yield f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}\n"
        awaits = getattr(awaits, "cr_await", None) or getattr(awaits, "gi_yieldfrom", None)
