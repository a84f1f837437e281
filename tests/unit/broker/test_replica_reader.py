"""Reading the replicas of a broker: which ones are read, and the result when some of them fail."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kera.broker.records import SegmentAddress
from kera.broker.recovery.replica_reader import ReadLimits, choose
from kera.core.base.ids import EntryId
from kera.core.errors import InternalError, Unavailable
from kera.core.format.chunk import ChunkHeader
from kera.core.format.header_table import as_headers
from kera.v1 import backup_pb2
from tests.replica_reading import ReplicasRead, Run, read_replicas
from tests.unit.broker.fake_backup import FakeBackup
from tests.unit.broker.support import ADDRESS, BROKER_ID, CHUNK_BYTES, STREAM_ID, placed

ENTRY = EntryId(*ADDRESS[:3])
LIMITS = ReadLimits(per_backup_max=1, read_bytes_max=2 * CHUNK_BYTES, timeout_s=5.0)


# -- which replicas ------------------------------------------------------------------------------------------------


def info(
    number: int = 1, length: int = 100, *, closed: bool = False, checksum: int = 5, damaged: int = 0
) -> backup_pb2.ReplicaInfo:
    return backup_pb2.ReplicaInfo(
        virtual_segment_id=number, length=length, closed=closed, checksum=checksum, chunks_damaged=damaged
    )


def test_a_closed_replica_is_read_before_a_longer_one_and_sets_the_wanted_length() -> None:
    (source,) = choose({1: [info(length=200)], 2: [info(length=100, closed=True)]})
    assert [backup_id for backup_id, _ in source.replicas] == [2, 1]
    assert source.wanted_bytes == 100


def test_the_longest_of_open_replicas_is_read_first() -> None:
    (source,) = choose({1: [info(length=100)], 2: [info(length=300)], 3: [info(length=200)]})
    assert [backup_id for backup_id, _ in source.replicas] == [2, 3, 1]
    assert source.wanted_bytes == 300


def test_a_damaged_replica_is_read_last() -> None:
    (source,) = choose({1: [info(closed=True, damaged=1)], 2: [info(closed=True)]})
    assert [backup_id for backup_id, _ in source.replicas] == [2, 1]


def test_equal_replicas_are_read_from_all_backups_in_turn() -> None:
    infos = [info(number, closed=True) for number in range(1, 7)]
    sources = choose({1: infos, 2: infos, 3: infos})
    assert [source.replicas[0][0] for source in sources] == [1, 2, 3, 1, 2, 3]


def test_closed_replicas_that_differ_are_marked_as_disagreeing() -> None:
    (source,) = choose({1: [info(closed=True)], 2: [info(closed=True, checksum=6)]})
    assert source.disagree


# -- reading -------------------------------------------------------------------------------------------------------


class World:
    """Backups, and the chunks that are read from them."""

    def __init__(self) -> None:
        self.backups = [FakeBackup(backup_id) for backup_id in (1, 2, 3)]
        self.taken: dict[ChunkHeader, bytes] = {}

    async def take(self, chunk: ChunkHeader, data: memoryview) -> None:
        assert chunk not in self.taken, "each once"
        self.taken[chunk] = bytes(data)

    async def read(self, streamlets: dict[int, list[int]] | None = None) -> ReplicasRead:
        messages = [backup.message for backup in self.backups]
        return await read_replicas(messages, BROKER_ID, streamlets, take=self.take, limits=LIMITS)

    def bytes_of(self, runs: Sequence[Run]) -> list[bytes]:
        return [self.taken[chunk] for run in runs for chunk in as_headers(run.chunks)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    for backup in found.backups:
        await backup.start()
    yield found
    for backup in found.backups:
        await backup.server.close()


def chunks_of(count: int, first: int = 0, address: SegmentAddress = ADDRESS) -> list[bytes]:
    return [placed(number, address, first_record=number) for number in range(first, first + count)]


async def test_all_chunks_on_backups_are_read_once_in_order_in_bounded_answers(world: World) -> None:
    chunks = chunks_of(20)
    one, two, three = world.backups
    for number in range(5):
        replica = b"".join(chunks[4 * number : 4 * number + 4])
        for backup in (one, two, three):
            backup.replicas[number + 1] = replica, True
    three.replicas[9] = b"".join(chunks[2:10]), False  # sent again

    result = await world.read()

    assert world.bytes_of(result.runs) == chunks
    assert [(run.start, run.length) for run in result.runs] == [(0, 20 * CHUNK_BYTES)]
    assert (result.unread, result.disagreeing, result.backups_failed, result.conflicts) == ([], [], {}, set())
    assert one.reads + two.reads + three.reads == 5 * 2 + 4, "in answers of two chunks, each replica once"
    assert min(one.reads, two.reads, three.reads) >= 2, "from all of them"


async def test_only_the_requested_streamlets_are_read(world: World) -> None:
    mine, others = chunks_of(4), chunks_of(4, address=ADDRESS._replace(streamlet_id=1))
    replica = b"".join(chunk for pair in zip(mine, others, strict=True) for chunk in pair)
    world.backups[0].replicas[1] = replica, True
    result = await world.read({STREAM_ID: [1]})
    assert world.bytes_of(result.runs) == others


async def test_a_chunk_that_is_damaged_on_one_backup_is_read_from_the_next(world: World) -> None:
    chunks = chunks_of(6)
    for backup in world.backups[:2]:
        backup.replicas[1] = b"".join(chunks), True
    world.backups[0].damaged.add((1, 2 * CHUNK_BYTES))
    result = await world.read()
    assert world.bytes_of(result.runs) == chunks
    assert result.unread == []


async def test_damage_on_all_backups_is_reported_and_does_not_hide_the_rest(world: World) -> None:
    chunks = chunks_of(6)
    for backup in world.backups[:2]:
        backup.replicas[1] = b"".join(chunks), True
        backup.damaged.add((1, 2 * CHUNK_BYTES))
    result = await world.read()
    assert world.bytes_of(result.runs) == [*chunks[:2], *chunks[3:]]
    assert result.gaps == [(ENTRY, 2, 3)]
    ((number, reasons),) = result.unread
    assert (number, sorted(reasons)) == (1, ["backup 1: 1 chunks are damaged", "backup 2: 1 chunks are damaged"])


async def test_a_replica_with_a_wrong_checksum_is_not_trusted_alone(world: World) -> None:
    chunks = chunks_of(4)
    for backup in world.backups[:2]:
        backup.replicas[1] = b"".join(chunks), False
    world.backups[0].replicas[1] = b"".join([*chunks[:2], chunks[3], chunks[0]]), False
    world.backups[0].claims[1] = 77
    result = await world.read()
    assert world.bytes_of(result.runs) == chunks
    assert result.unread == []


async def test_a_backup_that_fails_while_it_is_read_is_replaced_by_the_next(world: World) -> None:
    chunks = chunks_of(8)
    for backup in world.backups[:2]:
        backup.replicas[1] = b"".join(chunks), True
    first = world.backups[0]

    def fail(request: backup_pb2.ReadReplicaRequest) -> None:
        if request.offset:
            raise Unavailable("no more")

    first.on_read = fail
    result = await world.read()
    assert world.bytes_of(result.runs) == chunks
    assert result.backups_failed == {1: "no more"}
    assert result.unread == []


async def test_an_unreachable_backup_is_reported_and_others_are_read(world: World) -> None:
    chunks = chunks_of(2)
    world.backups[1].replicas[1] = b"".join(chunks), False
    await world.backups[0].server.close()
    result = await world.read()
    assert world.bytes_of(result.runs) == chunks
    assert set(result.backups_failed) == {1}


async def test_a_backup_that_refuses_one_replica_still_serves_others(world: World) -> None:
    chunks = chunks_of(4)
    world.backups[0].replicas = {1: (b"".join(chunks[:2]), True), 2: (b"".join(chunks[2:]), True)}

    def refuse(request: backup_pb2.ReadReplicaRequest) -> None:
        if request.virtual_segment_id == 1:
            raise InternalError("none of it")

    world.backups[0].on_read = refuse
    result = await world.read()
    assert world.bytes_of(result.runs) == chunks[2:]
    assert result.unread == [(1, ("backup 1: none of it",))]
    assert result.backups_failed == {}


async def test_closed_replicas_that_differ_are_both_read_and_their_conflict_is_reported(world: World) -> None:
    right, wrong = chunks_of(2), [placed(7, first_record=0), *chunks_of(1, first=1)]
    world.backups[0].replicas[1] = b"".join(right), True
    world.backups[1].replicas[1] = b"".join(wrong), True
    result = await world.read()
    assert result.disagreeing == [1]
    assert len(result.conflicts) == 1
    assert len(world.bytes_of(result.runs)) == 2


async def test_an_error_of_the_taker_ends_the_reading(world: World) -> None:
    world.backups[0].replicas[1] = b"".join(chunks_of(4)), True

    async def take(_: ChunkHeader, __: memoryview) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("no room")

    with pytest.raises(ExceptionGroup) as caught:
        await read_replicas([world.backups[0].message], BROKER_ID, take=take, limits=LIMITS)
    assert caught.group_contains(RuntimeError, match="no room")
