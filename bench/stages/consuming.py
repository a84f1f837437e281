"""The stages of a consumer: from bytes that were pulled or pushed to batches, and to records."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.stages.around import (
    BROKER_ID,
    SEGMENT_BYTES,
    STREAM_ID,
    Cluster,
    Wire,
    batch_of,
    deliver,
    frame,
    header_of,
    placed_chunks,
    until_sent,
)
from bench.stages.part import Load, Samples, now_ns, since
from kera.client.cluster.push import PushChannel
from kera.client.consuming.consumer import Consumer
from kera.client.settings import ConsumerSettings
from kera.core.base.settings import KIB
from kera.core.push import VERSION, Decoder, Run, encode_runs
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind
from kera.v1 import broker_pb2, common_pb2, push_pb2


class Pulls:
    """The work from the bytes of an answer to the batches in the loop of a consumer group."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        cluster: Any = Cluster()
        bulk = placed_chunks(load)
        async with Consumer(cluster, ("s",), ConsumerSettings(), start="earliest") as consumer:
            batches: Any = consumer.batches()
            for number in range(load.requests + 1):
                await until_sent(cluster.wire)
                (request,) = cluster.wire.sent
                cluster.wire.sent.clear()
                response = broker_pb2.MultiReadChunksResponse()
                response.session_kept = True
                result = response.results.add(handle=1, length_bytes=len(bulk))
                result.next.CopyFrom(
                    common_pb2.Cursor(stream_id=STREAM_ID, group_id=1, segment_id=1, position=(number + 1) * len(bulk))
                )
                answer = frame(FrameKind.REPLY, api.MULTI_READ_CHUNKS, header_of(request).request_id, response, [bulk])
                spent_ns = await deliver(cluster.channel_made, cluster.wire, answer)
                begun_ns = now_ns()
                for _ in range(load.chunks):
                    await anext(batches)
                spent_ns += since(begun_ns)
                if number:
                    samples.requests["pull: answer to batches"][load].append(spent_ns)
            await batches.aclose()
        cluster.close()


class Pushes:
    """The work from a message about a run of chunks to the batches in the loop of a consumer group; and to records."""

    RECORDS_LOAD = Load(1, 256 * KIB)
    _SLOTS_AT = 8 * KIB

    def __init__(self, loads: Sequence[Load], *, verify: bool) -> None:
        self.loads = loads
        self._verify = verify
        self._memory = memoryview(bytearray(self._SLOTS_AT + SEGMENT_BYTES))

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. A run reuses the place of another, so the bytes are warm if they fit into a cache."""
        length = len(placed_chunks(load))
        self._memory[self._SLOTS_AT : self._SLOTS_AT + length] = placed_chunks(load)
        what = "push: run to batches" + ("" if self._verify else ", unchecked")
        async with self._consumer() as (consumer, connection):
            batches: Any = consumer.batches()
            for number in range(load.requests + 1):
                message = self._run(number, length)
                begun_ns = now_ns()
                connection.data_received(message)
                for _ in range(load.chunks):
                    await anext(batches)
                if number:
                    samples.requests[what][load].append(since(begun_ns))
            await batches.aclose()
        if self._verify and load == self.RECORDS_LOAD:
            await self._records(length, samples)

    async def _records(self, length: int, samples: Samples) -> None:
        count = batch_of(self.RECORDS_LOAD.chunk_bytes).num_rows
        async with self._consumer() as (consumer, connection):
            records: Any = consumer.records()
            for number in range(self.RECORDS_LOAD.requests):
                message = self._run(number, length)
                begun_ns = now_ns()
                connection.data_received(message)
                left = count
                async for _ in records:
                    left -= 1
                    if not left:
                        break
                samples.records["records()"].append(since(begun_ns) / count)

    @contextlib.asynccontextmanager
    async def _consumer(self) -> AsyncIterator[tuple[Consumer, PushChannel]]:
        hello = push_pb2.PushHello(
            version=VERSION,
            broker_id=BROKER_ID,
            broker_epoch=1,
            slots=64,
            slot_bytes=SEGMENT_BYTES,
            slots_at=self._SLOTS_AT,
            rows_at=64,
            row_bytes=64,
        )
        connection = PushChannel(hello, self._memory.toreadonly(), Decoder(), "")
        wire = Wire()
        connection.connection_made(wire)
        cluster: Any = Cluster(connection)
        settings = ConsumerSettings(verify_checksums=self._verify, validate_chunks=self._verify)
        async with Consumer(cluster, ("s",), settings, start="earliest") as consumer:
            await until_sent(wire)  # it has subscribed
            yield consumer, connection
        cluster.close()
        wire.abort()

    def _run(self, number: int, length: int) -> bytes:
        return encode_runs([Run(1, 0, 0, self._SLOTS_AT, length, 1, 1, number * length, 0)])
