"""The broker's metrics, as Prometheus has them: read from counters and from the log when it asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kera.broker.counters import Counters, PushTotals
from kera.broker.engine import LogEngine

_HELP = {
    "write_requests": "multiWriteChunks requests",
    "chunks_appended": "chunks appended",
    "records_appended": "records in the chunks that were appended",
    "bytes_appended": "bytes of the chunks that were appended, headers included",
    "chunks_duplicate": "chunks that had been appended before, acknowledged again",
    "chunks_refused": "chunks refused with an error",
    "read_requests": "multiReadChunks requests",
    "bytes_read": "bytes of chunks returned to readers as copies",
    "not_owner": "chunks and ranges of reads refused because another broker has what they are about",
    "writes_without_lease": "chunks refused because the coordinator could not be reached for too long",
}

_PUSH_HELP = {
    "runs": "times that a reader was told where chunks lie in memory",
    "bytes": "bytes of chunks that readers were told of, to be read in place",
    "refused": "connections of readers refused: of another user, or too many",
}
_PUSH_NOW_HELP = {
    "connections": "readers of this node that are pushed to",
    "subscriptions": "ranges of entries that are being pushed",
}

_TOTALS_HELP = {
    "segments_flushed": "segments written to disk, complete",
    "bytes_flushed": "bytes of segments written to disk when they were complete",
    "commits": "group commits of level persisted",
    "bytes_committed": "bytes written to disk by group commits",
    "segments_loaded": "segments brought back from disk for readers",
    "bytes_loaded": "bytes of segments brought back from disk",
    "segments_evicted": "segments on disk whose memory was given to others",
    "segments_removed": "segments removed by retention, truncation and deletion",
    "bytes_removed": "bytes of segments removed",
    "chunks_damaged": "chunks on disk that do not match their checksums, found when they were loaded",
    "disk_errors": "reads and writes that failed",
}
_REPLICATION_HELP = {
    "batches": "requests' worth of chunks that all their backups have",
    "bytes": "bytes of chunks that all their backups have",
    "batches_sent_again": "batches that were sent once more, because a backup failed",
    "virtual_segments_opened": "virtual segments opened",
    "virtual_segments_closed": "virtual segments closed",
    "virtual_segments_sealed": "virtual segments that a backup left while they were not closed",
    "virtual_segments_repaired": "virtual segments with too few replicas that were replaced",
    "virtual_segments_retired": "virtual segments of which nothing is left in the log, or that were replaced",
    "bytes_repaired": "bytes of chunks that were replicated again",
    "backups_failed": "times that a backup failed",
    "backups_full": "times that a backup had no room",
}
_RECOVERY_HELP = {
    "bytes_recovered": "bytes of chunks that came back from backups, of brokers that were lost",
    "bytes_restored": "bytes of them that have all their replicas again",
    "segments_recovered": "segments that came back whole",
    "chunks_lost": "chunks that should be there, and that no backup has",
    "replicas_failed": "replicas that could not be read",
}
_FOUND_HELP = {
    "attached": "1: found the memory of the last launch",
    "lost_memory": "1: the last launch was killed and its memory is gone",
    "repaired": "1: the index was damaged and made anew from the segments",
    "segments_in_memory": "segments found in memory",
    "bytes_in_memory": "bytes of chunks found in memory",
    "open_files": "files of open segments read, because their memory is gone",
    "torn_tails": "segments with a torn tail, cut at a chunk boundary",
    "torn_bytes": "bytes cut with torn tails",
    "chunks_damaged": "chunks that do not match their checksums",
}


class BrokerCollector(Collector):
    """Counters and gauges of one broker."""

    def __init__(self, counters: Counters, pushed: PushTotals, engine: LogEngine) -> None:
        self._counters = counters
        self._pushed = pushed
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        for name, text in _HELP.items():
            yield CounterMetricFamily(f"kera_broker_{name}", text, value=getattr(self._counters, name))
        yield from self._push()
        engine = self._engine
        arena, memory, found = engine.arena, engine.memory, engine.restart.found
        yield GaugeMetricFamily("kera_broker_arena_slots", "segments that fit into memory", value=arena.slot_count)
        yield GaugeMetricFamily("kera_broker_arena_slots_free", "segments that are free", value=arena.free_slots)
        yield GaugeMetricFamily(
            "kera_broker_arena_slots_leased", "segments that readers hold", value=arena.leased_slots
        )
        yield GaugeMetricFamily("kera_broker_arena_slot_bytes", "size of a segment", value=arena.slot_bytes)
        yield GaugeMetricFamily("kera_broker_streams", "streams with streamlets here", value=len(engine.streams))
        yield GaugeMetricFamily(
            "kera_broker_unknown_streams",
            "streams that are kept here and that the coordinator does not know",
            value=len(engine.streams.unknown),
        )
        yield GaugeMetricFamily(
            "kera_broker_unknown_streams_bytes",
            "bytes of them when the broker started",
            value=sum(held.bytes for held in engine.streams.unknown.values()),
        )
        yield self._streamlets()
        states = GaugeMetricFamily("kera_broker_segments", "segments in memory, by state", labels=["state"])
        for state, count in memory.segments_by_state().items():
            states.add_metric([state], count)
        yield states
        for name, text in _TOTALS_HELP.items():
            yield CounterMetricFamily(f"kera_broker_{name}", text, value=getattr(memory.totals, name))
        for name, text in _FOUND_HELP.items():
            yield GaugeMetricFamily(f"kera_broker_start_{name}", text, value=getattr(found, name))
        yield from self._replication()
        yield from self._recovery()
        failing = memory.disk.error is not None
        yield GaugeMetricFamily("kera_broker_disk_failing", "1 while the disk takes no data", value=int(failing))

    def _push(self) -> Iterator[Metric]:
        pushed = self._pushed
        for name, text in _PUSH_HELP.items():
            yield CounterMetricFamily(f"kera_broker_push_{name}", text, value=getattr(pushed, name))
        for name, text in _PUSH_NOW_HELP.items():
            yield GaugeMetricFamily(f"kera_broker_push_{name}", text, value=getattr(pushed, name))
        ends = CounterMetricFamily("kera_broker_push_ends", "ranges that are pushed no more", labels=["reason"])
        for reason, count in pushed.ends.items():
            ends.add_metric([reason], count)
        yield ends

    def _streamlets(self) -> Metric:
        counts = {"owned": 0, "sealed": 0, "held": 0}
        for stream in self._engine.streams:
            for streamlet in stream.streamlets.values():
                counts["sealed" if streamlet.sealed else "owned" if streamlet.owned else "held"] += 1
        family = GaugeMetricFamily(
            "kera_broker_streamlets",
            "streamlets here: owned, sealed to be moved, and those of which there are older groups only",
            labels=["state"],
        )
        for state, count in counts.items():
            family.add_metric([state], count)
        return family

    def _recovery(self) -> Iterator[Metric]:
        totals = self._engine.takeovers.totals
        for name, text in _RECOVERY_HELP.items():
            yield CounterMetricFamily(f"kera_broker_recovery_{name}", text, value=getattr(totals, name))
        yield GaugeMetricFamily(
            "kera_broker_recovery_segments_to_come",
            "segments of lost brokers that are still on backups only",
            value=totals.segments_to_come,
        )

    def _replication(self) -> Iterator[Metric]:
        replication = self._engine.replication
        for name, text in _REPLICATION_HELP.items():
            value = getattr(replication.totals, name)
            yield CounterMetricFamily(f"kera_broker_replication_{name}", text, value=value)
        yield GaugeMetricFamily(
            "kera_broker_backups_up", "backups that can be used", value=replication.backups.up_count
        )
        segments = GaugeMetricFamily("kera_broker_virtual_segments", "virtual segments, by state", labels=["state"])
        for state, count in replication.virtual_segments.items():
            segments.add_metric([state], count)
        yield segments
        yield GaugeMetricFamily(
            "kera_broker_virtual_segments_deficient",
            "closed virtual segments with too few replicas",
            value=len(replication.coverage.deficient),
        )
        yield GaugeMetricFamily(
            "kera_broker_replication_backlog",
            "pieces of segments that no virtual segment covers yet",
            value=len(replication.backlog.extents),
        )
        labels = ["stream_id", "virtual_log"]
        lag_bytes = GaugeMetricFamily(
            "kera_broker_replication_lag_bytes", "bytes that backups do not have", labels=labels
        )
        lag_ms = GaugeMetricFamily("kera_broker_replication_lag_ms", "age of the oldest of them", labels=labels)
        in_flight = GaugeMetricFamily("kera_broker_replication_in_flight", "batches under way", labels=labels)
        for lag in replication.logs.lag():
            of = [str(lag.stream_id), str(lag.log_id)]
            lag_bytes.add_metric(of, lag.lag_bytes)
            lag_ms.add_metric(of, lag.lag_ms)
            in_flight.add_metric(of, lag.in_flight)
        yield from (lag_bytes, lag_ms, in_flight)
