"""Read sessions: the broker keeps the ranges that a reader reads, so requests and answers name only what changes.

Without a session, a reader that pulls thousands of ranges would repeat all of them after each chunk. A session keeps
the ranges and their positions, as push does (``kera.broker.serving.following``): an append marks a range, and a request
looks only at marked ranges.

* **Steps.** Step 0 begins or restarts a session, with all its ranges. Each later request has the step after the one
  whose answer the reader has received, so ranges advance only by data that the reader has received. A request with any
  other step is refused with `SessionLost`. After any failure the reader restarts the session: it knows its positions.
* **Turns.** Ranges have their turn in the order in which they were marked; a range with more data goes behind the
  others. A range whose next chunk does not fit into the rest of an answer stays in front.
* **Bounds.** `ServingLimits` bounds the ranges of a session, of a connection and of all connections. A session beyond
  these bounds is answered, but not kept: its reader restarts it each time. Sessions end with their connection.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator
from typing import NamedTuple

from kera.broker.counters import Counters
from kera.broker.log.bounds import lag_records
from kera.broker.log.entry import Entry
from kera.broker.log.read_plan import ReadPlan, begins_at, entry_of, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.streams import Streams
from kera.broker.serving.fetch import (
    READ_RANGES_AT_ONCE,
    READ_RANGES_MAX,
    READ_WAIT_MS_MAX,
    ReadReply,
)
from kera.broker.serving.following import Follower, Loading, Watches
from kera.broker.serving.hooks import ReadCall
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.outgoing import AnswersNotTaken, Outgoing
from kera.broker.serving.stream_access import CheckStream, nothing_is_kept
from kera.broker.slices import Slices
from kera.broker.storage.persistence import PersistenceManager
from kera.core.access.rights import Operation
from kera.core.base.turns import Turns, at_once
from kera.core.errors import InvalidArgument, KeraError, NotOwner, SessionLost
from kera.core.rpc import Reply
from kera.core.rpc.method import Peer
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2

ROUSED_AT_ONCE = 8
"""Waiting requests that are resumed in a round of the loop."""
_SESSIONS = "read sessions"


class _Range(Follower):
    """One range of a session."""

    __slots__ = ("handle",)

    def __init__(self, wanted: broker_pb2.ReadRange, session: _Session) -> None:
        super().__init__(wanted.start, wanted.end if wanted.HasField("end") else None, session.mark)
        self.handle = wanted.handle


class _Session:
    """The ranges that one reader reads, and the order in which marked ranges get their turn."""

    def __init__(self, session_id: int, loading: Loading, rouse: Callable[[_Session], None], *, kept: bool) -> None:
        """`rouse`: calls `roused`, at once or soon."""
        self.session_id = session_id
        self.loading = loading
        self._rouse = rouse
        self.kept = kept
        """Whether the session continues after the answer."""
        self.ranges: dict[int, _Range] = {}
        """The ranges, by handle."""
        self.marked: OrderedDict[_Range, None] = OrderedDict()
        """The ranges whose turn it is, in this order."""
        self.step = 0
        """Number of the last request."""
        self.busy = False
        """Whether the last request has not been answered yet."""
        self.closed = False
        self._woken: asyncio.Future[None] | None = None

    def mark(self, item: _Range) -> None:
        """Mark a range, which may have new data, and wake the waiting request."""
        if not self.closed:
            item.marked = True
            self.marked[item] = None
            self._wake()

    def remove(self, item: _Range) -> None:
        """Remove a range from the session, and stop following its entry."""
        self.ranges.pop(item.handle, None)
        self.marked.pop(item, None)
        self.loading.stop(item)
        item.unwatch()

    def close(self) -> None:
        """Close the session and wake the waiting request."""
        self.closed = True
        self._wake()

    async def woken(self, until_s: float | None) -> None:
        """Wait until a range is marked or the session is closed, up to a time of the loop."""
        if self.marked or self.closed:
            return
        self._woken = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(until_s):
                await self._woken
        except TimeoutError:
            pass
        finally:
            self._woken = None

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._rouse(self)

    def roused(self) -> None:
        """Let the waiting request go on."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class _Kept:
    """The kept sessions of one connection."""

    def __init__(self) -> None:
        self.by_id: dict[int, _Session] = {}
        self.ranges = 0
        """Number of ranges over all sessions of the connection."""


class _Answer:
    """The content of an answer so far."""

    def __init__(self, bytes_max: int) -> None:
        self.response = broker_pb2.MultiReadChunksResponse()
        self.bulk: list[memoryview] = []
        self.bytes_max = bytes_max
        self.left = bytes_max

    @property
    def used(self) -> bool:
        """Whether the answer has data already."""
        return self.left < self.bytes_max


class _Place(NamedTuple):
    """The streamlet and entry of a range, as of now."""

    streamlet: Streamlet
    entry: Entry


class ReadSessions:
    """Handles reads that are part of a session. Belongs to one event loop."""

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        counters: Counters,
        turns: Turns,
        outgoing: Outgoing,
        *,
        read_bytes_max: int,
        limits: ServingLimits,
        check: CheckStream = nothing_is_kept,
    ) -> None:
        self._check = check
        self._limits = limits
        self._streams = streams
        self._memory = memory
        self._counters = counters
        self._turns = turns
        self._outgoing = outgoing
        self._read_bytes_max = read_bytes_max
        self.ranges = 0
        """Number of ranges over all kept sessions."""
        self._slices = Slices(asyncio.get_running_loop())
        self._watches = Watches(self._slices, limits.woken_at_once)
        self._ended: deque[_Session] = deque()
        """Closed sessions whose ranges have to be removed."""
        self._to_rouse: dict[_Session, None] = {}
        self._roused = 0
        """Number of requests resumed in this round of the loop."""

    def read(self, call: ReadCall) -> ReadReply | Awaitable[ReadReply]:
        """Take one step of a session. Raises `SessionLost` and `InvalidArgument`."""
        self._counters.read_requests += 1
        request = call.message
        if len(request.ranges) > READ_RANGES_MAX:
            raise InvalidArgument(f"at most {READ_RANGES_MAX} ranges in a request", limit=READ_RANGES_MAX)
        if len(request.removed) > self._limits.session_ranges_max:
            raise InvalidArgument(
                f"a session has at most {self._limits.session_ranges_max} ranges", limit=self._limits.session_ranges_max
            )
        session = self._session_of(call)
        session.busy = True
        if len(request.ranges) + len(request.removed) + len(session.marked) > READ_RANGES_AT_ONCE:
            return self._step_later(call, session)
        try:
            at_once(self._change(call, session))
            answer = at_once(self._read_marked(call, session))
        except BaseException:
            self._end(call.peer, session)
            raise
        if answer.response.results or not (request.wait_ms or session.loading.waiting):
            return self._reply(call, session, answer)
        return self._step_later(call, session, changed=True)

    async def _step_later(self, call: ReadCall, session: _Session, *, changed: bool = False) -> ReadReply:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(call.message.wait_ms, READ_WAIT_MS_MAX) / 1000
        try:
            if not changed:
                await self._turns.run(self._change(call, session), id(call.peer))
            while True:
                answer = await self._turns.run(self._read_marked(call, session), id(call.peer))
                if session.closed:
                    raise SessionLost("the reader has restarted the read session meanwhile")
                loading = session.loading.waiting
                if answer.response.results or (loop.time() >= until and not loading):
                    return self._reply(call, session, answer)
                await session.woken(None if loading else until)  # loads have their own time limit
        except BaseException:
            self._end(call.peer, session)
            raise

    def _reply(self, call: ReadCall, session: _Session, answer: _Answer) -> ReadReply:
        session.busy = False
        answer.response.session_kept = session.kept
        if not session.kept:
            self._end(call.peer, session)
        return Reply(answer.response, answer.bulk)

    # -- sessions ------------------------------------------------------------------------------------------------

    def _session_of(self, call: ReadCall) -> _Session:
        """Return the session of a request; step 0 begins one. Raises `SessionLost`."""
        request, peer = call.message, call.peer
        sessions = self._kept_of(peer)
        session = sessions.by_id.get(request.session_id)
        if session is not None and (request.step == 0 or session.busy or request.step != session.step + 1):
            self._end(peer, session)
        if request.step == 0:
            return self._begun(sessions, request)
        if session is None or session.closed:
            at = "there is none" if session is None else f"it was at step {session.step}"
            raise SessionLost(
                f"step {request.step} of read session {request.session_id}: {at}; restart it with step 0",
                session_id=request.session_id,
                step=request.step,
            )
        session.step = request.step
        return session

    def _begun(self, sessions: _Kept, request: broker_pb2.MultiReadChunksRequest) -> _Session:
        added = len(request.ranges)
        kept = (
            len(sessions.by_id) < self._limits.sessions_max
            and sessions.ranges + added <= self._limits.connection_ranges_max
            and self.ranges + added <= self._limits.ranges_max
        )
        loading = Loading(self._memory, asyncio.get_running_loop(), self._limits.load_wait_ms)
        session = _Session(request.session_id, loading, self._rouse, kept=kept)
        if kept:
            sessions.by_id[session.session_id] = session
        return session

    def _kept_of(self, peer: Peer) -> _Kept:
        sessions: _Kept | None = peer.state.get(_SESSIONS)
        if sessions is None:
            sessions = peer.state[_SESSIONS] = _Kept()
            peer.on_close.append(lambda: self._lost(peer))
        return sessions

    def _change(self, call: ReadCall, session: _Session) -> Generator[None, None, None]:
        """Add and remove ranges; yields after each. Raises `InvalidArgument` and `SessionLost`."""
        request, peer = call.message, call.peer
        for handle in request.removed:
            yield
            gone = session.ranges.get(handle)
            if gone is not None:  # otherwise the range has ended already
                self._remove(peer, session, gone)
        for wanted in request.ranges:
            yield
            if session.closed:
                return
            if wanted.handle in session.ranges:
                raise InvalidArgument(f"two ranges of a session have the handle {wanted.handle}", handle=wanted.handle)
            self._add(peer, session, wanted)

    def _add(self, peer: Peer, session: _Session, wanted: broker_pb2.ReadRange) -> None:
        if session.kept:
            sessions = self._kept_of(peer)
            if (
                len(session.ranges) >= self._limits.session_ranges_max
                or sessions.ranges >= self._limits.connection_ranges_max
                or self.ranges >= self._limits.ranges_max
            ):
                raise SessionLost(
                    f"too many ranges for a read session: the broker keeps at most {self._limits.session_ranges_max}"
                    f" in a session, {self._limits.connection_ranges_max} on a connection and"
                    f" {self._limits.ranges_max} in total",
                    limit=self._limits.session_ranges_max,
                )
            sessions.ranges += 1
            self.ranges += 1
        item = session.ranges[wanted.handle] = _Range(wanted, session)
        session.mark(item)

    def _remove(self, peer: Peer, session: _Session, item: _Range) -> None:
        session.remove(item)
        if session.kept and not session.closed:
            self._kept_of(peer).ranges -= 1
            self.ranges -= 1

    def _end(self, peer: Peer, session: _Session) -> None:
        """End a session; may be repeated."""
        self._close(peer, session)
        if self._forget():
            self._slices.add(self._forget)

    def _close(self, peer: Peer, session: _Session) -> None:
        """Close a session, and queue it for the removal of its ranges; may be repeated."""
        if session.closed:
            return
        session.close()
        if session.kept:
            sessions = self._kept_of(peer)
            del sessions.by_id[session.session_id]
            sessions.ranges -= len(session.ranges)
            self.ranges -= len(session.ranges)
        self._ended.append(session)

    def _forget(self) -> bool:
        """Remove a few ranges of ended sessions; return whether more are left."""
        for _ in range(self._limits.forgotten_at_once):
            if not self._ended:
                return False
            session = self._ended[0]
            if session.ranges:
                session.remove(session.ranges.popitem()[1])
            else:
                self._ended.popleft()
        return bool(self._ended)

    def _lost(self, peer: Peer) -> None:
        """End the sessions of a closed connection."""
        sessions = self._kept_of(peer)

        def close_some() -> bool:
            for session in list(itertools.islice(sessions.by_id.values(), self._limits.forgotten_at_once)):
                self._close(peer, session)
            return bool(sessions.by_id)

        if close_some():
            self._slices.add(close_some)
        if self._forget():
            self._slices.add(self._forget)

    # -- waking --------------------------------------------------------------------------------------------------

    def _rouse(self, session: _Session) -> None:
        """Resume a waiting request: a few in each round of the loop, because each then has work to do."""
        if self._roused < ROUSED_AT_ONCE:
            session.roused()
        else:
            self._to_rouse[session] = None
        if not self._roused:
            asyncio.get_running_loop().call_soon(self._rouse_more)
        self._roused = min(self._roused + 1, ROUSED_AT_ONCE)

    def _rouse_more(self) -> None:
        self._roused = 0
        waiting = list(itertools.islice(self._to_rouse, ROUSED_AT_ONCE))
        for session in waiting:
            del self._to_rouse[session]
            self._rouse(session)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_marked(self, call: ReadCall, session: _Session) -> Generator[None, None, _Answer]:
        """Read the ranges that are marked now, in turn; yields after each."""
        answer = _Answer(min(call.message.bytes_max or self._read_bytes_max, self._read_bytes_max))
        for _ in range(len(session.marked)):
            yield
            full = answer.left <= 0 or len(answer.response.results) >= self._limits.results_max
            if full or session.closed or not session.marked:
                break
            item, _ = session.marked.popitem(last=False)
            item.marked = False
            try:
                if not self._advance(call.peer, session, item, answer):
                    session.mark(item)
                    session.marked.move_to_end(item, last=False)
                    break
            except KeraError as error:
                self._counters.not_owner += isinstance(error, NotOwner)
                result = answer.response.results.add(handle=item.handle, error=error_to_message(error))
                result.next.CopyFrom(item.cursor(item.position))
                result.ended = True
                self._remove(call.peer, session, item)
                if isinstance(error, AnswersNotTaken):
                    break  # the data of the other ranges would not fit either
        session.loading.next()
        return answer

    def _advance(self, peer: Peer, session: _Session, item: _Range, answer: _Answer) -> bool:
        """Read the next data of a range; False if it does not fit into the rest of the answer.

        Raises as `plan_read`.
        """
        if item.error is not None:
            raise item.error
        stream_id, streamlet_id, index = item.address
        self._check(peer, Operation.READ, stream_id)
        streamlet = self._streams.streamlet(stream_id, streamlet_id)
        here = _Place(streamlet, entry_of(streamlet, index))
        self._watches.watch(item, here.entry)
        plan = plan_read(streamlet, index, item.position, item.end, answer.left, strict=answer.used)
        item.reads_at(here.entry, plan.next)
        behind = plan.next < here.entry.end
        over = plan.moved or (item.end is not None and plan.next >= item.end)
        if plan.ranges or over:
            self._give(peer, here, item, plan, answer)
        if over:
            answer.response.results[-1].ended = True
            self._remove(peer, session, item)
        elif plan.missing is not None:
            session.loading.load(item, here.entry, plan.missing)
        elif behind or (here.entry.gaps and here.entry.gap_at(plan.next) is not None):
            if plan.ranges:
                session.mark(item)
            elif answer.used:
                return False
        return True

    def _give(self, peer: Peer, here: _Place, item: _Range, plan: ReadPlan, answer: _Answer) -> None:
        """Put the data of a plan into an answer, and advance the range by it."""
        views = [
            self._outgoing.give(peer, segment.slot, begin, end, lend=self._memory.slots.may_lease(segment))
            for segment, begin, end in plan.ranges
        ]
        answer.bulk += views  # all of them or none
        length = sum(map(len, views))
        for segment, _, _ in plan.ranges:
            self._memory.slots.touched(segment)
        result = answer.response.results.add(
            handle=item.handle, length_bytes=length, lag_records=lag_records(here.streamlet, here.entry, plan.next)
        )
        result.next.CopyFrom(item.cursor(plan.next))
        result.begins_at = begins_at(plan, item.position)
        item.position = plan.next
        answer.left -= length
        here.streamlet.bytes_read += length
        self._counters.bytes_read += length
