"""Reports of a producer that go alone: while chunks fill for long, no request could carry them.

Without lone reports, the broker would get measurements only when the next chunk is full, and advice would expire in
between: a writer that sends every seven seconds would go by its own settings from the fifth second on. A lone report is
a request without chunks. It goes only if there is advice, and measurements to report or a chunk that waits. Its outcome
does not affect chunks: without an answer the advice expires, and the settings count.
"""

from __future__ import annotations

import asyncio
import math

from kera.client.producing.latency.pace import Pace
from kera.client.producing.latency.writer_reports import WriterReports
from kera.client.producing.sending.hooks import SenderPort
from kera.core.errors import KeraError
from kera.core.rpc import Reply, api
from kera.v1 import broker_pb2

TIMEOUT_S = 5.0


class LoneReports:
    """The reports of a `Sender` that sends nothing else; it is woken when the next one is due."""

    def __init__(
        self,
        reports: WriterReports,
        pace: Pace,
        loop: asyncio.AbstractEventLoop,
        port: SenderPort,
    ) -> None:
        self._reports = reports
        self._pace = pace
        self._loop = loop
        self._port = port
        self.waits = False
        """Whether a chunk waits."""
        self._in_flight = False

    @property
    def next_s(self) -> float:
        """Time when the next report is due, if a chunk waits; infinity if none will be."""
        return self._reports.lone_s if self._pace.advised and not self._in_flight else math.inf

    def look(self) -> None:
        """Send a report if it is due. Called at the end of each round of the sender, while there is advice."""
        if self._in_flight or not (self.waits or self._reports.has_samples):
            return
        channel = self._port.channel()
        if channel is None or channel.closed:
            return
        now_s = self._loop.time()
        request = broker_pb2.MultiWriteChunksRequest()
        if not self._reports.add_to(request, self._port.stream_ids, now_s, lone=True):
            self._port.wake_at(self._reports.lone_s)
            return
        try:
            future = channel.submit(api.MULTI_WRITE_CHUNKS, request, timeout_s=TIMEOUT_S)
        except KeraError:
            return  # requests with chunks will report what is wrong
        self._in_flight = True
        future.when_done(lambda done: self._answered(now_s, done))

    def _answered(self, asked_s: float, done: asyncio.Future[Reply[broker_pb2.MultiWriteChunksResponse]]) -> None:
        self._in_flight = False
        if done.cancelled() or done.exception() is not None:
            self._port.wake_at(self._reports.lone_s)
            return
        now_s = self._loop.time()
        self._reports.answered(asked_s, done.result().message, now_s)
        self._port.wake_at(now_s)  # a chunk that waits may be due by now
