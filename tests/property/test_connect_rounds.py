"""Copies into a stream against a model of it, killed and paused anywhere, any number of them at once.

The promise: once a copy has reached the end, the stream has each record of the source once, and the records of a part
in their order; also if copies were killed, paused and woke up again, or lost answers on the way. A copy that finds
another one faster ends with `CopyElsewhere`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kera.client import AppendResult
from kera.connect.errors import CopyElsewhere
from kera.connect.pieces import Piece
from kera.connect.planning.rounds import Round
from kera.connect.streams.sink import RoundWriter
from kera.core.base.ids import EntryId
from kera.core.errors import OutOfSequence

STREAMLETS = 3
PARTS = 2
ROWS = 12
"""The rows of each part."""


class Killed(Exception):
    """The process is gone."""


@dataclass
class Gate:
    """Lets a process wait for its turn, before and after each call."""

    waiting: asyncio.Future[None] | None = None
    dead: bool = False

    async def turn(self) -> None:
        if self.dead:
            raise Killed
        while self.waiting is not None:  # another call of this process
            await asyncio.sleep(0)
        self.waiting = asyncio.get_running_loop().create_future()
        try:
            await self.waiting
        finally:
            self.waiting = None
        if self.dead:
            raise Killed


@dataclass
class Store:
    """The stream and the journal, as brokers keep them."""

    chunks: dict[int, list[list[int]]] = field(default_factory=lambda: {each: [] for each in range(STREAMLETS)})
    journal: list[bytes] = field(default_factory=list)


class Chunks:
    """An appender's interface to the store: rows are numbers, and their last digit is the key."""

    def __init__(self, store: Store, gate: Gate) -> None:
        self._store = store
        self._gate = gate
        self.stream: Any = SimpleNamespace(name="s", stream_id=7, config=SimpleNamespace(streamlets=STREAMLETS))
        self.chunk_bytes_max = 64  # four rows a slice

    def at_epoch(self, producer_epoch: int) -> Chunks:  # noqa: ARG002 - the store knows one writer
        return self

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def split(self, rows: pa.RecordBatch, keyless: int) -> list[tuple[int, pa.RecordBatch]]:
        numbers = rows.column("n").to_pylist()
        wanted = [keyless if number % 4 == 3 else number % STREAMLETS for number in numbers]
        found = [(each, [n for n, place in zip(numbers, wanted, strict=True) if place == each]) for each in range(3)]
        return [(each, batch(some)) for each, some in found if some]

    async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
        await self._gate.turn()
        chunks = self._store.chunks[streamlet_id]
        if sequence > len(chunks):
            raise OutOfSequence("gap", expected_sequence=len(chunks))
        duplicate = sequence < len(chunks)
        if not duplicate:
            chunks.append(rows.column("n").to_pylist())
        await self._gate.turn()  # a process killed here never gets the answer
        return AppendResult(rows.num_rows, duplicate, EntryId(7, streamlet_id, 0), None)


class Journal:
    """The journal's interface to the store."""

    def __init__(self, store: Store, gate: Gate) -> None:
        self._store = store
        self._gate = gate

    async def last(self) -> Round | None:
        await self._gate.turn()
        return Round.decode(self._store.journal[-1]) if self._store.journal else None

    async def add(self, added: Round) -> None:
        await self._gate.turn()
        if added.number != len(self._store.journal):
            raise CopyElsewhere("taken")
        self._store.journal.append(added.encode())
        await self._gate.turn()


def batch(numbers: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


def rows_of(part: str, start: int | None, end: int) -> pa.RecordBatch:
    return batch([int(part) * 100 + at for at in range(start or 0, end)])


async def run_copy(store: Store, gate: Gate, name: str, sizes: Sequence[int], *, by_number: bool) -> None:
    """Copy as `kera.connect.copying` does, with a source that gives pieces of these sizes."""
    writer = RoundWriter(Chunks(store, gate), Journal(store, gate), run=name, source="numbers", by_number=by_number)
    begun = await writer.begin()
    if begun.unsure:
        again = [rows_of(span.part, span.start, span.end) for span in begun.unsure]
        await writer.settle(again, may_shrink=False)
    places = dict(begun.places)
    turn = 0
    while any(places.get(str(part), 0) < ROWS for part in range(PARTS)):
        pieces = []
        for _ in range(2):
            part, size = str(turn % PARTS), sizes[turn % len(sizes)]
            turn += 1
            start = places.get(part)
            end = min(ROWS, (start or 0) + size)
            if end > (start or 0):
                pieces.append(Piece(part, start, end, rows_of(part, start, end), int(part)))
                places[part] = end
        if pieces:
            await writer.put(pieces)
    await writer.finish()


async def play(moves: Sequence[int], sizes: Sequence[int], *, by_number: bool) -> Store:
    """Processes take turns by `moves`: one goes on, one is killed, or one more is started."""
    store = Store()
    processes: list[tuple[Gate, asyncio.Future[None]]] = []

    def start() -> None:
        gate = Gate()
        name = str(len(processes))
        rotated = [*sizes[len(processes) % len(sizes) :], *sizes[: len(processes) % len(sizes)]]
        processes.append((gate, asyncio.ensure_future(run_copy(store, gate, name, rotated, by_number=by_number))))

    async def settle() -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    start()
    for move in moves:
        await settle()
        waiting = [gate for gate, _ in processes if gate.waiting is not None and not gate.waiting.done()]
        if not waiting or (move % 11 == 0 and len(processes) < 4):
            start()
            continue
        chosen = waiting[move % len(waiting)]
        chosen.dead = chosen.dead or move % 7 == 0
        assert chosen.waiting is not None
        chosen.waiting.set_result(None)
    await _run_out(store, processes, sizes, by_number=by_number)
    return store


async def _run_out(store: Store, processes: list[Any], sizes: Sequence[int], *, by_number: bool) -> None:
    """One more process, alone, reaches the end; then the paused ones wake up."""
    gate = Gate()
    last = asyncio.ensure_future(run_copy(store, gate, "last", sizes, by_number=by_number))
    while not last.done():
        await asyncio.sleep(0)
        if gate.waiting is not None and not gate.waiting.done():
            gate.waiting.set_result(None)
    await last
    while not all(task.done() for _, task in processes):
        await asyncio.sleep(0)
        for other, _ in processes:
            if other.waiting is not None and not other.waiting.done():
                other.waiting.set_result(None)
    for _, task in processes:
        error = task.exception()
        assert error is None or isinstance(error, (Killed, CopyElsewhere)), error


@given(st.lists(st.integers(0, 1000), max_size=120), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_each_record_is_copied_once_despite_killed_and_paused_processes(
    moves: list[int], sizes: list[int], by_number: bool
) -> None:
    store = asyncio.run(play(moves, sizes, by_number=by_number))

    stored = {each: [number for chunk in chunks for number in chunk] for each, chunks in store.chunks.items()}
    everything = sorted(number for numbers in stored.values() for number in numbers)
    assert everything == sorted(part * 100 + at for part in range(PARTS) for at in range(ROWS))
    for streamlet, numbers in stored.items():
        for part in range(PARTS):
            own = [number for number in numbers if number // 100 == part]
            assert own == sorted(own)
            assert not by_number or not own or streamlet == part
    last = Round.decode(store.journal[-1])
    assert last.records == PARTS * ROWS
    assert [Round.decode(each).number for each in store.journal] == list(range(len(store.journal)))
