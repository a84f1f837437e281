"""An event loop that does not wait: when nothing is ready, it is as late as its next timer wants it to be.

For what one process does by itself. There must be no threads and no sockets: nobody would wait for them.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
ROUNDS_MAX = 10_000
"""The maximum number of the loop's rounds at one time: after more, it counts as stuck."""


class _Leaps(selectors.SelectSelector):
    """Waits for nothing: the time that it would have waited is over."""

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
    """See the head of this module."""

    def __init__(self) -> None:
        self._leaps = _Leaps()
        super().__init__(self._leaps)

    def time(self) -> float:
        """Seconds since a thousand before its beginning."""
        return self._leaps.now_s


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """What `main` returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
