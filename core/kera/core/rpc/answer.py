"""A future that calls one callback at once.

An `asyncio.Future` calls its callbacks in the loop's next round. A single record needs several of them (the backup's
answer, the deferred reply, the broker's answer), and in each round the loop polls all of its files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Answer(asyncio.Future[T]):
    """A future for an answer: from the peer to a request, or from a handler to its caller."""

    __slots__ = ("_tell",)
    _tell: Callable[[Answer[T]], object] | None

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._tell = None

    def when_done(self, tell: Callable[[Answer[T]], object]) -> None:
        """Call `tell` with this future as soon as there is a result or an error, within the call that sets it.

        There can be one `tell`, set right after the request was made. If the future is done by then, or is cancelled
        later, `tell` is called in the loop's next round. An exception of `tell` goes to the loop's exception handler.
        """
        if self.done():
            self.add_done_callback(tell)
        else:
            self._tell = tell

    def set_result(self, result: T) -> None:
        """See `asyncio.Future`."""
        super().set_result(result)
        self._is_done()

    def set_exception(self, exception: type | BaseException) -> None:
        """See `asyncio.Future`."""
        super().set_exception(exception)
        self._is_done()

    def cancel(self, msg: Any | None = None) -> bool:
        """See `asyncio.Future`."""
        cancelled = super().cancel(msg)
        tell, self._tell = self._tell, None
        if cancelled and tell is not None:
            self.add_done_callback(tell)
        return cancelled

    def _is_done(self) -> None:
        tell, self._tell = self._tell, None
        if tell is None:
            return
        try:
            tell(self)
        except Exception as error:  # noqa: BLE001 - as in asyncio: it must not hit the code that sets the result
            context = {"message": f"exception in {tell!r}", "exception": error, "future": self}
            self.get_loop().call_exception_handler(context)
