"""Delivery result of a chunk: told once, to all who wait for its records.

Not an `asyncio.Future`, for two reasons. A task that stops waiting cancels the future that it waits for, and a chunk's
is shared by all its records. And of most chunks nobody asks: then it costs one small object, and no round of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from kera.client.producing.outcomes.deliveries import Deliveries, Stored, StoredBundle
from kera.client.types import Delivery
from kera.core.errors import KeraError


class _Told:
    """Something that is told once, to all who wait for it.

    Without __init__, as there is one for each chunk: what nobody has set is in the class.
    """

    _outcome: Any = None
    _waiters: list[asyncio.Future[None]] | None = None
    _callbacks: list[Callable[[], object]] | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` in a round of the loop of its own when the outcome is known, also if that is so already."""
        if self._outcome is not None:
            asyncio.get_running_loop().call_soon(callback)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def done(self) -> bool:
        """Whether it is known."""
        return self._outcome is not None

    def wait(self) -> Generator[Any, None, None]:
        """For ``yield from``: until it is known, whatever it is. Who gives up waiting leaves the others waiting."""
        if self._outcome is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            yield from waiter

    def _tell(self, outcome: object) -> None:
        self._outcome = outcome
        if self._waiters is not None:
            waiters, self._waiters = self._waiters, None
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                asyncio.get_running_loop().call_soon(callback)


class Outcome(_Told, Awaitable[Delivery]):
    """The outcome of one chunk; await it for its `Delivery`, or its error."""

    _outcome: Delivery | Stored | KeraError | None = None

    def exception(self) -> KeraError | None:
        """The chunk's error, if that is what became of it."""
        if self._outcome is None:
            raise _not_known()
        return self._outcome if isinstance(self._outcome, KeraError) else None

    def settle(self, outcome: Delivery | Stored | KeraError) -> None:
        """Tell it; what is told later does not count."""
        if self._outcome is None:
            self._tell(outcome)

    async def settled(self) -> None:
        """Wait until it is known, whatever it is."""
        with contextlib.suppress(KeraError):
            await self

    def result(self) -> Delivery:
        """The delivery, of an outcome that is known. Raises the chunk's error."""
        outcome = self._outcome
        if isinstance(outcome, KeraError):
            raise outcome.with_traceback(None)  # it is raised to many, and each would add to it
        if outcome is None:
            raise _not_known()
        if isinstance(outcome, Stored):
            self._outcome = outcome = outcome.delivery()
        return outcome

    def results(self) -> list[Delivery | StoredBundle]:
        """The same, as those of a bundle."""
        return [self.result()]

    def __await__(self) -> Generator[Any, None, Delivery]:
        yield from self.wait()
        return self.result()


class BundleOutcome(_Told):
    """The outcome of chunks that were sent together: all are stored, or each has an outcome of its own."""

    _outcome: StoredBundle | tuple[Outcome, ...] | None = None

    def settle(self, stored: StoredBundle) -> None:
        """All of them are stored."""
        self._tell(stored)

    def take_apart(self, outcomes: Sequence[Outcome]) -> None:
        """They have these outcomes from now on."""
        callbacks, self._callbacks = self._callbacks, None
        self._tell(tuple(outcomes))
        for callback in callbacks or ():
            self.when_done(callback)

    def _waiting(self) -> Outcome | None:
        each = self._outcome
        if each is None or isinstance(each, StoredBundle):
            return None
        return next((one for one in each if not one.done()), None)

    def when_done(self, callback: Callable[[], object]) -> None:
        """See `Outcome`; likewise what follows."""
        waiting = self._waiting()
        if waiting is None:
            super().when_done(callback)
        else:
            waiting.when_done(lambda: self.when_done(callback))

    def done(self) -> bool:
        """Whether all are known."""
        return self._outcome is not None and self._waiting() is None

    def wait(self) -> Generator[Any, None, None]:
        """Until all are known."""
        yield from super().wait()
        while (waiting := self._waiting()) is not None:
            yield from waiting.wait()

    async def settled(self) -> None:
        """Wait until all are known."""
        await _Waited(self)

    def exception(self) -> KeraError | None:
        """The first error."""
        each = self._outcome
        if each is None:
            raise _not_known()
        if isinstance(each, StoredBundle):
            return None
        return next((error for one in each if (error := one.exception()) is not None), None)

    def results(self) -> list[Delivery | StoredBundle]:
        """The results that deliveries are made from. Raises the first error."""
        each = self._outcome
        if each is None:
            raise _not_known()
        return [each] if isinstance(each, StoredBundle) else [one.result() for one in each]


class _Waited(Awaitable[None]):
    def __init__(self, outcome: BundleOutcome) -> None:
        self._outcome = outcome

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._outcome.wait()


def _not_known() -> asyncio.InvalidStateError:
    return asyncio.InvalidStateError("the outcome is not known yet")


class BatchDelivery(Awaitable[Sequence[Delivery]]):
    """The deliveries of the chunks that a batch became; await it for them, those of each streamlet in their order.

    Raises the error of the first one that has failed.
    """

    __slots__ = ("_outcomes",)

    def __init__(self, outcomes: Sequence[Outcome | BundleOutcome]) -> None:
        self._outcomes = outcomes

    def __await__(self) -> Generator[Any, None, Sequence[Delivery]]:
        for outcome in self._outcomes:
            yield from outcome.wait()
            outcome.results()  # raises
        return self.result()

    def done(self) -> bool:
        """Whether it is known what became of all chunks."""
        return all(outcome.done() for outcome in self._outcomes)

    def result(self) -> Sequence[Delivery]:
        """The result of awaiting it, without waiting. Raises the first error, or `asyncio.InvalidStateError`."""
        return Deliveries(part for outcome in self._outcomes for part in outcome.results())

    def exception(self) -> KeraError | None:
        """The first error, if there is one. Raises `asyncio.InvalidStateError`."""
        return next((error for outcome in self._outcomes if (error := outcome.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[BatchDelivery], object]) -> None:
        """Have the event loop call `callback` with this when it is known what became of all chunks."""

        def known() -> None:
            waiting = next((outcome for outcome in self._outcomes if not outcome.done()), None)
            if waiting is None:
                callback(self)
            else:
                waiting.when_done(known)

        if self._outcomes:
            self._outcomes[-1].when_done(known)
        else:
            asyncio.get_running_loop().call_soon(known)
