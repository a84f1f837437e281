"""Reports to the coordinator in heartbeats."""

import pytest

from kera.broker.heartbeat import HeartbeatLimits, HeartbeatReport
from kera.broker.log.intervals import Holding, Interval
from kera.core.base.clock import FakeClock, ProcessorTime
from kera.core.base.ids import EARLIEST, Position
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.moving_support import Cluster, assign
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, cursor, read_range, stream_info


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    return Broker(engine, stream_info(owners=(BROKER_ID,) * 3))


def filled(report: HeartbeatReport) -> coordinator_pb2.HeartbeatRequest:
    request = coordinator_pb2.HeartbeatRequest()
    report.fill(request)
    return request


def loads(request: coordinator_pb2.HeartbeatRequest) -> list[tuple[int, int, int, int]]:
    return [(each.streamlet_id, each.bytes_per_s, each.records_per_s, each.read_bytes_per_s) for each in request.loads]


async def test_loads_are_rates_since_the_last_heartbeat(broker: Broker, clock: FakeClock) -> None:
    report = HeartbeatReport(broker.streams, clock=clock)
    broker.append(*(chunk(1, sequence, streamlet_id=0, record_count=10) for sequence in range(2)))
    broker.append(*(chunk(1, sequence, streamlet_id=2, record_count=10) for sequence in range(4)))
    broker.append(chunk(1, 3, streamlet_id=2))  # a repeat is not load
    broker.read(read_range(EARLIEST, streamlet=0))
    clock.advance(2)
    first = filled(report)
    clock.advance(1)

    assert loads(first) == [(0, 1024, 10, 1024), (2, 2048, 20, 0)]
    assert (first.bytes_per_s, {load.stream_id for load in first.loads}) == (3072, {STREAM_ID})
    assert loads(filled(report)) == []


async def test_the_busy_share_of_the_loop_is_that_since_the_last_heartbeat(broker: Broker, clock: FakeClock) -> None:
    clock.processor = ProcessorTime(5.0, 9.0)
    report = HeartbeatReport(broker.streams, clock=clock)
    clock.advance(4)
    clock.processor = ProcessorTime(6.0, 15.0)
    told = filled(report)
    assert told.loop_busy_permille == 250

    clock.advance(1)
    idle = filled(report)
    assert (idle.HasField("loop_busy_permille"), idle.loop_busy_permille) == (True, 0), "that is known, too"
    clock.advance(1)
    clock.processor = ProcessorTime(8.0, 16.0)
    assert filled(report).loop_busy_permille == 1000, "clocks are not read at the same moment"
    clock.processor = None
    assert not filled(report).HasField("loop_busy_permille")


async def test_only_the_busiest_streamlets_are_reported(broker: Broker, clock: FakeClock) -> None:
    report = HeartbeatReport(broker.streams, clock=clock, limits=HeartbeatLimits(loads_max=2))
    for streamlet_id, count in ((0, 2), (1, 1), (2, 3)):
        broker.append(*(chunk(1, sequence, streamlet_id=streamlet_id) for sequence in range(count)))
    clock.advance(1)
    request = filled(report)

    assert [load[0] for load in loads(request)] == [2, 0]
    assert request.bytes_per_s == 6 * 1024, "of all of them"


async def truncate(broker: Broker, position: Position) -> None:
    await broker.ask(api.TRUNCATE_STREAMLETS, api.TRUNCATE_STREAMLETS.request(cursors=[cursor(position)]))


def starts(request: coordinator_pb2.HeartbeatRequest) -> list[tuple[int, int, int]]:
    return [(each.start.group_id, each.start.position, each.first_record) for each in request.starts]


async def test_moved_starts_are_reported_until_a_heartbeat_is_answered(broker: Broker) -> None:
    report = HeartbeatReport(broker.streams)
    broker.append(*(chunk(1, sequence) for sequence in range(3)))
    assert starts(filled(report)) == []
    await truncate(broker, Position(1, 1, 1024))
    assert starts(filled(report)) == starts(filled(report)) == [(1, 1024, 1)]
    await truncate(broker, Position(1, 1, 2048))
    report.answered(coordinator_pb2.HeartbeatResponse())

    assert starts(filled(report)) == [(1, 2048, 2)], "it has moved since it was told"
    report.answered(coordinator_pb2.HeartbeatResponse())
    assert starts(filled(report)) == []


async def test_starts_that_do_not_fit_go_with_the_next_heartbeat(
    broker: Broker,
) -> None:
    report = HeartbeatReport(broker.streams, limits=HeartbeatLimits(starts_max=2))
    for streamlet_id in range(3):
        broker.append(*(chunk(1, sequence, streamlet_id=streamlet_id) for sequence in range(2)))
        place = cursor(Position(1, 1, 1024), streamlet=streamlet_id)
        await broker.ask(api.TRUNCATE_STREAMLETS, api.TRUNCATE_STREAMLETS.request(cursors=[place]))
    told = []
    for _ in range(2):
        told.append([each.start.streamlet_id for each in filled(report).starts])
        report.answered(coordinator_pb2.HeartbeatResponse())

    assert told == [[0, 1], [2]]


async def test_a_reported_start_says_whether_records_before_it_were_removed(make_engine: MakeEngine) -> None:
    """Older records than a broker's first interval may be at other brokers."""
    cluster = Cluster(make_engine(16), make_engine(16))
    cluster.send(2)
    await cluster.move(2)
    cluster.send(2)
    broker = cluster.brokers[2]
    entry, report = broker.streams.streamlet(STREAM_ID, 0).entries[0], HeartbeatReport(broker.streams)
    broker.streams.moved_starts.note([entry])
    (told,) = filled(report).starts
    assert (told.start.group_id, told.first_record, told.removed) == (2, 2, False)

    await truncate(broker, Position(2, 1, 1024))
    (told,) = filled(report).starts
    assert (told.start.position, told.first_record, told.removed) == (1024, 3, True)


async def test_a_stream_that_is_being_dropped_does_not_hold_up_heartbeats(broker: Broker) -> None:
    report = HeartbeatReport(broker.streams)
    for streamlet_id in range(3):
        broker.append(*(chunk(1, sequence, streamlet_id=streamlet_id) for sequence in range(3)))
        entry = broker.streams.streamlet(STREAM_ID, streamlet_id).entries[0]
        broker.streams.move_start(entry, Position(1, 1, 1024), 1)
    steps = broker.streams.dropping(STREAM_ID)
    next(steps)
    assert [one.start.streamlet_id for one in filled(report).starts] == [1, 2]
    assert list(steps) == [None, None]
    assert not filled(report).starts


async def test_starts_of_a_dropped_stream_are_not_reported(broker: Broker) -> None:
    report = HeartbeatReport(broker.streams)
    broker.append(*(chunk(1, sequence) for sequence in range(3)))
    await truncate(broker, Position(1, 1, 1024))
    broker.streams.drop(STREAM_ID)

    assert starts(filled(report)) == []


async def test_empty_intervals_are_reported_until_they_are_given_up(make_engine: MakeEngine) -> None:
    cluster = Cluster(make_engine(16), make_engine(16), entries=2)
    cluster.send(2, producer=0)
    await cluster.move(2)
    cluster.send(2, producer=1)
    await cluster.move(1)
    first, second = (HeartbeatReport(broker.streams) for broker in cluster.brokers.values())

    def empty(report: HeartbeatReport) -> list[tuple[int, int, int, int]]:
        return [
            (each.stream_id, each.streamlet_id, each.first_group_id, each.end_group_id)
            for each in filled(report).empty_intervals
        ]

    assert empty(first) == empty(second) == []
    await truncate(cluster.brokers[1], Position(2, 1, 0))
    assert empty(first) == empty(first) == [(STREAM_ID, 0, 1, 2)]
    assert empty(second) == []
    cluster.info = assign(cluster.info, 1, [(2, 2, [2, 0]), (3, 1, [2, 2])])
    await cluster.open(1)
    assert empty(first) == []


async def test_moved_streamlets_are_checked_a_few_at_a_time(
    broker: Broker,
) -> None:
    for streamlet in broker.streams.get(STREAM_ID).streamlets.values():
        streamlet.hold(Holding((Interval(1, 2), Interval(2))))
    report = HeartbeatReport(broker.streams, limits=HeartbeatLimits(moved_max=2))

    told = [[each.streamlet_id for each in filled(report).empty_intervals] for _ in range(4)]
    assert told == [[0, 1], [2], [0, 1], [2]]


async def test_recoveries_are_reported_unchanged(broker: Broker) -> None:
    progress = coordinator_pb2.RecoveryProgress(
        source=common_pb2.RecoverySource(broker_id=4, before_epoch=9), bytes_total=5
    )
    report = HeartbeatReport(broker.streams, lambda: [progress])

    assert list(filled(report).recoveries) == [progress]
