"""Replication of a broker's data: joins its virtual logs, its backups, and their replicas. Pure.

    streams, appends ────────────┐                    ┌──► Send, Close, Free (`VirtualLogs.pump`)
    backups up, down, listed ────┤──► Replication ────┤──► changes of the index
    answers and failures ────────┘                    └──► data to cover again, in the background

    logs        the virtual logs: requests to backups, and their answers
    backups     the known backups, and which may be used
    coverage    the parts of the log that closed virtual segments cover, and which have too few replicas
    backlog     the parts of the log that have to be covered (again)

This module handles events that concern several of these. It never touches replicas of launches that are being, or were,
recovered: the coordinator has them freed when they are no longer needed. ``kera.broker.replication.replicator`` sends
the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

from kera.broker.log.events import Events
from kera.broker.records import SegmentAddress
from kera.broker.replication.backlog import Backlog
from kera.broker.replication.backups import Backups
from kera.broker.replication.coverage import Coverage, Note
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.virtual_index import delete_dropped, put_dropped
from kera.broker.replication.virtual_log import Close, Effect
from kera.broker.replication.virtual_logs import VirtualLogs
from kera.broker.replication.virtual_segment import Free, ReplicationTotals, VirtualSegment
from kera.core.base.done import nothing
from kera.core.errors import KeraError
from kera.v1 import backup_pb2

RELEASED_MAX = 10_000


class Replication:
    """Joins virtual logs, backups, coverage and backlog, and passes each event to those that it concerns.

    Belongs to one event loop.
    """

    def __init__(
        self,
        limits: ReplicationLimits,
        note: Note,
        events: Events,
        *,
        exists: Callable[[SegmentAddress], bool] = lambda _: True,
        spared: Callable[[int], bool] = lambda _: False,
        node_id: str = "",
        random: Random | None = None,
        now_ms: int = 0,
    ) -> None:
        """`exists`: whether the log has any data of a segment; `spared`: see `Backlog`.

        `node_id`: the id of this broker's own node.
        """
        self.limits = limits
        self.totals = ReplicationTotals()
        self._events = events
        self._effects: list[Effect] = []
        self.backups = Backups(segment_bytes=limits.segment_bytes, node_id=node_id, random=random or Random())
        self.coverage = Coverage(note, self.totals, self._do, exists)
        self.logs = VirtualLogs(limits, self.backups, self.coverage, self._effects, self.totals, events, now_ms=now_ms)
        self.backlog = Backlog(
            limits, self.logs, self.backups, self.coverage, self._effects, self.totals, events, spared=spared
        )
        self._others: dict[tuple[int, int], set[int]] = {}
        """Replicas of earlier launches from which other brokers may recover, by backup and stream."""
        self._released: set[int] = set()
        """Streams whose replicas of earlier launches no broker needs; about the last `RELEASED_MAX` are remembered, for
        backups that connect later."""
        self._note = note
        self._dropped: dict[int, set[int]] = {}
        """Dropped streams, each with the backups that were away then and may have replicas of it; also in the index."""
        events.gone.listen(self.coverage.gone)

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)
        self._events.backup_work()

    def begin(
        self,
        broker_epoch: int,
        found: Iterable[VirtualSegment],
        *,
        recover_before_epoch: int = 0,
        spare_before_epoch: int = 0,
        dropped: Mapping[int, set[int]] | None = None,
    ) -> None:
        """Begin a launch with the virtual segments of the index; `dropped`: see `dropped_streams`.

        Replicas of launches before `recover_before_epoch` are for recovery: they cover nothing, and this broker frees
        them only when their stream is dropped or released (`release`). Replicas of launches before `spare_before_epoch`
        may be needed for recovery: they are not freed either, unless they cover data that is here.
        """
        self.logs.begin(broker_epoch)
        self._dropped = dict(dropped or {})
        self._released.update(self._dropped)
        self.coverage.begin(
            (segment for segment in found if segment.virtual_segment_id >= recover_before_epoch << 32),
            spare_before=max(recover_before_epoch, spare_before_epoch) << 32,
        )
        for segment in self.coverage.segments.values():
            for backup_id in segment.backups:
                self.backups.expect(backup_id, self.logs.now_ms)

    def drop_stream(self, stream_id: int, error: KeraError) -> None:
        """Forget a dropped stream. Its records in the index are removed with its other records."""
        self.logs.drop_stream(stream_id, error)
        self.coverage.drop_stream(stream_id)  # even if it was not open, the index may have virtual segments of it
        self.release(stream_id)
        away = self.backups.away()
        if away and len(self._dropped) < RELEASED_MAX:
            self._released.add(stream_id)
            self._dropped[stream_id] = away
            self._note([put_dropped(stream_id, away)], nothing)
        self._events.backup_work()

    def release(self, stream_id: int) -> None:
        """Free the replicas of a stream of earlier launches: no broker needs them, neither this one nor a recovery."""
        if not self.coverage.spare_before:
            return
        if len(self._released) >= RELEASED_MAX:
            self._released = set(self._dropped)
        self._released.add(stream_id)
        for (backup_id, of_stream), ids in self._others.items():
            if of_stream == stream_id and ids:
                self._effects.append(Free(backup_id, tuple(sorted(ids))))
                ids.clear()
                self._events.backup_work()

    def closed_replica(self, close: Close) -> None:
        """Handle the answer of a backup that has closed a replica."""
        if close.log is not None:
            close.log.closed(close.place, close.backup_id)
        else:
            self.coverage.heal(close.place, close.backup_id)

    # -- backups ---------------------------------------------------------------------------------------------------

    def backup_up(self, backup_id: int) -> None:
        """Note that a backup is connected, and knows this launch."""
        self.backups.up(backup_id, self.logs.last_id)
        if self.logs.starved:
            self._events.backup_work()
        self._events.room()

    def backup_down(self, backup_id: int) -> None:
        """Note that a backup has failed: all virtual segments that are not closed leave it."""
        self.totals.backups_failed += self.backups.down(backup_id, self.logs.now_ms)
        self.logs.lost(backup_id)
        self._events.backup_work()

    def listed(self, backup_id: int, replicas: Iterable[backup_pb2.ReplicaInfo]) -> None:
        """Take the complete list of this broker's replicas on a backup that is up."""
        last_id = self.backups.listed(backup_id)
        self._others = {key: ids for key, ids in self._others.items() if key[0] != backup_id}
        has: set[int] = set()
        for replica in replicas:
            id_ = replica.virtual_segment_id
            if id_ > last_id or id_ in self.logs.opened:
                continue  # the list is outdated; if it has left the backup, the backup gets its end when it is closed
            segment = self.coverage.segments.get(id_)
            if segment is not None:
                if self.coverage.has(backup_id, segment, replica):
                    has.add(id_)
            elif id_ >> 32 == self.logs.last_id >> 32:
                self._effects.append(Free(backup_id, (id_,)))
            elif id_ >= self.coverage.spare_before:
                self.backlog.add_stranger(backup_id, id_, replica.stream_id)
            elif replica.stream_id in self._released:
                self._effects.append(Free(backup_id, (id_,)))
            else:
                self._others.setdefault((backup_id, replica.stream_id), set()).add(id_)
        self.coverage.without(backup_id, has=lambda id_: id_ > last_id or id_ in has)
        self._forget_dropped(backup_id)
        self._events.backup_work()

    def _forget_dropped(self, backup_id: int) -> None:
        """Forget that a backup, or one that is no longer known, may have replicas of dropped streams."""
        for stream_id, away in list(self._dropped.items()):
            away -= {each for each in away if each == backup_id or not self.backups.knows(each)}
            if not away:
                del self._dropped[stream_id]
                self._note([delete_dropped(stream_id)], nothing)

    def unneeded_backups(self) -> frozenset[int]:
        """Return the dead backups whose replicas are all elsewhere, too."""
        dead = self.backups.dead
        found = self.backups.unneeded & dead
        if dead == found or self.backlog.replicas_needed:
            return found
        segments = (*self.logs.opened.values(), *self.coverage.segments.values())
        return frozenset(dead - {backup_id for each in segments for backup_id in self._backups_of(each)})

    def _backups_of(self, segment: VirtualSegment) -> list[int]:
        """Return the backups that have a replica, or a part of one that may be the best available."""
        lacking = segment in self.coverage.deficient or segment.virtual_segment_id in self.logs.opened
        return [*segment.backups, *segment.left] if lacking else segment.backups

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Do the work that is due at the time `now_ms`."""
        backups, draining = self.backups, self.backups.draining
        self.logs.tick(now_ms)
        self.coverage.drain(draining)
        self.logs.leave(draining, backups.restarting, backups.lasting_count)
        self.coverage.write_again()
        for backup_id in backups.given_up(now_ms - self.limits.repair_delay_ms):
            self.coverage.without(backup_id)
        if self.logs.has_work:
            self._events.backup_work()

    @property
    def virtual_segments(self) -> dict[str, int]:
        """The numbers of virtual segments that are open (or closing), and that are closed."""
        return {"open": len(self.logs.opened), "closed": len(self.coverage.segments)}
