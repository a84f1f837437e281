"""The virtual logs of all streams of a broker: plans their requests, and places their virtual segments. Pure.

    appends ──► VirtualLogs ──pump()──► Send, Close, Free ──► Replicator ──► acknowledged, refused

A stream has V virtual logs, which its entries share, and another one for data that is covered again (``backlog``).
Their virtual segments are placed on ``backups``; ``coverage`` gets them when they are closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kera.broker.log.events import Events
from kera.broker.log.segment import Segment
from kera.broker.replication.backups import Backups
from kera.broker.replication.coverage import Coverage
from kera.broker.replication.hooks import ReplicationHooks
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.virtual_log import Close, Effect, Send, VirtualLog
from kera.broker.replication.virtual_segment import Batch, Extent, ReplicationTotals, VirtualSegment
from kera.core.errors import KeraError, NotReplicated

REPAIR_LOG_ID = (1 << 32) - 1
"""Id of each stream's log for data that is covered again."""
IDLE_CLOSED_MAX = 8
"""Maximum number of virtual segments that are closed at once to make room on full backups."""
IDLE_MS_MIN = 500
"""Virtual segments that were written to more recently are not closed for that."""


class VirtualLogLag(NamedTuple):
    """The lag of a virtual log."""

    stream_id: int
    log_id: int
    lag_bytes: int
    lag_ms: int
    in_flight: int


class StreamLogs:
    """The virtual logs of one stream."""

    def __init__(self, stream_id: int, replication: int, entries: int, *, by_replicas: bool) -> None:
        self.stream_id = stream_id
        self.replication = replication
        self._entries = entries
        self.by_replicas = by_replicas
        """Whether readers and writers wait for backups, so no data may be moved to the backlog."""
        self.logs: list[VirtualLog] = []
        self.draining: list[VirtualLog] = []
        """The logs from before the number of logs was changed, until they are settled."""
        self.repair: VirtualLog | None = None
        self.priority = 0
        """Streams with a higher priority go first."""

    def of(self, streamlet_id: int, entry: int) -> VirtualLog:
        """Return the log of an entry."""
        return self.logs[(streamlet_id * self._entries + entry) % len(self.logs)]

    def all(self) -> list[VirtualLog]:
        """Return all logs, including those for repair and from before a change of their number."""
        return [*self.logs, *self.draining, *([self.repair] if self.repair is not None else [])]

    def set_by_replicas(self, by_replicas: bool) -> None:  # noqa: FBT001 - what it sets is called so
        """Set `by_replicas`."""
        self.by_replicas = by_replicas

    def set_priority(self, priority: int) -> None:
        """Set `priority`."""
        self.priority = priority

    def shed(self) -> list[Extent]:
        """Forget the data that was never sent and that no request waits for; return its extents."""
        return [extent for log in self.logs for extent in log.shed()] if not self.by_replicas else []


def priority_of(streams: Mapping[int, StreamLogs], stream_id: int) -> int:
    """Return the priority of a stream; 0 if it is not here."""
    stream = streams.get(stream_id)
    return stream.priority if stream is not None else 0


class VirtualLogs:
    """The virtual logs of all streams; places their virtual segments on backups, and routes answers to the logs."""

    def __init__(
        self,
        limits: ReplicationLimits,
        backups: Backups,
        coverage: Coverage,
        effects: list[Effect],
        totals: ReplicationTotals,
        events: Events,
        *,
        now_ms: int,
    ) -> None:
        """`effects`: the requests to backups, to which other parts add, too."""
        self.now_ms = now_ms
        """The time of the last `tick`."""
        self.streams: dict[int, StreamLogs] = {}
        self.opened: dict[int, VirtualSegment] = {}
        """Virtual segments that are not closed, by id."""
        self.last_id = 0
        """The id of the newest virtual segment."""
        self._limits = limits
        self._backups = backups
        self._coverage = coverage
        self._effects = effects
        self._totals = totals
        self._events = events
        self._work: dict[VirtualLog, None] = {}
        """Logs that may have requests to send."""
        self._hooks: ReplicationHooks | None = None
        self._active: dict[VirtualLog, None] = {}
        """All logs that are not settled, and some that were not at the last tick; a tick looks at no others."""

    def begin(self, broker_epoch: int) -> None:
        """Begin a launch: the ids of its virtual segments are above those of earlier launches."""
        self.last_id = broker_epoch << 32

    def plug_in(self, hooks: ReplicationHooks) -> None:
        """Call these hooks from now on."""
        self._hooks = hooks

    # -- streams ---------------------------------------------------------------------------------------------------

    def open_stream(
        self, stream_id: int, *, replication: int, entries: int, virtual_logs: int, by_replicas: bool
    ) -> StreamLogs:
        """Create the logs of a stream; for a restored stream, `Backlog.restore` of its entries has to follow."""
        stream = self.streams[stream_id] = StreamLogs(stream_id, replication, entries, by_replicas=by_replicas)
        stream.logs = [self._log(stream, log_id) for log_id in range(virtual_logs)]
        self._coverage.adopt(stream_id)
        return stream

    def set_virtual_logs(self, stream: StreamLogs, virtual_logs: int) -> None:
        """Change the number of a stream's logs: new logs take over, and wait until the old ones have sent all."""
        if virtual_logs == len(stream.logs):
            return
        stream.draining = [log for log in (*stream.draining, *stream.logs) if not log.settled]
        before = list(stream.draining)
        for log in before:
            if not log.busy:
                log.close_open(self._effects)
        stream.logs = [self._log(stream, log_id, before) for log_id in range(virtual_logs)]
        self._events.backup_work()

    def drop_stream(self, stream_id: int, error: KeraError) -> None:
        """Forget a dropped stream, if it was here, and fail its waiters with `error`."""
        stream = self.streams.pop(stream_id, None)
        for log in stream.all() if stream is not None else ():
            self._effects += log.drop(error)
            self._work.pop(log, None)
            self._active.pop(log, None)
            if self._hooks is not None:
                self._hooks.on_dropped(log)
        self.opened = {id_: segment for id_, segment in self.opened.items() if segment.stream_id != stream_id}

    def repair_log(self, stream_id: int) -> VirtualLog | None:
        """Return the log of a stream for data that is covered again; None if the stream is gone."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return None
        if stream.repair is None:
            stream.repair = self._log(stream, REPAIR_LOG_ID)
        return stream.repair

    def _log(self, stream: StreamLogs, log_id: int, after: list[VirtualLog] | None = None) -> VirtualLog:
        return VirtualLog(
            stream.stream_id,
            log_id,
            replication=stream.replication,
            limits=self._limits,
            on_closed=self._closed,
            totals=self._totals,
            after=after,
        )

    def _all(self) -> list[VirtualLog]:
        return [log for stream in self.streams.values() for log in stream.all()]

    # -- appends ---------------------------------------------------------------------------------------------------

    def append(self, log: VirtualLog, segment: Segment, start: int, end: int, *, persist: bool = False) -> Batch:
        """Replicate chunks of a segment in memory; return their batch."""
        batch = log.append(segment, start, end, self.now_ms, persist=persist)
        self._work[log] = self._active[log] = None
        if self._hooks is not None:
            self._hooks.on_appended(log, batch, segment, start, end)
        return batch

    def wait(self, batch: Batch, segment: Segment, start: int, requests: int) -> None:
        """Note that `requests` more requests wait for a batch; their producer's chunks begin at `start`."""
        if self._hooks is not None:
            self._hooks.on_waiting(batch, segment, start, requests)

    def pump(self) -> list[Effect]:
        """Return the requests to send now."""
        hooks = self._hooks
        if hooks is not None:
            self._work.update((log, None) for log in hooks.on_pump())
        work = list(self._work)
        if len(work) > 1:
            work.sort(key=lambda log: priority_of(self.streams, log.stream_id), reverse=True)
        for log in work:
            self._effects += log.plan(self.now_ms, self._open, hooks)
            if not log.starved or not log.busy:
                del self._work[log]
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _open(self, log: VirtualLog) -> VirtualSegment | None:
        chosen = self._backups.choose(log.replication, self.now_ms)
        if chosen is None:
            if self._backups.full(self.now_ms):
                self._close_idle()
            return None
        self.last_id += 1
        segment = VirtualSegment(self.last_id, log.stream_id, log.log_id, chosen, self.now_ms)
        self.opened[segment.virtual_segment_id] = segment
        self._totals.virtual_segments_opened += 1
        return segment

    def _close_idle(self) -> None:
        """Close idle virtual segments, so that full backups can move them to disk."""
        idle = [
            (log.open.touched_ms, number, log)
            for number, log in enumerate(self._all())
            if log.open is not None and not log.busy and log.open.touched_ms <= self.now_ms - IDLE_MS_MIN
        ]
        for _, _, log in sorted(idle)[:IDLE_CLOSED_MAX]:
            log.close_open(self._effects)

    # -- answers ---------------------------------------------------------------------------------------------------

    def acknowledged(self, send: Send) -> None:
        """Handle the answer of a backup that has a batch."""
        log = send.log
        lagged = log.lags
        self._effects += log.acknowledged(send.batch, send.place, send.backup_id)
        self._go_on(log)
        if lagged and not log.lags:
            self._events.room()

    def refused(self, effect: Send | Close, *, full: bool) -> None:
        """Handle the refusal of a backup that cannot take a virtual segment: continue elsewhere."""
        if isinstance(effect, Send) and effect.batch.place is not effect.place:
            return  # the virtual segment was given up meanwhile, and the batch goes elsewhere
        if effect.log is None:  # the virtual segment is closed, and goes on without this replica
            if effect.backup_id not in effect.place.left:
                effect.place.left.append(effect.backup_id)
            return
        self._totals.backups_full += full
        self._backups.refused(effect.backup_id, self.now_ms, full=full)
        effect.log.leave(effect.place, effect.backup_id, self._effects)
        self._go_on(effect.log)

    def _go_on(self, log: VirtualLog) -> None:
        if log.busy:
            self._work[log] = None
        stream = self.streams.get(log.stream_id)
        if stream is not None and log in stream.draining and not log.busy:
            log.close_open(self._effects)
            self._work.update((each, None) for each in (*stream.draining, *stream.logs) if each.busy)

    def _closed(self, segment: VirtualSegment) -> None:
        """Pass on a virtual segment that is closed on all its backups, or was given up empty."""
        self.opened.pop(segment.virtual_segment_id, None)
        if segment.stream_id not in self.streams or not segment.head:
            return
        self._coverage.closed(segment)
        for backup_id in segment.left:
            if self._backups.is_up(backup_id):  # it is back, and can close its replica at the right length
                self._effects.append(Close(None, segment, backup_id))

    # -- backups that come and go ----------------------------------------------------------------------------------

    @property
    def starved(self) -> bool:
        """Whether a log waits for more backups."""
        return any(log.starved for log in self._work)

    def lost(self, backup_id: int) -> None:
        """Let all virtual segments that are not closed leave a backup that has failed."""
        for log in self._all():
            self._effects += log.lost(backup_id)
            self._go_on(log)

    def leave(self, draining: set[int], restarting: set[int], lasting: int) -> None:
        """Leave backups that are being drained, or about to stop, if the `lasting` others are enough for a stream.

        A virtual segment on a stopping backup is closed, and keeps its replica there. On a draining backup, it is
        sealed without that replica.
        """
        for segment in [each for each in self.opened.values() if draining.intersection(each.backups)]:
            stream = self.streams.get(segment.stream_id)
            for log in stream.all() if stream is not None and stream.replication <= lasting else ():
                if log.log_id == segment.log_id:
                    for backup_id in draining.intersection(segment.backups):
                        log.leave(segment, backup_id, self._effects)
                    self._go_on(log)
        for log in self._all() if any(map(self._backups.is_up, restarting)) else ():
            if log.open is not None and log.replication <= lasting and restarting.intersection(log.open.backups):
                log.close_open(self._effects)

    # -- time, and the end -----------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Fail requests that have waited too long, and close idle virtual segments."""
        self.now_ms = now_ms
        limits = self._limits
        text = f"the chunk is in the broker's memory, but its backups did not have it within {limits.wait_ms_max} ms"
        if full := self._backups.full(now_ms):
            text += f"; of those that can be reached these have no room: {', '.join(map(str, full))}"
        error = NotReplicated(text, wait_ms_max=limits.wait_ms_max, full_backup_ids=full)
        for log in list(self._active):
            if log.busy:
                log.expire(now_ms - limits.wait_ms_max, error)
                self._work[log] = None
            elif log.open is not None and now_ms - log.open.touched_ms >= limits.idle_close_ms:
                log.close_open(self._effects)
            elif log.settled:
                del self._active[log]
                stream = self.streams.get(log.stream_id)
                if stream is not None:
                    stream.draining = [each for each in stream.draining if each is not log]

    @property
    def has_work(self) -> bool:
        """Whether there may be requests to send."""
        return bool(self._work or self._effects)

    def fail(self, error: KeraError) -> None:
        """Fail all waiting requests, because nothing will be replicated any more."""
        for log in self._all():
            log.expire(self.now_ms, error)

    def close_open(self, stream_id: int | None = None) -> None:
        """Close the open virtual segments of a stream, or of all, because a caller waits for them to be recorded."""
        for log in self._all():
            if stream_id in (None, log.stream_id) and not log.busy:
                log.close_open(self._effects)
        self._events.backup_work()

    @property
    def settled(self) -> bool:
        """Whether all logs are settled."""
        return all(log.settled for log in self._all())

    def lag(self) -> list[VirtualLogLag]:
        """Return the lag of each virtual log."""
        return [
            VirtualLogLag(log.stream_id, log.log_id, log.lag_bytes, log.lag_ms(self.now_ms), log.in_flight)
            for log in self._all()
        ]
