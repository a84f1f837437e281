"""Plug-ins of a consumer: when it calls their hooks, and that it works without them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.consuming.consumer import Consumer
from kera.client.consuming.fetching.arrivals import Arrivals
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.fetching.hooks import FetcherPort, FetchHooks
from kera.client.consuming.fetching.ranges import Range
from kera.client.consuming.group_consumer import GroupConsumer
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.consuming.plugins import DeliveryHooks, Plugins
from kera.client.settings import ConsumerSettings
from kera.client.types import Record, StreamDescription
from kera.core.base.ids import EARLIEST
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.fake_support import MakeFleet
from tests.unit.client.producer_support import give
from tests.unit.client.push_broker import SOON, PushFleet
from tests.unit.client.support import FakeCluster, until
from tests.unit.client.test_fetcher import put


class Seen(FetchHooks):
    """Notes the calls of hooks."""

    def __init__(self, port: FetcherPort) -> None:
        self.port = port
        self.calls: list[str] = []
        self.pauses: list[int] = []

    def on_range(self) -> None:
        self.calls.append("range")

    def on_fetched(self, item: Range, fetched: Fetched) -> None:
        assert item.wanted.entry == fetched.entry
        stream_id, broker_id = self.port.home(item)
        assert (stream_id, broker_id) in list(self.port.homes())
        assert broker_id in self.port.streams[stream_id].brokers
        self.calls.append("fetched")

    def on_asked(self) -> None:
        self.calls.append("asked")

    def on_taken(self, item: Range, fetched: Fetched) -> None:
        assert item.wanted.entry == fetched.entry
        self.calls.append("taken")

    def on_closed(self) -> None:
        self.calls.append("closed")

    def pause_s(self, stream_id: int, answer: Iterable[Fetched]) -> float:
        assert stream_id in self.port.streams
        self.pauses.append(sum(fetched.size_bytes for fetched in answer))
        return 0.0


class Around(DeliveryHooks):
    """Notes the method that each item goes through."""

    def __init__(self, streams: Mapping[int, StreamDescription]) -> None:
        self.streams = streams
        self.calls: list[str] = []

    async def _each(self, name: str, given: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for item in given:
            self.calls.append(name)
            yield item

    def batches(self, given: AsyncIterator[ChunkBatch]) -> AsyncIterator[ChunkBatch]:
        return self._each("batch", given)

    def records(self, given: AsyncIterator[Record]) -> AsyncIterator[Record]:
        return self._each("record", given)

    async def next_batches(self, coming: Awaitable[list[ChunkBatch]]) -> list[ChunkBatch]:
        found = await coming
        self.calls.append(f"{len(found)} batches")
        return found

    async def next_records(self, coming: Awaitable[list[Record]]) -> list[Record]:
        found = await coming
        self.calls.append(f"{len(found)} records")
        return found


@pytest.fixture
async def one_record(cluster: FakeCluster, make_producer: MakeProducer) -> FakeCluster:
    producer = make_producer(cluster)
    await producer.prepare("s")
    await give(producer.send("s", b"x"))
    return cluster


def seeing(made: list[Seen]) -> Plugins:
    def make(port: FetcherPort) -> Seen:
        made.append(Seen(port))
        return made[-1]

    return Plugins(make)


async def test_hooks_see_pulled_and_taken_chunks(one_record: FakeCluster) -> None:
    made: list[Seen] = []
    settings = ConsumerSettings(shared_memory="never", fetch_wait_ms=20)
    consumer = Consumer(one_record, ["s"], settings, start="earliest", streamlets=[0], plugins=seeing(made))  # type: ignore[arg-type]
    async with consumer:
        assert (await give(anext(consumer.records()))).value == b"x"
    (seen,) = made
    assert sorted(seen.calls[:3]) == ["asked", "fetched", "range"]
    assert seen.calls[3:] == ["taken", "closed"]
    assert sum(seen.pauses) > 0


async def test_hooks_see_pushed_chunks(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = PushFleet(await make_fleet(timing=SOON), tmp_path)
    put(fleet, b"x")
    await fleet.pushing.start(fleet.info.push_unix_path)
    made: list[Seen] = []
    try:
        async with Consumer(
            fleet.cluster, ["s"], ConsumerSettings(), start="earliest", plugins=seeing(made)
        ) as consumer:
            taking = asyncio.ensure_future(give(anext(consumer.batches())))
            await until(lambda: any(reader.subscribed for reader in fleet.pushing.readers))
            fleet.pushing.reader.push(fleet.pushing.reader.lane, fleet.s.streamlets[0].log[:1], 0)
            assert (await taking).batch.num_rows == 1
        (seen,) = made
        assert (seen.calls, seen.pauses) == (["range", "asked", "fetched", "taken", "closed"], [])
    finally:
        await fleet.pushing.close()


async def test_a_fetcher_without_hooks_has_the_plain_queue(one_record: FakeCluster) -> None:
    fetcher = Fetcher(one_record, ConsumerSettings(fetch_wait_ms=20))  # type: ignore[arg-type]
    try:
        assert (fetcher.hooks, type(fetcher.arrivals)) == (None, Arrivals)
        stream = await one_record.stream("s")
        fetcher.add(stream, Wanted(stream.entry_id(0, 0), EARLIEST, None))
        assert await give(fetcher.fetched()) is not None
    finally:
        await fetcher.close()


async def test_every_way_of_reading_goes_through_the_delivery_hooks(one_record: FakeCluster) -> None:
    made: list[Around] = []

    def make(streams: Mapping[int, StreamDescription]) -> Around:
        made.append(Around(streams))
        return made[-1]

    async def read(how: str) -> None:
        settings, plugins = ConsumerSettings(fetch_wait_ms=20), Plugins(at_delivery=make)
        consumer = Consumer(one_record, ["s"], settings, start="earliest", end="latest", plugins=plugins)  # type: ignore[arg-type]
        async with consumer:
            if how == "batches":
                assert len([batch async for batch in consumer.batches()]) == 1
            elif how == "records":
                assert [record.value async for record in consumer] == [b"x"]
            elif how == "poll":
                assert [record.value for record in await consumer.poll()] == [b"x"]
            else:
                assert len(await consumer.next_batches(9)) == 1

    for how in ("batches", "records", "poll", "next_batches"):
        await give(read(how))
    assert [hooks.calls for hooks in made] == [["batch"], ["record"], ["1 records"], ["1 batches"]]
    assert all([stream.name for stream in hooks.streams.values()] == ["s"] for hooks in made)


async def test_every_way_of_reading_in_a_group_goes_through_the_delivery_hooks(groups: Any, fill_groups: Any) -> None:
    await fill_groups(1)
    around = Around({})
    settings = GroupConsumerSettings(fetch_wait_ms=20, heartbeat_interval_ms=20)
    async with GroupConsumer(groups, "app", ["s"], settings, plugins=Plugins(at_delivery=lambda _: around)) as consumer:
        assert await give(anext(consumer.batches())) is not None
        await fill_groups(1)
        assert await give(anext(consumer.records())) is not None
        await fill_groups(1)
        assert await give(consumer.next_records())
    assert around.calls == ["batch", "record", "1 records"]
