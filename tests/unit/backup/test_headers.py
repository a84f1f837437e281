"""The cache of chunk headers: it equals the headers on disk, and its size is bounded."""

import pytest

from kera.backup.replica import Replica
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.format.chunk import HEADER_BYTES
from tests.unit.backup.support import STREAM_ID, FakeBackup, FakeDisk, Segment, placed
from tests.unit.broker.support import ADDRESS

SEGMENT_BYTES = 64 * BLOCK_BYTES
SIZES = [192, 1024, 70_016, 4096, 192, 130_048, 8192, 1984]
STARTS = [sum(SIZES[:number]) for number in range(len(SIZES) + 1)]
PLENTY = 1 << 20


def chunk(number: int, size: int = 192) -> bytes:
    """A chunk of one of two streamlets, in turn."""
    return placed(number, ADDRESS._replace(streamlet_id=number % 2), size=size, fill=bytes([number + 1]))


def written(*numbers: int, bytes_max: int = PLENTY) -> FakeBackup:
    """A backup with closed replicas of `SIZES`, on disk only."""
    backup = FakeBackup(FakeDisk(), segment_bytes=SEGMENT_BYTES, headers_bytes_max=bytes_max)
    for number in numbers:
        Segment(number).append(backup, *(chunk(at, size) for at, size in enumerate(SIZES)), close=True)
        backup.run()
        assert backup.get(number).slot is None
    return backup


def is_kept(backup: FakeBackup, replica: Replica) -> bool:
    return backup.store.headers.read(replica, 0, PLENTY, {}) is not None


@pytest.mark.parametrize("offset", [*STARTS, STARTS[2] + 64])
@pytest.mark.parametrize("bytes_max", [1, HEADER_BYTES, 3 * HEADER_BYTES + 5, PLENTY])
@pytest.mark.parametrize(
    "streamlets",
    [
        {},
        {STREAM_ID: frozenset()},
        {STREAM_ID: frozenset({1})},
        {STREAM_ID: frozenset({5})},
        {STREAM_ID + 1: frozenset(), STREAM_ID: frozenset({0, 3})},
    ],
)
def test_kept_headers_equal_those_on_disk(offset: int, bytes_max: int, streamlets: dict[int, frozenset[int]]) -> None:
    backup = written(1)
    kept = backup.store.headers.read(backup.get(), offset, bytes_max, streamlets)

    assert kept == backup.read(offset=offset, bytes_max=bytes_max, streamlets=streamlets, headers_only=True)


def test_headers_of_a_closed_replica_in_memory_are_kept() -> None:
    backup = FakeBackup(FakeDisk(), segment_bytes=SEGMENT_BYTES, headers_bytes_max=PLENTY)
    segment = Segment()
    segment.append(backup, chunk(0))
    assert not is_kept(backup, backup.get()), "more may come"
    segment.append(backup, chunk(1), close=True)
    kept = backup.store.headers.read(backup.get(), 0, PLENTY, {})

    assert kept == backup.read(headers_only=True)


def test_the_oldest_headers_are_dropped_when_the_limit_is_reached() -> None:
    size = len(SIZES) * HEADER_BYTES
    backup = written(1, 2, 3, bytes_max=2 * size)

    assert [is_kept(backup, backup.get(number)) for number in (1, 2, 3)] == [False, True, True]
    assert backup.store.headers.bytes_kept == 2 * size


def test_freeing_a_replica_drops_its_headers() -> None:
    backup = written(1, 2)
    replica = backup.get(1)
    backup.store.free(replica.broker_id, [1], lambda _: None)
    backup.run()

    assert not is_kept(backup, replica)
    assert backup.store.headers.bytes_kept == len(SIZES) * HEADER_BYTES


def test_no_headers_are_kept_after_a_restart() -> None:
    backup = written(1).restarted()

    assert not is_kept(backup, backup.get())
    assert backup.read(headers_only=True).next_offset == sum(SIZES)
