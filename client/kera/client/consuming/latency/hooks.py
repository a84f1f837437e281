"""The plug-in of a consumer for latency constraints; see `kera.client.consuming.fetching.hooks`.

A pushing broker gets no requests that could carry a report, and an answer that has waited at the broker says little
about clocks. So reports go in separate requests: a request to read without ranges, to each broker that chunks come
from. While there is no constraint, they go only now and then, to learn of one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice

from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched
from kera.client.consuming.fetching.arrivals import LOOK_MAX
from kera.client.consuming.fetching.hooks import FetcherPort, FetchHooks, MakeFetchHooks
from kera.client.consuming.fetching.ranges import Home, Range
from kera.client.consuming.latency.reader_reports import ReaderMeter
from kera.client.consuming.latency.waiting import Waiting
from kera.client.types import StreamDescription
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.v1 import broker_pb2

TIMEOUT_S = 5.0


def reader_latency(cluster: Cluster, consumer_group: str) -> MakeFetchHooks | None:
    """Return the plug-in for the fetchers of a consumer group's reader; None without a group: nothing is measured."""
    return partial(ReaderLatency, cluster, consumer_group) if consumer_group else None


class ReaderLatency(FetchHooks):
    """The latency of the data that one fetcher gets for a consumer group."""

    def __init__(self, cluster: Cluster, consumer_group: str, port: FetcherPort) -> None:
        self._cluster = cluster
        self._port = port
        self._waiting: deque[Waiting] = deque()
        """Fetched data that are not taken yet, in their order."""
        self._meter = ReaderMeter(consumer_group, cluster.at_work, lambda: islice(self._waiting, LOOK_MAX))
        self._now_s = asyncio.get_running_loop().time
        self._reports = False
        """Whether reports go out."""

    def on_range(self) -> None:
        """See `FetchHooks`; likewise what follows."""
        if not self._reports:
            self._reports = True
            self._port.start(self._report())

    def on_fetched(self, item: Range, fetched: Fetched) -> None:
        """Begin to measure how long the data wait."""
        came = self._meter.came(fetched, self._port.home(item)[1], self._now_s())
        self._waiting.append(Waiting(item, fetched.entry, came))

    def on_asked(self) -> None:
        """Note that the application may be done with its data."""
        self._meter.asks(self._now_s())

    def on_taken(self, item: Range, fetched: Fetched) -> None:
        """Begin to measure how long the application works on the data."""
        self._meter.taken(fetched, self._waiting.popleft().came, self._now_s(), item)

    def on_closed(self) -> None:
        """End all measurements."""
        self._waiting.clear()
        self._meter.close()

    def pause_s(self, stream_id: int, answer: Iterable[Fetched]) -> float:
        """Return the pause that a constraint of the stream allows; mostly 0."""
        if not self._meter.watches:
            return 0.0
        return self._meter.pause_s(stream_id, sum(fetched.size_bytes for fetched in answer), self._now_s())

    async def _report(self) -> None:
        """Report until cancelled."""
        cluster, meter, now_s = self._cluster, self._meter, self._now_s
        while True:
            await asyncio.sleep(cluster.timing.latency_report_s if meter.watches else cluster.timing.latency_learn_s)
            found = streams_by_broker(self._port.streams, self._port.homes())
            meter.look(now_s(), cluster.timing.latency_report_s)
            meter.keep(found)
            for broker_id, streams in found.items():
                report = meter.report(broker_id, [stream.stream_id for stream in streams])
                request = broker_pb2.MultiReadChunksRequest(latency=report)
                try:
                    channel = await cluster.channel(streams[0], broker_id)
                    asked_s = now_s()
                    reply = await channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=TIMEOUT_S)
                except KeraError:
                    continue  # the fetching itself will report what is wrong
                meter.answered(broker_id, reply.message, asked_s, now_s())


def streams_by_broker(
    streams: Mapping[int, StreamDescription], homes: Iterable[Home]
) -> dict[int, list[StreamDescription]]:
    """Return the brokers that chunks come from, with the streams read there. `homes`: of the readers."""
    found: dict[int, list[StreamDescription]] = {}
    for stream_id, broker_id in dict.fromkeys(homes):
        stream = streams[stream_id]
        if broker_id in stream.brokers:
            found.setdefault(broker_id, []).append(stream)
    return found
