"""An event loop that does not wait: when nothing is ready, its time leaps to its next timer.

It is for code within one process. Threads and sockets are not allowed: the loop would not wait for them.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Leaps(selectors.SelectSelector):
    """Does not wait: its time leaps over each wait."""

    now_s = 1_000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing is ready, and nothing will be")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaps to its next timer."""

    def __init__(self) -> None:
        self._leaps = _Leaps()
        super().__init__(self._leaps)

    def time(self) -> float:
        """Virtual seconds; the loop begins at 1000."""
        return self._leaps.now_s


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` on a virtual loop, and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
