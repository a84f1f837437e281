"""Epochs at a broker: it makes promises, keeps them with punctuations, and refuses times from the future."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.broker.health import watch_clock
from kera.broker.log.epochs import EpochRules
from kera.broker.log.locate import Progress, Query, locate
from kera.broker.log.segment import Segment
from kera.broker.log.watermarks import watermark_of, watermark_within
from kera.broker.ownership.clock_offset import ClockOffset
from kera.core.base.health import Health, State
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import TimestampAhead
from kera.core.format.chunk import HEADER_BYTES, iterate_chunks, verify_chunk
from kera.core.format.punctuation import FLAG, NO_TIME, encode_punctuation, is_punctuation
from kera.core.rpc import api
from kera.v1 import common_pb2
from tests.epochs_model import Owner
from tests.examples import first_quick
from tests.unit.broker.moving_support import Cluster
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import (
    CHUNK_BYTES,
    SLOT_BYTES,
    STREAM_ID,
    Broker,
    Engine,
    Log,
    Outcome,
    chunk,
    stream_info,
)

MS = 1000
GRACE_US = 1000 * MS
NOW_US = 1_000_000 * MS
EPOCHS: dict[str, Any] = {"epoch_ms": 1000, "epoch_grace_ms": 1000, "timestamp_ahead_max_ms": 5000}


def set_time(engine: Engine, now_us: int) -> None:
    engine.memory.tick(engine.memory.now_ms, now_us, idle_close_ms=1 << 40)


def open_broker(engine: Engine, **config: Any) -> Broker:
    set_time(engine, NOW_US)
    return Broker(engine, stream_info(**(EPOCHS | config)))


def chunks(broker: Broker) -> list[tuple[bool, int]]:
    """Whether each chunk of the first entry is a punctuation, and its greatest time."""
    entry = broker.streams.streamlet(STREAM_ID, 0).entries[0]
    return [
        (is_punctuation(header), header.max_timestamp_us)
        for segment in entry.tail
        for header, _ in iterate_chunks(segment.slot.view, 0, segment.head)
    ]


def sent(time_us: int, sequence: int, **fields: Any) -> bytes:
    return chunk(1, sequence, min_timestamp_us=time_us, max_timestamp_us=time_us, **fields)


async def described(broker: Broker, *, promise: bool = True) -> Any:
    request = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=[0], promise=promise)
    (streamlet,) = (await broker.ask(api.DESCRIBE_STREAMLETS, request)).streamlets
    return streamlet.entries[0]


def test_epoch_rules_follow_the_config_of_the_stream() -> None:
    config = common_pb2.StreamConfig(epoch_ms=10)
    assert EpochRules.of(config) == EpochRules(True, 1_000_000, 3_600_000_000), "what is left out has its default"
    config.epoch_grace_ms, config.timestamp_ahead_max_ms = 5, 0
    config.punctuation = common_pb2.PUNCTUATION_PRODUCERS
    config.clock_until_us = 7
    assert EpochRules.of(config) == EpochRules(False, 5000, 0, 7)
    config.epoch_ms = 0
    assert EpochRules.of(config) == EpochRules(False, 0, 0, 7)
    assert not EpochRules.of(config).are_kept


def test_a_punctuation_is_a_whole_chunk_without_records() -> None:
    data = encode_punctuation(7, 3, 1234, 5)
    header = verify_chunk(data)
    assert len(data) == header.chunk_bytes == HEADER_BYTES
    assert (header.flags, header.record_count, header.payload_bytes) == (FLAG, 0, 0)
    assert (header.stream_id, header.streamlet_id, header.min_timestamp_us, header.max_timestamp_us) == (
        7,
        3,
        1234,
        1234,
    )


async def test_an_entry_without_writes_promises_up_to_a_grace_before_the_clock(engine: Engine) -> None:
    broker = open_broker(engine)
    first = await described(broker)
    assert (first.HasField("watermark_us"), first.promised_us) == (False, NOW_US)
    set_time(engine, NOW_US + 7000 * MS)

    later = await described(broker)
    assert later.promised_us == NOW_US + 6000 * MS, "a grace before the clock"
    assert later.promised_at.group_id == 0, "also where nothing was ever written"
    assert engine.arena.free_slots == engine.arena.slot_count, "which takes no memory"


async def test_a_description_without_a_request_for_a_promise_promises_nothing(engine: Engine) -> None:
    broker = open_broker(engine)
    set_time(engine, NOW_US + 7000 * MS)
    seen = await described(broker, promise=False)
    assert (seen.HasField("promised_us"), seen.settled_us) == (False, NOW_US + 6000 * MS)
    broker.append(sent(NOW_US + 9, 0), sent(NOW_US + 5, 1))
    assert chunks(broker) == [(False, NOW_US + 9), (False, NOW_US + 5)], "nothing had to be kept"

    broker.broker.clock_offset.least_us = GRACE_US
    assert (await described(broker, promise=False)).settled_us == NOW_US + 9, "by its clock it would promise nothing"


async def test_a_stream_without_epochs_promises_and_settles_nothing(engine: Engine) -> None:
    broker = open_broker(engine, epoch_ms=0)
    broker.append(sent(NOW_US, 0))
    seen = await described(broker)
    assert (seen.HasField("promised_us"), seen.HasField("settled_us"), seen.watermark_us) == (False, False, NOW_US)


@pytest.mark.parametrize("durability", [common_pb2.DURABILITY_LEADER, common_pb2.DURABILITY_PERSISTED])
async def test_a_punctuation_is_written_only_before_a_chunk_older_than_the_promise(
    engine: Engine, durability: int
) -> None:
    broker = open_broker(engine, durability=durability)
    set_time(engine, NOW_US + 7000 * MS)
    promised_us = (await described(broker)).promised_us

    broker.write(sent(promised_us, 0))
    assert chunks(broker) == [(False, promised_us)], "it is not older"
    set_time(engine, NOW_US + 9000 * MS)
    assert (await described(broker)).promised_us == promised_us + 2000 * MS
    broker.write(sent(promised_us + 1, 1), sent(promised_us + 2, 2))
    engine.run()

    assert chunks(broker) == [
        (False, promised_us),
        (True, promised_us + 2000 * MS),
        (False, promised_us + 1),
        (False, promised_us + 2),
    ]
    entry = await described(broker)
    assert (entry.first_record, entry.next_record) == (0, 3), "a punctuation is not a record"
    assert entry.watermark_us == promised_us + 2000 * MS, "as brokers tell it"
    assert broker.counters.punctuations == 1
    streamlet = broker.streams.streamlet(STREAM_ID, 0)
    assert dict(streamlet.producers) == {1: (0, 3)}, "and of no producer"


async def test_no_punctuation_is_written_without_a_promise(engine: Engine) -> None:
    broker = open_broker(engine, punctuation=common_pb2.PUNCTUATION_PRODUCERS)
    assert not (await described(broker)).HasField("promised_us")
    broker.append(sent(NOW_US, 0), sent(5, 1), sent(-5, 2))
    assert [is_one for is_one, _ in chunks(broker)] == [False] * 3


async def test_an_older_repeat_is_answered_without_a_punctuation(engine: Engine) -> None:
    broker = open_broker(engine)
    broker.append(sent(NOW_US, 0))
    set_time(engine, NOW_US + 9000 * MS)
    await described(broker)
    statuses = broker.append(sent(NOW_US, 0), sent(NOW_US, 5), sent(NOW_US, 1))
    assert [status.duplicate for status in statuses] == [True, False, False]
    assert [status.HasField("error") for status in statuses] == [False, True, False]
    assert [is_one for is_one, _ in chunks(broker)] == [False, True, False]


async def test_the_next_owner_keeps_the_promise_of_the_last_one_and_no_more(make_engine: MakeEngine) -> None:
    engines = make_engine(16), make_engine(16)
    for engine in engines:
        set_time(engine, NOW_US)
    cluster = Cluster(*engines, **EPOCHS)
    cluster.owner.append(sent(NOW_US, 0))
    set_time(engines[0], NOW_US + 9000 * MS)
    promised_us = (await described(cluster.owner)).promised_us
    assert promised_us == NOW_US + 8000 * MS
    set_time(engines[1], NOW_US + 20_000 * MS)

    state = await cluster.move(2)
    assert state.promised_us == promised_us
    assert not (await described(cluster.brokers[1])).HasField("promised_us"), "who has lost it promises nothing"
    cluster.owner.append(sent(promised_us, 1), sent(promised_us - 1, 2))
    assert chunks(cluster.owner) == [(False, promised_us), (False, promised_us - 1)]

    assert (await described(cluster.owner)).promised_us == NOW_US + 19_000 * MS
    await cluster.move(1)
    cluster.owner.append(sent(promised_us, 3))
    assert chunks(cluster.owner)[-2:] == [(True, NOW_US + 19_000 * MS), (False, promised_us)]


async def test_a_handed_over_promise_is_kept_when_the_stream_makes_no_more_promises(
    make_engine: MakeEngine,
) -> None:
    engines = make_engine(16), make_engine(16)
    for engine in engines:
        set_time(engine, NOW_US)
    cluster = Cluster(*engines, **EPOCHS)
    promised_us = (await described(cluster.owner)).promised_us
    cluster.info.config.punctuation = common_pb2.PUNCTUATION_PRODUCERS
    await cluster.move(2)
    cluster.owner.append(sent(promised_us - 1, 0))
    assert chunks(cluster.owner) == [(True, promised_us), (False, promised_us - 1)]


async def test_an_owner_without_a_handover_keeps_what_the_last_one_may_have_promised(engine: Engine) -> None:
    broker = open_broker(engine, entries=2)
    streamlet = broker.streams.streamlet(STREAM_ID, 0)
    assert [entry.promised_us for entry in streamlet.entries] == [NOW_US] * 2


@pytest.mark.parametrize("grace_ms", [1, 1000])
async def test_a_new_stream_has_promised_nothing(engine: Engine, grace_ms: int) -> None:
    broker = open_broker(engine)
    info = stream_info(8, **(EPOCHS | {"epoch_grace_ms": grace_ms}))
    request = api.OPEN_STREAMLETS.request(stream=info, created=True)
    await broker.ask(api.OPEN_STREAMLETS, request)
    assert not broker.streams.streamlet(8, 0).promised_us > 0, "however long its creation took"


async def test_a_stream_that_gets_epochs_later_has_promised_nothing_before(engine: Engine) -> None:
    broker = open_broker(engine, epoch_ms=0)
    set_time(engine, NOW_US + 9000 * MS)
    broker.streams.get(STREAM_ID).alter(_altered())
    broker.append(sent(5, 0))
    assert chunks(broker) == [(False, 5)]
    assert (await described(broker)).promised_us == NOW_US + 9000 * MS - GRACE_US
    broker.append(sent(5, 1))
    assert chunks(broker) == [(False, 5), (True, NOW_US + 9000 * MS - GRACE_US), (False, 5)]


@pytest.mark.parametrize(
    ("config", "promised_us"),
    [
        ({"clock_until_us": NOW_US - 5}, NOW_US - 5),
        ({"clock_until_us": NOW_US + 5}, NOW_US),
        ({"clock_until_us": NOW_US - 5, "epoch_ms": 0}, NOW_US - 5),
        ({}, NO_TIME),
    ],
)
async def test_an_owner_keeps_promises_from_the_time_when_the_clock_counted(
    engine: Engine, config: dict[str, Any], promised_us: int
) -> None:
    broker = open_broker(engine, punctuation=common_pb2.PUNCTUATION_PRODUCERS, **config)
    assert broker.streams.streamlet(STREAM_ID, 0).promised_us == promised_us
    broker.append(sent(5, 0))
    assert chunks(broker)[:-1] == [(True, promised_us)] * (promised_us != NO_TIME)


async def test_only_chunks_with_times_too_far_ahead_are_refused(engine: Engine) -> None:
    broker = open_broker(engine)
    statuses = broker.append(sent(NOW_US + 5000 * MS, 0), sent(NOW_US + 5000 * MS + 1, 1), sent((1 << 63) - 1, 1))
    errors = [status.error.code for status in statuses]
    assert errors == ["", TimestampAhead.code, TimestampAhead.code]
    assert "timestamp_ahead_max_ms" in statuses[1].error.message
    assert chunks(broker) == [(False, NOW_US + 5000 * MS)]
    broker.streams.get(STREAM_ID).alter(_altered(timestamp_ahead_max_ms=0))
    assert broker.append(sent((1 << 63) - 1, 1))


def _altered(**config: Any) -> common_pb2.StreamInfo:
    info: common_pb2.StreamInfo = stream_info(**(EPOCHS | config))
    info.config_version = 1
    return info


async def test_a_broker_without_a_valid_lease_or_whose_clock_is_off_promises_nothing(engine: Engine) -> None:
    broker = open_broker(engine)
    service = broker.broker
    service.lease.renew(0.0, 1)
    assert not (await described(broker)).HasField("promised_us"), "somebody else may own it by now"
    service.lease.renew(0.0, 0)
    assert (await described(broker)).HasField("promised_us")
    service.clock_offset.least_us = GRACE_US
    assert not (await described(broker)).HasField("promised_us"), "a later owner may not know of it"


@pytest.mark.parametrize(
    ("coordinator_us", "round_trip_s", "least_us"),
    [
        (0, 0.0, 0),
        (NOW_US, 0.0, 0),
        (NOW_US - 300_000, 0.2, 100_000),
        (NOW_US - 300_000, 0.4, 0),
        (NOW_US + 150_000, 0.0, -50_000),
        (NOW_US + 50_000, 5.0, 0),
        (NOW_US + 9_000_000, 5.0, -8_900_000),
        (NOW_US - 9_000_000, -1.0, 9_000_000),
    ],
)
def test_the_clock_offset_is_what_the_round_trip_does_not_explain(
    coordinator_us: int, round_trip_s: float, least_us: int
) -> None:
    offset = ClockOffset(lambda: NOW_US)
    offset.note(coordinator_us, round_trip_s)
    assert offset.least_us == least_us


def test_a_clock_offset_beyond_half_the_grace_is_logged_once() -> None:
    offset = ClockOffset(lambda: NOW_US)
    with capture_logs() as lines:
        assert offset.is_within(0)
        offset.note(NOW_US - 600_000, 0.0)
        assert offset.is_within(1_300_000)
        assert [offset.is_within(1_000_000) for _ in range(2)] == [False, False]
        offset.note(NOW_US, 0.0)
        assert offset.is_within(1_000_000)
    assert [line["log_level"] for line in lines] == ["warning", "info"]


def test_a_clock_that_keeps_epochs_open_is_a_health_warning() -> None:
    offset = ClockOffset(lambda: NOW_US)
    health = Health()
    watch_clock(health, offset)
    assert [(check.name, check.state) for check in health.checks()[1:]] == [("clock", State.OK)]
    offset.note(NOW_US + 2_600_000, 0.0)
    assert not offset.is_within(3_000_000)
    check = health.checks()[-1]
    assert check.state is State.WARNING
    assert "2.5 s behind the coordinator's: epochs of streams with a grace of 3 s stay open" in check.text
    offset.note(NOW_US, 0.0)
    assert offset.is_within(3_000_000)
    assert health.checks()[-1].state is State.OK


async def test_a_client_cannot_write_a_punctuation(engine: Engine) -> None:
    broker = open_broker(engine)
    statuses = broker.append(encode_punctuation(STREAM_ID, 0, NOW_US, 5), sent(NOW_US, 0))
    assert [status.error.code for status in statuses] == ["invalid_argument", ""]
    statuses = broker.append(sent(NOW_US, 1, typed=False)[:5] + b"\x04" + sent(NOW_US, 1)[6:])
    assert statuses[0].error.code == "corrupt_chunk"


@pytest.mark.parametrize("room", [CHUNK_BYTES, HEADER_BYTES, 0])
async def test_a_punctuation_goes_before_its_chunk_wherever_there_is_room(engine: Engine, room: int) -> None:
    broker = open_broker(engine)
    broker.append(sent(NOW_US, 0, size=SLOT_BYTES - room))
    set_time(engine, NOW_US + 9000 * MS)
    await described(broker)
    broker.append(sent(NOW_US + 1, 1, size=SLOT_BYTES))
    entry = broker.streams.streamlet(STREAM_ID, 0).entries[0]
    assert [is_one for is_one, _ in chunks(broker)] == [False, True, False]
    assert [segment.head for segment in entry.tail][-1] == SLOT_BYTES
    assert (await described(broker)).next_record == 2


@pytest.mark.parametrize("on_disk", [False, True])
async def test_boundaries_stay_where_they_were_promised(engine: Engine, on_disk: bool) -> None:
    broker = open_broker(engine)
    streamlet = broker.streams.streamlet(STREAM_ID, 0)
    entry = streamlet.entries[0]
    broker.append(sent(NOW_US, 0))
    set_time(engine, NOW_US + 9000 * MS)
    promised = await described(broker)
    place = Position(promised.promised_at.group_id, promised.promised_at.segment_id, promised.promised_at.position)
    broker.append(sent(NOW_US - 1, 1), sent(NOW_US + 20_000, 2), sent(NOW_US + 5000 * MS, 3))
    if on_disk:
        for segment in list(entry.tail):
            engine.memory.close(segment)
        engine.run()
        assert entry.stored_segments

    for time_us in (NOW_US + 1, promised.promised_us):
        step = locate(streamlet, 0, Query(timestamp_us=time_us), Progress(EARLIEST), 1 << 10)
        assert step.place is not None
        assert step.place.position == place, "nothing that is older than what was promised comes behind it"
    assert watermark_of(entry) == promised.promised_us


async def test_watermarks_outlive_removed_records(make_engine: MakeEngine) -> None:
    engine = make_engine(8)
    broker = open_broker(engine)
    broker.append(*(sent(time_us, at) for at, time_us in enumerate((50, 900, 10, 20, 30, 40, 45, 46, 47))))
    engine.run()
    entry = broker.streams.streamlet(STREAM_ID, 0).entries[0]
    assert watermark_of(entry) == NOW_US, "it was promised before all of them"
    assert entry.removed_watermark_us == NO_TIME
    outcome = Outcome()
    broker.streams.move_start(entry, Position(2, 1, 0), entry.tail[-1].first_record, outcome)
    assert entry.removed_watermark_us == NOW_US
    first = next(entry.segments())[1]
    assert isinstance(first, Segment)
    times = [header.max_timestamp_us for header, _ in iterate_chunks(first.slot.view, 0, first.head)]
    assert [watermark_within(first, end) for end in first.chunk_ends] == list(accumulate(times, max))
    assert watermark_within(first, 0) == NO_TIME


def test_a_punctuation_is_made_once_and_belongs_to_no_producer(engine: Engine) -> None:
    set_time(engine, NOW_US)
    log = Log(engine)
    log.streamlet.set_epochs(EpochRules(by_clock=True, grace_us=GRACE_US))
    log.append(max_timestamp_us=NOW_US)
    log.streamlet.entries.promise(NOW_US + 5)
    header = verify_chunk(sent(NOW_US + 1, 1))
    assert log.streamlet.keep_promise(header, CHUNK_BYTES) is not None
    assert log.streamlet.keep_promise(header, CHUNK_BYTES) is None, "once"
    assert list(log.entry.tail[-1].producers) == [1]


@pytest.mark.parametrize("seed", first_quick(range(20), 4))
async def test_a_broker_promises_and_punctuates_as_its_model_does(seed: int, make_engine: MakeEngine) -> None:
    random, engine = Random(seed), make_engine(64)
    broker, model, now_us, sequence = open_broker(engine), Owner(GRACE_US), NOW_US, 0
    streamlet = broker.streams.streamlet(STREAM_ID, 0)
    broker.paused = True  # `chunks` does not look at the disk
    model.begin(NOW_US)
    for number in range(60):
        match random.randrange(5):
            case 0:
                now_us += random.randrange(3000 * MS)
                set_time(engine, now_us)
            case 1:
                promised_us, watermark_us = streamlet.promise(streamlet.entries[0]), model.watermark
                assert promised_us is not None
                assert max(promised_us, watermark_us) == max(model.promise(now_us)[0], watermark_us)
            case 2:
                said_us = now_us + random.randrange(-3000 * MS, 5000 * MS)
                request = api.PUNCTUATE.request(stream_id=STREAM_ID, streamlet_ids=[0], timestamp_us=said_us)
                await broker.ask(api.PUNCTUATE, request)
                model.say(said_us)
            case _:
                time_us = now_us + random.randrange(-6000 * MS, 500 * MS)
                broker.append(sent(time_us, sequence))
                model.append(time_us, number)
                sequence += 1
        assert chunks(broker) == [(kind == "punctuation", time_us) for kind, time_us, _ in model.log]
        assert streamlet.entries[0].promised_us in {model.promised, NO_TIME}
