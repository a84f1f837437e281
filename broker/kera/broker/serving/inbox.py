"""Requests of one push reader, carried out in their order: small ones at once, others in slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kera.broker.slices import Slices
from kera.core.errors import ProtocolError


class Inbox:
    """The requests of one connection that are not carried out yet."""

    def __init__(
        self,
        slices: Slices,
        steps_at_once: int,
        *,
        on_idle: Callable[[], object],
        on_failed: Callable[[ProtocolError], object],
    ) -> None:
        """`on_idle`: called when a later slice has ended the last task; `on_failed`: when it raises `ProtocolError`."""
        self._slices = slices
        self._steps_at_once = steps_at_once
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._tasks: deque[Iterator[None]] = deque()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether tasks are left to do."""
        return bool(self._tasks)

    def add(self, task: Iterator[None]) -> None:
        """Add a task that yields after each step, and begin it if it is the only one.

        Raises `ProtocolError` if its first steps do.
        """
        self._tasks.append(task)
        if len(self._tasks) == 1 and self._do_some():
            self._slices.add(self._do_more)

    def close(self) -> None:
        """Drop all tasks; may be repeated."""
        self._closed = True
        self._tasks.clear()

    def _do_some(self) -> bool:
        """Do a few steps; return whether tasks are left."""
        tasks = self._tasks
        for _ in range(self._steps_at_once):
            if not tasks:
                break
            if next(tasks[0], tasks) is tasks:
                tasks.popleft()
        return bool(tasks)

    def _do_more(self) -> bool:
        try:
            if self._do_some():
                return True
        except ProtocolError as error:
            self._tasks.clear()
            self._on_failed(error)
            return False
        if not self._closed:
            self._on_idle()
        return False
