"""Writing again under the same producer id finds the stored records: in memory, only on disk, and after their
removal.
"""

import asyncio
from collections import Counter

import pyarrow as pa

from kera.client import PRODUCER_IDS, Appender, AppendResult, Client
from kera.local.cluster import RunningCluster
from kera.spark_connector.writing.streamlet_writer import StreamletWriter
from kera.spark_connector.writing.task import StreamletLog

NAME = PRODUCER_IDS[7]
CHUNK_BYTES = 8 << 10


class Forgetful:
    """An appender to a broker that has everything only on disk: it says that a chunk is stored, but not where."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender
        self.stream, self.producer_id, self.producer_epoch = appender.stream, NAME, appender.producer_epoch

    async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
        appended = await self._appender.append(streamlet_id, rows, sequence)
        return appended._replace(position=None) if appended.duplicate else appended


def batch(numbers: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"value": [b"%d" % number + bytes(500) for number in numbers]})


async def appender(client: Client, stream: str, epoch: int = 1) -> Appender:
    return await client.appender(
        stream, producer_id=NAME, producer_epoch=epoch, chunk_bytes_max=CHUNK_BYTES, compares=True
    )


async def write(client: Client, stream: str, numbers: list[int], *, forgetful: bool = False) -> StreamletWriter:
    """Make one attempt to write."""
    made = await appender(client, stream)
    log = StreamletLog(client, Forgetful(made) if forgetful else made, 0)  # type: ignore[arg-type]
    writer = StreamletWriter(log, ignored=["timestamp"])
    writer.add(made.conform(batch(numbers)))
    await writer.drain()
    return writer


async def others(client: Client, stream: str) -> None:
    """Write records of another producer."""
    async with client.producer(chunk_bytes_max=CHUNK_BYTES) as producer:
        await (await producer.send_batch(stream, batch([-1] * 200)))


async def stored(client: Client, stream: str) -> Counter[int]:
    found: Counter[int] = Counter()
    async with client.consumer(stream, start="earliest", end="latest") as consumer:
        async for record in consumer:
            found[int((record.value or b"").rstrip(b"\0"))] += 1
    del found[-1]
    return found


async def write_again(cluster: RunningCluster, stream: str, *, forgetful: bool) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(stream, entries=2)
        await others(client, stream)
        await write(client, stream, list(range(300)))
        await others(client, stream)

        same = await write(client, stream, list(range(300)), forgetful=forgetful)
        assert (same.appended, same.found, same.surplus) == (0, 300, 0)
        other = await write(client, stream, list(range(399, -1, -1)), forgetful=forgetful)
        assert (other.appended, other.found, other.surplus) == (100, 300, 0)
        assert await stored(client, stream) == Counter(range(400))


def test_repeated_chunks_in_the_brokers_memory_are_found_by_their_places(cluster: RunningCluster) -> None:
    asyncio.run(write_again(cluster, "in-memory", forgetful=False))


def test_repeated_chunks_without_a_known_place_are_searched_for(cluster: RunningCluster) -> None:
    asyncio.run(write_again(cluster, "on-disk", forgetful=True))


def test_repeated_chunks_that_were_removed_count_as_stored(cluster: RunningCluster) -> None:
    async def run() -> None:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("removed")
            await write(client, "removed", list(range(100)))
            (bounds,) = (await client.bounds("removed"))[0]
            await client.admin.truncate_stream("removed", {0: [bounds.end]})

            again = await write(client, "removed", list(range(100)))

            assert (again.appended, again.found) == (0, 100)

    asyncio.run(run())
