"""Accepts the batches of `Producer.send_batch`: gathers small ones, and makes chunks of others as there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pyarrow as pa

from kera.client.arrow_input import Columns, record_batches
from kera.client.cluster.cluster import Cluster
from kera.client.producing.encoding.partition_payloads import Payloads, partition_payloads
from kera.client.producing.encoding.payloads import Payload
from kera.client.producing.open_chunks.stream_writer import StreamWriter
from kera.client.producing.open_chunks.stream_writers import StreamWriters
from kera.client.producing.outcomes.outcome import BatchDelivery, BundleOutcome, Outcome
from kera.client.producing.sending.buffer import Buffer
from kera.client.settings import ProducerSettings
from kera.client.types import StreamDescription
from kera.core.base.clock import Clock
from kera.core.errors import SchemaMismatch


class Batches:
    """Accepts the batches of one producer."""

    def __init__(
        self,
        cluster: Cluster,
        settings: ProducerSettings,
        buffer: Buffer,
        writers: StreamWriters,
        clock: Clock,
        request_chunks_max: int,
    ) -> None:
        """`clock`: gives rows without a time the time of their acceptance."""
        self._cluster = cluster
        self._chunk_bytes_max = int(settings.chunk_bytes_max)
        self._lean = settings.lean
        self._request_bytes_max = int(settings.request_bytes_max)
        self._bundle_bytes_max = min(
            self._request_bytes_max, cluster.settings.message_bytes_max, int(settings.buffer_bytes_max) // 4
        )
        self._request_chunks_max = request_chunks_max
        self._buffer = buffer
        self._writers = writers
        self._clock = clock
        self._loop = asyncio.get_running_loop()

    async def send(self, stream: str, batch: Columns, *, streamlet: int | None = None) -> BatchDelivery:
        """See `Producer.send_batch`."""
        writer, buffer = await self._writers.writer(stream), self._buffer
        if buffer.ended:
            raise self._writers.not_ready(stream)
        streamlet = None if streamlet is None else writer.checked_streamlet(streamlet)
        given = [batch] if isinstance(batch, pa.RecordBatch) else record_batches(batch)
        if len(given) == 1:
            size = writer.size_of(given[0])
            gathered = writer.gather(given[0], size, streamlet, self._clock.now_us())
            if gathered is not None:
                if buffer.queued_bytes >= self._request_bytes_max:
                    await buffer.let_loop_run()
                return gathered
            now_us = self._clock.now_us()
            chunk = writer.whole_chunk(given[0], size, streamlet, now_us)
            if chunk is not None:
                return BatchDelivery([await self._accept(writer, *chunk, now_us)])
        outcomes: list[Outcome | BundleOutcome] = []
        described, parts = await self._conforming(writer, given)
        writer.close_gatherings()
        for part, chunk_bytes in parts:
            now_us = self._clock.now_us()
            partition = writer.partition(part, chunk_bytes, streamlet)
            for made in partition_payloads(
                partition, described, self._chunk_bytes_max, now_us, chunk_bytes, lean=self._lean
            ):
                if isinstance(made, Payloads):
                    for payloads in made.cut(self._bundle_bytes_max, self._request_chunks_max):
                        await self._room_for(int(payloads.payload_bytes.sum()), stream)
                        outcomes += writer.enqueue_together(payloads, now_us, self._loop.time())
                        await self._let_send()
                    continue
                place, of_place = made
                for payload in of_place:
                    outcomes.append(await self._accept(writer, place, payload, now_us))
        return BatchDelivery(outcomes)

    async def _accept(self, writer: StreamWriter, streamlet: int, payload: Payload, now_us: int) -> Outcome:
        """Queue a chunk of a batch when there is room for it."""
        outcome = Outcome()
        await self._room_for(len(payload.payload), writer.stream.name)
        writer.close_open_chunk(streamlet)  # records that were sent before stay before
        writer.enqueue(streamlet, payload, now_us, outcome, self._loop.time())
        await self._let_send()
        return outcome

    async def _room_for(self, payload_bytes: int, stream: str) -> None:
        """Wait until `payload_bytes` of a batch may be queued."""
        if self._buffer.is_full(payload_bytes):
            await self._buffer.wait_for_room(payload_bytes, self._writers.close_open_chunks)
        if self._buffer.ended:  # while we waited, or while the loop ran
            raise self._writers.not_ready(stream)

    async def _let_send(self) -> None:
        """Let the event loop run if a request is full: else nothing would be sent until the buffer is full."""
        if self._buffer.queued_bytes >= self._request_bytes_max:
            await self._buffer.let_loop_run()

    async def _conforming(
        self, writer: StreamWriter, batch: Sequence[pa.RecordBatch]
    ) -> tuple[StreamDescription, list[tuple[pa.RecordBatch, int]]]:
        """Return the stream's description and the parts of a batch, checked against that description."""
        known = writer.stream
        try:
            return known, writer.checked_parts(batch, self._clock.now_us())
        except SchemaMismatch:
            if not known.typed:
                raise
            self._cluster.forget(known.name)  # columns may have been added since it was looked up
            await self._writers.routes.refresh(writer.lanes)
            if writer.deleted is not None or writer.stream.schema_id == known.schema_id:
                raise
        return writer.stream, writer.checked_parts(batch, self._clock.now_us())
