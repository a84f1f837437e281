"""A reader that pulls hundreds of streamlets, over read sessions, while brokers restart and streamlets move."""

import asyncio
from collections import Counter
from pathlib import Path

from kera.client import Client
from kera.client.consuming.consumer import Consumer
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster
from tests.integration.control_support import (
    TIMEOUT_S,
    broker_id_of,
    broker_names,
    connect,
    control_cluster,
)

STREAMLETS = 300
MOVED = 8


async def write_round(client: Client, number: int) -> set[bytes]:
    """Write one record to each streamlet; returns the records."""
    async with client.producer() as producer:
        await producer.prepare("wide")
        values = {b"%d of round %d" % (streamlet, number): streamlet for streamlet in range(STREAMLETS)}
        await asyncio.gather(
            *(producer.send("wide", value, streamlet=streamlet) for value, streamlet in values.items())
        )
    return set(values)


async def test_each_record_is_read_once_through_moves_and_a_broker_restart(tmp_path: Path) -> None:
    async with (
        control_cluster(tmp_path, brokers=2, arena_bytes=64 * MIB, segment_bytes=16 * KIB) as cluster,
        await connect(cluster) as client,
    ):
        await client.admin.create_stream("wide", streamlets=STREAMLETS)
        async with client.consumer("wide", start="earliest", shared_memory="never") as consumer:
            await read_all(cluster, client, consumer)


async def read_all(cluster: LocalCluster, client: Client, consumer: Consumer) -> None:
    read: Counter[bytes] = Counter()
    records = aiter(consumer)

    async def read_round(wanted: set[bytes]) -> None:
        async with asyncio.timeout(2 * TIMEOUT_S):
            while not wanted <= read.keys():
                read[(await anext(records)).value or b""] += 1

    await read_round(await write_round(client, 0))
    one, two = (broker_id_of(cluster, name) for name in broker_names(cluster))
    assignments = (await client.admin.describe_stream("wide")).assignments
    for streamlet in range(MOVED):
        at = assignments[streamlet].broker_id
        await client.admin.move_streamlet("wide", streamlet, two if at == one else one)
    await read_round(await write_round(client, 1))
    await cluster.restart(broker_names(cluster)[0])
    await read_round(await write_round(client, 2))
    await read_round(await write_round(client, 3))
    assert set(read.values()) == {1}
    assert read.total() == 4 * STREAMLETS
