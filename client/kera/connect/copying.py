"""Runs a copy: reads ahead, within bounds, while the target writes, and stops only when the target's state is complete.

`copy` is one attempt, which ends with the first error. `outliving` makes attempts until one succeeds: because the
target stores the place of the copy, each attempt continues where the previous one was, as another process would.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from kera.connect.pieces import Piece, Progress, Sink, Source
from kera.connect.planning.outages import STABLE_S, Outages, Resumed
from kera.connect.planning.rates import Rates

T = TypeVar("T")

AHEAD_BYTES_MAX = 32 << 20
"""Maximum size of rows that were read and wait to be written; reading pauses while there are more."""
TOGETHER_BYTES_MAX = 16 << 20
TOGETHER_MAX = 256
"""Maximum number of pieces that are written together."""
STOP_S = 30.0
"""Maximum time for a write that is under way when the copy is cancelled."""


class Copied(NamedTuple):
    """The result of a copy."""

    begun: Progress
    """The progress of the copy when this run began."""
    rates: Rates


class Ahead:
    """The queue of pieces between the reader and the writer."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._changed = asyncio.Condition()
        self._ended = False

    async def fill(self, pieces: AsyncGenerator[Piece, None]) -> None:
        """Queue all `pieces`, and wait while the queue is full; close `pieces` in the end."""
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    async with self._changed:
                        await self._changed.wait_for(lambda: self._bytes < AHEAD_BYTES_MAX)
                        self._pieces.append(piece)
                        self._bytes += piece.rows.nbytes
                        self._changed.notify_all()
        finally:
            async with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def take(self) -> list[Piece]:
        """Wait for pieces, and take as many as are written together; none when all have been taken."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pieces or self._ended)
            count = size = 0
            for piece in self._pieces:
                if count and (size + piece.rows.nbytes > TOGETHER_BYTES_MAX or count >= TOGETHER_MAX):
                    break
                count, size = count + 1, size + piece.rows.nbytes
            taken, self._pieces = self._pieces[:count], self._pieces[count:]
            self._bytes -= size
            self._changed.notify_all()
            return taken


async def copy(
    source: Source,
    sink: Sink,
    tell: Callable[[Rates], None],
    began: Callable[[Progress], None],
    rates: Rates | None = None,
) -> Copied:
    """Copy all pieces of `source`; return when the source has ended, and all is written.

    `tell` is called after each write, `began` once the progress of the copy is known. A cancelled copy first finishes
    the write that is under way. `source` and `sink` are closed. `rates`: the rates of an earlier attempt, to continue.
    """
    try:
        await source.open()
        begun = await sink.open(source)
        if begun.unsure:
            begun = await sink.settle(await source.again(begun.unsure))
        left = await source.left(begun.places)
        rates = rates or Rates(time.monotonic(), left)
        rates.expect(left)
        began(begun)
        await _copy_from(source, sink, begun, lambda pieces: _add(rates, pieces, tell))
        return Copied(begun, rates)
    finally:
        try:
            await sink.close()
        finally:
            await source.close()


async def outliving(
    attempt: Callable[[Callable[[], None], Callable[[], None]], Awaitable[T]],
    failing: Callable[[Exception], None],
    resumed: Callable[[Resumed], None],
) -> T:
    """Call `attempt`, which copies, again after each temporary error, and return its result; see `planning.outages`.

    `attempt` gets two functions: it calls the first once the copy has begun, and the second after each write. `failing`
    is called when an outage begins, and for each new kind of error, `resumed` when the outage is over.
    """
    outages = Outages()
    loop = asyncio.get_running_loop()
    stable: asyncio.TimerHandle | None = None

    def wrote() -> None:
        if (outage := outages.succeeded(time.monotonic())) is not None:
            resumed(outage)

    def began() -> None:
        nonlocal stable
        outages.began()
        stable = loop.call_later(STABLE_S, wrote)

    while True:
        try:
            return await attempt(began, wrote)
        except Exception as error:
            failed = outages.failed(error, time.monotonic())
            if failed is None:
                raise
            if failed.report:
                failing(error)
        finally:
            if stable is not None:
                stable.cancel()
        await asyncio.sleep(failed.pause_s)


def _add(rates: Rates, pieces: Sequence[Piece], tell: Callable[[Rates], None]) -> None:
    rows, size = sum(piece.rows.num_rows for piece in pieces), sum(piece.rows.nbytes for piece in pieces)
    rates.add(rows, size, time.monotonic())
    tell(rates)


async def _copy_from(source: Source, sink: Sink, begun: Progress, done: Callable[[Sequence[Piece]], None]) -> None:
    ahead = Ahead()
    reading = asyncio.create_task(ahead.fill(source.read(begun.places, sink.piece_bytes)))
    try:
        while pieces := await ahead.take():
            await source.kept(await _to_the_end(sink.put(pieces)))
            done(pieces)
        await reading  # raises its error, if any
    except asyncio.CancelledError:
        await source.kept(await _to_the_end(sink.finish(complete=False)))
        raise
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await source.kept(await _to_the_end(sink.finish(complete=True)))


async def _to_the_end(writing: Coroutine[Any, Any, T]) -> T:
    """Wait for a write; when cancelled, wait up to `STOP_S` for its end before stopping."""
    task = asyncio.ensure_future(writing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task], timeout=STOP_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
