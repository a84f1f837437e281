"""Cursors: the wire form of positions, committing them, and removing the data before them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kera.broker.log.bounds import end_of
from kera.broker.log.entry import Entry, written_end
from kera.broker.log.intervals import interval_after, interval_before, interval_of
from kera.broker.log.read_plan import check_possible, entry_of, ordinal_of, resolve
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.waiting import begun
from kera.broker.log.watermarks import with_its_punctuation
from kera.broker.ownership.streams import Streams
from kera.broker.records import Key, SegmentRecord
from kera.broker.serving.limits import CONSUMER_GROUP_BYTES_MAX, ServingLimits
from kera.broker.serving.stream_access import CheckStream, nothing_is_kept
from kera.broker.storage.load_wait import until_loaded
from kera.broker.storage.persistence import PersistenceManager
from kera.core.access.rights import Operation
from kera.core.base.done import Done
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.turns import Turns
from kera.core.errors import DataLost, InvalidArgument, KeraError, Unavailable
from kera.core.rpc import Call, Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

CHANGES_MAX = 8192
"""Maximum number of cursors in one request to commit or to truncate.

The results are kept until the disk has done all of them.
"""
Change = asyncio.Future[KeraError | None]
"""A removal or a commit that was begun; its result is the error, if it failed."""


def position_of(cursor: common_pb2.Cursor) -> Position:
    """Return a cursor's position in its entry."""
    return Position(cursor.group_id, cursor.segment_id, cursor.position) if cursor.group_id else EARLIEST


def fill_cursor(cursor: common_pb2.Cursor, entry: Entry, position: Position) -> None:
    """Make `cursor` stand for a position in an entry."""
    cursor.stream_id, cursor.streamlet_id, cursor.entry = entry.log_id
    cursor.group_id, cursor.segment_id, cursor.position = position


class CursorChanges:
    """Handles commitCursors and truncateStreamlets."""

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        turns: Turns,
        limits: ServingLimits,
        check: CheckStream = nothing_is_kept,
    ) -> None:
        self._check = check
        self._streams = streams
        self._memory = memory
        self._turns = turns
        self._consumer_groups_max = limits.consumer_groups_max
        self._removal_s_max = limits.removal_s_max
        self._load_wait_s = limits.load_wait_ms / 1000
        self._removing: dict[Entry, Change] = {}
        """The last removal of each entry that has not ended: a repeated request waits for it."""

    async def truncate_streamlets(
        self, call: Call[broker_pb2.TruncateStreamletsRequest]
    ) -> Reply[broker_pb2.TruncateStreamletsResponse]:
        """Remove the data before cursors; answer when it cannot come back. Truncating removed data is not an error."""
        now_s = asyncio.get_running_loop().time
        load_until_s = now_s() + self._load_wait_s

        async def load(entry: Entry, key: Key) -> None:
            nonlocal load_until_s
            await until_loaded(self._memory.loads, entry, key, load_until_s, ahead=False)
            load_until_s = now_s() + self._load_wait_s  # loads that come one after the other may take longer in all
            if (segment := entry.resident.get(key)) is not None:
                self._memory.slots.touched(segment)

        async def truncate(streamlet: Streamlet, entry: Entry, position: Position) -> Change | None:
            return await self._truncate(streamlet, entry, position, load)

        results = await self._for_each(call, Operation.DELETE, truncate, self._removed)
        return Reply(broker_pb2.TruncateStreamletsResponse(results=results))

    async def commit_cursors(
        self, call: Call[broker_pb2.CommitCursorsRequest]
    ) -> Reply[broker_pb2.CommitCursorsResponse]:
        """Remember how far a consumer group has read, which retention takes into account; answer when it is on disk."""
        consumer_group = call.message.consumer_group
        if not consumer_group or len(consumer_group.encode()) > CONSUMER_GROUP_BYTES_MAX:
            raise InvalidArgument(
                f"a cursor belongs to a consumer_group of 1 to {CONSUMER_GROUP_BYTES_MAX} bytes",
                limit=CONSUMER_GROUP_BYTES_MAX,
            )

        async def commit(streamlet: Streamlet, entry: Entry, position: Position) -> Change | None:
            return self._commit(streamlet, entry, consumer_group, position)

        results = await self._for_each(call, Operation.READ, commit, _committed)
        return Reply(broker_pb2.CommitCursorsResponse(results=results))

    async def _for_each(
        self,
        call: Call[Any],
        operation: Operation,
        action: Callable[[Streamlet, Entry, Position], Awaitable[Change | None]],
        done: Callable[[Entry, Change, float], Awaitable[None]],
    ) -> list[broker_pb2.CursorResult]:
        """Apply `action` to each cursor of a request; a cursor that fails does not affect the others.

        The changes that actions begin are awaited together, with `done`, which gets the time until which it may wait
        for a removal.
        """
        cursors = call.message.cursors
        if len(cursors) > CHANGES_MAX:
            raise InvalidArgument(f"at most {CHANGES_MAX} cursors in a request", limit=CHANGES_MAX)
        results, changes = [], []
        pace = self._turns.pace(id(call.peer))
        for cursor in cursors:
            await pace.step()
            result = broker_pb2.CursorResult()
            try:
                self._check(call.peer, operation, cursor.stream_id)
                streamlet = self._streams.streamlet(cursor.stream_id, cursor.streamlet_id)
                entry = entry_of(streamlet, cursor.entry)
                changes.append((result, entry, await action(streamlet, entry, position_of(cursor))))
            except KeraError as error:
                result.error.CopyFrom(error_to_message(error))
            results.append(result)
        until_s = asyncio.get_running_loop().time() + self._removal_s_max
        for result, entry, change in changes:
            try:
                if change is not None:
                    await done(entry, change, until_s)
                fill_cursor(result.start, entry, entry.start)
            except KeraError as error:
                result.error.CopyFrom(error_to_message(error))
        return results

    async def _truncate(
        self,
        streamlet: Streamlet,
        entry: Entry,
        position: Position,
        load: Callable[[Entry, Key], Awaitable[None]],
    ) -> Change | None:
        check_possible(position)
        if position <= entry.start:
            return self._removing.get(entry) or self._begin(
                entry, lambda done: self._streams.moved_starts.when_removed(entry, done)
            )
        if interval_of(streamlet.intervals, position.group_id) is None:
            return self._truncate_before(streamlet, entry, position)
        key = (position.group_id, position.segment_id)
        if position.offset and key not in entry.resident and isinstance(entry.find(key), SegmentRecord):
            await load(entry, key)  # to see where its chunks end
        try:
            resolve(streamlet, entry, position)
        except DataLost:
            if position < entry.start:
                return None  # retention has moved the start meanwhile
            raise
        position = with_its_punctuation(entry, position)
        if position == EARLIEST or position <= entry.start:
            return None
        return self._move_start(entry, position, ordinal_of(entry, position))

    def _truncate_before(self, streamlet: Streamlet, entry: Entry, position: Position) -> Change | None:
        """Remove the data that this broker has before a position at another broker."""
        before = interval_before(streamlet.intervals, position.group_id)
        after = interval_after(streamlet.intervals, position.group_id)
        if before is None:
            return None
        if after is not None:
            start, record = after.start, after.first_record(entry.index)
        else:
            start, record = before.following, before.end_record(entry.index)
        return self._move_start(entry, start, record) if start > entry.start else None

    def _move_start(self, entry: Entry, position: Position, record: int) -> Change:
        return self._begin(entry, lambda done: self._streams.move_start(entry, position, record, done))

    def _begin(self, entry: Entry, begin: Callable[[Done], None]) -> Change:
        removal = self._removing[entry] = begun(begin)
        removal.add_done_callback(lambda _: self._forget(entry, removal))
        return removal

    def _forget(self, entry: Entry, removal: Change) -> None:
        if self._removing.get(entry) is removal:
            del self._removing[entry]

    async def _removed(self, entry: Entry, removal: Change, until_s: float) -> None:
        """Wait for a removal. Raises its error, and `Unavailable` if it takes too long."""
        left_s = max(0.0, until_s - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait([removal], timeout=left_s)  # the removal goes on after a timeout
        if not done:
            raise Unavailable(
                f"the broker could not report the new start of entry {entry.index} of streamlet"
                f" {entry.log_id.streamlet_id} to the coordinator within {self._removal_s_max:g} s; until it has, a"
                " recovery may restore the removed records",
                streamlet_id=entry.log_id.streamlet_id,
                entry=entry.index,
            )
        if (error := removal.result()) is not None:
            raise error

    def _commit(self, streamlet: Streamlet, entry: Entry, consumer_group: str, position: Position) -> Change | None:
        if position == EARLIEST:
            return None
        check_possible(position)
        interval = interval_of(streamlet.intervals, position.group_id)
        beyond = interval is None and interval_before(streamlet.intervals, position.group_id) is not None
        if position > max(end_of(streamlet, entry)[0], written_end(entry)) and not beyond:
            raise InvalidArgument(
                f"{tuple(position)} is beyond the durable head {tuple(entry.end)}", position=list(position)
            )  # invariant 9
        if consumer_group not in entry.committed and len(entry.committed) >= self._consumer_groups_max:
            raise InvalidArgument(
                f"{self._consumer_groups_max} consumer groups have committed cursors here already",
                limit=self._consumer_groups_max,
            )
        return begun(lambda done: self._memory.index_writer.commit_cursor(entry, consumer_group, position, done))


async def _committed(_entry: Entry, commit: Change, _until_s: float) -> None:
    """Wait until a commit is on disk. Raises its error."""
    if (error := await commit) is not None:
        raise error
