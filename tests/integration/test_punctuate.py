"""Producers punctuate streams, and epochs close: with real daemons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from kera.client import Client, ClientSettings, sync
from kera.client.settings import Transport
from kera.core.errors import ClosedError, DataLost, InvalidArgument, TimestampAhead, UnknownStream
from kera.core.format.chunk import encode_header
from kera.core.format.punctuation import encode_punctuation
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.local.cluster import RunningCluster
from kera.v1 import broker_pb2
from tests.integration.control_support import broker_name, connect, now_us, until_recovered
from tests.integration.shared_cluster import SharedCluster
from tests.integration.test_epochs import MS, WAIT_S, kera, read, seen, write

pytestmark = pytest.mark.timeout(120)
HISTORY: dict[str, Any] = {"epoch_ms": 10, "punctuation": "producers"}


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


@pytest.mark.parametrize(
    ("transport", "durability"),
    [
        ("tcp", "persisted"),
        *(
            pytest.param(transport, durability, marks=pytest.mark.slow)
            for transport, durability in [
                ("tcp", "leader"),
                ("grpc", "leader"),
                ("grpc", "persisted"),
                ("unix", "leader"),
                ("unix", "persisted"),
            ]
        ),
    ],
)
async def test_a_punctuation_closes_the_epochs_before_it(
    cluster: RunningCluster, transport: Transport, durability: str
) -> None:
    stream = f"history-{transport}-{durability}"
    async with await Client.connect(cluster.bootstrap, ClientSettings(transport=transport)) as client:
        await client.admin.create_stream(stream, streamlets=4, entries=2, durability=durability, **HISTORY)
        await write(client, stream, [1], [12 * MS], streamlet=0)
        await write(client, stream, [5], streamlet=3)
        async with client.epochs(stream, start=0) as epochs, client.producer() as producer:
            asked = asyncio.ensure_future(read(epochs, 2))
            await producer.prepare(stream)
            producer.send(stream, b"last", timestamp_us=18 * MS, streamlet=3)
            await producer.punctuate(stream, 20 * MS)
            found = await asked
            assert [(epoch.number, epoch.records) for epoch in found] == [(0, 2), (1, 2)]
            assert b"last" in found[1].rows()["value"].to_pylist(), "what was sent before is before it"
            for again in (20 * MS, 1, 0):
                await producer.punctuate(stream, again)
        bounds = await client.bounds(stream)
        watermarks = {each.watermark_us for entries in bounds.values() for each in entries}
        assert watermarks == {None, 20 * MS}, "an entry to which nothing was written gets none"
        async with client.consumer(stream, start="earliest", end="latest") as consumer:
            assert len([record async for record in consumer]) == 4
        assert sum(each.next_record for entries in bounds.values() for each in entries) == 4


async def test_records_older_than_a_punctuation_are_late(client: Client) -> None:
    await client.admin.create_stream("punctuated-late", **HISTORY)
    await write(client, "punctuated-late", [1])
    async with client.producer() as producer:
        await producer.punctuate("punctuated-late", 20 * MS)
        await producer.send("punctuated-late", b"2", timestamp_us=2)
        await producer.punctuate("punctuated-late", 30 * MS)
    async with client.epochs("punctuated-late", start=0) as epochs:
        found = await read(epochs, 2)
    assert [(epoch.number, epoch.records, epoch.late_records) for epoch in found] == [(0, 1, 0), (2, 1, 1)]


@pytest.mark.parametrize("cut", [pytest.param("latest", marks=pytest.mark.slow), "there"])
async def test_records_after_a_removed_history_are_given_to_every_reader(client: Client, cut: str) -> None:
    stream = f"punctuated-removed-{cut}"
    settings: dict[str, Any] = {"consumer_group": "history", "start": "committed"}
    await client.admin.create_stream(stream, **HISTORY)
    await write(client, stream, [1], [12 * MS])
    async with client.producer() as producer:
        await producer.punctuate(stream, 20 * MS)
        async with client.epochs(stream, **settings) as epochs:
            assert [epoch.number for epoch in await read(epochs, 2)] == [0, 1]
            await epochs.commit()
        if cut == "latest":
            await client.admin.truncate_stream(stream, "latest")
        for value, time_us in ((b"late", 3), (b"new", 21 * MS)):
            await producer.prepare(stream)
            await producer.send(stream, value, timestamp_us=time_us)
        if cut == "there":
            ((place,),) = (await client.positions_at(stream, 20 * MS)).values()
            await client.admin.truncate_stream(stream, {0: [place.position]})
        await producer.punctuate(stream, 30 * MS)
    digests = set()
    for arguments in (settings, {"start": "earliest"}, {"start": 2}):
        async with client.epochs(stream, end=3, **arguments) as epochs:
            (epoch,) = await read(epochs, 9)
            assert (epoch.number, epoch.records, epoch.late_records) == (2, 2, 1), arguments
            digests.add(epoch.digest)
    assert len(digests) == 1
    with pytest.raises(DataLost, match="start at 2"):
        async with client.epochs(stream, start=1):
            pass


async def test_punctuating_a_recreated_stream_needs_a_new_prepare(client: Client) -> None:
    await client.admin.create_stream("punctuated-again", **HISTORY)
    async with client.producer() as producer:
        await producer.prepare("punctuated-again")
        await producer.send("punctuated-again", b"old", timestamp_us=1)
        await client.admin.delete_stream("punctuated-again")
        await client.admin.create_stream("punctuated-again", **HISTORY)
        with pytest.raises(UnknownStream, match="prepare it again"):
            await producer.punctuate("punctuated-again", 20 * MS)
        await producer.prepare("punctuated-again")
        await producer.send("punctuated-again", b"new", timestamp_us=2)
        await producer.punctuate("punctuated-again", 20 * MS)
    async with client.epochs("punctuated-again", start=0, end=2) as epochs:
        assert [epoch.records for epoch in await read(epochs, 9)] == [1]


async def test_invalid_punctuations_are_refused(client: Client) -> None:
    await client.admin.create_stream("punctuated-never")
    await client.admin.create_stream("punctuated-now", epoch_ms=1000)
    await write(client, "punctuated-never", [1])
    await write(client, "punctuated-now", [time.time_ns() // 1000])
    wrong: list[tuple[type[Exception], str, Any]] = [
        (InvalidArgument, "punctuated-never", 5),
        (InvalidArgument, "punctuated-now", -1),
        (InvalidArgument, "punctuated-now", 1 << 63),
        (InvalidArgument, "punctuated-now", 1.5),
        (InvalidArgument, "punctuated-now", True),
        (TimestampAhead, "punctuated-now", time.time_ns() // 1000 + 2 * 3_600_000_000),
        (UnknownStream, "punctuated-nothing", 5),
    ]
    async with client.producer() as producer:
        for error, stream, time_us in wrong:
            with pytest.raises(error):
                await producer.punctuate(stream, time_us)
        await producer.punctuate("punctuated-now", 5)
        await client.admin.delete_stream("punctuated-now")
        with pytest.raises(UnknownStream):
            await producer.punctuate("punctuated-now", 5)
    with pytest.raises(ClosedError):
        await producer.punctuate("punctuated-never", 5)


async def test_punctuations_work_while_streamlets_move(client: Client) -> None:
    await client.admin.create_stream("punctuated-moves", streamlets=2, entries=2, **HISTORY)
    await write(client, "punctuated-moves", [1], streamlet=0)
    await write(client, "punctuated-moves", [1], streamlet=1)
    brokers = sorted(broker.broker_id for broker in (await client.admin.describe_cluster()).brokers)
    stop = asyncio.Event()

    async def move() -> None:
        for number in range(6):
            await client.admin.move_streamlet("punctuated-moves", 0, brokers[number % len(brokers)])
        stop.set()

    said = 0
    async with client.producer() as producer:
        moving = asyncio.ensure_future(move())
        while not stop.is_set():
            said += 1
            await producer.punctuate("punctuated-moves", said * MS)
        await moving
        await producer.punctuate("punctuated-moves", 100_000 * MS)
    bounds = await client.bounds("punctuated-moves")
    assert {each.watermark_us for entries in bounds.values() for each in entries} == {None, 100_000 * MS}
    async with client.epochs("punctuated-moves", start=0, end=10_000) as epochs:
        assert [(epoch.number, epoch.records) for epoch in await read(epochs, 9)] == [(0, 2)]


async def test_the_synchronous_client_punctuates(cluster: RunningCluster) -> None:
    def said() -> None:
        with sync.Client(cluster.bootstrap) as client, client.producer() as producer:
            client.admin.create_stream("punctuated-sync", **HISTORY)
            producer.send("punctuated-sync", b"one", timestamp_us=1)
            producer.punctuate("punctuated-sync", 10 * MS)
            with client.epochs("punctuated-sync", start=0, end=1) as epochs:
                assert [epoch.records for epoch in epochs] == [1]

    await asyncio.to_thread(said)


async def test_the_command_line_punctuates(client: Client, cluster: RunningCluster) -> None:
    await client.admin.create_stream("punctuated-cli", epoch_ms=1000, epoch_grace_ms=3_600_000)
    now_us = time.time_ns() // 1000
    code, out, error = kera(cluster, "epochs", "punctuate", "punctuated-cli", "--time", "5s")
    assert (code, "nothing was ever written to it" in out) == (0, True), error
    assert kera(cluster, "epochs", "punctuate", "punctuated-cli", "--time", "3000-01-01")[0] == 1
    await write(client, "punctuated-cli", [now_us - 10_000_000])
    code, out, error = kera(cluster, "epochs", "punctuate", "punctuated-cli", "--time", "5s")
    assert code == 0, error
    assert "is late from now on (entries with records: 1, punctuations written: 1)" in out
    assert kera(cluster, "epochs", "punctuate", "punctuated-cli", "--durability", "leader")[0] == 0
    async with client.epochs("punctuated-cli", start="earliest", end="latest") as epochs:
        assert [epoch.records for epoch in await read(epochs, 1)] == [1]
    ((entry,),) = (await client.bounds("punctuated-cli")).values()
    assert entry.watermark_us is not None
    assert entry.watermark_us >= now_us
    for wrong in (["--time", "soon"], ["--durability", "paper"]):
        assert kera(cluster, "epochs", "punctuate", "punctuated-cli", *wrong)[0] != 0
    code, _, error = kera(cluster, "epochs", "punctuate", "no-such-stream")
    assert (code, "no-such-stream" in error) == (1, True)


async def test_a_producer_with_a_failed_delivery_does_not_punctuate(client: Client) -> None:
    await client.admin.create_stream("punctuated-failed", **(HISTORY | {"timestamp_ahead_max_ms": 1000}))
    await write(client, "punctuated-failed", [1])
    async with client.producer() as producer:
        await producer.prepare("punctuated-failed")
        producer.send("punctuated-failed", b"x", timestamp_us=time.time_ns() // 1000 + 3_600_000_000)
        with pytest.raises(TimestampAhead):
            await producer.punctuate("punctuated-failed", 20 * MS)
    ((entry,),) = (await client.bounds("punctuated-failed")).values()
    assert entry.watermark_us == 1


@pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_a_broker_refuses_punctuation_chunks_and_invalid_requests_from_clients(
    client: Client, transport: str
) -> None:
    name = f"punctuated-hostile-{transport}"
    await client.admin.create_stream(name, **HISTORY)
    await write(client, name, [1])
    stream = await client.describe(name)
    owner = stream.broker_of(0)
    assert owner is not None
    bad = [
        encode_punctuation(stream.stream_id, 0, 10**15, 5),
        encode_header(b"", 1, 0, 0, stream.stream_id, 0, stream.schema_id, 1 << 40, 0, 0, 0, 5, 10**15, 10**15),
        encode_header(b"", 1, 4, 1, stream.stream_id, 0, stream.schema_id, 1 << 40, 0, 0, 0, 5, 10**15, 10**15),
    ]
    channel: Channel = GrpcChannel(owner.grpc_address)
    if transport == "tcp":
        channel = await FrameChannel.connect_tcp(owner.frames_address, timeout_s=WAIT_S)
    try:
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(bad))
        reply = await channel.submit(api.MULTI_WRITE_CHUNKS, request, bad, timeout_s=WAIT_S)
        assert [status.error.code for status in reply.message.statuses] == [InvalidArgument.code] * len(bad)
        wrongs: list[dict[str, Any]] = [{"streamlet_ids": []}, {"timestamp_us": -5}, {"durability": 99}]
        for wrong in wrongs:
            asked: dict[str, Any] = {"stream_id": stream.stream_id, "streamlet_ids": [0], "timestamp_us": 5} | wrong
            with pytest.raises(InvalidArgument):
                await channel.submit(api.PUNCTUATE, broker_pb2.PunctuateRequest(**asked), timeout_s=WAIT_S)
    finally:
        await channel.close()
    ((entry,),) = (await client.bounds(name)).values()
    assert (entry.watermark_us, entry.next_record) == (1, 1)


async def test_consumers_skip_groups_that_have_only_punctuations(client: Client) -> None:
    await client.admin.create_stream("punctuated-groups", **HISTORY)
    brokers = sorted(broker.broker_id for broker in (await client.admin.describe_cluster()).brokers)
    expected = []
    async with client.producer() as producer:
        for number in range(1, 9):
            if number % 3 == 1:  # otherwise the group that a broker begins has only a punctuation
                expected.append(b"%d" % number)
                await producer.prepare("punctuated-groups")
                await producer.send("punctuated-groups", expected[-1], timestamp_us=number * 1000)
            await producer.punctuate("punctuated-groups", number * 1000 + 500)
            await client.admin.move_streamlet("punctuated-groups", 0, brokers[number % 2])
    found = []
    async with client.group_consumer("punctuated-group", "punctuated-groups") as member:
        async with asyncio.timeout(WAIT_S):
            async for record in member:
                found.append(record.value)
                if len(found) == len(expected):
                    break
        await member.commit()
    assert found == expected
    async with client.group_consumer("punctuated-group", "punctuated-groups") as member, client.producer() as producer:
        await producer.prepare("punctuated-groups")
        await producer.send("punctuated-groups", b"last", timestamp_us=10**6)
        async with asyncio.timeout(WAIT_S):
            async for record in member:
                assert record.value == b"last", "nothing comes twice"
                break
    async with client.epochs("punctuated-groups", start=0, end="latest") as epochs:
        rows = [value for epoch in await read(epochs, 9) for value in epoch.rows()["value"].to_pylist()]
    assert rows == expected


@pytest.mark.slow
async def test_live_epochs_during_moves_and_promises_equal_later_ones(client: Client) -> None:
    await client.admin.create_stream("promised-moves", streamlets=2, entries=2, epoch_ms=100, epoch_grace_ms=50)
    brokers = sorted(broker.broker_id for broker in (await client.admin.describe_cluster()).brokers)
    first = time.time_ns() // 100_000_000
    random, stop = Random(3), asyncio.Event()

    async def produce(streamlet: int) -> None:
        async with client.producer() as producer:
            await producer.prepare("promised-moves")
            while not stop.is_set():
                at = time.time_ns() // 1000 - random.choice([0, 0, 60_000, 700_000])
                await producer.send("promised-moves", b"%d" % at, timestamp_us=at, streamlet=streamlet)

    async def ask() -> None:
        while not stop.is_set():
            await client.bounds("promised-moves", promise=True)

    async def move() -> None:
        for number in range(8):
            await client.admin.move_streamlet("promised-moves", number % 2, brokers[number // 2 % 2])
        await client.admin.rebalance()

    others = [asyncio.create_task(each) for each in (produce(0), produce(1), ask())]
    try:
        async with client.epochs("promised-moves", start=first) as eager:
            moving = asyncio.create_task(move())
            live = await read(eager, 12)
            await moving
            live += await read(eager, 3)
    finally:
        stop.set()
        await asyncio.gather(*others)
    async with client.epochs("promised-moves", start=first, end=live[-1].number + 1) as late:
        again = await read(late, 1000)
    assert seen(again) == seen(live)
    assert sum(epoch.late_records for epoch in live) > 0


async def test_punctuations_at_the_end_survive_the_loss_of_a_broker(members: SharedCluster) -> None:
    async with await connect(members) as client:
        made = await client.admin.create_stream("s", brokers=1, replication=1, durability="replicated", **HISTORY)
        name = broker_name(members, made.assignments[0].broker_id)
        await write(client, "s", [1], [15 * MS])
        async with client.producer() as producer:
            await producer.punctuate("s", 40 * MS)
        before = (await client.bounds("s"))[0][0]
        begun_us = now_us()
        await members.kill(name)
        await until_recovered(client, [made.assignments[0].broker_id], begun_us)
        after = (await client.bounds("s"))[0][0]
        assert (after.watermark_us, after.next_record) == (40 * MS, 2)
        assert after.watermark_us == before.watermark_us
        async with client.producer() as producer:
            await producer.punctuate("s", 40 * MS)
            await producer.prepare("s")
            await producer.send("s", b"late", timestamp_us=5)
            await producer.punctuate("s", 60 * MS)
        async with client.epochs("s", start=0, end=6) as epochs:
            found = [(epoch.number, epoch.records, epoch.late_records) for epoch in await read(epochs, 9)]
        assert found == [(0, 1, 0), (1, 1, 0), (4, 1, 1)]


@pytest.mark.slow
async def test_the_next_owner_keeps_promises_by_the_clock_after_punctuation_changed(
    members: SharedCluster,
) -> None:
    async with await connect(members) as client:
        made = await client.admin.create_stream(
            "s", streamlets=2, brokers=1, replication=1, durability="replicated", epoch_ms=100, epoch_grace_ms=200
        )
        owner_id = made.assignments[0].broker_id
        at_us = time.time_ns() // 1000
        await write(client, "s", [at_us - 5_000_000], streamlet=0)
        await write(client, "s", [at_us], streamlet=1)
        async with client.epochs("s", start=at_us // 100_000 - 60) as epochs:
            live = await read(epochs, 2)
        assert live[-1].number == at_us // 100_000, "closed by what was promised of streamlet 0"
        await client.admin.alter_stream("s", punctuation="producers")
        begun_us = now_us()
        name = broker_name(members, owner_id)
        await members.kill(name)
        await until_recovered(client, [owner_id], begun_us)
        await write(client, "s", [at_us + 1], streamlet=0)
        async with client.producer() as producer:
            await producer.punctuate("s", at_us + 60_000_000)
        async with client.epochs("s", start=live[0].number, end=at_us // 100_000 + 500) as epochs:
            again = await read(epochs, 9)
        assert seen(again)[:2] == seen(live)
        assert [epoch.late_records for epoch in again] == [0, 0, 1]


@pytest.mark.slow
async def test_epochs_continue_unchanged_while_brokers_are_drained(members: SharedCluster) -> None:
    async with await connect(members) as client:
        await client.admin.create_stream("epochs-drained", streamlets=4, epoch_ms=200, epoch_grace_ms=200)
        found = []

        async def follow() -> None:
            async with client.epochs("epochs-drained", start="earliest") as epochs:
                async for epoch in epochs:
                    found.append(epoch)  # noqa: PERF401 - as they come

        async def keep_writing() -> None:
            random = Random(11)
            async with client.producer() as producer:
                await producer.prepare("epochs-drained")
                while True:
                    late_us = random.randrange(300 * MS)
                    await producer.send(
                        "epochs-drained", b"x", streamlet=random.randrange(4), timestamp_us=now_us() - late_us
                    )

        async def until_more() -> None:
            wanted = len(found) + 2
            while len(found) < wanted:
                for task in tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(follow()), asyncio.create_task(keep_writing())]
        try:
            async with asyncio.timeout(WAIT_S):
                await until_more()
                for broker in (await client.admin.describe_cluster()).brokers[:2]:
                    status = await client.admin.drain_broker(broker.broker_id)
                    while status.streamlets_owned:
                        status = await client.admin.drain_broker(broker.broker_id, ask=True)
                    await until_more()
                    await client.admin.drain_broker(broker.broker_id, undo=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with client.epochs("epochs-drained", start="earliest", end=found[-1].number + 1) as epochs:
            again = await read(epochs, len(found) + 1)
        assert [(epoch.number, epoch.records, epoch.digest) for epoch in again] == [
            (epoch.number, epoch.records, epoch.digest) for epoch in found
        ]
