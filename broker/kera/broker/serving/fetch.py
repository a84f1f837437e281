"""multiReadChunks: returns whole chunks from each range, as bytes.

Readers on the same node need no copies: ``kera.broker.serving.push`` serves them.

The start of a range tells the persistence manager where the reader is. A range that is only on disk is loaded first. If
another range of the request has data, the request does not wait for the load, and the next request finds the segment in
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from functools import partial
from typing import NamedTuple

from kera.broker.counters import Counters
from kera.broker.log.bounds import lag_records
from kera.broker.log.entry import Entry
from kera.broker.log.read_plan import ReadPlan, begins_at, entry_of, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.waiting import FORGOTTEN_AT_ONCE, EntriesWaiter
from kera.broker.ownership.streams import Streams
from kera.broker.records import Key
from kera.broker.serving.cursors import position_of
from kera.broker.serving.hooks import ReadCall
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.outgoing import AnswersNotTaken, Outgoing
from kera.broker.serving.stream_access import CheckStream, nothing_is_kept
from kera.broker.slices import Slices
from kera.broker.storage.load_wait import until_loaded
from kera.broker.storage.persistence import PersistenceManager
from kera.core.access.rights import Operation
from kera.core.base.ids import Position
from kera.core.base.turns import Turns, at_once
from kera.core.errors import InvalidArgument, KeraError, NotOwner
from kera.core.rpc import Reply
from kera.core.rpc.method import Peer
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2

READ_BYTES_MAX = 16 << 20
"""Bound on one response, whatever the reader asks for."""
READ_RANGES_MAX = 65536
READ_RANGES_AT_ONCE = 32
"""A request with more ranges is handled in slices, with other requests in between."""
READ_WAIT_MS_MAX = 60_000
READERS_KEPT_S = 300.0
"""How long the broker remembers where a connection has read an entry last; longer than a read waits."""
_READS = "reads"

ReadReply = Reply[broker_pb2.MultiReadChunksResponse]


class _Reads:
    """The entries that a connection reads."""

    __slots__ = ("entries", "left", "timer")

    def __init__(self) -> None:
        self.entries: dict[Entry, float] = {}
        """Each with when it was read last, as a time of the loop."""
        self.left: list[Entry] = []
        """Entries that it does not read any more, and that still know where it was."""
        self.timer: asyncio.TimerHandle | None = None
        """Looks for entries that it has left; None: there are none to look at."""


class _Found(NamedTuple):
    """A reply as of now."""

    reply: ReadReply
    found: bool
    """Whether the reply has data, an error or a move, so the request need not wait."""
    missing: list[tuple[Entry, Key]]
    """Segments that have to be loaded for more data."""


class Fetches:
    """Handles reads for the service."""

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        counters: Counters,
        turns: Turns,
        *,
        read_bytes_max: int,
        limits: ServingLimits,
        check: CheckStream = nothing_is_kept,
    ) -> None:
        self._check = check
        self._streams = streams
        self._memory = memory
        self._counters = counters
        self._turns = turns
        self._load_wait_s = limits.load_wait_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._slices = Slices(self._loop)
        self.outgoing = Outgoing(memory.slots.slot_count)
        self.read_bytes_max = min(read_bytes_max, READ_BYTES_MAX)  # the transports may allow less

    def read(self, call: ReadCall) -> ReadReply | Awaitable[ReadReply]:
        """Read from each range; when all are at their ends, wait for the first one that gets new data."""
        self._counters.read_requests += 1
        request = call.message
        if len(request.ranges) > READ_RANGES_MAX:
            raise InvalidArgument(f"at most {READ_RANGES_MAX} ranges in a request", limit=READ_RANGES_MAX)
        if len(request.ranges) > READ_RANGES_AT_ONCE:
            return self._read_in_slices(call)
        return self._answer(call, at_once(self._read_ranges(call, {})))

    async def _read_in_slices(self, call: ReadCall) -> ReadReply:
        answer = self._answer(call, await self._turns.run(self._read_ranges(call, {}), id(call.peer)))
        return answer if isinstance(answer, Reply) else await answer

    def _answer(self, call: ReadCall, look: _Found) -> ReadReply | Awaitable[ReadReply]:
        request = call.message
        if look.found or not (request.wait_ms or look.missing):
            for entry, key in look.missing:
                self._memory.loads.load(entry, key)
            return look.reply
        return self._read_later(call)

    async def _read_later(self, call: ReadCall) -> ReadReply:
        loop = asyncio.get_running_loop()
        wait_until = loop.time() + min(call.message.wait_ms, READ_WAIT_MS_MAX) / 1000
        load_until = loop.time() + self._load_wait_s
        errors: dict[tuple[Entry, Key], KeraError] = {}
        waiter = EntriesWaiter(self._slices)
        try:
            while True:
                waiter.again()
                # Look again: requests handled since the last look did not wake this one.
                look = await self._read_ranges_again(call, errors, waiter)
                if look.found:
                    return look.reply
                if look.missing:
                    wanted = look.missing[0]
                    try:
                        await until_loaded(self._memory.loads, *wanted, load_until)
                    except KeraError as error:
                        errors[wanted] = error
                elif loop.time() >= wait_until or not await waiter.woken(wait_until):
                    return (await self._read_ranges_again(call, errors, waiter)).reply
        finally:
            waiter.close()

    async def _read_ranges_again(
        self, call: ReadCall, errors: dict[tuple[Entry, Key], KeraError], waiter: EntriesWaiter
    ) -> _Found:
        steps = self._read_ranges(call, errors, waiter)
        if len(call.message.ranges) > READ_RANGES_AT_ONCE:
            return await self._turns.run(steps, id(call.peer))
        return at_once(steps)

    def _read_ranges(
        self, call: ReadCall, errors: dict[tuple[Entry, Key], KeraError], waiter: EntriesWaiter | None = None
    ) -> Generator[None, None, _Found]:
        """Read from each range, and yield before each; the reply keeps all results. `waiter`: gets the entries."""
        request = call.message
        response = broker_pb2.MultiReadChunksResponse()
        bulk: list[memoryview] = []
        missing: list[tuple[Entry, Key]] = []
        budget = bytes_max = min(request.bytes_max or self.read_bytes_max, self.read_bytes_max)
        found = False
        for wanted in request.ranges:
            yield
            result = response.results.add()
            start = wanted.start
            result.next.CopyFrom(start)
            try:
                self._check(call.peer, Operation.READ, start.stream_id)
                streamlet = self._streams.streamlet(start.stream_id, start.streamlet_id)
                entry = entry_of(streamlet, start.entry)
                if waiter is not None:
                    waiter.add(entry)
                stop = position_of(wanted.end) if wanted.HasField("end") else None
                # After the budget is used up, the response still repeats the start of each range.
                if budget <= 0:
                    continue
                plan = plan_read(streamlet, start.entry, position_of(start), stop, budget, strict=budget < bytes_max)
                if plan.missing is not None:
                    if (entry, plan.missing) in errors and not plan.ranges:
                        raise errors[entry, plan.missing]
                    missing.append((entry, plan.missing))
                length = self._give(call.peer, streamlet, entry, plan, result, bulk)
            except KeraError as error:
                self._counters.not_owner += isinstance(error, NotOwner)
                result.error.CopyFrom(error_to_message(error))
                found = True
                if isinstance(error, AnswersNotTaken):
                    budget = 0  # the data of the other ranges would not fit either
                continue
            streamlet.bytes_read += length
            budget -= length
            found = found or length > 0 or plan.moved  # after the end of an interval, the reader goes on elsewhere
            self._counters.bytes_read += length
        return _Found(Reply(response, bulk), found, missing)

    def _give(
        self,
        peer: Peer,
        streamlet: Streamlet,
        entry: Entry,
        plan: ReadPlan,
        result: broker_pb2.ReadResult,
        bulk: list[memoryview],
    ) -> int:
        """Put the plan's ranges into the result; returns their length."""
        views = [
            self.outgoing.give(peer, segment.slot, begin, end, lend=self._memory.slots.may_lease(segment))
            for segment, begin, end in plan.ranges
        ]
        bulk += views  # all of them or none
        length = sum(map(len, views))
        for segment, _, _ in plan.ranges:
            self._memory.slots.touched(segment)
        result.length_bytes = length
        result.begins_at = begins_at(plan, position_of(result.next))
        result.next.group_id, result.next.segment_id, result.next.position = plan.next
        result.lag_records = lag_records(streamlet, entry, plan.next)
        self._note(peer, entry, plan.next)
        return length

    def _note(self, peer: Peer, entry: Entry, position: Position) -> None:
        """Remember where a reader is, until its connection is gone or it has not read the entry for long."""
        reads: _Reads | None = peer.state.get(_READS)
        if reads is None:
            reads = peer.state[_READS] = _Reads()
            peer.on_close.append(lambda: self._forget_all(peer))
        if reads.timer is None:
            reads.timer = self._loop.call_later(READERS_KEPT_S, self._forget_old, id(peer), reads)
        reads.entries[entry] = self._loop.time()
        entry.readers[id(peer)] = place_of(entry, position)

    def _forget_old(self, reader: int, reads: _Reads) -> None:
        """Forget where a reader was long ago: it would keep what it does not read, and entries that were dropped."""
        before_s = self._loop.time() - READERS_KEPT_S
        reads.left += [entry for entry, read_s in reads.entries.items() if read_s <= before_s]
        for entry in reads.left:
            reads.entries.pop(entry, None)
        reads.timer = None
        if reads.entries:
            reads.timer = self._loop.call_later(READERS_KEPT_S, self._forget_old, reader, reads)
        self._slices.add(partial(_forget_some, reader, reads))

    def _forget_all(self, peer: Peer) -> None:
        """Forget the reader of a closed connection."""
        reads: _Reads = peer.state.pop(_READS)
        if reads.timer is not None:
            reads.timer.cancel()
        reads.left += reads.entries
        reads.entries.clear()
        if _forget_some(id(peer), reads):
            self._slices.add(partial(_forget_some, id(peer), reads))


def _forget_some(reader: int, reads: _Reads) -> bool:
    """Forget where a reader was in some of the entries that it has left; return whether there are more."""
    for _ in range(min(len(reads.left), FORGOTTEN_AT_ONCE)):
        entry = reads.left.pop()
        if entry not in reads.entries:  # otherwise it has come back
            entry.readers.pop(reader, None)
    return bool(reads.left)


def place_of(entry: Entry, position: Position) -> Key:
    """Return the segment that a reader at `position` reads next; it need not exist yet."""
    key = (position.group_id, position.segment_id)
    segment = entry.resident.get(key)
    done = segment is not None and segment.closed and position.offset >= segment.head
    return (key[0], key[1] + 1) if done else key
