"""A connection that handlers hold: nothing more is taken from it until all of them have released it."""

from __future__ import annotations

from collections.abc import Callable


class Holds:
    """See `kera.core.rpc.method.Peer`."""

    def __init__(self, held: Callable[[], None], released: Callable[[], None]) -> None:
        """`held` is called when somebody holds it, `released` when nobody does any more."""
        self._held = held
        self._released = released
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def hold(self) -> None:
        """Take nothing more for now."""
        self._count += 1
        self._held()

    def release(self) -> None:
        """Once for each `hold`."""
        self._count -= 1
        if not self._count:
            self._released()
