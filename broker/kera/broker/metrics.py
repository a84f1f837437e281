"""The broker's metrics in Prometheus's form, read from counters and from the log on each scrape."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kera.broker.counters import Counters, Latencies, PushTotals
from kera.broker.engine import LogEngine
from kera.broker.log.bounds import lag_records
from kera.broker.ownership.clock_offset import ClockOffset
from kera.broker.ownership.epoch_lag import furthest_behind
from kera.broker.ownership.stream import Stream
from kera.core.errors import KeraError
from kera.server.monitoring.sources import Steps

SORTED_AT_ONCE = 256
_NAME = attrgetter("name")


class SeriesLimits(NamedTuple):
    """Limits on the numbers of series. Metrics also show how many were left out."""

    streams_max: int = 1000
    """Maximum number of streams: the first ones by name."""
    virtual_logs_max: int = 2000
    consumer_groups_max: int = 1000
    """Maximum number of pairs of a consumer group and a stream."""
    entries_max: int = 20_000
    """Maximum number of entries that are looked at for the lag of consumer groups."""


SERIES_LIMITS = SeriesLimits()

_HELP = {
    "write_requests": "multiWriteChunks requests",
    "chunks_appended": "chunks appended",
    "records_appended": "records in the chunks that were appended",
    "bytes_appended": "bytes of the chunks that were appended, headers included",
    "chunks_duplicate": "chunks that had been appended before, acknowledged again",
    "chunks_refused": "chunks refused with an error",
    "promises": "promises to readers that nothing older than a time will come",
    "punctuations": "punctuations written because a chunk was older than readers had been promised",
    "read_requests": "multiReadChunks requests",
    "bytes_read": "bytes of chunks returned to readers as copies",
    "not_owner": "chunks and reads refused because another broker owns the streamlet",
    "writes_without_lease": "chunks refused because the coordinator could not be reached for too long",
}

_PUSH_HELP = {
    "runs": "announcements to readers of where chunks are in memory",
    "bytes": "bytes of chunks announced to readers, which read them in place",
    "refused": "connections of readers refused: of another user, or too many",
}
_PUSH_NOW_HELP = {
    "connections": "readers of this node that get pushed chunks",
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
    "batches": "batches of chunks that all their backups have",
    "bytes": "bytes of chunks that all their backups have",
    "batches_sent_again": "batches that were sent once more, because a backup failed",
    "virtual_segments_opened": "virtual segments opened",
    "virtual_segments_closed": "virtual segments closed",
    "virtual_segments_sealed": "virtual segments that a backup left while they were not closed",
    "virtual_segments_repaired": "virtual segments with too few replicas that were replaced",
    "virtual_segments_retired": "virtual segments with nothing left in the log, or replaced",
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
    "repaired": "1: the index was damaged and rebuilt from the segments",
    "segments_in_memory": "segments found in memory",
    "bytes_in_memory": "bytes of chunks found in memory",
    "open_files": "files of open segments read, because their memory is gone",
    "torn_tails": "segments with a torn tail, cut at a chunk boundary",
    "torn_bytes": "bytes cut with torn tails",
    "chunks_damaged": "chunks that do not match their checksums",
}


class BrokerCollector:
    """Counters and gauges of one broker."""

    def __init__(
        self,
        counters: Counters,
        pushed: PushTotals,
        latencies: Latencies,
        engine: LogEngine,
        *,
        may_promise: Callable[[int], bool],
        clock_offset: ClockOffset,
        limits: SeriesLimits = SERIES_LIMITS,
    ) -> None:
        """`may_promise`: whether the broker may now promise that nothing older comes, given the grace of a stream."""
        self._counters = counters
        self._pushed = pushed
        self._latencies = latencies
        self._engine = engine
        self._may_promise = may_promise
        self._clock_offset = clock_offset
        self._streams_max = limits.streams_max
        self._virtual_logs_max = limits.virtual_logs_max
        self._consumer_groups_max = limits.consumer_groups_max
        self._entries_max = limits.entries_max

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`."""
        families = list(self._totals())
        yield
        families += self._replication()
        yield
        families += yield from self._over_streams()
        if everything:
            shown, count = yield from self._first_streams()
            families += yield from self._of_streams(shown, count)
            families += yield from self._of_virtual_logs(shown)
            families += yield from self._of_consumer_groups(shown)
        return families

    def _totals(self) -> Iterator[Metric]:
        for name, text in _HELP.items():
            yield CounterMetricFamily(f"kera_broker_{name}", text, value=getattr(self._counters, name))
        yield from self._push()
        yield from self._latency()
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
        states = GaugeMetricFamily("kera_broker_segments", "segments in memory, by state", labels=["state"])
        for state, count in memory.segments_by_state().items():
            states.add_metric([state], count)
        yield states
        for name, text in _TOTALS_HELP.items():
            yield CounterMetricFamily(f"kera_broker_{name}", text, value=getattr(memory.totals, name))
        for name, text in _FOUND_HELP.items():
            yield GaugeMetricFamily(f"kera_broker_start_{name}", text, value=getattr(found, name))
        yield from self._recovery()
        yield GaugeMetricFamily(
            "kera_broker_clock_offset_seconds",
            "how far the clock is ahead of the coordinator's at least; below 0: behind it",
            value=self._clock_offset.least_us / 1e6,
        )
        failing = memory.disk.error is not None
        yield GaugeMetricFamily("kera_broker_disk_failing", "1 while the disk takes no data", value=int(failing))

    def _latency(self) -> Iterator[Metric]:
        appends = HistogramMetricFamily(
            "kera_broker_append_seconds",
            "time from handling a write to answering it: at once, or later, after a wait for backups, the disk or room",
            labels=["answered"],
        )
        reads = HistogramMetricFamily(
            "kera_broker_fetch_seconds",
            "time from handling a read to answering it: at once, or later, after a wait for chunks or other requests",
            labels=["answered"],
        )
        for family, at_once, later in (
            (appends, self._latencies.appends, self._latencies.appends_waited),
            (reads, self._latencies.reads, self._latencies.reads_waited),
        ):
            at_once.add_to(family, ["at_once"])
            later.add_to(family, ["later"])
            yield family

    def _push(self) -> Iterator[Metric]:
        pushed = self._pushed
        for name, text in _PUSH_HELP.items():
            yield CounterMetricFamily(f"kera_broker_push_{name}", text, value=getattr(pushed, name))
        for name, text in _PUSH_NOW_HELP.items():
            yield GaugeMetricFamily(f"kera_broker_push_{name}", text, value=getattr(pushed, name))
        ends = CounterMetricFamily("kera_broker_push_ends", "ranges whose push has ended", labels=["reason"])
        for reason, count in pushed.ends.items():
            ends.add_metric([reason], count)
        yield ends

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
        answers = GaugeMetricFamily(
            "kera_broker_backup_answer_ms",
            "how long a backup takes to answer: the mean of the last seconds, or the age of what waits longer",
            labels=["backup"],
        )
        for backup_id, answer_ms in self._engine.replicator.answer_ms().items():
            answers.add_metric([str(backup_id)], answer_ms)
        yield answers
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

    def _over_streams(self) -> Steps:
        """Return the metrics that are sums over all streams."""
        counts = {"owned": 0, "sealed": 0, "held": 0}
        lag_bytes = in_flight = lag_ms = 0
        now_ms = self._engine.replication.logs.now_ms
        held_up_ms = 0
        for stream in list(self._engine.streams):
            held_up_ms = max(held_up_ms, (yield from self._held_up_ms(stream)))
            for streamlet in stream.streamlets.values():
                counts["sealed" if streamlet.sealed else "owned" if streamlet.owned else "held"] += 1
            for log in stream.logs.all() if stream.logs is not None else ():
                if log.lag_bytes or not log.settled:
                    lag_bytes += log.lag_bytes
                    in_flight += log.in_flight
                    lag_ms = max(lag_ms, log.lag_ms(now_ms))
            yield
        family = GaugeMetricFamily(
            "kera_broker_streamlets",
            "streamlets on this broker: owned, sealed for a move, and past (older groups only)",
            labels=["state"],
        )
        for state, count in counts.items():
            family.add_metric([state], count)
        return [
            family,
            GaugeMetricFamily("kera_broker_replication_lag_bytes", "bytes that backups do not have", value=lag_bytes),
            GaugeMetricFamily("kera_broker_replication_lag_ms", "age of the oldest of them", value=lag_ms),
            GaugeMetricFamily("kera_broker_replication_in_flight", "batches under way", value=in_flight),
            GaugeMetricFamily(
                "kera_broker_epochs_held_up_ms",
                "delay of an entry behind the clock beyond the grace, for streams whose epochs follow the clock",
                value=held_up_ms,
            ),
        ]

    def _epoch_lag_ms(self, stream: Stream) -> Generator[None, None, int | None]:
        now_us = self._engine.memory.now_us
        found = yield from furthest_behind(stream, now_us, self._may_promise)
        return found.lag_ms(now_us) if found is not None else None

    def _held_up_ms(self, stream: Stream) -> Generator[None, None, int]:
        if not stream.epochs.by_clock:
            return 0
        now_us = self._engine.memory.now_us
        found = yield from furthest_behind(stream, now_us, self._may_promise)
        return found.held_up_ms(stream.epochs, now_us) if found is not None else 0

    def _first_streams(self) -> Generator[None, None, tuple[list[Stream], int]]:
        """Return the first streams by name, so that mostly the same ones are shown, and the number of all streams."""
        streams = list(self._engine.streams)
        runs = []
        for start in range(0, len(streams), SORTED_AT_ONCE):
            runs.append(sorted(streams[start : start + SORTED_AT_ONCE], key=_NAME))
            yield
        return list(islice(heapq.merge(*runs, key=_NAME), self._streams_max)), len(streams)

    def _of_streams(self, streams: list[Stream], count: int) -> Steps:
        labels = ["stream"]
        appended = CounterMetricFamily(
            "kera_broker_stream_bytes_appended", "bytes appended, as of the last heartbeat", labels=labels
        )
        records = CounterMetricFamily(
            "kera_broker_stream_records_appended", "records appended, likewise", labels=labels
        )
        read = CounterMetricFamily("kera_broker_stream_bytes_read", "bytes read, likewise", labels=labels)
        streamlets = GaugeMetricFamily("kera_broker_stream_streamlets", "streamlets owned here", labels=labels)
        epochs = GaugeMetricFamily(
            "kera_broker_stream_epoch_lag_ms",
            "delay of the least settled entry behind the clock, for streams with epochs",
            labels=labels,
        )
        for stream in streams:
            name = [stream.name]
            appended.add_metric(name, stream.bytes_appended)
            records.add_metric(name, stream.records_appended)
            read.add_metric(name, stream.bytes_read)
            streamlets.add_metric(name, sum(each.owned for each in stream.streamlets.values()))
            lag_ms = yield from self._epoch_lag_ms(stream)
            if lag_ms is not None:
                epochs.add_metric(name, lag_ms)
            yield
        left_out = _left_out("streams", count - len(streams))
        return [appended, records, read, streamlets, epochs, left_out]

    def _of_virtual_logs(self, streams: list[Stream]) -> Steps:
        labels = ["stream", "virtual_log"]
        lag_bytes = GaugeMetricFamily("kera_broker_virtual_log_lag_bytes", "bytes that backups lack", labels=labels)
        lag_ms = GaugeMetricFamily("kera_broker_virtual_log_lag_ms", "age of the oldest of them", labels=labels)
        in_flight = GaugeMetricFamily("kera_broker_virtual_log_in_flight", "batches under way", labels=labels)
        now_ms, room, left_out = self._engine.replication.logs.now_ms, self._virtual_logs_max, 0
        for stream in streams:
            logs = stream.logs.all() if stream.logs is not None else []
            for log in logs[:room]:
                of = [stream.name, str(log.log_id)]
                lag_bytes.add_metric(of, log.lag_bytes)
                lag_ms.add_metric(of, log.lag_ms(now_ms))
                in_flight.add_metric(of, log.in_flight)
            shown = min(len(logs), room)
            room -= shown
            left_out += len(logs) - shown
            yield
        return [lag_bytes, lag_ms, in_flight, _left_out("virtual_logs", left_out, "of the streams that are shown")]

    def _of_consumer_groups(self, streams: list[Stream]) -> Steps:
        lags: dict[tuple[str, str], int] = {}
        looked = left_out = 0
        for stream in streams:
            for streamlet in list(stream.streamlets.values()):
                if looked >= self._entries_max:
                    left_out += 1
                    continue
                for entry in list(streamlet.entries.made):
                    looked += 1
                    for name, position in list(entry.committed.items()):
                        key = name, stream.name
                        if key not in lags and len(lags) >= self._consumer_groups_max:
                            left_out += 1
                            continue
                        try:
                            records = lag_records(streamlet, entry, position)
                        except KeraError:  # the committed position was removed
                            continue
                        lags[key] = lags.get(key, 0) + records
                        yield  # a single lag may walk through a thousand segments
            yield
        family = GaugeMetricFamily(
            "kera_broker_consumer_group_lag_records",
            "records on this broker that a consumer group has not committed, in entries where it has a cursor",
            labels=["consumer_group", "stream"],
        )
        for key, count in lags.items():
            family.add_metric([*key], count)
        return [family, _left_out("consumer_group_lags", left_out, "cursors, or streamlets that were not looked at")]


def _left_out(what: str, count: int, of: str = "in /metrics/all, as there are too many") -> Metric:
    return GaugeMetricFamily(f"kera_broker_{what}_left_out", f"{what.replace('_', ' ')} not shown: {of}", value=count)
