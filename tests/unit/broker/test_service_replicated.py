"""Writing to and reading from replicated streams: which writes wait, their answers, and what readers see."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from kera.broker.replication.virtual_log import Send
from kera.broker.serving.limits import ServingLimits
from kera.core.base.clock import boottime_s
from kera.core.base.ids import Position
from kera.core.errors import Unavailable
from kera.core.rpc import Reply, api
from kera.v1 import common_pb2
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.replication_support import EPOCH, FIRST_ID, ModelBackup, Wire, nothing_pinned
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    STREAM_ID,
    Broker,
    Engine,
    chunk,
    cursor,
    read_range,
    sequences_of,
    stream_info,
)
from tests.virtual_loop import run_virtually

LEADER, REPLICATED, PERSISTED = (
    common_pb2.DURABILITY_LEADER,
    common_pb2.DURABILITY_REPLICATED,
    common_pb2.DURABILITY_PERSISTED,
)
WAIT_MS = 5000


class ReplicatedBroker(Broker):
    """A broker with model backups, which do nothing until the test runs them."""

    def __init__(
        self,
        engine: Engine,
        *,
        backups: int = 3,
        up: bool = True,
        limits: ServingLimits | None = None,
        **config: Any,
    ) -> None:
        engine.replication.begin(EPOCH, [])
        self.replication = engine.replication
        self.wire = Wire(engine.replication, [ModelBackup(number + 1) for number in range(backups)])
        if up:
            self.wire.connect()
            self.wire.run()
        super().__init__(engine, limits=limits, pump=self.wire.pump)
        settings = {"replication": 2, "durability": REPLICATED} | config
        self.broker.registered(BROKER_ID, [stream_info(**settings), stream_info(8, **settings)])

    def begin(self, *chunks: bytes, durability: int = 0) -> asyncio.Future[Reply[Any]]:
        """A write that has to wait."""
        result = self.write(*chunks, durability=durability)
        assert isinstance(result, Awaitable), "the write does not wait"
        return asyncio.ensure_future(result)

    def stored(self) -> list[int]:
        """The sequences that readers see in the first entry."""
        return sequences_of(self.read(read_range()))


@pytest.fixture
async def broker(engine: Engine) -> ReplicatedBroker:
    return ReplicatedBroker(engine)


async def turn() -> None:
    """Let all that is ready go on."""
    for _ in range(10):
        await asyncio.sleep(0)  # sleep: one turn of the loop


async def answered(write: asyncio.Future[Reply[Any]]) -> Reply[Any]:
    async with asyncio.timeout(10):
        return await write


def codes(reply: Reply[Any]) -> list[str]:
    return [status.error.code for status in reply.message.statuses]


# --- levels ------------------------------------------------------------------------------------------------


async def test_a_write_is_answered_when_backups_have_it_and_names_them(broker: ReplicatedBroker) -> None:
    write = broker.begin(chunk(1, 0), chunk(1, 1))
    await turn()
    assert not write.done()
    assert broker.stored() == []
    broker.wire.run()
    reply = await answered(write)

    assert codes(reply) == ["", ""]
    assert [status.virtual_segment_id for status in reply.message.statuses] == [FIRST_ID] * 2
    assert {status.durability for status in reply.message.statuses} == {REPLICATED}
    (virtual,) = reply.message.virtual_segments
    holders = [id_ for id_, backup in broker.wire.backups.items() if FIRST_ID in backup.replicas]
    assert (virtual.virtual_segment_id, sorted(virtual.backup_ids)) == (FIRST_ID, holders)
    assert broker.stored() == [0, 1]


async def test_a_write_of_a_lower_level_is_answered_at_once_and_readers_wait(broker: ReplicatedBroker) -> None:
    (status,) = broker.append(chunk(1, 0), durability=LEADER)
    assert (status.durability, status.virtual_segment_id, broker.stored()) == (LEADER, 0, [])
    broker.wire.run()

    assert broker.stored() == [0]


async def test_a_write_of_level_persisted_asks_backups_to_persist_it(broker: ReplicatedBroker) -> None:
    write = broker.begin(chunk(1, 0), durability=PERSISTED)
    (batch,) = {effect.batch for effect in broker.wire.sent if isinstance(effect, Send)}
    assert batch.persist
    broker.wire.run()

    assert (await answered(write)).message.statuses[0].durability == PERSISTED


async def test_readers_of_a_stream_of_level_leader_do_not_wait_for_replicas(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, durability=LEADER)
    broker.append(chunk(1, 0))
    write = broker.begin(chunk(1, 1), durability=REPLICATED)
    assert broker.stored() == [0, 1]
    broker.wire.run()

    assert codes(await answered(write)) == [""]


# --- repeats -----------------------------------------------------------------------------------------------


async def test_a_repeat_waits_as_the_first_attempt_does(broker: ReplicatedBroker) -> None:
    first = broker.begin(chunk(1, 0))
    again = broker.begin(chunk(1, 0))
    await turn()
    assert (first.done(), again.done()) == (False, False)
    broker.wire.run()
    await answered(first)
    (status,) = (await answered(again)).message.statuses

    assert (status.duplicate, status.position, status.error.code) == (True, 0, "")
    (later,) = broker.append(chunk(1, 0))
    assert later.duplicate


async def test_a_repeat_with_a_higher_level_is_sent_to_backups_again_and_waits_for_them(
    broker: ReplicatedBroker,
) -> None:
    first = broker.begin(chunk(1, 0))
    broker.wire.run()
    await answered(first)
    broker.wire.sent.clear()
    again = broker.begin(chunk(1, 0), durability=PERSISTED)
    (batch,) = {effect.batch for effect in broker.wire.sent if isinstance(effect, Send)}
    assert batch.persist
    broker.wire.run()
    (status,) = (await answered(again)).message.statuses

    assert (status.error.code, status.duplicate, status.durability) == ("", True, PERSISTED)


async def test_a_repeat_of_a_shed_chunk_is_acknowledged_only_when_backups_have_it(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, durability=LEADER, up=False)
    broker.replication.limits.lag_bytes_max = CHUNK_BYTES
    broker.append(chunk(1, 0))
    broker.append(chunk(1, 1))  # the first one is shed
    assert broker.replication.backlog.extents
    broker.replication.limits.lag_bytes_max = 1 << 20
    broker.wire.connect()
    again = broker.begin(chunk(1, 0), durability=REPLICATED)
    broker.wire.run()
    reply = await answered(again)

    assert codes(reply) == [""]
    assert len(broker.wire.holders((STREAM_ID, 0, 0, 0))) == 2


async def test_a_repeat_of_a_chunk_only_on_disk_without_replicas_is_not_replicated(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(4)
    broker = ReplicatedBroker(engine, durability=LEADER, up=False)
    broker.replication.limits.lag_bytes_max = CHUNK_BYTES
    for sequence in range(30):
        broker.append(chunk(1, sequence))
        engine.run()
    broker.wire.connect()
    broker.wire.run()
    assert broker.wire.holders((STREAM_ID, 0, 0, 0)) == set()
    (status,) = broker.append(chunk(1, 0), durability=REPLICATED)

    assert status.error.code == "not_replicated"


# --- too few backups, and slow ones ------------------------------------------------------------------------


async def test_without_enough_backups_nothing_is_appended(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, up=False)
    broker.wire.connect(1)
    (status,) = broker.append(chunk(1, 0))
    assert status.error.code == "too_few_backups"
    assert engine.streams.get(STREAM_ID).streamlets[0].entries[0].tail == []
    broker.wire.connect(2)
    write = broker.begin(chunk(1, 0))
    broker.wire.run()

    assert (await answered(write)).message.statuses[0].first_record == 0


async def test_level_leader_needs_no_backups(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, durability=LEADER, up=False)
    (status,) = broker.append(chunk(1, 0))

    assert (status.error.code, broker.stored()) == ("", [0])


async def test_level_leader_goes_on_without_backups_when_the_memory_is_full(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, durability=LEADER, up=False)
    refused = []
    for sequence in range(60):
        write = asyncio.ensure_future(_reply(broker.write(chunk(1, sequence))))
        await turn()
        refused += [sequence] if not write.done() or codes(write.result()) != [""] else []
        write.cancel()
        engine.run()

    assert refused == []


async def _reply(result: Reply[Any] | Awaitable[Reply[Any]]) -> Reply[Any]:
    return result if isinstance(result, Reply) else await result


async def test_a_lagging_log_holds_writers_back_until_backups_have_caught_up(engine: Engine) -> None:
    broker = ReplicatedBroker(engine)
    broker.replication.limits.lag_bytes_max = 2 * CHUNK_BYTES
    first = broker.begin(chunk(1, 0), chunk(1, 1), chunk(1, 2))
    await turn()
    assert engine.streams.get(STREAM_ID).streamlets[0].entries[0].next_record == 2
    second = broker.begin(chunk(2, 0))
    broker.wire.run()
    await turn()
    broker.wire.run()

    assert codes(await answered(first)) == [""] * 3
    await turn()
    broker.wire.run()
    assert codes(await answered(second)) == [""]


async def test_a_log_that_lags_too_long_refuses_waiting_writes(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, limits=ServingLimits(room_wait_ms=10))
    broker.replication.limits.lag_bytes_max = CHUNK_BYTES
    first = broker.begin(chunk(1, 0))
    second = broker.begin(chunk(1, 1))
    assert codes(await answered(second)) == ["arena_full"]
    broker.wire.run()

    assert codes(await answered(first)) == [""]


# --- requests over several logs ----------------------------------------------------------------------------


async def test_a_request_over_several_virtual_logs_is_answered_when_all_are_replicated(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, entries=4, virtual_logs=4)
    write = broker.begin(
        *(chunk(producer, sequence) for producer in range(3) for sequence in range(2)), chunk(0, stream_id=8)
    )
    for backup_id in (1, 2):
        broker.wire.run(backup_id)
    await turn()
    broker.wire.run()
    reply = await answered(write)

    assert codes(reply) == [""] * 7
    assert len({status.virtual_segment_id for status in reply.message.statuses}) == 4
    assert len(reply.message.virtual_segments) == 4
    assert all(len(virtual.backup_ids) == 2 for virtual in reply.message.virtual_segments)
    assert nothing_pinned(engine)


async def test_only_chunks_whose_backups_do_not_answer_are_not_replicated(engine: Engine) -> None:
    broker = ReplicatedBroker(engine, backups=2, replication=1, entries=2, virtual_logs=2)
    write = broker.begin(chunk(0, 0), chunk(1, 0), chunk(0, 1))
    first = next(effect for effect in broker.wire.sent if isinstance(effect, Send) and effect.place.log_id == 0)
    backup = broker.wire.backups[first.backup_id]
    number = next(at for at, request in enumerate(backup.requests) if request.effect is first)
    backup.requests.rotate(-number)
    backup.carry_out()
    broker.wire.answer(backup.backup_id)
    broker.wire.tick(WAIT_MS + 1)
    reply = await answered(write)

    assert codes(reply) == ["", "not_replicated", ""]
    assert [bool(status.virtual_segment_id) for status in reply.message.statuses] == [True, False, True]
    broker.wire.run()
    again = broker.write(chunk(1, 0))
    assert isinstance(again, Reply)
    assert again.message.statuses[0].duplicate


async def test_dropping_a_stream_fails_its_waiting_writes(broker: ReplicatedBroker) -> None:
    write = broker.begin(chunk(1, 0))
    broker.streams.drop(STREAM_ID)
    broker.wire.run()

    assert codes(await answered(write)) == ["not_replicated"]


async def test_a_cancelled_write_does_not_affect_others(broker: ReplicatedBroker) -> None:
    gone, stays = broker.begin(chunk(1, 0)), broker.begin(chunk(2, 0))
    await turn()
    gone.cancel()
    await turn()
    broker.wire.run()

    assert codes(await answered(stays)) == [""]


# --- readers and the disk ----------------------------------------------------------------------------------


async def test_readers_see_only_chunks_that_all_backups_have(broker: ReplicatedBroker) -> None:
    first = broker.begin(chunk(1, 0))
    second = broker.begin(chunk(1, 1))
    backups = [backup for backup in broker.wire.backups.values() if backup.requests]
    broker.wire.step(backups[0].backup_id)
    assert broker.stored() == []
    broker.wire.step(backups[1].backup_id)
    assert broker.stored() == [0]
    await answered(first)
    broker.wire.run()
    await answered(second)

    assert broker.stored() == [0, 1]


async def test_a_closed_segment_goes_to_disk_when_backups_have_all_of_it(broker: ReplicatedBroker) -> None:
    write = broker.begin(*(chunk(1, sequence) for sequence in range(5)))
    entry = broker.streams.get(STREAM_ID).streamlets[0].entries[0]
    broker.engine.run()
    assert entry.last_stored == (0, 0)
    assert broker.engine.memory.waits_for_replicas
    broker.wire.run()
    await answered(write)
    await turn()

    assert entry.last_stored == (1, 1)
    assert broker.stored() == [0, 1, 2, 3, 4]


# --- lease and fence ---------------------------------------------------------------------------------------


async def test_a_broker_without_its_lease_refuses_writes_to_replicated_streams(broker: ReplicatedBroker) -> None:
    broker.broker.lease.renew(boottime_s() - 2, 1000)
    (refused,) = broker.append(chunk(1, 0))
    assert (refused.error.code, broker.counters.writes_without_lease) == ("unavailable", 1)
    assert "cannot reach the coordinator" in refused.error.message
    broker.broker.lease.renew(boottime_s(), 1000_000)
    write = broker.begin(chunk(1, 0))
    broker.wire.run()

    assert codes(await answered(write)) == [""]


async def test_a_lease_runs_out_while_the_host_is_suspended(
    broker: ReplicatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slept_s = time.clock_gettime, 0.0
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: clock(which) + (slept_s if which == time.CLOCK_BOOTTIME else 0)
    )
    broker.broker.lease.renew(time.clock_gettime(time.CLOCK_BOOTTIME), 60_000)
    write = broker.begin(chunk(1, 0))
    broker.wire.run()
    assert codes(await answered(write)) == [""]

    slept_s = 61.0  # the monotonic clock has stood still
    (refused,) = broker.append(chunk(1, 1))

    assert (refused.error.code, broker.counters.writes_without_lease) == ("unavailable", 1)


async def test_a_broker_without_its_lease_still_takes_writes_to_streams_without_replicas(
    broker: ReplicatedBroker,
) -> None:
    broker.streams.open(stream_info(9), BROKER_ID)
    broker.broker.lease.renew(boottime_s() - 2, 1000)

    assert [status.error.code for status in broker.append(chunk(1, 0, stream_id=9))] == [""]


async def test_a_write_that_waits_when_the_lease_ends_is_answered_when_backups_have_it(
    broker: ReplicatedBroker,
) -> None:
    """Backups would refuse it if another broker had the streamlet by now."""
    write = broker.begin(chunk(1, 0))
    broker.broker.lease.renew(boottime_s() - 2, 1000)
    broker.wire.run()

    assert codes(await answered(write)) == [""]


@pytest.mark.parametrize("level", [REPLICATED, PERSISTED])
async def test_a_replaced_broker_acknowledges_no_write(broker: ReplicatedBroker, level: int) -> None:
    waiting = broker.begin(chunk(1, 0), chunk(1, 5), durability=level)
    broker.broker.writer.fence()
    broker.wire.run()

    assert codes(await answered(waiting)) == ["not_replicated", "out_of_sequence"]
    assert [status.error.code for status in broker.append(chunk(1, 1), chunk(1, 2))] == ["not_owner"] * 2


async def test_a_replaced_broker_does_not_acknowledge_a_write_that_waits_for_the_disk(
    engine: Engine,
) -> None:
    broker = Broker(engine, stream_info(durability=PERSISTED))
    broker.paused = True
    waiting = asyncio.ensure_future(broker.write(chunk(1, 0)))  # type: ignore[arg-type]
    broker.broker.writer.fence()
    broker.resume()

    assert codes(await answered(waiting)) == ["not_replicated"]


async def test_a_replaced_broker_refuses_a_write_that_waits_for_room(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    broker.paused = True
    slots = engine.fill_memory()
    waiting = asyncio.ensure_future(broker.write(chunk(1, 0)))  # type: ignore[arg-type]
    await turn()
    broker.broker.writer.fence()

    assert codes(await answered(waiting)) == ["not_owner"]
    for slot in slots:
        slot.retire()


async def test_a_seal_waits_until_backups_have_everything(broker: ReplicatedBroker) -> None:
    write = broker.begin(chunk(1, 0))
    request = api.SEAL_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=[0], wait_ms=WAIT_MS)
    sealing = asyncio.ensure_future(broker.ask(api.SEAL_STREAMLETS, request))
    await turn()
    assert not sealing.done()
    broker.wire.run()

    assert [list(state.next_records) for state in (await sealing).states] == [[1]]
    assert codes(await answered(write)) == [""]
    assert broker.stored() == [0]


async def test_a_seal_that_waits_too_long_for_backups_fails_and_the_streamlet_goes_on(broker: ReplicatedBroker) -> None:
    write = broker.begin(chunk(1, 0))
    request = api.SEAL_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=[0], wait_ms=10)
    with pytest.raises(Unavailable, match="1024 bytes of entry 0 of streamlet 0 did not get to backups within 10 ms"):
        await broker.ask(api.SEAL_STREAMLETS, request)
    again = broker.begin(chunk(1, 1))
    broker.wire.run()

    assert codes(await answered(write)) + codes(await answered(again)) == ["", ""]


async def test_groups_are_listed_as_far_as_they_are_durable(broker: ReplicatedBroker) -> None:
    write = broker.begin(*(chunk(1, sequence) for sequence in range(9)))
    request = api.LIST_GROUPS.request(stream_id=STREAM_ID)
    assert list((await broker.ask(api.LIST_GROUPS, request)).groups) == []
    broker.wire.run()
    await answered(write)
    late = broker.begin(chunk(1, 9))
    answer = await broker.ask(api.LIST_GROUPS, request)
    told = [(g.group_id, g.closed, g.start.group_id, g.end.segment_id, g.end.position) for g in answer.groups]

    assert told == [(1, True, 1, 2, 4096), (2, False, 2, 1, 1024)]
    assert [(g.first_record, g.next_record, g.length_bytes) for g in answer.groups] == [(0, 8, 8192), (8, 9, 1024)]
    first = await broker.ask(api.LIST_GROUPS, api.LIST_GROUPS.request(stream_id=STREAM_ID, groups_max=1))
    last = await broker.ask(api.LIST_GROUPS, api.LIST_GROUPS.request(stream_id=STREAM_ID, after_group_id=1))
    assert [([g.group_id for g in each.groups], each.complete) for each in (first, last)] == [([1], False), ([2], True)]
    broker.wire.run()
    await answered(late)


def test_a_truncation_is_not_acknowledged_before_the_coordinator_knows(engine: Engine) -> None:
    async def truncate() -> None:
        broker = ReplicatedBroker(engine)
        written = broker.begin(*(chunk(1, sequence) for sequence in range(3)))
        broker.wire.run()
        await written
        request = api.TRUNCATE_STREAMLETS.request(cursors=[cursor(Position(1, 1, CHUNK_BYTES))])
        (result,) = (await broker.ask(api.TRUNCATE_STREAMLETS, request)).results
        assert result.error.code == Unavailable.code
        assert "streamlet 0" in result.error.message
        assert broker.stored() == [1, 2], "nobody reads it any more"
        (again,) = (await broker.ask(api.TRUNCATE_STREAMLETS, request)).results
        assert again.error.code == Unavailable.code, "it is still not known"

        asked = asyncio.ensure_future(broker.ask(api.TRUNCATE_STREAMLETS, request))
        await turn()
        (entry,) = broker.streams.moved_starts
        broker.streams.moved_starts.told(entry)
        engine.run()
        (done,) = (await asked).results
        assert not done.HasField("error")
        assert (done.start.group_id, done.start.position) == (1, CHUNK_BYTES)

    run_virtually(truncate())
