"""The stages of a producer: from records or a batch to a frame, and from the answer to the awaited result."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.stages.around import MESSAGE_BYTES_MAX, Cluster, batch_of, deliver, frame, header_of, until_sent
from bench.stages.part import RECORD_BYTES, Load, Samples, now_ns, since
from kera.cli.bench._payload import make_value
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind
from kera.v1 import broker_pb2


@contextlib.asynccontextmanager
async def _producer(chunk_bytes_max: int) -> AsyncIterator[tuple[Producer, Cluster]]:
    cluster: Any = Cluster()
    settings = ProducerSettings(chunk_bytes_max=chunk_bytes_max, request_bytes_max=MESSAGE_BYTES_MAX)
    async with Producer(cluster, settings) as producer:
        await producer.prepare("s")
        yield producer, cluster
    cluster.close()


def stored(pieces: Sequence[Any], chunks: int) -> bytes:
    """A broker's answer to a write."""
    response = broker_pb2.MultiWriteChunksResponse(all_stored=chunks > 1)
    for _ in range(chunks):
        response.statuses.add(group_id=1, segment_id=1, position=4096, first_record=1000, durability=1)
    return frame(FrameKind.REPLY, api.MULTI_WRITE_CHUNKS, header_of(pieces).request_id, response)


class Batches:
    """The work of `send_batch` up to the frame for the transport, and from the answer to the awaited result."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. The first request also connects."""
        batch = batch_of(load.chunk_bytes)
        # A batch of more than half of a chunk is not gathered with others.
        async with _producer(min(load.chunk_bytes, 2 * batch.nbytes - 1)) as (producer, cluster):
            for number in range(load.requests + 1):
                begun_ns = now_ns()
                pending = [await producer.send_batch("s", batch) for _ in range(load.chunks)]
                await until_sent(cluster.wire)
                there_ns = since(begun_ns)
                (request,) = cluster.wire.sent
                cluster.wire.sent.clear()
                answer = stored(request, load.chunks)
                back_ns = await deliver(cluster.channel_made, cluster.wire, answer)
                begun_ns = now_ns()
                for each in pending:
                    await each
                back_ns += since(begun_ns)
                if number:
                    samples.requests["producer: send_batch to frame"][load].append(there_ns)
                    samples.requests["producer: answer to delivery"][load].append(back_ns)


class Records:
    """`send`, and the work on a chunk's records: it is closed, encoded, and put into a frame."""

    RECORDS_MIN = 1000

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = [load for load in loads if load.chunks == 1]

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        value, records = make_value(RECORD_BYTES), batch_of(load.chunk_bytes).num_rows
        keys = [b"key-%d" % number for number in range(RECORD_BYTES)]
        # No chunk closes before all its records are there.
        async with _producer(2 * load.chunk_bytes) as (producer, cluster):
            send, wire = producer.send, cluster.wire
            for number in range(load.requests + 1):
                keyed = records >= self.RECORDS_MIN and number % 2 == 0
                begun_ns = now_ns()
                if keyed:
                    for record in range(records):
                        send("s", value, keys=keys[record % RECORD_BYTES])
                else:
                    for _ in range(records):
                        send("s", value)
                sent_ns = since(begun_ns)
                begun_ns = now_ns()
                await until_sent(wire)
                framed_ns = since(begun_ns)
                (request,) = wire.sent
                wire.sent.clear()
                await deliver(cluster.channel_made, cluster.wire, stored(request, 1))
                if records >= self.RECORDS_MIN and number:
                    what = "send, a value and a key" if keyed else "send, a value"
                    samples.records[what].append(sent_ns / records)
                if number and not keyed:
                    samples.requests["producer: records to frame"][load].append(framed_ns)
