"""Delivery result of a chunk: set once, and shared by all waiters for its records.

It is not an `asyncio.Future`, for two reasons. A cancelled task cancels the future that it awaits, but all records of a
chunk share its outcome. And most outcomes are never awaited: such an outcome costs one small object, and no round of
the loop.
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
    """An outcome that is set once; it wakes its waiters and has its callbacks called.

    Has no __init__, because there is one for each chunk: unset attributes are in the class.
    """

    _outcome: Any = None
    _waiters: list[asyncio.Future[None]] | None = None
    _callbacks: list[Callable[[], object]] | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Have the event loop call `callback` once the outcome is known, also if it is known already."""
        if self._outcome is not None:
            asyncio.get_running_loop().call_soon(callback)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._outcome is not None

    def wait(self) -> Generator[Any, None, None]:
        """Wait, with ``yield from``, until the outcome is known. A cancelled waiter does not affect the others."""
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
    """The outcome of one chunk; await it for the `Delivery`. Awaiting raises the chunk's error."""

    _outcome: Delivery | Stored | KeraError | None = None

    def exception(self) -> KeraError | None:
        """Return the chunk's error if it has failed. Raises `asyncio.InvalidStateError` if that is not known yet."""
        if self._outcome is None:
            raise _not_known()
        return self._outcome if isinstance(self._outcome, KeraError) else None

    def settle(self, outcome: Delivery | Stored | KeraError) -> None:
        """Set the outcome; later calls have no effect."""
        if self._outcome is None:
            self._tell(outcome)

    async def settled(self) -> None:
        """Wait until the outcome is known; raises no error of the chunk."""
        with contextlib.suppress(KeraError):
            await self

    def result(self) -> Delivery:
        """Return the delivery. Raises the chunk's error, or `asyncio.InvalidStateError` if that is not known yet."""
        outcome = self._outcome
        if isinstance(outcome, KeraError):
            raise outcome.with_traceback(None)  # it is raised several times, and the traceback would grow each time
        if outcome is None:
            raise _not_known()
        if isinstance(outcome, Stored):
            self._outcome = outcome = outcome.delivery()
        return outcome

    def results(self) -> list[Delivery | StoredBundle]:
        """Return the delivery in a list, like `BundleOutcome.results`."""
        return [self.result()]

    def __await__(self) -> Generator[Any, None, Delivery]:
        yield from self.wait()
        return self.result()


class BundleOutcome(_Told):
    """The outcome of a bundle: all its chunks are stored, or each has its own outcome."""

    _outcome: StoredBundle | tuple[Outcome, ...] | None = None

    def settle(self, stored: StoredBundle) -> None:
        """Note that all chunks are stored."""
        self._tell(stored)

    def take_apart(self, outcomes: Sequence[Outcome]) -> None:
        """Give each chunk its own outcome; callbacks and waiters now depend on these."""
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
        """Return whether all chunks are stored or have failed."""
        return self._outcome is not None and self._waiting() is None

    def wait(self) -> Generator[Any, None, None]:
        """Wait, with ``yield from``, until all chunks are stored or have failed."""
        yield from super().wait()
        while (waiting := self._waiting()) is not None:
            yield from waiting.wait()

    async def settled(self) -> None:
        """Wait until all chunks are stored or have failed; raises no error of theirs."""
        await _Waited(self)

    def exception(self) -> KeraError | None:
        """Return the first error, if there is one. Raises `asyncio.InvalidStateError`."""
        each = self._outcome
        if each is None:
            raise _not_known()
        if isinstance(each, StoredBundle):
            return None
        return next((error for one in each if (error := one.exception()) is not None), None)

    def results(self) -> list[Delivery | StoredBundle]:
        """Return the results that deliveries are made from. Raises the first error, or `asyncio.InvalidStateError`."""
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
    """The deliveries of the chunks of a batch; await it for them, those of each streamlet in order.

    Awaiting raises the error of the first chunk that has failed.
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
        """Return whether all chunks are delivered or have failed."""
        return all(outcome.done() for outcome in self._outcomes)

    def result(self) -> Sequence[Delivery]:
        """Return the deliveries without waiting. Raises the first error, or `asyncio.InvalidStateError`."""
        return Deliveries(part for outcome in self._outcomes for part in outcome.results())

    def exception(self) -> KeraError | None:
        """Return the first error, if there is one. Raises `asyncio.InvalidStateError`."""
        return next((error for outcome in self._outcomes if (error := outcome.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[BatchDelivery], object]) -> None:
        """Have the event loop call `callback` with this object when all chunks are delivered or have failed."""

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
