"""`kera.connect.streams`: copies into a stream that resume, and sources or streams that have changed meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from kera.client import PRODUCER_IDS, AppendResult
from kera.connect.errors import CopyElsewhere, CopyMismatch, SourceChanged
from kera.connect.pieces import Piece
from kera.connect.planning.rounds import Round
from kera.connect.records import is_default
from kera.connect.streams.journal import producer_id
from kera.connect.streams.sink import RoundWriter
from kera.connect.streams.source import StreamSource
from kera.core.base.ids import EntryId, Position
from kera.core.errors import InternalError, OutOfSequence, ProducerFenced
from kera.core.format.schema import DEFAULT_SCHEMA


class Chunks:
    """A streamlet that stores chunks, and may lose or cut them."""

    def __init__(self) -> None:
        self.stream: Any = SimpleNamespace(name="s", stream_id=7, config=SimpleNamespace(streamlets=1))
        self.chunk_bytes_max = 1 << 20
        self.stored: list[list[Any]] = []
        self.before: list[list[Any]] = []
        """Chunks of earlier epochs."""
        self.epoch = 1
        self.takes_rows: int | None = None

    def at_epoch(self, producer_epoch: int) -> Chunks:
        if producer_epoch > self.epoch:
            self.before, self.stored, self.epoch = [*self.before, *self.stored], [], producer_epoch
        return self

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def split(self, rows: pa.RecordBatch, keyless: int) -> list[tuple[int, pa.RecordBatch]]:
        return [(keyless, rows)]

    async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
        if sequence > len(self.stored):
            raise OutOfSequence("gap", expected_sequence=len(self.stored))
        duplicate = sequence < len(self.stored)
        if not duplicate:
            self.stored.append(rows.column("value").to_pylist())
        return AppendResult(self.takes_rows or rows.num_rows, duplicate, EntryId(7, streamlet_id, 0), None)


class Journal:
    """A journal in memory."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    async def last(self) -> Round | None:
        return self.rounds[-1] if self.rounds else None

    async def add(self, added: Round) -> None:
        self.rounds.append(added)


def rows(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary())})


def writer(chunks: Chunks, journal: Journal, source: str = "topic t", partitioner: str = "crc32c") -> RoundWriter:
    return RoundWriter(chunks, journal, run="me", source=source, by_number=True, partitioner=partitioner)


async def begun(chunks: Chunks, journal: Journal) -> RoundWriter:
    made = writer(chunks, journal)
    await made.begin()
    await made.put([Piece("0", 0, 2, rows(b"a", b"b"), 0)])
    return made


async def test_a_finished_copy_has_no_unsure_pieces() -> None:
    chunks, journal = Chunks(), Journal()
    made = await begun(chunks, journal)
    assert (await writer(chunks, journal).begin()).unsure
    await made.finish()
    await made.finish()

    progress = await writer(chunks, journal).begin()

    assert progress.unsure == []
    assert (progress.places, progress.records) == ({"0": 2}, 2)
    assert [each.number for each in journal.rounds] == [0, 1, 2]


@pytest.mark.parametrize(
    ("start", "offsets", "starts"), [(4, [4, 5, 6], ()), (4, [4, 5, 8], (4, 5, 8)), (3, [4, 5, 6], (4, 5, 6))]
)
async def test_the_journal_has_the_start_offset_of_each_chunk(
    start: int, offsets: list[int], starts: tuple[int, ...]
) -> None:
    """Offsets without gaps need no starts."""
    chunks, journal = Chunks(), Journal()
    chunks.chunk_bytes_max = 2  # a row for each chunk
    made = writer(chunks, journal)
    await made.begin()

    await made.put([Piece("0", start, offsets[-1] + 1, rows(b"a", b"b", b"c"), 0, row_places=offsets)])

    ((written,),) = (each.pieces for each in journal.rounds if each.pieces)
    assert written.starts == starts
    assert written.chunks[0].number == 3


async def test_another_source_or_a_recreated_stream_is_refused() -> None:
    chunks, journal = Chunks(), Journal()
    await begun(chunks, journal)

    with pytest.raises(CopyMismatch, match="from topic t, not from topic u"):
        await writer(chunks, journal, "topic u").begin()
    chunks.stream.stream_id = 8
    with pytest.raises(CopyMismatch, match="deleted and created again"):
        await writer(chunks, journal).begin()


async def test_a_copy_cannot_change_its_partitioner() -> None:
    chunks, journal = Chunks(), Journal()
    await writer(chunks, journal, partitioner="murmur2_random").begin()
    await writer(chunks, journal, partitioner="murmur2_random").begin()

    with pytest.raises(CopyMismatch, match="places keys by murmur2_random, not by crc32c: go on with --partitioner m"):
        await writer(chunks, journal).begin()


async def test_a_stream_that_has_lost_chunks_ends_the_copy() -> None:
    chunks, journal = Chunks(), Journal()
    made = await begun(chunks, journal)
    chunks.stored.clear()

    with pytest.raises(CopyMismatch, match="has only 0 chunks of this copy, and has acknowledged 1"):
        await made.put([Piece("0", 2, 3, rows(b"c"), 0)])
    await made.finish()
    assert journal.rounds[-1].pieces, "what is not stored is not called so"


@pytest.mark.parametrize("found", [rows(b"a"), rows(b"a", b"b", b"c"), rows()])
async def test_changed_rows_are_not_written_again(found: pa.RecordBatch) -> None:
    chunks, journal = Chunks(), Journal()
    await begun(chunks, journal)
    again = writer(chunks, journal)
    await again.begin()

    with pytest.raises(SourceChanged, match="it had 2 records"):
        await again.settle([found], may_shrink=False)


async def test_a_round_with_changed_rows_is_copied_again_from_its_start() -> None:
    chunks, journal = Chunks(), Journal()
    made = await begun(chunks, journal)
    await made.put([Piece("0", 2, 4, rows(b"c", b"d"), 0, "c,d"), Piece("0", 4, 5, rows(b"e"), 0)])
    again = writer(chunks, journal)
    assert [span.digest for span in (await again.begin()).unsure] == ["c,d", ""]

    progress = await again.settle([rows(b"c", b"d"), None], may_shrink=False)

    assert (progress.places, progress.records, list(progress.unsure)) == ({"0": 2}, 2, [])
    begins = await again.put([Piece("0", 2, 5, rows(b"c", b"d", b"f"), 0)])
    assert begins == {"0": 2}
    assert chunks.before + chunks.stored == [[b"a", b"b"], [b"c", b"d"], [b"e"], [b"c", b"d", b"f"]]
    assert (journal.rounds[-1].epoch, journal.rounds[-1].records) == (2, 5)
    after = writer(chunks, journal)
    await after.begin()
    await after.settle([rows(b"c", b"d", b"f")], may_shrink=False)
    assert chunks.stored == [[b"c", b"d", b"f"]], "what is appended again has the epoch that it had"


async def test_a_fenced_writer_reports_that_the_copy_runs_elsewhere() -> None:
    class Fenced(Chunks):
        async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
            raise ProducerFenced("fenced by 2", streamlet_id=streamlet_id, rows=rows.num_rows, sequence=sequence)

    with pytest.raises(CopyElsewhere):
        await begun(Fenced(), Journal())


async def test_rows_for_everywhere_go_to_each_streamlet_also_in_retries() -> None:
    class Two(Chunks):
        def __init__(self) -> None:
            super().__init__()
            self.stream.config.streamlets = 2
            self.appended: list[tuple[int, int]] = []

        async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
            self.appended.append((streamlet_id, sequence))
            return AppendResult(rows.num_rows, False, EntryId(7, streamlet_id, 0), None)

    chunks, journal = Two(), Journal()
    made = writer(chunks, journal)
    await made.begin()
    await made.put([Piece("0", 0, 1, rows(b"all"), everywhere=True)])
    again = writer(chunks, journal)
    await again.begin()

    await again.settle([rows(b"all")], may_shrink=False)

    assert chunks.appended == [(0, 0), (1, 0)] * 2


async def test_rows_missing_in_a_shrinking_source_must_already_be_stored() -> None:
    chunks, journal = Chunks(), Journal()
    await begun(chunks, journal)
    again = writer(chunks, journal)
    await again.begin()

    await again.settle([rows()], may_shrink=True)
    await again.settle([rows(b"b")], may_shrink=True)
    assert chunks.stored == [[b"a", b"b"]]
    chunks.stored.clear()
    with pytest.raises(SourceChanged):
        await again.settle([rows()], may_shrink=True)


class Lossy:
    """The client of a stream whose records 2 to 4 are lost."""

    async def bounds(self, _: str) -> dict[int, list[Any]]:
        return {0: [SimpleNamespace(start=(0, 0, 0), first_record=0, starts_behind_loss=False, lost=None)]}

    def consumer(self, *_: object, **__: object) -> Any:
        return self

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def batches(self) -> AsyncIterator[Any]:
        entry = EntryId(7, 0, 0)
        for start, behind, first, batch in (
            ((0, 0, 0), (0, 0, 9), 0, rows(b"a", b"b")),
            ((0, 1, 0), (0, 1, 9), 5, rows(b"f")),
        ):
            header = SimpleNamespace(first_record=first)
            yield SimpleNamespace(
                batch=batch, header=header, start=Position(*start), next=Position(*behind), entry=entry
            )


async def test_a_copy_skips_records_that_its_source_has_lost() -> None:
    source = StreamSource(Lossy(), "s", follow=False, skip_lost=True)  # type: ignore[arg-type]
    chunks, journal = Chunks(), Journal()
    made = writer(chunks, journal)
    await made.begin()

    async for piece in source.read({}, 1):
        await made.put([piece])

    assert chunks.stored == [[b"a", b"b"], [b"f"]]
    assert journal.rounds[-1].places == {"0/0": [0, 1, 9, 6]}
    spans = [span for each in journal.rounds for span in each.spans]
    assert [(span.start, span.end) for span in spans if not span.rows] == [([0, 0, 9, 2], [0, 1, 0, 5])]
    (lost,) = await source.again([span for span in spans if not span.rows])
    assert lost is not None, "they are not read again, because they are gone"
    assert lost.num_rows == 0


async def test_a_slice_that_does_not_fit_into_a_chunk_is_an_internal_error() -> None:
    chunks, journal = Chunks(), Journal()
    chunks.takes_rows = 1

    with pytest.raises(InternalError, match="a slice fits into a chunk"):
        await begun(chunks, journal)


def test_each_copy_and_each_recreated_journal_has_its_own_producer_id() -> None:
    assert producer_id("a", 1) in PRODUCER_IDS
    assert len({producer_id("a", 1), producer_id("a", 2), producer_id("b", 1)}) == 3


def test_a_subset_of_the_default_columns_counts_as_the_default_schema() -> None:
    assert is_default(DEFAULT_SCHEMA)
    assert is_default(pa.schema([("value", pa.binary())]))
    assert not is_default(pa.schema([("value", pa.string())]))
    assert not is_default(pa.schema([("value", pa.binary()), ("x", pa.int64())]))
