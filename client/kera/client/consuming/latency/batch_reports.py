"""Measurements of a query that reads in batches, for the brokers of streams with a latency constraint.

The driver that plans the batches of such a query (Spark's) reads no chunks, so a consumer's measurements do not cover
it. Its hops are those of a consumer group: HAND_OVER ends when a batch is planned, WORK goes on until the batch is
processed; each is measured by the oldest chunk of some entries. Like a consumer, it asks for constraints now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kera.client.cluster.asking import ask_broker
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.latency.reader_reports import ReaderMeter
from kera.core.base.ids import EntryId
from kera.core.errors import KeraError
from kera.core.latency.hop import Hop
from kera.core.rpc import api
from kera.v1 import broker_pb2


class TakenEntry(NamedTuple):
    """An entry that is in a batch."""

    stream: str
    entry: EntryId
    created_us: int
    """``created_us`` of its first chunk, as the chunk's writer has set it."""


class BatchReports:
    """The reports of one query. Get them as `Client.latency.batch_reports`."""

    def __init__(self, cluster: Cluster, consumer_group: str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._meter = ReaderMeter(consumer_group)
        self._now_s = now_s
        self._told_s: float | None = None

    def watches(self, stream_id: int) -> bool:
        """Return whether a broker wants measurements of a stream."""
        return self._meter.watches_stream(stream_id, self._now_s())

    async def done(self, taken: Sequence[TakenEntry], planned_s: float, done_s: float) -> None:
        """Measure a batch that was planned and processed at these times, on the clock `now_s`.

        Raises the errors of looking up streams.
        """
        for one in taken:
            if self.watches(one.entry.stream_id):
                stream = await self._cluster.stream(one.stream)
                assignment = stream.assignments.get(one.entry.streamlet_id)
                if assignment is None or stream.stream_id != one.entry.stream_id:
                    continue
                planned_us = self._meter.broker_us(assignment.broker_id, planned_s)
                if planned_us is not None:
                    self._meter.add(assignment.broker_id, one.entry, Hop.HAND_OVER, planned_us - one.created_us)
                self._meter.add(assignment.broker_id, one.entry, Hop.WORK, round((done_s - planned_s) * 1e6))

    async def tell(self, streams: Iterable[str]) -> None:
        """Report to all brokers of `streams`, if it is time. Raises the errors of looking up streams."""
        timing = self._cluster.timing
        interval_s = timing.latency_report_s if self._meter.watches else timing.latency_learn_s
        if self._told_s is not None and self._now_s() - self._told_s < interval_s:
            return
        self._told_s = self._now_s()
        known = [await self._cluster.stream(name) for name in streams]
        homes = sorted({one.broker_id for stream in known for one in stream.assignments.values()})
        self._meter.keep(homes)
        for broker_id in homes:
            there = [
                stream for stream in known if any(one.broker_id == broker_id for one in stream.assignments.values())
            ]
            report = self._meter.report(broker_id, [stream.stream_id for stream in there])
            request, asked_s = broker_pb2.MultiReadChunksRequest(latency=report), self._now_s()
            try:
                answer = await ask_broker(self._cluster, there[0], broker_id, api.MULTI_READ_CHUNKS, request)
            except KeraError:
                continue  # readers of that broker will report what is wrong
            self._meter.answered(broker_id, answer, asked_s, self._now_s())
