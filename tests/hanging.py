"""Reports where a test hangs, before pytest-timeout ends its process: the stacks of all threads and of all tasks.

pytest-timeout reports only threads, and writes to an output that a worker of pytest-xdist does not have; about a loop
it shows only that it waits. This module writes to the error output that the run began with.
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
"""Time of the report before the test's time-out."""
DEEPEST = 40
"""The maximal number of reported awaits of a task."""


class Hanging:
    """A plugin of pytest, for the processes that run tests; create it before their output is captured."""

    def __init__(self) -> None:
        self._to = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch the test."""
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
    """The time-out of a test in seconds, for pytest-timeout; 0: unlimited."""
    marker = item.get_closest_marker("timeout")
    asked = item.config.getoption("timeout", None)
    if marker is not None and asked is None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    return float(asked if asked is not None else item.config.getini("timeout") or 0)


def awaits_of(task: asyncio.Task[Any]) -> Iterator[str]:
    """A line for each coroutine that awaits the next one, from the task's own to the innermost."""
    awaits: Any = task.get_coro()
    for _ in range(DEEPEST):
        frame = getattr(awaits, "cr_frame", None) or getattr(awaits, "gi_frame", None)
        if frame is None:
            return
        yield f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}\n"
        awaits = getattr(awaits, "cr_await", None) or getattr(awaits, "gi_yieldfrom", None)
