"""Brokers, backups and the coordinator are killed or paused: no acknowledged record is lost, and the others
continue.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from kera.client import Client, StreamDescription
from kera.core.errors import KeraError
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2, coordinator_pb2
from tests.chaos.control import Chaos
from tests.integration.control_support import (
    TIMEOUT_S,
    Reader,
    broker_id_of,
    broker_name,
    check_log,
    connect,
    control_cluster,
    now_us,
    reader,
    streamlets_of,
    until_recovered,
    until_registered,
    until_safe,
    writer,
)
from tests.integration.replication_support import backup_name
from tests.integration.shared_cluster import SharedCluster
from tests.integration.support import until, value_of

# -- under load ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replication", "scenarios"),
    [
        pytest.param(1, ("broker", "backup"), id="alone"),
        pytest.param(2, ("broker+backup", "broker+coordinator"), id="pairs"),
        pytest.param(2, ("broker+owner",), id="owner"),
        pytest.param(1, ("coordinator", "broker-memory"), id="back"),
        pytest.param(2, ("frozen-broker", "frozen-backup"), id="frozen"),
        pytest.param(1, ("drain+owner",), id="drained-to"),
        pytest.param(2, ("drain+broker",), id="drained-from"),
    ],
)
async def test_acknowledged_records_are_neither_lost_nor_doubled(
    tmp_path: Path, replication: int, scenarios: Sequence[str]
) -> None:
    async with (
        control_cluster(tmp_path) as cluster,
        Chaos(cluster, random.Random(7), replication=replication) as chaos,
    ):
        for scenario in scenarios:
            await chaos.round(scenario)


# -- one thing at a time ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def owned(
    cluster: SharedCluster | LocalCluster, *, durability: str | None = None, streamlets: int = 1
) -> AsyncIterator[tuple[Client, str]]:
    """A client, and the name of the broker that owns the whole stream "s"."""
    async with await connect(cluster) as client:
        made = await client.admin.create_stream(
            "s", streamlets=streamlets, brokers=1, group_segments=2, replication=1, durability=durability
        )
        (owner_id,) = {assignment.broker_id for assignment in made.assignments.values()}
        yield client, broker_name(cluster, owner_id)


def raw_chunk(stream: StreamDescription, producer: tuple[int, int], sequence: int) -> bytes:
    """A chunk of a producer with one record, whose number is its sequence."""
    row = {"timestamp": 0, "keys": None, "value": value_of(sequence), "headers": None}
    return encode_chunk(
        encode_payload(pa.RecordBatch.from_pylist([row], schema=DEFAULT_SCHEMA)),
        record_count=1,
        stream_id=stream.stream_id,
        streamlet_id=0,
        schema_id=stream.schema_id,
        producer_id=producer[0],
        producer_epoch=producer[1],
        sequence=sequence,
        created_us=0,
        min_timestamp_us=0,
        max_timestamp_us=0,
    ).to_bytes()


async def channel_to(client: Client, stream: str) -> Channel:
    """A connection to the owner of a stream's first streamlet."""
    broker = (await client.admin.describe_stream(stream)).broker_of(0)
    assert broker is not None
    return await FrameChannel.connect_tcp(broker.frames_address, timeout_s=TIMEOUT_S)


async def write(channel: Channel, *chunks: bytes) -> list[broker_pb2.ChunkStatus]:
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(chunks))
    return list((await channel.submit(api.MULTI_WRITE_CHUNKS, request, chunks, timeout_s=TIMEOUT_S)).message.statuses)


async def new_producer(client: Client) -> tuple[int, int]:
    answer = await client._cluster.ask(api.INIT_PRODUCER, coordinator_pb2.InitProducerRequest())
    return answer.producer_id, answer.producer_epoch


async def numbers(client: Client) -> list[bytes | None]:
    async with client.consumer("s", start="earliest", end="latest") as consumer:
        return [record.value async for record in consumer]


@pytest.mark.slow
async def test_the_new_owner_recognises_repeated_chunks_of_a_producer(members: SharedCluster) -> None:
    async with owned(members) as (client, owner):
        stream = await client.describe("s")
        producer = await new_producer(client)
        chunks = [raw_chunk(stream, producer, sequence) for sequence in range(7)]
        before = await channel_to(client, "s")
        stored = await write(before, *chunks[:5])
        assert not any(status.HasField("error") for status in stored)

        begun_us = now_us()
        await members.kill(owner)
        await until_recovered(client, [broker_id_of(members, owner)], begun_us)
        await before.close()

        after = await channel_to(client, "s")
        again = await write(after, *chunks[3:6])
        assert [status.duplicate for status in again] == [True, True, False]
        assert [status.first_record for status in again] == [3, 4, 5], "ordinals go on"
        (late,) = await write(after, raw_chunk(stream, producer, 9))
        assert late.error.code == "out_of_sequence"
        await after.close()
        assert await numbers(client) == [value_of(number) for number in range(6)]


@pytest.mark.slow
async def test_a_consumer_continues_after_a_recovery_where_another_one_stopped(members: SharedCluster) -> None:
    async with owned(members, streamlets=2) as (client, owner), writer(client, "s") as load:
        await load.go_on(count=100)
        found = Reader(client, load.stream)
        found.reopen()  # at the next chunk
        await found.read()
        assert 0 < found.records < load.acknowledged
        await load.settle()

        begun_us = now_us()
        await members.kill(owner)
        await until_recovered(client, [broker_id_of(members, owner)], begun_us)
        await found.read(end="latest")
        assert found.records == load.acknowledged
        load.paused = False
        await load.go_on()
        await load.settle()
        await found.read(end="latest")
        assert found.records == load.acknowledged


async def test_a_broker_that_returns_late_owns_nothing_and_can_take_streamlets_again(
    members: SharedCluster,
) -> None:
    async with owned(members, streamlets=2) as (client, owner):
        owner_id = broker_id_of(members, owner)
        async with writer(client, "s") as load, reader(client, "s") as follower:
            await load.go_on(count=50)
            begun_us = now_us()
            await members.kill(owner)
            (recovery,) = await until_recovered(client, [owner_id], begun_us)
            assert recovery.phase == "done"
            assert (recovery.streamlets_total, recovery.streamlets_restored) == (2, 2)
            assert recovery.bytes_recovered >= recovery.bytes_total > 0
            assert recovery.records_lost == 0
            times = [recovery.detected_us, recovery.fenced_us, recovery.opened_us, recovery.readable_us]
            assert begun_us < times[0]
            assert [*times, recovery.restored_us] == sorted([*times, recovery.restored_us])

            await members.restart(owner)
            await until_registered(client, owner_id)
            assert await streamlets_of(client, "s", owner_id) == []
            stream = await client.admin.describe_stream("s")
            assert all(owner_id not in assignment.broker_ids for assignment in stream.assignments.values())
            await load.go_on()
            await client.admin.move_streamlet("s", 1, owner_id)
            await load.go_on()
            assert await streamlets_of(client, "s", owner_id) == [1]
            await load.settle()
            await follower.catch_up([load])
            assert await check_log(client, "s", [load]) == load.acknowledged


@pytest.mark.slow
async def test_a_recovery_names_the_missing_replicas_and_ends_when_they_return(members: SharedCluster) -> None:
    async with owned(members, durability="persisted") as (client, owner):
        owner_id = broker_id_of(members, owner)
        async with writer(client, "s") as load:
            await load.go_on(count=50)
            await load.settle()
            holders = {backup_name(members, each) for delivery in load.deliveries[0] for each in delivery.backups}
            begun_us = now_us()
            for name in holders:
                await members.kill(name)
            await members.kill(owner)
            async with asyncio.timeout(TIMEOUT_S):
                while not any(each.waits_for for each in await client.admin.recoveries()):
                    await asyncio.sleep(0.05)
            for name in holders:
                await members.restart(name)
            (recovery,) = await until_recovered(client, [owner_id], begun_us)
            assert (recovery.phase, list(recovery.waits_for), recovery.records_lost) == ("done", [], 0)
            load.paused = False
            await load.go_on()
            await load.settle()
            assert await check_log(client, "s", [load]) == load.acknowledged


async def test_a_broker_that_was_paused_too_long_acknowledges_nothing_and_ends(members: SharedCluster) -> None:
    async with owned(members) as (client, owner):
        stream = await client.describe("s")
        producer = await new_producer(client)
        chunks = [raw_chunk(stream, producer, sequence) for sequence in range(6)]
        zombie = await channel_to(client, "s")
        assert not any(status.HasField("error") for status in await write(zombie, *chunks[:2]))

        begun_us = now_us()
        await members.pause(owner)
        try:
            asked = [asyncio.create_task(write(zombie, chunk)) for chunk in chunks[2:4]]
            await until_recovered(client, [broker_id_of(members, owner)], begun_us)
            successor = await channel_to(client, "s")
            assert not any(status.HasField("error") for status in await write(successor, *chunks[2:6]))
        finally:
            await members.resume(owner)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, list):
                assert [status.HasField("error") for status in answer] == [True]
            else:
                assert isinstance(answer, KeraError)
        await until(lambda: owner not in members.processes, TIMEOUT_S)
        await zombie.close()
        await successor.close()
        assert await numbers(client) == [value_of(number) for number in range(6)]


@pytest.mark.slow
async def test_a_broker_that_restarts_in_time_gets_its_streamlets_back(tmp_path: Path) -> None:
    patient = {"report_grace_ms": 60_000, "heartbeats_missed_max": 300}  # however long the broker takes to start
    async with (
        control_cluster(tmp_path, brokers=2, backups=2, coordinator_settings=patient) as cluster,
        owned(cluster) as (client, owner),
    ):
        owner_id = broker_id_of(cluster, owner)
        async with writer(client, "s") as load:
            await load.go_on(count=50)
            await cluster.restart(owner)  # a planned stop: nothing has to be recovered
            await load.go_on()
            async with asyncio.timeout(TIMEOUT_S):
                while await streamlets_of(client, "s", owner_id) != [0]:  # it was handed over, and comes back
                    await asyncio.sleep(0.05)
            assert all(each.phase == "cancelled" for each in await client.admin.recoveries())
            await load.settle()
            await until_safe(cluster)
            assert await check_log(client, "s", [load]) == load.acknowledged


@pytest.mark.slow
async def test_streams_without_replication_wait_for_their_broker(members: SharedCluster) -> None:
    async with owned(members) as (client, owner):
        owner_id = broker_id_of(members, owner)
        await client.admin.create_stream("alone", streamlets=3, replication=0)
        mine = await streamlets_of(client, "alone", owner_id)
        assert len(mine) == 1
        async with writer(client, "alone") as load, writer(client, "s") as other:
            await load.go_on(count=50)
            begun_us = now_us()
            await members.kill(owner)
            await until_recovered(client, [owner_id], begun_us)
            await other.go_on()
            assert await streamlets_of(client, "alone", owner_id) == mine
            await members.restart(owner)
            await load.go_on()
            await load.settle()
            assert await streamlets_of(client, "alone", owner_id) == mine
            assert await check_log(client, "alone", [load]) == load.acknowledged
