"""The broker's counters. The hot path adds to plain integers; Prometheus reads them when it asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kera.broker.arena import Arena
from kera.broker.stream import Streams


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    write_requests: int = 0
    chunks_appended: int = 0
    records_appended: int = 0
    bytes_appended: int = 0
    chunks_duplicate: int = 0
    chunks_refused: int = 0
    read_requests: int = 0
    bytes_read: int = 0


_HELP = {
    "write_requests": "multiWriteChunks requests",
    "chunks_appended": "chunks appended",
    "records_appended": "records in the chunks that were appended",
    "bytes_appended": "bytes of the chunks that were appended, headers included",
    "chunks_duplicate": "chunks that had been appended before, acknowledged again",
    "chunks_refused": "chunks refused with an error",
    "read_requests": "multiReadChunks requests",
    "bytes_read": "bytes of chunks returned to readers, by copy or by reference",
}


class BrokerCollector(Collector):
    """Counters and gauges of one broker."""

    def __init__(self, counters: Counters, arena: Arena, streams: Streams) -> None:
        self._counters = counters
        self._arena = arena
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        for name, text in _HELP.items():
            yield CounterMetricFamily(f"kera_broker_{name}", text, value=getattr(self._counters, name))
        arena = self._arena
        yield GaugeMetricFamily("kera_broker_arena_slots", "segments that fit into memory", value=arena.slot_count)
        yield GaugeMetricFamily("kera_broker_arena_slots_free", "segments that are free", value=arena.free_slots)
        yield GaugeMetricFamily("kera_broker_arena_slot_bytes", "size of a segment", value=arena.slot_bytes)
        yield GaugeMetricFamily("kera_broker_streams", "streams with streamlets here", value=len(self._streams))
