"""Requests of one reader of the push channel: carried out at once if they are little, else in slices, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kera.broker.slices import Slices
from kera.core.errors import ProtocolError


class Inbox:
    """Belongs to one connection."""

    def __init__(
        self,
        slices: Slices,
        steps_at_once: int,
        *,
        on_idle: Callable[[], object],
        on_failed: Callable[[ProtocolError], object],
    ) -> None:
        """`on_idle`: called when it is not `busy` any more; `on_failed`: when a later slice raises `ProtocolError`."""
        self._slices = slices
        self._steps_at_once = steps_at_once
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._tasks: deque[Iterator[None]] = deque()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether there is something left to do."""
        return bool(self._tasks)

    def add(self, task: Iterator[None]) -> None:
        """Do a task, which yields after each step. Raises `ProtocolError` if the first steps do."""
        self._tasks.append(task)
        if len(self._tasks) == 1 and self._do_some():
            self._slices.add(self._do_more)

    def close(self) -> None:
        """Do nothing more; may be repeated."""
        self._closed = True
        self._tasks.clear()

    def _do_some(self) -> bool:
        """A few steps; returns whether there is more."""
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
