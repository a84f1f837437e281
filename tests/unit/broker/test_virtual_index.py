"""Virtual segments in the index: they are read as they were written, and belong to their stream."""

from hypothesis import given
from hypothesis import strategies as st

from kera.broker.records import SegmentAddress
from kera.broker.replication.virtual_index import delete_virtual_segment, put_virtual_segment, virtual_segments
from kera.broker.replication.virtual_segment import VirtualSegment
from kera.broker.storage.index_format import stream_of
from tests.unit.broker.replication_support import Replicated, extents_of
from tests.unit.broker.support import STREAM_ID, Engine

U32 = st.integers(0, (1 << 32) - 1)


def fields(place: VirtualSegment) -> tuple[object, ...]:
    return (
        place.virtual_segment_id,
        place.stream_id,
        place.log_id,
        place.head,
        place.checksum,
        place.wanted,
        place.backups,
        extents_of(place),
    )


def closed(engine: Engine, chunks: int = 3) -> tuple[Replicated, VirtualSegment]:
    world = Replicated(engine)
    world.append(world.open(), chunks)
    world.finish()
    world.close_all()
    return world, min(world.replication.coverage.segments.values(), key=lambda each: each.virtual_segment_id)


def test_a_virtual_segment_is_read_as_it_was_written(engine: Engine) -> None:
    world, place = closed(engine, 6)

    assert fields(next(virtual_segments(world.engine.index))) == fields(place)
    assert {each.address for each in extents_of(place)} <= {
        SegmentAddress(STREAM_ID, 0, 0, 1, 1),
        SegmentAddress(STREAM_ID, 0, 0, 1, 2),
    }


def test_a_deleted_virtual_segment_is_not_found(engine: Engine) -> None:
    world, place = closed(engine)
    world.engine.index.commit([delete_virtual_segment(place)])

    assert list(virtual_segments(world.engine.index)) == []


def test_records_belong_to_their_stream(engine: Engine) -> None:
    world, place = closed(engine)
    key, _ = put_virtual_segment(place)

    assert stream_of(key) == STREAM_ID
    assert key in world.engine.index.keys_of_stream(STREAM_ID)


@given(
    virtual_segment_id=st.integers(0, (1 << 64) - 1),
    stream_id=st.integers(0, (1 << 64) - 1),
    numbers=st.tuples(U32, U32, U32),
    backups=st.lists(U32, max_size=4, unique=True),
    lost=st.integers(0, 2),
)
def test_a_virtual_segment_with_any_numbers_is_read_as_it_was_written(
    virtual_segment_id: int,
    stream_id: int,
    numbers: tuple[int, int, int],
    backups: list[int],
    lost: int,
) -> None:
    log_id, head, checksum = numbers
    place = VirtualSegment(virtual_segment_id, stream_id, log_id, list(backups), 0)
    place.head, place.checksum, place.wanted = head, checksum, len(backups) + lost

    class Records:
        """An index of one record."""

        def records(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
            key, value = put_virtual_segment(place)
            assert key.startswith(prefix)
            assert value is not None
            return [(key, value[:-4])]

    (found,) = virtual_segments(Records())  # type: ignore[arg-type]
    assert fields(found) == fields(place)
