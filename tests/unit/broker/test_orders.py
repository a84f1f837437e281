"""Orders of the coordinator: how a registration, recoveries and the next launch fit in."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from kera.broker.log.arena import Arena
from kera.broker.ownership.handover import HandedOver, handed_over, put_handed_over
from kera.broker.records import OriginRecord, ProducerRecord
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import put_origin, put_producer
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.ids import Position
from kera.core.errors import Unavailable
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2
from tests.unit.broker.moving_support import Cluster, assign, moved
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import (
    BROKER_ID,
    STREAM_ID,
    Broker,
    Engine,
    FailingDisk,
    chunk,
    stream_info,
)

SOURCE = common_pb2.RecoverySource(broker_id=8, before_epoch=20)


def recovered(info: common_pb2.StreamInfo, *streamlet_ids: int) -> common_pb2.StreamInfo:
    """A stream with some streamlets that come from a lost broker."""
    changed = common_pb2.StreamInfo()
    changed.CopyFrom(info)
    for streamlet_id in streamlet_ids:
        changed.assignments[streamlet_id].sources.append(SOURCE)
    return changed


class FakeTakeovers:
    """Remembers its calls, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.known: set[int] = set()
        self.failures = 0
        self.failure: Exception = Unavailable("no backup has it")
        self.open_then: Callable[[], bool] = lambda: True
        self.was_open: list[bool] = []

    async def take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        self.calls.append(("take_over", [each.streamlet_ids[0] for each in request.streams]))
        return broker_pb2.TakeOverResponse(records_lost=3)

    def prepared(self, stream_id: int, streamlet_id: int, sources: Iterable[common_pb2.RecoverySource]) -> bool:
        assert stream_id == STREAM_ID
        assert list(sources) == [SOURCE]
        return streamlet_id in self.known

    async def prepare(self, _info: common_pb2.StreamInfo, /, streamlet_ids: Sequence[int]) -> None:
        self.calls.append(("prepare", list(streamlet_ids)))
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise self.failure
        self.known.update(streamlet_ids)

    async def commit(self, _info: common_pb2.StreamInfo, /, streamlet_ids: Sequence[int]) -> None:
        self.calls.append(("commit", list(streamlet_ids)))
        self.was_open.append(self.open_then())

    def opened(self, info: common_pb2.StreamInfo) -> None:
        self.calls.append(("opened", [each.streamlet_id for each in info.assignments]))


async def open_streamlets(broker: Broker, info: common_pb2.StreamInfo) -> None:
    await broker.ask(api.OPEN_STREAMLETS, api.OPEN_STREAMLETS.request(stream=info))


# --- recoveries --------------------------------------------------------------------------------------------


async def test_recovered_streamlets_are_prepared_and_committed_before_they_are_opened(engine: Engine) -> None:
    takeovers = FakeTakeovers()
    broker = Broker(engine, takeovers=takeovers)
    broker.broker.registered(BROKER_ID, [])
    takeovers.open_then = lambda: STREAM_ID in broker.streams
    info = recovered(stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1)), 1, 2)
    await open_streamlets(broker, info)

    assert takeovers.calls == [("prepare", [1]), ("commit", [1]), ("opened", [0, 1, 2])]
    assert takeovers.was_open == [False]
    assert sorted(broker.streams.get(STREAM_ID).streamlets) == [0, 1]


async def test_streamlets_known_from_a_take_over_are_not_prepared_again(engine: Engine) -> None:
    takeovers = FakeTakeovers()
    broker = Broker(engine, takeovers=takeovers)
    broker.broker.registered(BROKER_ID, [])
    takeovers.known.add(0)
    request = api.TAKE_OVER.request(streams=[broker_pb2.TakeOverStream(streamlet_ids=[0])])
    assert (await broker.ask(api.TAKE_OVER, request)).records_lost == 3
    await open_streamlets(broker, recovered(stream_info(), 0))

    assert takeovers.calls == [("take_over", [0]), ("commit", [0]), ("opened", [0])]


async def test_replicas_are_released_once_no_streamlet_of_a_stream_is_here_or_recovered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(engine)
    broker.broker.registered(BROKER_ID, [])
    released: list[int] = []
    monkeypatch.setattr(engine.replication, "release", released.append)
    monkeypatch.setattr(engine.replication.coverage, "spare_before", 1)
    info = stream_info(owners=(BROKER_ID + 1,))
    info.assignments[0].sources.add(broker_id=BROKER_ID, before_epoch=7)
    await open_streamlets(broker, info)
    assert released == [], "others read them"

    info.assignments_version += 1
    del info.assignments[0].sources[:]
    await open_streamlets(broker, info)
    assert released == [STREAM_ID]
    info.assignments_version += 1
    info.assignments[0].broker_id = BROKER_ID
    await open_streamlets(broker, info)
    assert released == [STREAM_ID], "it has the stream again"


async def test_a_recovery_that_cannot_be_prepared_fails_the_opening(engine: Engine) -> None:
    takeovers = FakeTakeovers()
    takeovers.failures = 1
    broker = Broker(engine, takeovers=takeovers)
    broker.broker.registered(BROKER_ID, [])
    with pytest.raises(Unavailable, match="no backup"):
        await open_streamlets(broker, recovered(stream_info(), 0))

    assert STREAM_ID not in broker.streams


async def test_a_broker_without_backups_takes_nothing_over(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    with pytest.raises(Unavailable, match="no backups"):
        await broker.ask(api.TAKE_OVER, api.TAKE_OVER.request())


@pytest.mark.parametrize("failure", [Unavailable("no backup has it"), RuntimeError("unforeseen")])
async def test_a_registration_opens_unprepared_streamlets_later_and_the_others_at_once(
    engine: Engine, failure: Exception
) -> None:
    takeovers = FakeTakeovers()
    takeovers.failures, takeovers.failure = 2, failure
    broker = Broker(engine, takeovers=takeovers)
    broker.broker.registered(BROKER_ID, [recovered(stream_info(owners=(BROKER_ID,) * 3), 0, 2)])
    stream = broker.streams.get(STREAM_ID)
    assert sorted(stream.streamlets) == [1]
    assert takeovers.calls == [("opened", [1])]
    async with asyncio.timeout(10):
        while takeovers.calls[-1][0] != "opened" or len(stream.streamlets) < 3:
            await asyncio.sleep(0.001)
    await broker.broker.close()

    assert takeovers.calls[1:] == [("prepare", [0, 2])] * 3 + [("commit", [0, 2]), ("opened", [0, 1, 2])]


async def test_closing_a_broker_ends_openings_that_wait_for_backups(engine: Engine) -> None:
    takeovers = FakeTakeovers()
    takeovers.failures = 1000
    broker = Broker(engine, takeovers=takeovers)
    broker.broker.registered(BROKER_ID, [recovered(stream_info(), 0)])
    while ("prepare", [0]) not in takeovers.calls:
        await asyncio.sleep(0)
    await broker.broker.close()

    assert broker.streams.get(STREAM_ID).streamlets == {}


# --- launches ----------------------------------------------------------------------------------------------


async def test_streamlets_of_another_launch_are_not_opened(engine: Engine) -> None:
    broker = Broker(engine)
    info = stream_info(owners=(BROKER_ID, BROKER_ID))
    info.assignments[0].broker_epoch, info.assignments[1].broker_epoch = 11, 12
    broker.broker.registered(BROKER_ID, [info], 12)

    assert sorted(broker.streams.get(STREAM_ID).streamlets) == [1]


async def test_an_older_interval_is_opened_whoever_owns_the_streamlet(engine: Engine) -> None:
    broker = Broker(engine)
    info = assign(stream_info(), BROKER_ID + 1, [(1, BROKER_ID, []), (5, BROKER_ID + 1, [4])], broker_epoch=77)
    broker.broker.registered(BROKER_ID, [info], 12)
    streamlet = broker.streams.get(STREAM_ID).streamlet(0)

    assert not streamlet.owned
    assert [status.error.code for status in broker.append(chunk(1, 0))] == ["not_owner"]


class Launches:
    """A broker that is killed and started again, over one arena or one disk."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self.engine = engine
        self.root = root

    def again(self, info: common_pb2.StreamInfo, number: int) -> Broker:
        """Start again after everything was flushed: without the memory, and without a stop."""
        self.engine.memory.segments.close_all()
        self.engine.run()
        self.engine.close()
        index = SegmentIndex.open(self.root / "index", durable=False)
        restart = Restart(None, index, SegmentStore(self.root, FailingDisk(self.root), index))
        meta = dict(index.meta(), clean=True)
        index.commit([], meta)
        restart.look(index_whole=True, slot_bytes=self.engine.arena.slot_bytes)
        for slot in self.engine.arena.slots():
            if slot.content is not None:
                slot.retire()
        self.engine = Engine(self.engine.arena, self.root, restart)
        broker = Broker(self.engine)
        broker.broker.registered(number, [info])
        return broker


@pytest.fixture
def arenas(make_arena: Callable[..., Arena]) -> Callable[[], Arena]:
    return lambda: make_arena(16)


async def test_the_next_launch_of_a_new_owner_keeps_the_state_handed_over(
    make_engine: MakeEngine, arenas: Callable[[], Arena], tmp_path: Path
) -> None:
    launches = Launches(Engine(arenas(), tmp_path), tmp_path)
    cluster = Cluster(make_engine(16), launches.engine)
    cluster.send(3)
    await cluster.move(2)
    cluster.brokers[2] = launches.again(cluster.info, 2)
    repeated, following = cluster.owner.append(chunk(1, 2), chunk(1, 3))

    assert repeated.duplicate
    assert following.first_record == 3
    cluster.sequences[1] = 4
    cluster.sent.append((1, 3))
    cluster.send(2)
    assert await cluster.read_all() == cluster.sent
    cluster.brokers[2] = launches.again(cluster.info, 2)
    cluster.send(2)
    assert await cluster.read_all() == cluster.sent
    launches.engine.close()


async def test_the_next_launch_goes_on_behind_the_groups_of_other_brokers(
    make_engine: MakeEngine, arenas: Callable[[], Arena], tmp_path: Path
) -> None:
    launches = Launches(Engine(arenas(), tmp_path), tmp_path)
    cluster = Cluster(launches.engine, make_engine(16))
    for to in (2, 1):
        cluster.send(3)
        await cluster.move(to)
    cluster.brokers[1] = launches.again(cluster.info, 1)
    (status,) = cluster.owner.append(chunk(1, 6))

    assert (status.error.code, status.group_id, status.first_record) == ("", 3, 6)
    cluster.sequences[1] = 7
    cluster.sent.append((1, 6))
    assert await cluster.read_all() == cluster.sent
    launches.engine.close()


async def test_an_owner_that_restarts_before_the_handover_waits_for_it(
    make_engine: MakeEngine, arenas: Callable[[], Arena], tmp_path: Path
) -> None:
    launches = Launches(Engine(arenas(), tmp_path), tmp_path)
    cluster = Cluster(make_engine(16), launches.engine)
    cluster.send(3)
    state = await cluster.seal(1)
    cluster.info = moved(cluster.info, state, 2)
    cluster.brokers[2] = launches.again(cluster.info, 2)
    assert [status.error.code for status in cluster.owner.append(chunk(1, 3))] == ["not_owner"]
    await cluster.open(2, state)

    assert [status.duplicate for status in cluster.owner.append(chunk(1, 2), chunk(1, 3))] == [True, False]
    launches.engine.close()


async def test_a_broker_with_older_groups_can_follow_a_lost_owner(make_engine: MakeEngine) -> None:
    """The index has the recovered groups, as usual; but the streamlet is open here already."""
    takeovers = FakeTakeovers()
    takeovers.known.add(0)
    cluster = Cluster(make_engine(16), make_engine(16), takeovers=takeovers)
    cluster.send(3)
    await cluster.move(2)
    index = cluster.brokers[1].engine.index
    origin = OriginRecord(frozenset({(8, 20)}), 9, 0)
    index.commit([put_origin(STREAM_ID, 0, origin), put_producer(STREAM_ID, 0, 1, ProducerRecord(0, 6))])
    cluster.info = recovered(assign(cluster.info, 1), 0)
    await cluster.open(1)
    repeated, following = cluster.owner.append(chunk(1, 5), chunk(1, 6))

    assert repeated.duplicate
    assert following.group_id == 9


async def test_a_recovered_streamlet_needs_no_handover_in_later_launches(engine: Engine) -> None:
    takeovers = FakeTakeovers()
    broker = Broker(engine, takeovers=takeovers)
    broker.broker.registered(BROKER_ID, [])
    info = recovered(assign(stream_info(), BROKER_ID, [(1, 9, []), (5, BROKER_ID, [4])]), 0)
    await open_streamlets(broker, info)
    engine.run()
    (status,) = broker.append(chunk(1, 0))

    assert (status.error.code, status.group_id, status.first_record) == ("", 5, 4)
    assert handed_over(engine.index, STREAM_ID, 0) == HandedOver(5, (4,))


def test_state_handed_over_is_removed_with_its_streamlet_or_stream(engine: Engine) -> None:
    def known() -> list[HandedOver]:
        return [handed_over(engine.index, STREAM_ID, each) for each in (0, 1, 2)]

    engine.index.commit([put_handed_over(STREAM_ID, 0, 5, [7, 8]), put_handed_over(STREAM_ID, 1, 6, [])])
    assert known() == [HandedOver(5, (7, 8)), HandedOver(6), HandedOver()]
    engine.memory.removals.drop_streamlet(STREAM_ID, 0)
    engine.run()
    assert known() == [HandedOver(), HandedOver(6), HandedOver()]
    engine.memory.removals.drop_stream(STREAM_ID)
    engine.run()

    assert known() == [HandedOver()] * 3


async def test_the_next_launch_goes_on_behind_other_brokers_that_the_map_has_forgotten(
    make_engine: MakeEngine, arenas: Callable[[], Arena], tmp_path: Path
) -> None:
    """When no group between them is left, an owner's intervals become one."""
    launches = Launches(Engine(arenas(), tmp_path), tmp_path)
    cluster = Cluster(launches.engine, make_engine(16))
    for to in (2, 1):
        cluster.send(3)
        await cluster.move(to)
    cluster.info = assign(cluster.info, 1)
    cluster.brokers[1] = launches.again(cluster.info, 1)
    (status,) = cluster.owner.append(chunk(1, 6))

    assert (status.error.code, status.group_id, status.first_record) == ("", 3, 6)
    launches.engine.close()


async def test_entries_start_at_the_places_in_the_map(make_engine: MakeEngine) -> None:
    """Ordinals of an interval begin where the interval before it ended, whatever the index knows."""
    cluster = Cluster(make_engine(16), make_engine(16), entries=2)
    cluster.send(3, producer=0)
    await cluster.move(2)
    entries = cluster.owner.streams.get(STREAM_ID).streamlet(0).entries

    assert [(entry.start, entry.start_record, entry.next_record) for entry in entries] == [
        (Position(2, 1, 0), 3, 3),
        (Position(2, 1, 0), 0, 0),
    ]
