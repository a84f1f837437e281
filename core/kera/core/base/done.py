"""A callback that runs when something is done. It is not a future, since it runs at once, in the code that completes
the work.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.core.errors import KeraError

Done = Callable[[KeraError | None], None]
"""Called once, with the error if there is one."""


def nothing(error: KeraError | None) -> None:
    """A `Done` for which nobody waits."""


def all_done(count: int, done: Done) -> Done:
    """To be called `count` times: then it calls `done`, with the first error among them; of none, at once."""
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
