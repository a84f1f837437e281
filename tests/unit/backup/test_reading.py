"""Reading the chunks of a replica: filtered, in pieces, from memory and from a disk, whole and damaged."""

import random
from collections import Counter

import pytest

from kera.backup.reading import Walk, disk_window, memory_window, walk
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.format.chunk import HEADER_BYTES
from tests.examples import first_quick
from tests.unit.backup.support import FakeBackup, FakeDisk, Segment, placed
from tests.unit.broker.support import ADDRESS

SEGMENT_BYTES = 64 * BLOCK_BYTES
SIZES = [192, 1024, 70_016, 4096, 192, 130_048, 8192, 1984]


@pytest.fixture
def chunks() -> list[bytes]:
    """Chunks of two streamlets, in turn."""
    return [
        placed(number, ADDRESS._replace(streamlet_id=number % 2), size=size, fill=bytes([number + 1]))
        for number, size in enumerate(SIZES)
    ]


@pytest.fixture(params=["memory", "disk"])
def backup(request: pytest.FixtureRequest, chunks: list[bytes]) -> FakeBackup:
    """A replica with all `chunks`, read in small windows."""
    backup = FakeBackup(FakeDisk(), segment_bytes=SEGMENT_BYTES, window_bytes=BLOCK_BYTES)
    Segment().append(backup, *chunks, close=request.param == "disk")
    backup.run()
    return backup


def read_all(backup: FakeBackup, bytes_max: int) -> list[Walk]:
    answers = [backup.read(bytes_max=bytes_max)]
    while answers[-1].next_offset < backup.get().length:
        answers.append(backup.read(bytes_max=bytes_max, offset=answers[-1].next_offset))
    return answers


@pytest.mark.parametrize("bytes_max", [1, 200, 2000, 100_000, SEGMENT_BYTES])
def test_pieces_carry_all_chunks_whole_and_respect_the_byte_limit(
    backup: FakeBackup, chunks: list[bytes], bytes_max: int
) -> None:
    answers = read_all(backup, bytes_max)

    assert b"".join(bytes(answer.chunks) for answer in answers) == b"".join(chunks)
    for answer in answers:
        assert len(answer.chunks) <= bytes_max or bytes(answer.chunks) in chunks, "a single one may be larger"


@pytest.mark.parametrize(
    ("streamlets", "wanted"),
    [
        ({}, [0, 1]),
        ({7: frozenset()}, [0, 1]),
        ({7: frozenset({1})}, [1]),
        ({7: frozenset({0, 1, 5})}, [0, 1]),
        ({8: frozenset()}, []),
    ],
)
def test_only_chunks_of_the_requested_streamlets_are_read(
    backup: FakeBackup, chunks: list[bytes], streamlets: dict[int, frozenset[int]], wanted: list[int]
) -> None:
    found = backup.read(streamlets=streamlets)

    assert bytes(found.chunks) == b"".join(data for number, data in enumerate(chunks) if number % 2 in wanted)
    assert found.next_offset == sum(SIZES)


@pytest.mark.parametrize("damaged", range(len(SIZES)))
@pytest.mark.parametrize("at", [0, 40, 90, 150])
def test_a_damaged_chunk_is_reported_and_all_others_are_read(chunks: list[bytes], damaged: int, at: int) -> None:
    content = bytearray(b"".join(chunks))
    start = sum(SIZES[:damaged])
    content[start + at] ^= 1
    found = walk(memory_window(memoryview(content), len(content)), len(content))

    assert bytes(found.chunks) == b"".join(chunks[:damaged] + chunks[damaged + 1 :])
    assert found.damaged == [start]


@pytest.mark.parametrize("seed", first_quick(range(20), 4))
def test_random_damage_leaves_all_whole_chunks_readable_and_no_others(chunks: list[bytes], seed: int) -> None:
    chance = random.Random(seed)
    disk = FakeDisk()
    backup = FakeBackup(disk, segment_bytes=SEGMENT_BYTES)
    Segment().append(backup, *chunks, close=True)
    backup.run()
    hit = set()
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(sum(SIZES))
        disk.flip(2 * BLOCK_BYTES + place)
        hit.add(next(number for number in range(len(SIZES)) if place < sum(SIZES[: number + 1])))
    buffer = memoryview(bytearray(SEGMENT_BYTES))
    window = disk_window(disk, backup.layout, 0, sum(SIZES), buffer)
    found = walk(window, sum(SIZES))

    whole = [data for number, data in enumerate(chunks) if number not in hit]
    assert bytes(found.chunks) == b"".join(whole)
    assert 1 <= len(found.damaged) <= len(hit), "neighbours of which no header is whole are one piece"


def test_damage_is_reported_once_when_a_replica_is_read_in_many_pieces(chunks: list[bytes]) -> None:
    disk = FakeDisk()
    backup = FakeBackup(disk, segment_bytes=SEGMENT_BYTES, window_bytes=BLOCK_BYTES)
    Segment().append(backup, *chunks, close=True)
    backup.run()
    start = sum(SIZES[:5])
    disk.flip(2 * BLOCK_BYTES + start)
    answers = read_all(backup, 200)

    assert b"".join(bytes(answer.chunks) for answer in answers) == b"".join(chunks[:5] + chunks[6:])
    assert [offset for answer in answers for offset in answer.damaged] == [start]


def test_a_read_from_the_middle_of_a_chunk_goes_on_with_the_next_one(backup: FakeBackup, chunks: list[bytes]) -> None:
    found = backup.read(offset=192 + 64)

    assert bytes(found.chunks) == b"".join(chunks[2:])
    assert found.damaged == [], "no damage, but a wrong question"


@pytest.mark.parametrize("bytes_max", [1, 300, SEGMENT_BYTES])
def test_a_read_for_headers_only_gives_the_header_of_each_wanted_chunk(
    backup: FakeBackup, chunks: list[bytes], bytes_max: int
) -> None:
    found, offset = b"", 0
    while offset < backup.get().length:
        answer = backup.read(bytes_max=bytes_max, offset=offset, headers_only=True, streamlets={7: frozenset({1})})
        assert len(answer.chunks) <= max(bytes_max, HEADER_BYTES)
        found, offset = found + bytes(answer.chunks), answer.next_offset

    assert found == b"".join(data[:HEADER_BYTES] for data in chunks[1::2])


def test_reading_headers_skips_payloads_of_large_chunks(chunks: list[bytes]) -> None:
    content, read = memoryview(b"".join(chunks)), []

    def window(offset: int, size: int) -> memoryview:
        read.append(size)
        return content[offset : offset + size]

    found = walk(window, len(content), headers_only=True)
    large = [number for number, size in enumerate(SIZES) if size >= 64 << 10]

    assert bytes(found.chunks) == b"".join(data[:HEADER_BYTES] for data in chunks)
    assert sum(read) < len(content) - sum(SIZES[number] for number in large) * 3 // 4
    behind = [data[:HEADER_BYTES] for data in chunks[large[0] :]]
    rest = walk(window, len(content), offset=sum(SIZES[: large[0]]), headers_only=True)
    assert bytes(rest.chunks) == b"".join(behind)


class CountingDisk(FakeDisk):
    """Counts how often each block is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[int] = Counter()

    def read(self, offset: int, into: memoryview) -> int:
        self.reads.update(range(offset // BLOCK_BYTES, (offset + len(into)) // BLOCK_BYTES))
        return super().read(offset, into)


@pytest.mark.parametrize("wanted", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("bytes_max", [1, 2000, SEGMENT_BYTES])
def test_no_block_is_read_twice_and_blocks_of_large_unwanted_chunks_are_skipped(
    chunks: list[bytes], wanted: set[int], bytes_max: int
) -> None:
    disk = CountingDisk()
    backup = FakeBackup(disk, segment_bytes=SEGMENT_BYTES)
    Segment().append(backup, *chunks, close=True)
    backup.run()
    buffer, here = memoryview(bytearray(SEGMENT_BYTES)), bytearray(SEGMENT_BYTES // BLOCK_BYTES)
    found, offset = b"", 0
    disk.reads.clear()
    while offset < sum(SIZES):
        window = disk_window(disk, backup.layout, 0, sum(SIZES), buffer, here)
        streamlets = {7: frozenset(wanted)}
        answer = walk(window, sum(SIZES), offset=offset, bytes_max=bytes_max, streamlets=streamlets, wanted_only=True)
        found, offset = found + bytes(answer.chunks), answer.next_offset

    assert found == b"".join(data for number, data in enumerate(chunks) if number % 2 in wanted)
    assert max(disk.reads.values()) == 1
    if wanted == {0}:
        large = range((sum(SIZES[:5]) + (64 << 10)) // BLOCK_BYTES + 2, sum(SIZES[:6]) // BLOCK_BYTES)
        assert not disk.reads.keys() & {block + 2 for block in large}


def test_damage_of_unwanted_chunks_is_reported_only_when_a_header_is_damaged(chunks: list[bytes]) -> None:
    content = bytearray(b"".join(chunks))
    content[sum(SIZES[:2]) + 200] ^= 1  # a payload of streamlet 0
    content[sum(SIZES[:4]) + 40] ^= 1  # a header of streamlet 0
    window = memory_window(memoryview(content), len(content))
    found = walk(window, len(content), streamlets={7: frozenset({1})}, wanted_only=True)

    assert bytes(found.chunks) == b"".join(chunks[1::2])
    assert found.damaged == [sum(SIZES[:4])], "whose it is cannot be known"


def test_a_read_for_headers_reports_damaged_headers_but_not_damaged_payloads(chunks: list[bytes]) -> None:
    content = bytearray(b"".join(chunks))
    content[sum(SIZES[:3]) + 40] ^= 1  # in a header
    content[sum(SIZES[:6]) + 200] ^= 1  # in a payload
    found = walk(memory_window(memoryview(content), len(content)), len(content), headers_only=True)

    assert bytes(found.chunks) == b"".join(data[:HEADER_BYTES] for data in chunks[:3] + chunks[4:])
    assert found.damaged == [sum(SIZES[:3])]
