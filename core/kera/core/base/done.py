"""A callback that runs when work is done. It is not a future, since it runs at once, in the code that completes the
work.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.core.errors import KeraError

Done = Callable[[KeraError | None], None]
"""Called once, with the error if there is one."""


def nothing(error: KeraError | None) -> None:
    """A `Done` that ignores the result."""


def all_done(count: int, done: Done) -> Done:
    """Return a `Done` that calls `done` when it was called `count` times, with the first error among them.

    If `count` is 0, `done` is called at once.
    """
    left = count
    failed: KeraError | None = None
    if not count:
        done(None)

    def one(error: KeraError | None) -> None:
        nonlocal left, failed
        left -= 1
        failed = failed or error
        if left == 0:
            done(failed)

    return one
