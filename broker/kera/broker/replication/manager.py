"""Replication of everything a broker has: the virtual logs of its streams, and what they need of backups. Pure.

    streams, appends, removals ──┐                    ┌──► Send, Close, Free (`pump`)
    backups up, down, listed ────┤──► Replication ────┤──► changes of the index
    answers and failures ────────┘                    └──► what to cover again, in the background

Which backups there are is in ``kera.broker.replication.backups``, what closed virtual segments cover in
``kera.broker.replication.coverage``.

What no virtual segment covers is the *backlog*: the end of the log after a restart, and what a stream of level leader
could not replicate for want of backups. It is covered in the same way as what has too few replicas: appended to the
stream's repair log, a virtual log of its own, at a pace of its own (``kera.broker.replication.repair``). Replicas of
earlier launches that the index does not know (*strangers*) are kept until then; those of launches that are being
recovered, or were, are never touched: the coordinator has them freed when they are not needed any more.

Sending is for ``kera.broker.replication.replicator``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.segment import Segment
from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.replication.backups import Backups
from kera.broker.replication.coverage import Coverage, Note
from kera.broker.replication.virtual_log import (
    Batch,
    Close,
    Effect,
    Extent,
    Free,
    Send,
    Totals,
    VirtualLog,
    VirtualSegment,
)
from kera.core.done import Done
from kera.core.errors import KeraError, NotReplicated, TooFewBackups
from kera.core.rpc.limits import REPLICATED_BYTES_MAX
from kera.v1 import backup_pb2

REPAIR_LOG_ID = (1 << 32) - 1
"""Of each stream: what has to be covered again goes through it."""
IDLE_CLOSED_MAX = 8
"""Virtual segments that are closed at once, to make room on backups that are full."""
IDLE_MS_MIN = 500
"""Younger ones are not closed for that."""


@dataclass(slots=True)
class Limits:
    """What bounds replication; see the settings of the broker."""

    segment_bytes: int
    """Of a virtual segment."""
    lag_bytes_max: int = 64 << 20
    """Of a virtual log: what has been appended and is not on backups; then writers wait."""
    wait_ms_max: int = 5_000
    """How long a write waits for backups, before its writer is told that it is not known what will become of it."""
    idle_close_ms: int = 60_000
    """A virtual segment to which nobody has written for so long closes."""
    repair_delay_ms: int = 10_000
    """How long a backup may be away before what it had is repaired."""


class StreamLogs:
    """The virtual logs of one stream."""

    def __init__(self, stream_id: int, replication: int, entries: int) -> None:
        self.stream_id = stream_id
        self.replication = replication
        self._entries = entries
        self.by_replicas = True
        """Readers and writers wait for backups: nothing may be put off until later."""
        self.logs: list[VirtualLog] = []
        self.draining: list[VirtualLog] = []
        """Those of before the number of logs was changed."""
        self.repair: VirtualLog | None = None

    def of(self, streamlet_id: int, entry: int) -> VirtualLog:
        """The log of an entry."""
        return self.logs[(streamlet_id * self._entries + entry) % len(self.logs)]

    def all(self) -> list[VirtualLog]:
        """Every log in which there may be something."""
        return [*self.logs, *self.draining, *([self.repair] if self.repair is not None else [])]


class Lag(NamedTuple):
    """How far a virtual log is behind."""

    stream_id: int
    log_id: int
    lag_bytes: int
    lag_ms: int
    in_flight: int


class Replication:
    """See the head of this module. Belongs to one event loop."""

    def __init__(self, limits: Limits, note: Note, *, node_id: str = "", random: Random | None = None) -> None:
        """`node_id`: of this broker's own node."""
        self.limits = limits
        self.totals = Totals()
        self.now_ms = 0
        """Set by `tick`."""
        self.on_work: Callable[[], None] = lambda: None
        """Called when `pump` may have something to do."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when writers that waited may go on."""
        self.backups = Backups(segment_bytes=limits.segment_bytes, node_id=node_id, random=random or Random())
        self.coverage = Coverage(note, self.totals, self._do)
        self.backlog: deque[Extent] = deque()
        """To be covered in the background."""
        self.opened: dict[int, VirtualSegment] = {}
        """Virtual segments that are not closed, by id."""
        self._next_id = 0
        self._streams: dict[int, StreamLogs] = {}
        self.spared: Container[int] = ()
        """Streams that are not open and whose strangers are kept: what is here of them may not be covered."""
        self._strangers: list[tuple[int, int, int]] = []
        """Backup, virtual segment and stream."""
        self._restored: list[Batch] = []
        """What was not covered when this launch began, and is in memory."""
        self._work: dict[VirtualLog, None] = {}
        """Logs that may have something to send."""
        self._active: dict[VirtualLog, None] = {}
        """Logs that are not settled, and some that were not at the last tick: of many streams, most are quiet."""
        self._effects: list[Effect] = []

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)
        self.on_work()

    def begin(
        self,
        broker_epoch: int,
        found: Iterable[VirtualSegment],
        *,
        recover_before_epoch: int = 0,
        spare_before_epoch: int = 0,
    ) -> None:
        """A launch begins, with the virtual segments that the index has.

        Replicas of launches before `recover_before_epoch` are for recovery: they cover nothing, and are never freed
        from here. Those of launches before `spare_before_epoch` may be: they are not freed either, unless they cover
        something that is here.
        """
        self._next_id = broker_epoch << 32
        self.coverage.spare_before = max(recover_before_epoch, spare_before_epoch) << 32
        self.coverage.found(segment for segment in found if segment.virtual_segment_id >= recover_before_epoch << 32)
        for segment in self.coverage.segments.values():
            for backup_id in segment.backups:
                self.backups.expect(backup_id, self.now_ms)

    # -- streams ---------------------------------------------------------------------------------------------------

    def open_stream(
        self, stream_id: int, *, replication: int, entries: int, virtual_logs: int, by_replicas: bool
    ) -> StreamLogs:
        """The logs of a stream, which is new here or was restored: then `restore` follows for each of its entries."""
        stream = self._streams[stream_id] = StreamLogs(stream_id, replication, entries)
        stream.by_replicas = by_replicas
        stream.logs = [self._log(stream, log_id) for log_id in range(virtual_logs)]
        self.coverage.adopt(stream_id)
        return stream

    def restore(self, stream: StreamLogs, entry: Entry) -> None:
        """Cover what is not covered of an entry: what is in memory at once, as writers and readers wait for it."""
        for key, found in entry.segments():
            if isinstance(found, SegmentRecord) and found.to_come:
                continue  # it has yet to come: see `recovered`
            for extent in self.coverage.uncovered(entry.address(key), length_of(found)):
                if isinstance(found, Segment) and not found.in_index:
                    self._restore_part(stream.of(entry.log_id.streamlet_id, entry.index), found, extent)
                else:
                    self.backlog.append(extent)
        self.on_work()

    def recovered(self, address: SegmentAddress, length: int) -> None:
        """A segment has come from backups: it is to be covered."""
        self.backlog.extend(self.coverage.uncovered(address, length))
        self.on_work()

    def _restore_part(self, log: VirtualLog, segment: Segment, extent: Extent) -> None:
        parts = list(segment.intact(extent.start, extent.end))
        self._restored += [
            self.append(log, segment, *piece)
            for start, end in parts
            for piece in segment.pieces(start, end, REPLICATED_BYTES_MAX)
        ]
        if not parts:
            segment.replicated(extent.start)  # there is only damage, which nobody waits for

    def _log(self, stream: StreamLogs, log_id: int, after: list[VirtualLog] | None = None) -> VirtualLog:
        return VirtualLog(
            stream.stream_id,
            log_id,
            replication=stream.replication,
            capacity_bytes=self.limits.segment_bytes,
            on_closed=self._closed,
            totals=self.totals,
            after=after,
        )

    def set_virtual_logs(self, stream: StreamLogs, virtual_logs: int) -> None:
        """Change the number of logs of a stream: new ones take over, and wait until the old ones have sent all."""
        if virtual_logs == len(stream.logs):
            return
        stream.draining = [log for log in (*stream.draining, *stream.logs) if not log.settled]
        before = list(stream.draining)
        for log in before:
            if not log.busy:
                log.close_open(self._effects)
        stream.logs = [self._log(stream, log_id, before) for log_id in range(virtual_logs)]
        self.on_work()

    def drop_stream(self, stream_id: int, error: KeraError) -> None:
        """The stream is gone. Its records in the index go with its other records."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            self.coverage.drop_stream(stream_id)  # it was not open, but what it had is written down
            self.on_work()
            return
        for log in stream.all():
            self._effects += log.drop(error)
            self._work.pop(log, None)
            self._active.pop(log, None)
        self.opened = {id_: segment for id_, segment in self.opened.items() if segment.stream_id != stream_id}
        self.coverage.drop_stream(stream_id)
        self.on_work()

    # -- appends ---------------------------------------------------------------------------------------------------

    def check(self, stream: StreamLogs, name: str) -> None:
        """Raise `TooFewBackups` while what is appended now could not be replicated."""
        up = self.backups.up_count
        if up < stream.replication:
            raise TooFewBackups(
                f"stream {name!r} is replicated on {stream.replication} backups, and {up} can be used;"
                " it goes on by itself when there are enough",
                stream=name,
                replication=stream.replication,
                backups=up,
            )

    def append(self, log: VirtualLog, segment: Segment, start: int, end: int, *, persist: bool = False) -> Batch:
        """Have chunks of a segment that is in memory replicated; returns the batch they go with."""
        batch = log.append(segment, start, end, self.now_ms, persist=persist)
        self._work[log] = self._active[log] = None
        return batch

    def lags(self, log: VirtualLog) -> bool:
        """Whether writers have to wait."""
        return log.lag_bytes >= self.limits.lag_bytes_max

    def shed(self, stream: StreamLogs) -> bool:
        """What the logs of a stream cannot send now, and nobody waits for, is covered later; whether there was any."""
        extents = [extent for log in stream.logs for extent in log.shed()] if not stream.by_replicas else []
        self.backlog += extents
        return bool(extents)

    def make_room(self) -> bool:
        """The memory is full: give up what waits for backups and need not; whether there was any."""
        found = False
        for stream in self._streams.values():
            found = self.shed(stream) or found
        return found

    def cover(self, segment: Segment, start: int, end: int, done: Done) -> Batch | None:
        """Cover chunks again, in the background. None: the stream is gone."""
        stream = self._streams.get(segment.address.stream_id)
        if stream is None:
            return None
        if stream.repair is None:
            stream.repair = self._log(stream, REPAIR_LOG_ID)
        batch = self.append(stream.repair, segment, start, end)
        batch.waiters.append(done)
        self.totals.bytes_repaired += end - start
        return batch

    @property
    def rests(self) -> bool:
        """Whether all that is to be covered (again) is: what is not covered is damaged."""
        idle = not (self.backlog or self.coverage.deficient or self.coverage.replacing)
        return idle and all(stream.repair is None for stream in self._streams.values())

    @property
    def repairing(self) -> bool:
        """Whether something is being covered again."""
        return any(stream.repair is not None and stream.repair.busy for stream in self._streams.values())

    def pump(self) -> list[Effect]:
        """What to do now."""
        for log in list(self._work):
            self._effects += log.plan(self.now_ms, self._open)
            if not log.starved or not log.busy:
                del self._work[log]
        effects, self._effects = self._effects, []
        return effects

    def _open(self, log: VirtualLog) -> VirtualSegment | None:
        chosen = self.backups.choose(log.replication, self.now_ms)
        if chosen is None:
            if self.backups.full(self.now_ms):
                self._close_idle()
            return None
        self._next_id += 1
        segment = VirtualSegment(self._next_id, log.stream_id, log.log_id, chosen, self.now_ms)
        self.opened[segment.virtual_segment_id] = segment
        self.totals.virtual_segments_opened += 1
        return segment

    def _close_idle(self) -> None:
        """Backups are full: close what nobody writes to, so that they can put it on disk."""
        idle = [
            (log.open.touched_ms, number, log)
            for number, log in enumerate(self._logs())
            if log.open is not None and not log.busy and log.open.touched_ms <= self.now_ms - IDLE_MS_MIN
        ]
        for _, _, log in sorted(idle)[:IDLE_CLOSED_MAX]:
            log.close_open(self._effects)

    def _logs(self) -> list[VirtualLog]:
        return [log for stream in self._streams.values() for log in stream.all()]

    # -- answers ---------------------------------------------------------------------------------------------------

    def acknowledged(self, send: Send) -> None:
        """A backup has a batch."""
        lagged = self.lags(send.log)
        self._effects += send.log.acknowledged(send.batch, send.place, send.backup_id)
        self._go_on(send.log)
        if lagged and not self.lags(send.log):
            self.on_room()

    def closed_replica(self, close: Close) -> None:
        """A backup has closed a replica."""
        if close.log is not None:
            close.log.closed(close.place, close.backup_id)
        else:
            self.coverage.heal(close.place, close.backup_id)

    def refused(self, effect: Send | Close, *, full: bool) -> None:
        """A backup is no place for one virtual segment: another one is found."""
        if isinstance(effect, Send) and effect.batch.place is not effect.place:
            return  # it was given up meanwhile, and goes elsewhere
        if effect.log is None:  # a replica that came too late to count
            if effect.backup_id not in effect.place.left:
                effect.place.left.append(effect.backup_id)
            return
        self.totals.backups_full += full
        self.backups.refused(effect.backup_id, self.now_ms, full=full)
        effect.log.leave(effect.place, effect.backup_id, self._effects)
        self._go_on(effect.log)

    def _go_on(self, log: VirtualLog) -> None:
        if log.busy:
            self._work[log] = None
        stream = self._streams.get(log.stream_id)
        if stream is not None and log in stream.draining and not log.busy:
            log.close_open(self._effects)
            self._work.update((each, None) for each in (*stream.draining, *stream.logs) if each.busy)

    def _closed(self, segment: VirtualSegment) -> None:
        """A virtual segment is closed on all its backups, or was given up with nothing in it."""
        self.opened.pop(segment.virtual_segment_id, None)
        if segment.stream_id not in self._streams or not segment.head:
            return
        self.coverage.closed(segment)
        for backup_id in segment.left:
            if self.backups.is_up(backup_id):  # it is back, and can be told where the virtual segment ended
                self._effects.append(Close(None, segment, backup_id))

    # -- backups ---------------------------------------------------------------------------------------------------

    def backup_up(self, backup_id: int) -> None:
        """A backup is connected, and knows of this launch."""
        self.backups.up(backup_id, self._next_id)
        if any(log.starved for log in self._work):
            self.on_work()
        self.on_room()

    def backup_down(self, backup_id: int) -> None:
        """A backup has failed: all virtual segments leave it that are not closed."""
        self.totals.backups_failed += self.backups.down(backup_id, self.now_ms)
        for log in self._logs():
            self._effects += log.lost(backup_id)
            self._go_on(log)
        self.on_work()

    def listed(self, backup_id: int, replicas: Iterable[backup_pb2.ReplicaInfo]) -> None:
        """A backup that is up has these replicas of this broker, and no others."""
        last_id = self.backups.listed(backup_id)
        has: set[int] = set()
        for replica in replicas:
            id_ = replica.virtual_segment_id
            if id_ > last_id or id_ in self.opened:
                continue  # we know better; and what has left it is told when it is closed
            segment = self.coverage.segments.get(id_)
            if segment is not None:
                if self.coverage.has(backup_id, segment, replica):
                    has.add(id_)
            elif id_ >> 32 == self._next_id >> 32:
                self._effects.append(Free(backup_id, (id_,)))
            elif id_ >= self.coverage.spare_before:
                self._strangers.append((backup_id, id_, replica.stream_id))
        self.coverage.without(backup_id, has=lambda id_: id_ > last_id or id_ in has)
        self.on_work()

    def unneeded_backups(self) -> frozenset[int]:
        """Backups that are dead, and have nothing that is not elsewhere, too."""
        dead = self.backups.dead
        found = self.backups.unneeded & dead
        if dead == found or self._restored or self.backlog:
            return found  # what this launch has not covered yet, replicas of earlier ones may have
        segments = (*self.opened.values(), *self.coverage.segments.values())
        return frozenset(dead - {backup_id for each in segments for backup_id in self._holders(each)})

    def _holders(self, segment: VirtualSegment) -> list[int]:
        """The backups that have a replica, or a part of one that may be the best there is."""
        lacking = segment in self.coverage.deficient or segment.virtual_segment_id in self.opened
        return [*segment.backups, *segment.left] if lacking else segment.backups

    # -- repair ----------------------------------------------------------------------------------------------------

    def next_deficient(self) -> VirtualSegment | None:
        """What to repair next. None while there is nothing, or no place."""
        return self.coverage.next_deficient(self.backups.usable(self.now_ms))

    def repair_rests(self) -> None:
        """There is nothing to repair: close what repair has opened, so that it is written down."""
        for stream in self._streams.values():
            if stream.repair is not None and not stream.repair.busy:
                stream.repair.close_open(self._effects)
                if stream.repair.settled:
                    stream.repair = None
        self._restored = [batch for batch in self._restored if not batch.over]
        if not (self._restored or self.backlog):
            strangers = self._strangers
            self._strangers = [each for each in strangers if each[2] in self.spared]
            self._effects += [
                Free(backup_id, (id_,)) for backup_id, id_, stream_id in strangers if stream_id not in self.spared
            ]
        self.on_work()

    # -- time, and the end -----------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Time goes on."""
        self.now_ms = now_ms
        limits = self.limits
        text = f"the chunk is in the broker's memory, but its backups did not have it within {limits.wait_ms_max} ms"
        if full := self.backups.full(now_ms):
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
                stream = self._streams.get(log.stream_id)
                if stream is not None:
                    stream.draining = [each for each in stream.draining if each is not log]
        self._leave_draining()
        self._leave_restarting()
        self.coverage.write_again()
        for backup_id in self.backups.given_up(now_ms - limits.repair_delay_ms):
            self.coverage.without(backup_id)
        if self._work or self._effects:
            self.on_work()

    def _leave_draining(self) -> None:
        """Leave backups that are to be empty, as far as there are enough others."""
        draining = self.backups.draining
        self.coverage.drain(draining)
        if not draining:
            return
        lasting = self.backups.lasting_count
        for segment in [each for each in self.opened.values() if draining.intersection(each.backups)]:
            stream = self._streams.get(segment.stream_id)
            for log in stream.all() if stream is not None and stream.replication <= lasting else ():
                if log.log_id == segment.log_id:
                    for backup_id in draining.intersection(segment.backups):
                        log.leave(segment, backup_id, self._effects)
                    self._go_on(log)

    def _leave_restarting(self) -> None:
        """Close what is open on backups that are about to stop, as far as there are enough others to go on at.

        Unlike what leaves one that is drained, it keeps its replica there.
        """
        restarting = self.backups.restarting
        if not any(map(self.backups.is_up, restarting)):
            return
        lasting = self.backups.lasting_count
        for log in self._logs():
            if log.open is not None and log.replication <= lasting and restarting.intersection(log.open.backups):
                log.close_open(self._effects)

    def fail(self, error: KeraError) -> None:
        """Nothing will be replicated any more: tell all who wait."""
        for log in self._logs():
            log.expire(self.now_ms, error)

    def close_soon(self, stream_id: int) -> None:
        """Close the open virtual segments of a stream, so that they are written down: somebody waits for that."""
        stream = self._streams.get(stream_id)
        for log in stream.all() if stream is not None else ():
            if not log.busy:
                log.close_open(self._effects)
        self.on_work()

    def close_all(self) -> None:
        """Close all open virtual segments, for the end."""
        for log in self._logs():
            if not log.busy:
                log.close_open(self._effects)
        self.on_work()

    @property
    def settled(self) -> bool:
        """Whether nothing is open or under way."""
        return all(log.settled for log in self._logs())

    # -- for those who watch ---------------------------------------------------------------------------------------

    @property
    def virtual_segments(self) -> dict[str, int]:
        """How many are open (or closing), and how many are closed."""
        return {"open": len(self.opened), "closed": len(self.coverage.segments)}

    def lag(self) -> list[Lag]:
        """Of each virtual log."""
        return [
            Lag(log.stream_id, log.log_id, log.lag_bytes, log.lag_ms(self.now_ms), log.in_flight)
            for log in self._logs()
        ]
