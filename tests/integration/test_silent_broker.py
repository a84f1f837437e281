"""A paused broker: consumers that it pushed to continue with its successor."""

import asyncio
from collections.abc import AsyncIterable
from pathlib import Path

import pytest

from kera.client import Client, ClientSettings, Record
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import load, number_of, until

STREAMLETS = 2
GOES_ON_S = 30.0
"""From the broker's silence on: until it is noticed, counts as dead, and has been recovered from its backup."""


async def follow(records: AsyncIterable[Record], seen: dict[int, set[int]]) -> None:
    """Note the records of each streamlet."""
    async for record in records:
        seen[record.streamlet].add(number_of(record.value))


def all_beyond(seen: list[dict[int, set[int]]], number: int) -> bool:
    """Whether each reader has a record of each streamlet with at least this number."""
    return all(max(numbers, default=0) >= number for kept in seen for numbers in kept.values())


@pytest.mark.slow
async def test_readers_of_a_paused_broker_continue_with_its_successor(tmp_path: Path) -> None:
    with LocalCluster.running(
        brokers=2,
        backups=1,
        data_dir=tmp_path,
        arena_bytes=32 * MIB,
        backup_memory_bytes=32 * MIB,
        segment_bytes=256 * KIB,
        coordinator_settings={"heartbeat_interval_ms": 100, "heartbeats_missed_max": 15},
    ) as cluster:
        settings = ClientSettings(request_timeout_ms=3_000)
        async with await Client.connect(cluster.bootstrap, settings) as client:
            await goes_on(client, cluster)


async def goes_on(client: Client, cluster: RunningCluster) -> None:
    """Pause a broker, and wait until a consumer and a group consumer continue with all streamlets."""
    await client.admin.create_stream("s", streamlets=STREAMLETS, replication=1)
    seen: list[dict[int, set[int]]] = [{streamlet: set() for streamlet in range(STREAMLETS)} for _ in range(2)]
    async with (
        client.producer() as producer,
        client.consumer("s", start="earliest", shared_memory="always") as consumer,
        client.group_consumer("app", "s", commit_interval_ms=200) as member,
    ):
        await producer.prepare("s")
        async with load(producer, streamlets=STREAMLETS) as sending, asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(follow(consumer, seen[0])), tasks.create_task(follow(member, seen[1]))]
            await until(lambda: all_beyond(seen, 100))
            await asyncio.to_thread(cluster.pause, "broker-1")
            try:
                sent = sending.sent  # pushed records may still come; later records go to another broker
                await until(lambda: all_beyond(seen, sent), GOES_ON_S)
            finally:
                await asyncio.to_thread(cluster.resume, "broker-1")
                for task in following:
                    task.cancel()
