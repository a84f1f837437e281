"""An event loop that does not wait: when nothing is ready, its time leaps to its next timer.

It is for code within one process. Threads and sockets are not allowed: the loop would not wait for them.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
ROUNDS_MAX = 10_000
"""The maximum number of the loop's rounds at one time: after more, it counts as stuck."""


class _Leaps(selectors.SelectSelector):
    """Does not wait: its time leaps over each wait."""

    now_s = 1_000.0
    rounds = 0
    """The loop's rounds since its time went on."""

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing is ready, and nothing will be")
        self.rounds = 0 if timeout > 0 else self.rounds + 1
        if self.rounds > ROUNDS_MAX:
            raise AssertionError("the loop runs on and on, and its time stands still")
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
