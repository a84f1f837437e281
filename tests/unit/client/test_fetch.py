"""Fetching from a real broker service without processes: positions and batches."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pytest
from pydantic import ByteSize

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.fetch import Fetched, NewerSchema, Wanted, batches_of
from kera.client.cluster.read_session import ReadSession
from kera.client.consuming.groups.lease import Cut, bytes_behind, cut_behind
from kera.client.settings import ConsumerSettings
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import CorruptChunk, DataLost, SchemaMismatch, UnknownStream
from kera.core.format.chunk import (
    ARROW_VERSION,
    HEADER_BYTES,
    LEAN_VERSION,
    Codec,
    encode_chunk,
    encode_payload,
    place_chunk,
)
from kera.core.format.payload import encode_lean
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.support import FakeCluster, description

ENTRY = EntryId(7, 0, 0)
EVERYTHING = 1 << 24
STREAM = description()
EACH = ConsumerSettings(joined_bytes_max=ByteSize(0))
"""Settings that do not join small chunks."""


@dataclass(eq=False)
class Item:
    """A range of a read session."""

    wanted: Wanted


async def fetch_all(cluster: FakeCluster, wanted: Sequence[Wanted]) -> list[Fetched]:
    session = ReadSession(cluster.loopback, items=map(Item, wanted))
    return [told.fetched for told in await session.read(bytes_max=EVERYTHING, wait_ms=0, timeout_s=10)]


async def fetch(
    cluster: FakeCluster, start: Position = EARLIEST, end: Position | None = None, *, bytes_max: int = EVERYTHING
) -> Fetched:
    session = ReadSession(cluster.loopback, items=[Item(Wanted(ENTRY, start, end))])
    told = await session.read(bytes_max=bytes_max, wait_ms=0, timeout_s=10)
    return told[0].fetched if told else Fetched(ENTRY, start, start, [], 0, None)


def chunks(fetched: Fetched) -> list[ChunkBatch]:
    return list(batches_of(fetched, STREAM, EACH))


def values(batches: Sequence[ChunkBatch]) -> list[bytes]:
    return [value for chunk in batches for value in chunk.batch["value"].to_pylist()]


@pytest.fixture
async def filled(cluster: FakeCluster, make_producer: MakeProducer) -> FakeCluster:
    """A stream of several segments and groups, with chunks of different sizes."""
    producer = make_producer(cluster, chunk_bytes_max=1024)
    for number in range(30):
        rows = pa.record_batch({"value": [b"%d-" % number + b"x" * (800 * number)]})
        await producer.send_batch("s", rows)
    await producer.flush()
    assert cluster.streams.get(7).streamlet(0).available_groups() > (1, 2)
    return cluster


async def test_fetching_from_the_place_of_a_chunk_begins_with_that_chunk(filled: FakeCluster) -> None:
    """Each chunk knows its place and the place of the next one."""
    reader = filled
    found = chunks(await fetch(reader))
    assert values(found) == filled.values()
    assert [chunk.start for chunk in found] == sorted({chunk.start for chunk in found})
    for chunk, following in zip(found, [*found[1:], None], strict=True):
        again = chunks(await fetch(reader, chunk.start, bytes_max=1))
        assert [(each.start, each.next, each.entry) for each in again] == [(chunk.start, chunk.next, ENTRY)]
        assert again[0].batch.equals(chunk.batch)
        assert (chunk.header.group_id, chunk.header.segment_id) == chunk.start[:2]
        rest = chunks(await fetch(reader, chunk.next))
        assert (rest[0].start if rest else None) == (following.start if following else None)


async def test_a_range_ends_exactly_at_its_end_position(filled: FakeCluster) -> None:
    reader = filled
    found = chunks(await fetch(reader))
    for first, last in ((0, 0), (0, 7), (3, 20), (11, 29)):
        part = await fetch(reader, found[first].start, found[last].next)
        assert values(chunks(part)) == values(found[first : last + 1])


async def test_an_answer_is_bounded_and_the_next_one_continues(filled: FakeCluster) -> None:
    reader, position, found = filled, EARLIEST, []
    while True:
        fetched = await fetch(reader, position, bytes_max=30_000)
        if not fetched.buffers:
            break
        assert sum(buffer.size for buffer in fetched.buffers) <= 30_000
        found += chunks(fetched)
        assert found[-1].next <= fetched.next
        position = fetched.next
    assert values(found) == filled.values()


async def test_several_ranges_share_an_answer(filled: FakeCluster) -> None:
    found = chunks(await fetch(filled))
    wanted = [Wanted(ENTRY, chunk.start, chunk.next) for chunk in found[::-7]]
    answers = await fetch_all(filled, wanted)
    assert [values(chunks(answer)) for answer in answers] == [values([chunk]) for chunk in found[::-7]]


async def test_an_error_of_one_range_leaves_the_others(filled: FakeCluster) -> None:
    wanted = [Wanted(EntryId(99, 0, 0), EARLIEST, None), Wanted(ENTRY, EARLIEST, None)]
    unknown, good = await fetch_all(filled, wanted)
    assert isinstance(unknown.error, UnknownStream)
    assert good.error is None
    assert values(chunks(good)) == filled.values()


async def test_the_error_for_a_lost_range_names_the_gap(filled: FakeCluster) -> None:
    filled.infos["s"].assignments[0].first_group_id = 1000
    filled.restart_broker()
    fetched = await fetch(filled, Position(2, 1, 0))
    assert isinstance(fetched.error, DataLost)
    assert fetched.error.attributes["lost_from"] == [2, 1, 0]
    assert fetched.error.attributes["available_from"] == [1000, 1, 0]


async def test_a_chunk_with_an_unknown_schema_is_refused(filled: FakeCluster) -> None:
    fetched = await fetch(filled)
    with pytest.raises(SchemaMismatch, match="does not have"):
        list(batches_of(fetched, replace(STREAM, schema_id=2), EACH))


async def test_the_error_for_a_newer_schema_carries_the_unopened_rest(filled: FakeCluster) -> None:
    fetched = await fetch(filled)
    known = list(batches_of(fetched, STREAM, EACH))
    older = replace(STREAM, schema_id=0)
    with pytest.raises(NewerSchema) as newer:
        list(batches_of(fetched, older, EACH))
    assert newer.value.schema_id == 1
    left = list(batches_of(newer.value.rest, STREAM, EACH))
    assert [chunk.start for chunk in left] == [chunk.start for chunk in known]


async def test_chunks_before_a_flipped_bit_are_read(cluster: FakeCluster, filled: FakeCluster) -> None:
    found = chunks(await fetch(filled))
    (segment,) = (segment for segment in cluster.segments() if segment.key == found[5].start[:2])
    segment.slot.view[found[5].start.offset + HEADER_BYTES + 100] ^= 1
    reading = batches_of(await fetch(filled), STREAM, EACH)
    assert values([next(reading) for _ in range(5)]) == values(found[:5])
    with pytest.raises(CorruptChunk):
        next(reading)


# --- chunks with wrong headers, or with unreadable data ---------------------------------------------------------------


def crafted(
    payload: bytes, records: int, first_record: int = 0, sequence: int = 0, version: int = ARROW_VERSION
) -> bytes:
    """A placed chunk with correct checksums, whatever its payload is."""
    encoded = encode_chunk(
        pa.py_buffer(payload),
        record_count=records,
        stream_id=ENTRY.stream_id,
        streamlet_id=0,
        schema_id=1,
        producer_id=1,
        producer_epoch=0,
        sequence=sequence,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
        version=version,
    )
    data = bytearray(encoded.to_bytes())
    place_chunk(data, 0, (1, 1, 0, first_record, 9, 0))
    return bytes(data)


def of_values(*found: bytes) -> bytes:
    rows = [{"timestamp": 1, "value": value} for value in found]
    return bytes(encode_payload(pa.RecordBatch.from_pylist(rows, DEFAULT_SCHEMA)))


def with_wild_offset(payload: bytes) -> bytes:
    """The second offset of the values points far beyond them."""
    at = payload.rindex(struct.pack("<3i", 0, 5, 10))
    return payload[: at + 4] + struct.pack("<i", 1 << 30) + payload[at + 8 :]


GOOD = of_values(b"first", b"other")
WRONG = {
    "more records": (GOOD, 3),
    "fewer records": (GOOD, 1),
    "wild offsets": (with_wild_offset(GOOD), 2),
    "no batch": (b"nothing of Arrow's" * 8, 2),
}


@pytest.mark.parametrize("which", WRONG)
def test_the_error_for_an_unreadable_chunk_names_its_place_and_how_to_skip_it(which: str) -> None:
    payload, records = WRONG[which]
    data = crafted(GOOD, 2) + crafted(payload, records, 2)
    fetched = Fetched(ENTRY, Position(1, 1, 0), Position(1, 1, len(data)), [pa.py_buffer(data)], 0, None)
    reading = batches_of(fetched, STREAM, EACH)
    good = next(reading)
    with pytest.raises(CorruptChunk, match='corrupt_chunks="skip"') as refused:
        next(reading)
    told = refused.value.attributes
    assert (told["stream"], told["streamlet_id"], told["entry"]) == ("s", 0, 0)
    assert told["position"] == list(good.next)
    assert told["reason"]


@pytest.mark.parametrize("which", WRONG)
def test_an_unreadable_chunk_counts_as_empty_with_corrupt_chunks_skip(which: str) -> None:
    payload, records = WRONG[which]
    data = crafted(payload, records) + crafted(GOOD, 2, records)
    fetched = Fetched(ENTRY, Position(1, 1, 0), Position(1, 1, len(data)), [pa.py_buffer(data)], 0, None)
    bad, good = batches_of(fetched, STREAM, EACH.model_copy(update={"corrupt_chunks": "skip"}))
    assert (bad.batch.num_rows, bad.header.record_count, bad.next) == (0, records, good.start)
    assert good.batch.column("value").to_pylist() == [b"first", b"other"]
    assert good.next == Position(1, 1, len(data))


def test_without_validation_only_the_number_of_records_is_checked() -> None:
    settings = ConsumerSettings(validate_chunks=False)
    for payload, records in ((with_wild_offset(GOOD), 2), (GOOD, 2)):
        fetched = Fetched(
            ENTRY, Position(1, 1, 0), Position(1, 1, 0), [pa.py_buffer(crafted(payload, records))], 0, None
        )
        assert [found.batch.num_rows for found in batches_of(fetched, STREAM, settings)] == [2]
    for payload, records in (WRONG["more records"], WRONG["fewer records"], WRONG["no batch"]):
        fetched = Fetched(
            ENTRY, Position(1, 1, 0), Position(1, 1, 0), [pa.py_buffer(crafted(payload, records))], 0, None
        )
        with pytest.raises(CorruptChunk):
            list(batches_of(fetched, STREAM, settings))


def test_a_chunk_with_a_damaged_header_cannot_be_skipped() -> None:
    data = bytearray(crafted(GOOD, 2) + crafted(GOOD, 2, 2))
    data[20] ^= 1
    fetched = Fetched(ENTRY, Position(1, 1, 0), Position(1, 1, len(data)), [pa.py_buffer(bytes(data))], 0, None)
    with pytest.raises(CorruptChunk):
        list(batches_of(fetched, STREAM, EACH.model_copy(update={"corrupt_chunks": "skip"})))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("missing", [64, 300])
def test_the_error_for_a_truncated_chunk_names_its_place(missing: int, verify: bool) -> None:
    whole = crafted(GOOD, 2)
    data = whole + crafted(GOOD, 2, 2)[:-missing] if missing < 200 else whole + whole[:100]
    fetched = Fetched(ENTRY, Position(1, 1, 0), Position(1, 1, len(data)), [pa.py_buffer(data)], 0, None)
    for corrupt_chunks in ("fail", "skip"):
        settings = EACH.model_copy(update={"corrupt_chunks": corrupt_chunks, "verify_checksums": verify})
        with pytest.raises(CorruptChunk, match="cut short") as refused:
            list(batches_of(fetched, STREAM, settings))
        assert refused.value.attributes["stream"] == "s"
        assert refused.value.attributes["position"] == [1, 1, len(whole)]


def test_a_chunk_too_large_when_decompressed_is_refused_beforehand() -> None:
    rows = [{"timestamp": 1, "value": bytes(1 << 20)}] * 8
    payload = encode_payload(pa.RecordBatch.from_pylist(rows, DEFAULT_SCHEMA), Codec.ZSTD).to_pybytes()
    assert len(payload) < 4096
    data = crafted(payload, 8)
    fetched = Fetched(ENTRY, Position(1, 1, 0), Position(1, 1, len(data)), [pa.py_buffer(data)], 0, None)
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptChunk, match="decompressed_bytes_max") as refused:
        list(batches_of(fetched, STREAM, ConsumerSettings(decompressed_bytes_max=ByteSize(4 << 20))))
    assert refused.value.attributes["limit"] == 4 << 20
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert len(list(batches_of(fetched, STREAM, EACH))) == 1


# --- small chunks, joined ---------------------------------------------------------------------------------------------


def lean_ones(counts: Sequence[int]) -> bytes:
    """Chunks with these numbers of records; the values are numbered."""
    data, record = b"", 0
    for sequence, count in enumerate(counts):
        rows = [{"timestamp": 1, "value": b"%d" % (record + each)} for each in range(count)]
        payload = encode_lean(pa.RecordBatch.from_pylist(rows, DEFAULT_SCHEMA), Codec.NONE)
        data += crafted(payload or b"", count, record, sequence, version=LEAN_VERSION)
        record += count
    return data


def fetched_of(data: bytes) -> Fetched:
    return Fetched(ENTRY, Position(1, 1, 0), Position(1, 1, len(data)), [pa.py_buffer(data)], 0, None)


def test_small_chunks_are_joined_and_keep_their_headers() -> None:
    fetched = fetched_of(lean_ones([1, 3, 2]))
    each = chunks(fetched)
    (all_of_them,) = batches_of(fetched, STREAM, ConsumerSettings())
    assert (all_of_them.start, all_of_them.next) == (each[0].start, fetched.next)
    assert values([all_of_them]) == values(each) == [b"%d" % number for number in range(6)]
    assert all_of_them.headers == [chunk.header for chunk in each]
    assert (all_of_them.chunks, each[0].chunks) == (3, 1)
    assert all_of_them.header.chunk_bytes == fetched.size_bytes
    assert list(all_of_them.ends()) == [end for chunk in each for end in chunk.ends()]
    assert not all_of_them.pushed


def test_the_rest_of_joined_chunks_looks_as_if_it_began_there() -> None:
    fetched = fetched_of(lean_ones([1, 3, 2, 5]))
    each = chunks(fetched)
    (all_of_them,) = batches_of(fetched, STREAM, ConsumerSettings())
    for number, chunk in enumerate(each):
        rest = all_of_them.rest(chunk.start)
        assert values([rest]) == values(each[number:])
        assert rest.headers == [left.header for left in each[number:]]
        assert (rest.start, rest.next) == (chunk.start, fetched.next)
        assert rest.header.first_record == chunk.header.first_record
        assert rest.header.chunk_bytes == sum(left.header.chunk_bytes for left in each[number:])
    assert each[1].rest(each[1].start) is each[1]


def test_joined_chunks_until_a_place_look_as_if_they_ended_there() -> None:
    fetched = fetched_of(lean_ones([1, 3, 2, 5]))
    each = chunks(fetched)
    (all_of_them,) = batches_of(fetched, STREAM, ConsumerSettings())
    for number, chunk in enumerate(each[1:], 1):
        first = all_of_them.until(chunk.start)
        assert first is not None
        assert values([first]) == values(each[:number])
        assert first.headers == [taken.header for taken in each[:number]]
        assert (first.start, first.next) == (fetched.start, chunk.start)
        assert first.header.record_count == sum(taken.header.record_count for taken in each[:number])
        assert first.header.chunk_bytes == sum(taken.header.chunk_bytes for taken in each[:number])
    assert all_of_them.until(fetched.start) is None
    assert all_of_them.until(fetched.next) is all_of_them


def test_a_fetched_range_is_cut_at_the_end_of_a_chunk() -> None:
    fetched = fetched_of(lean_ones([1, 3, 2, 5]))
    each = chunks(fetched)
    for number, chunk in enumerate(each[:-1]):
        behind = chunk.next.offset - each[0].start.offset
        cut = Cut(chunk.next, each[number + 1].header.first_record)
        assert cut_behind(fetched, fetched.start, behind) == cut
        assert cut_behind(fetched, fetched.start, behind - 1) == cut
        assert bytes_behind(fetched, chunk.next) == fetched.next.offset - chunk.next.offset
    assert cut_behind(fetched, each[2].start, 1) == Cut(each[3].start, each[3].header.first_record)
    assert cut_behind(fetched, fetched.start, fetched.size_bytes + 1) is None
    assert cut_behind(fetched_of(bytes(fetched.buffers[0])[:-64]), each[3].start, 1) is None, "it is not a whole chunk"


def test_a_damaged_chunk_splits_joined_chunks() -> None:
    data = bytearray(lean_ones([2, 2, 2, 2, 2]))
    at = chunks(fetched_of(bytes(data)))[2].start.offset + HEADER_BYTES + 20
    data[at] ^= 1
    settings = ConsumerSettings(corrupt_chunks="skip")
    first, bad, rest = batches_of(fetched_of(bytes(data)), STREAM, settings)
    assert values([first]) == [b"0", b"1", b"2", b"3"]
    assert (bad.batch.num_rows, bad.start, bad.next) == (0, first.next, rest.start)
    assert values([rest]) == [b"6", b"7", b"8", b"9"]


def test_joined_chunks_have_the_newest_columns() -> None:
    added = pa.schema([*DEFAULT_SCHEMA, pa.field("more", pa.int64())])
    newer = replace(STREAM, schema=added, schema_id=2, earlier_schemas={1: DEFAULT_SCHEMA})
    (found,) = batches_of(fetched_of(lean_ones([1, 2])), newer, ConsumerSettings())
    assert found.batch.schema == added
    assert found.batch["more"].to_pylist() == [None] * 3
