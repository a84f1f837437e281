"""`kera.connect.copying`: bounded reading ahead, stops that leave a whole target, errors of source and target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from kera.connect import copying
from kera.connect.copying import copy
from kera.connect.pieces import Piece, Place, Progress, Source, Span
from kera.connect.worker import Worker

ROW = pa.record_batch({"n": pa.array([1], pa.int64())})


class Numbers:
    """A source of pieces with a row each."""

    schema = ROW.schema
    may_shrink = False
    shown = identity = "numbers"
    streamlets = 0

    def __init__(self, count: int, *, fails_at: int | None = None, for_ever: bool = False) -> None:
        self.notes: list[str] = []
        self.given = 0
        self.let_go: list[int] = []
        self.closed = False
        self._count = count
        self._fails_at = fails_at
        self._for_ever = for_ever

    async def open(self) -> None: ...

    async def left(self, places: Mapping[str, Place]) -> int | None:
        return self._count - int(places.get("", 0))

    async def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        del piece_bytes
        for number in range(places.get("", 0), self._count):
            if number == self._fails_at:
                raise ValueError("unreadable")
            self.given += 1
            yield Piece("", number, number + 1, ROW)
        if self._for_ever:
            await asyncio.Event().wait()

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        return [ROW for _ in spans]

    async def kept(self, places: Mapping[str, Place]) -> None:
        self.let_go.append(places.get("", 0))

    async def close(self) -> None:
        self.closed = True


class Kept:
    """A target that keeps the pieces that it gets, once `may` is set."""

    shown = "kept"
    piece_bytes = 1

    def __init__(self, begun: Progress | None = None) -> None:
        self.notes: list[str] = []
        self.numbers: list[int] = []
        self.settled = 0
        self.may = asyncio.Event()
        self.may.set()
        self.puts = 0
        self.finished: bool | None = None
        self.closed = False
        self._begun = begun or Progress({})

    async def open(self, source: Source) -> Progress:
        del source
        return self._begun

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        self.settled = len(rows)
        return self._begun

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        self.puts += 1
        await self.may.wait()
        begins = {"": pieces[0].start}
        self.numbers += [piece.start for piece in pieces]
        return begins

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        self.finished = complete
        return {"": self.numbers[-1] + 1} if self.numbers else {}

    async def close(self) -> None:
        self.closed = True


def quiet(_: Any) -> None:
    pass


async def test_a_copy_goes_on_from_the_progress_of_the_target_in_order() -> None:
    source, sink = Numbers(1000), Kept(Progress({"": 10}, 10, [Span("", 8, 9, 1), Span("", 9, 10, 1)]))
    told: list[int] = []

    copied = await copy(source, sink, lambda rates: told.append(rates.standing(1e9).records), quiet)

    assert sink.numbers == list(range(10, 1000))
    assert sink.settled == 2
    assert (sink.finished, sink.closed, source.closed) == (True, True, True)
    assert told[-1] == 990
    assert source.let_go == sorted(source.let_go)
    assert source.let_go[-1] == 1000
    assert copied.rates.standing(1e9).left == 0


async def test_the_reader_waits_for_a_slow_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "AHEAD_BYTES_MAX", 10 * ROW.nbytes)
    monkeypatch.setattr(copying, "TOGETHER_MAX", 4)
    source, sink = Numbers(1000), Kept()
    sink.may.clear()

    task = asyncio.ensure_future(copy(source, sink, quiet, quiet))
    while not sink.puts:
        await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)

    assert source.given <= 16
    sink.may.set()
    await task
    assert sink.numbers == list(range(1000))


async def test_a_stopped_copy_finishes_its_pending_write() -> None:
    source, sink = Numbers(10, for_ever=True), Kept()
    sink.may.clear()
    task = asyncio.ensure_future(copy(source, sink, quiet, quiet))
    while not sink.puts:
        await asyncio.sleep(0)

    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    sink.may.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sink.numbers
    assert (sink.finished, sink.closed, source.closed) == (False, True, True)


async def test_a_stopped_copy_gives_up_a_write_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "STOP_S", 0.01)
    source, sink = Numbers(10), Kept()
    sink.may.clear()
    task = asyncio.ensure_future(copy(source, sink, quiet, quiet))
    while not sink.puts:
        await asyncio.sleep(0)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sink.closed
    assert sink.numbers == []


async def test_rows_before_an_error_of_the_source_are_written() -> None:
    source, sink = Numbers(10, fails_at=5), Kept()

    with pytest.raises(ValueError, match="unreadable"):
        await copy(source, sink, quiet, quiet)

    assert sink.numbers == list(range(5))
    assert sink.finished is None
    assert sink.closed
    assert source.closed


async def test_a_worker_yields_items_in_order_and_a_cancelled_call_waits_for_its_end() -> None:
    worker = Worker("test")
    assert [each async for each in worker.each(each for each in (1, None, 2))] == [1, 2]
    began, may = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(may.wait(), loop).result()

    task = asyncio.ensure_future(worker.call(work))
    await began.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    worker.close()
