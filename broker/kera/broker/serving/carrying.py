"""Brings appended chunks to the requested durability level, and checks before that whether it can be reached.

A chunk reaches its level when backups have it, when the disk has it, or at once; until then its request waits, see
`Waiting`. A punctuation goes the same way as the chunk behind it, but no request waits for it, unless a producer has
asked for the punctuation.

Chunks enter replication through `gate` and `replicate`, whether the native core or Python appends them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kera.broker.counters import Counters
from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Appended, Streamlet
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.stream import Stream
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_log import VirtualLog
from kera.broker.replication.virtual_logs import StreamLogs
from kera.broker.serving.pending_write import PendingWrite, Waiting
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.done import nothing
from kera.core.errors import ArenaFull, InvalidArgument, KeraError, NotReplicated, Unavailable, invariant
from kera.v1 import common_pb2

_LEADER, _PERSISTED = common_pb2.DURABILITY_LEADER, common_pb2.DURABILITY_PERSISTED
_REPLICATED = common_pb2.DURABILITY_REPLICATED
Level: TypeAlias = common_pb2.Durability.ValueType


class Lagging(ArenaFull):
    """Memory is available, but backups have to catch up first."""


class Carrying:
    """Brings the chunks of one writer to their durability level."""

    def __init__(self, replication: Replication, memory: PersistenceManager, counters: Counters, lease: Lease) -> None:
        self._logs = replication.logs
        self._backlog = replication.backlog
        self._backups = replication.backups
        self._limits = replication.limits
        self._memory = memory
        self._counters = counters
        self._lease = lease

    def way(
        self, write: PendingWrite, stream: Stream, streamlet_id: int, entry: int
    ) -> tuple[Level, VirtualLog | None]:
        """Return the level that a chunk has to reach, and its virtual log; None: the stream is not replicated.

        Raises the error that keeps the chunk from being appended.
        """
        level = write.level or stream.durability
        if stream.by_disk and _PERSISTED in (level, stream.durability):
            self._memory.disk.check()
        if stream.logs is not None:
            write.pump = True
            log = stream.logs.of(streamlet_id, entry)
            self.check_backups(stream, stream.logs, log, level)
            return level, log
        if level == _REPLICATED:
            raise InvalidArgument(f"stream {stream.name!r} is not replicated: it has no backups", stream=stream.name)
        return level, None

    def punctuated(
        self,
        write: PendingWrite,
        stream: Stream,
        streamlet: Streamlet,
        log: VirtualLog | None,
        punctuation: Appended,
        level: Level,
    ) -> None:
        """Replicate and persist a punctuation like the chunk behind it, which does not become readable before it."""
        segment, end = punctuation.segment, punctuation.end
        if stream.durability == _LEADER:
            streamlet.publish(punctuation)
        if log is not None and segment is not None:
            self.replicate(write, stream, log, segment, punctuation.position, end, level)
        elif segment is not None and _PERSISTED in (level, stream.durability):
            self._memory.commits.persist([(segment, end)], nothing)

    def carry_on(
        self,
        write: PendingWrite,
        stream: Stream,
        streamlet: Streamlet,
        log: VirtualLog | None,
        appended: Appended,
        level: Level,
    ) -> None:
        """Bring an appended chunk to its level, and let `write` wait for that if the level asks for it."""
        entry, group_id, segment_id, position, first_record, duplicate, segment, end, same = appended
        stream_level = stream.durability
        if stream_level == _LEADER:
            streamlet.publish(appended)
        if log is not None:
            self._replicate(write, stream, log, appended, level)
        if stream.by_disk and _PERSISTED in (level, stream_level) and segment is not None:
            if level == _PERSISTED:
                write.wanted.append((segment, end))
                write.waiting.append(len(write.statuses))
            else:
                self._memory.commits.persist([(segment, end)], nothing)
        status = write.statuses.add()  # and field by field, which takes half as long as keyword arguments
        status.entry = entry
        status.group_id = group_id
        status.segment_id = segment_id
        status.position = position
        status.first_record = first_record
        status.durability = level
        if duplicate:
            status.duplicate = True
            if same is not None:
                status.same = same

    def check_backups(self, stream: Stream, logs: StreamLogs, log: VirtualLog, level: int) -> None:
        """Raise `Unavailable`, `TooFewBackups` or `Lagging` if a chunk must not or cannot be appended."""
        if not self._lease.holds:
            self._counters.writes_without_lease += 1
            raise Unavailable(
                f"the broker cannot reach the coordinator, and streamlets of stream {stream.name!r} may be given to"
                " another broker; writing resumes when the coordinator answers",
                stream=stream.name,
            )
        if level > _LEADER:
            self._backups.check(logs.replication, stream.name)
        if not log.lags:
            return
        if logs.by_replicas or level > _LEADER or not self._backlog.shed(logs):
            raise Lagging("backups are too far behind")

    def _replicate(self, write: PendingWrite, stream: Stream, log: VirtualLog, appended: Appended, level: int) -> None:
        """Replicate a chunk, unless its replication is under way."""
        segment = appended.segment
        if appended.duplicate and level <= stream.durability:
            if segment is None or level == _LEADER or appended.end <= segment.durable_head:
                return  # the chunk has reached its level, or its level does not wait for backups
            batch = log.last()
            if batch is not None:
                if write.wait_for(batch, 0, 1):
                    self._logs.wait(batch, segment, appended.position, 1)
                return
        elif segment is None:
            raise NotReplicated("the chunk is on the broker's disk; whether backups have it is not known any more")
        self.replicate(write, stream, log, segment, appended.position, appended.end, level, 0, 1)

    def gate(
        self, write: Waiting, stream: Stream, streamlet_id: int, producer_id: int, level: int
    ) -> tuple[VirtualLog, int] | None:
        """Return the virtual log for chunks of a replicated stream, and how many bytes may be appended to it.

        Returns None if chunks must not or cannot be appended; the Python path then reports the reason.
        """
        logs = stream.logs
        invariant(logs is not None, "the stream is replicated", stream=stream.name)
        if logs is None:
            return None
        write.pump = True
        log = logs.of(streamlet_id, producer_id % stream.streamlets[streamlet_id].entries.count)
        room = self._limits.lag_bytes_max - log.lag_bytes
        if room <= 0 or not self._lease.holds:
            return None
        try:
            self.check_backups(stream, logs, log, level)
        except KeraError:
            return None
        return log, room

    def replicate(  # noqa: PLR0913, PLR0917 - what chunks are that follow each other
        self,
        write: Waiting,
        stream: Stream,
        log: VirtualLog,
        segment: Segment,
        start: int,
        end: int,
        level: int,
        answers: Any = 0,
        count: int = 0,
    ) -> None:
        """Append a reference to consecutive chunks to a virtual log; `count` answers wait if their level asks for it.

        `answers`: identifies these answers, see `Waiting`.
        """
        batch = self._logs.append(log, segment, start, end, persist=_PERSISTED in (level, stream.durability))
        if count and level > _LEADER:
            requests = write.wait_for(batch, answers, count)
            if requests:
                self._logs.wait(batch, segment, start, requests)


def written_last(entry: Entry) -> Appended | None:
    """Return the last chunk of an entry as if it were sent again; None if it is only on disk, or was removed."""
    segment = next((each for each in reversed(entry.tail) if each.chunk_ends), None)
    if segment is None:
        return None
    ends = segment.chunk_ends
    return Appended(
        entry.index,
        *segment.key,
        ends[-2] if len(ends) > 1 else 0,
        entry.next_record,
        duplicate=True,
        segment=segment,
        end=ends[-1],
    )
