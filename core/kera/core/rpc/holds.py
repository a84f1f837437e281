"""Holds of handlers on a connection: the server reads no further requests until all of them are released."""

from __future__ import annotations

from collections.abc import Callable


class Holds:
    """See `kera.core.rpc.method.Peer`."""

    def __init__(self, held: Callable[[], None], released: Callable[[], None]) -> None:
        """`held` is called at each `hold`, `released` when the last hold is released."""
        self._held = held
        self._released = released
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def hold(self) -> None:
        """Take no further requests until `release`."""
        self._count += 1
        self._held()

    def release(self) -> None:
        """End one `hold`; called once for each."""
        self._count -= 1
        if not self._count:
            self._released()
