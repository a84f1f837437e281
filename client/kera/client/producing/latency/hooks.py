"""Plug-ins of a producer for latency constraints and targets; see `kera.client.producing.sending.hooks`.

`ProducerLatency` is plugged into a producer, and `BrokerLatency` into the sender of each broker. Reports carry the
measurements of streams with a constraint to a broker. They go with requests or alone; the answers carry advice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from kera.client.cluster.at_work import AtWork
from kera.client.producing.latency.broker_times import BrokerTimes
from kera.client.producing.latency.lone_reports import LoneReports
from kera.client.producing.latency.pace import Lateness, Pace
from kera.client.producing.latency.writer_reports import WriterReports
from kera.client.producing.open_chunks.accumulator import Accumulator
from kera.client.producing.open_chunks.hooks import ChunkHooks
from kera.client.producing.sending.fill_time import Due
from kera.client.producing.sending.hooks import SenderHooks, SenderPort
from kera.client.producing.sending.request import Request
from kera.client.settings import ProducerSettings
from kera.v1 import broker_pb2


class _Written:
    """A stream that the producer writes to."""

    def __init__(self, open_chunks: Mapping[int, Accumulator]) -> None:
        self.open_chunks = open_chunks


class ProducerLatency(ChunkHooks):
    """The latency of one producer's chunks. Reports accepted records to `AtWork`, while a question is pending there."""

    def __init__(self, settings: ProducerSettings, at_work: AtWork, now_us: Callable[[], int]) -> None:
        """`now_us`: the time of day, on the clock that chunks carry."""
        self.times = BrokerTimes()
        self.late_s = 0.0
        """Total time that chunks stayed open beyond their deadlines although they could have been sent."""
        self._settings = settings
        self._now_us = now_us
        self._at_work = at_work
        self._written: dict[int, _Written] = {}
        """Streams by id; `AtWork` forgets a stream when this object drops it."""

    def at_broker(self, port: SenderPort) -> BrokerLatency:
        """Return the plug-in for the sender of a broker."""
        return BrokerLatency(self, port, self._settings, self._now_us)

    def on_prepared(self, stream_id: int, open_chunks: Mapping[int, Accumulator]) -> None:
        """See `ChunkHooks`; likewise what follows."""
        written = self._written[stream_id] = _Written(open_chunks)
        self._at_work.add_writer(stream_id, written)

    def on_accepted(self, stream_id: int, at_s: float) -> None:
        """Report it to `AtWork`, which may have a pending question."""
        if self._at_work.pending:
            self._at_work.accepted(stream_id, at_s)

    def on_chunk_closed(self, stream_id: int, chunk: Accumulator) -> None:
        """Report its records to `AtWork`, which may have a pending question."""
        if self._at_work.pending:
            self._at_work.closing(stream_id, chunk)


class BrokerLatency(SenderHooks):
    """The latency of one producer's chunks for one broker."""

    def __init__(
        self, producer: ProducerLatency, port: SenderPort, settings: ProducerSettings, now_us: Callable[[], int]
    ) -> None:
        self.pace = Pace(settings)
        self._producer = producer
        self._port = port
        loop = asyncio.get_running_loop()
        timeout_s = settings.delivery_timeout_ms / 1000
        self._reports = WriterReports(port.broker_id, producer.times, self.pace, timeout_s, now_us, loop.time())
        self._lone = LoneReports(self._reports, self.pace, loop, port)
        self._lateness = Lateness()

    def on_round(self) -> None:
        """See `SenderHooks`; likewise what follows."""
        self._lateness.begins()

    def on_round_end(self) -> None:
        """Send a report alone if it is due."""
        if self.pace.advised:
            self._lone.look()

    def on_chunk_opened(self) -> None:
        """Let lone reports go from now on: a chunk waits."""
        self._lone.waits = True
        if self.pace.advised:
            self._port.wake_at(self._lone.next_s)

    def on_looked(self, due: Due, now_s: float) -> None:
        """Add up how late the due chunks are."""
        self._producer.late_s += self._lateness.looked(due, now_s)
        self._lone.waits = due.next_s is not None

    def on_connected(self, now_s: float) -> None:
        """Leave chunks that waited for the connection out of the measurements: they do not predict the next ones."""
        self.pace.connected_s = now_s

    def on_request(self, request: Request) -> None:
        """Add a report to the request if one is due."""
        self._lateness.sent()
        self._reports.add_to(request.message, self._port.stream_ids, request.sent_s)

    def on_answer(self, request: Request, answer: broker_pb2.MultiWriteChunksResponse, now_s: float) -> None:
        """Measure how long the chunks took, and take advice from the answer."""
        if request.message.HasField("latency"):
            self._reports.answered(request.sent_s, answer, now_s)
            self._lateness.told(now_s)
        if self.pace.measures:
            self.pace.acknowledged(request.chunks, now_s)
            self._lateness.told(now_s)
        if self.pace.advised:
            self._reports.delivered(request.bundles, request.chunks, now_s)
