"""Taking over from a lost broker: asks the new owners, and writes what they find."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.keys import STARTS, streamlet_key
from kera.coordinator.cluster.recovering import known_starts, last_handover
from kera.coordinator.cluster.starts import joined
from kera.coordinator.cluster.state import State
from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.recovery.batches import in_batches
from kera.coordinator.recovery.decide import DRAINED, PENDING, recovered, source_of
from kera.coordinator.recovery.progress import Unneeded
from kera.coordinator.recovery.records import RecoveryRecords, Run, records_of
from kera.core.errors import Unavailable
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

TAKE_OVER_BYTES_MAX = 16 << 20
"""Maximum of the streamlets in one request to take over, with all that is known of them; the rest follow in the next
one.
"""

CursorsOf = Callable[[int], Sequence[common_pb2.Cursor]]
"""Returns the positions up to which the consumer groups have read a stream."""


class TakeOvers:
    """Asks the new owners to take over a lost broker's streamlets, and stores the result."""

    def __init__(
        self,
        state: State,
        records: RecoveryRecords,
        unneeded: Unneeded,
        cursors_of: CursorsOf,
        shown: Callable[[Run], coordinator_pb2.RecoveryInfo],
    ) -> None:
        """`shown` returns a recovery with its present progress."""
        self._state = state
        self._records = records
        self._unneeded = unneeded
        self._cursors_of = cursors_of
        self._shown = shown

    async def carry_out(
        self, run: Run, owner: Launch, streamlets: Iterable[StreamletId], on_written: Callable[[], None]
    ) -> None:
        """Have a broker find out where streamlets end, then write that it owns them.

        `on_written` is called after each write; more may follow. Raises `Unavailable` if streamlets are left.
        """
        state = self._state
        request = self._request(run, streamlets)
        answer = await state.broker_calls.take_over(state.brokers.describe(owner.member_id), request)
        found = {StreamletId(one.stream_id, one.state.streamlet_id): one.state for one in answer.streamlets}
        counted = False
        for batch in in_batches(request.streams):
            if await state.change(self._write_taken(run, owner, batch, found, None if counted else answer)):
                counted = True
                on_written()  # so that the owner opens them while others are written
        if answer.waits_for:
            raise Unavailable(f"it waits for {'; '.join(answer.waits_for)}", broker_id=owner.member_id)

    async def _write_taken(
        self,
        run: Run,
        owner: Launch,
        asked: Iterable[broker_pb2.TakeOverStream],
        found: Mapping[StreamletId, common_pb2.StreamletState],
        totals: broker_pb2.TakeOverResponse | None,
    ) -> bool:
        """Write that `owner` has the streamlets that it was asked for and has found; return whether there were any.

        `totals`: the numbers of the answer, if they are not counted yet.
        """
        if self._state.catching_up or run.info.phase not in PENDING or not self._state.brokers.is_current(owner):
            return False  # the lost broker came back, or the new owner went: the findings are outdated
        streams = [stream for one in asked if (stream := self._taken(run, owner, one, found)) is not None]
        if streams:
            if totals is not None:
                run.found(totals.bytes_total, totals.records_lost)
            info = self._shown(run)
            await self._state.write(records_of([info]) | self._starts_joined(streams), streams)
            self._records.put(info)
        return bool(streams)

    def _starts_joined(self, streams: Iterable[common_pb2.StreamInfo]) -> dict[str, bytes | None]:
        """Return the changed records of where entries start, for streamlets whose intervals are joined."""
        changes: dict[str, bytes | None] = {}
        for stream in streams:
            before = self._state.catalog.with_id(stream.stream_id)
            for old, new in zip(before.assignments, stream.assignments, strict=True):
                key = streamlet_key(STARTS, stream.stream_id, new.streamlet_id)
                if old == new or (value := self._state.ledger.get(key)) is None:
                    continue
                known = broker_pb2.TakeOverStream.FromString(value).starts
                left = joined(old, new, known)
                if len(left) < len(known):
                    changes[key] = broker_pb2.TakeOverStream(starts=left).SerializeToString() or None
        return changes

    def _request(self, run: Run, streamlets: Iterable[StreamletId]) -> broker_pb2.TakeOverRequest:
        state = self._state
        by_stream: dict[int, list[int]] = {}
        for streamlet in streamlets:
            by_stream.setdefault(streamlet.stream_id, []).append(streamlet.streamlet_id)
        request = broker_pb2.TakeOverRequest(
            coordinator_epoch=state.coordinator_epoch,
            source=source_of(run.info),
        )
        total_bytes = 0
        for stream_id, streamlet_ids in by_stream.items():
            stream = state.catalog.with_id(stream_id)
            total_bytes += stream.ByteSize()
            if request.streams and total_bytes > TAKE_OVER_BYTES_MAX:
                break
            asked = request.streams.add(stream=stream)
            for part in self._parts(run, stream, streamlet_ids):
                total_bytes += part.ByteSize()
                if asked.streamlet_ids and total_bytes > TAKE_OVER_BYTES_MAX:
                    break
                asked.MergeFrom(part)
        request.backups.extend(self._backups_for(run, request))
        return request

    def _parts(
        self, run: Run, stream: common_pb2.StreamInfo, streamlet_ids: Iterable[int]
    ) -> Iterator[broker_pb2.TakeOverStream]:
        """Yield the facts about each streamlet, without the stream."""
        ledger, cursors = self._state.ledger, defaultdict[int, list[common_pb2.Cursor]](list)
        for cursor in self._cursors_of(stream.stream_id):
            cursors[cursor.streamlet_id].append(cursor)
        for one in streamlet_ids:
            handed_over = last_handover(ledger, stream.stream_id, one)
            yield broker_pb2.TakeOverStream(
                streamlet_ids=[one],
                starts=known_starts(ledger, run.info.broker_id, stream, one),
                cursors=cursors[one],
                handed_over=[] if handed_over is None else [handed_over],
            )

    def _backups_for(self, run: Run, request: broker_pb2.TakeOverRequest) -> list[common_pb2.BackupInfo]:
        """Return all backups; a dead one that is not needed is marked as draining, so that the broker does not
        wait for it.

        A backup that does not refuse the source yet is marked as dead: it may still get more of it.
        """
        sources = [request.source]
        for asked in request.streams:
            sources += [
                one for streamlet_id in asked.streamlet_ids for one in asked.stream.assignments[streamlet_id].sources
            ]
        found = self._state.backups.describe_all()
        for backup in found:
            if not backup.alive and self._unneeded.by_all(sources, backup.backup_id):
                backup.draining = True
            if run.info.cause != DRAINED and Launch(backup.backup_id, backup.backup_epoch) not in run.fenced:
                backup.alive = False
        return found

    def _taken(
        self,
        run: Run,
        owner: Launch,
        asked: broker_pb2.TakeOverStream,
        found: Mapping[StreamletId, common_pb2.StreamletState],
    ) -> common_pb2.StreamInfo | None:
        """Return the stream with `owner` as the owner of what it has found; None if all of it has changed since
        the request.
        """
        stream_id = asked.stream.stream_id
        stream = self._state.catalog.find(stream_id)
        if stream is None:
            return None
        changed = [
            recovered(
                run.info,
                stream.assignments[one],
                owner,
                found[StreamletId(stream_id, one)],
                self._own_losses(run, owner),
            )
            for one in asked.streamlet_ids
            if stream.assignments[one] == asked.stream.assignments[one] and StreamletId(stream_id, one) in found
        ]
        return with_assignments(stream, changed, self._state.coordinator_epoch) if changed else None

    def _own_losses(self, run: Run, owner: Launch) -> list[coordinator_pb2.RecoveryInfo]:
        """Return the pending recoveries of earlier launches of a broker that takes over from another one."""
        own = self._records.pending_of(owner.member_id) if owner.member_id != run.info.broker_id else []
        return [info for info in own if info.cause != DRAINED]
