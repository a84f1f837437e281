"""Push: readers of this node are told where new chunks lie in memory (thesis 7.4.2). State only, no sockets.

    append, load, move ──wake()──► lane, marked ──call_soon──► flush ──► RUNS, END
                                                                 ▲
                              TAKEN opens the window, RELEASE ends leases

* A **lane** is a range of an entry that is pushed over one connection. It goes on where its last run has ended, by the
  rules of ``kera.broker.log.read_plan``; so what is on disk and is loaded first, and what is appended meanwhile, follow
  each other without gap or repeat.
* A **flush** is one per connection and round of the loop at most, whatever has happened in it: a run is all that became
  readable of a segment meanwhile. Lanes take turns, and so do connections (``kera.broker.slices``).
* What a reader asks for is done at once if it is little, and else in slices, in its order.
* The **window** bounds what was pushed and is not taken. A run may exceed it when nothing else is outstanding, or a
  large chunk would never come; until then, a lane whose turn it is keeps its place before the others.
* A **lease** per run keeps its slot, until the reader releases it or is gone. Readers who hold too much of the memory,
  or need what is in its reserve, are told to pull: they get copies then, and others get the memory.

`ProtocolError` means that the peer is not to be trusted any more: who calls `received` closes the connection then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator

from kera.broker.counters import PushTotals
from kera.broker.log.arena import Arena
from kera.broker.log.bounds import end_of, lag_records
from kera.broker.log.entry import Entry
from kera.broker.log.intervals import interval_of
from kera.broker.log.read_plan import ReadPlan, entry_of, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.streams import Streams
from kera.broker.serving.following import Follower, Loading, Watches
from kera.broker.slices import Loop, Slices
from kera.broker.storage.persistence import PersistenceManager
from kera.core.errors import InvalidCursor, KeraError, ProtocolError
from kera.core.ids import Position
from kera.core.push import RUN, Kind, encode, numbers_of, taken_of, window_bytes_max
from kera.core.rpc.wire import error_to_message, parse
from kera.core.telemetry import get_logger
from kera.v1 import push_pb2

log = get_logger("kera.push")

LANES_MAX = 65536
"""Of a connection. Those above are told to pull."""
RUN_BYTES_MAX = 4 << 20
"""A longer run would keep the other lanes waiting; a single chunk may be larger."""
FLUSH_RUNS_MAX = 1024
"""In one message; then it is other connections' turn."""
FLUSH_LANES_MAX = 64
"""Looked at for one message, likewise."""
STEPS_AT_ONCE = 128
"""Lanes that are begun or ended, or leases; then it is looked whether others have their turn."""
CONSUMER_GROUP_BYTES_MAX = 256

Reason = push_pb2.PushEnd.Reason


class Push:
    """What all connections have in common."""

    def __init__(
        self, streams: Streams, arena: Arena, memory: PersistenceManager, totals: PushTotals, loop: Loop
    ) -> None:
        self.streams = streams
        self.arena = arena
        self.memory = memory
        self.totals = totals
        self.loop = loop
        self.slices = Slices(loop)
        self.watches = Watches(self.slices)
        self.window_bytes_max = window_bytes_max(arena.slot_count, arena.slot_bytes)


class Lane(Follower):
    """A range of an entry, as far as it has been pushed."""

    __slots__ = ("connection", "number")

    def __init__(self, connection: PushConnection, number: int, wanted: push_pb2.PushLane) -> None:
        super().__init__(wanted.start, wanted.end if wanted.HasField("end") else None, connection.mark)
        self.connection = connection
        self.number = number


class PushConnection:
    """One reader. See the head of this module."""

    def __init__(
        self,
        push: Push,
        send: Callable[[bytes], object],
        *,
        on_idle: Callable[[], object] = lambda: None,
        on_failed: Callable[[ProtocolError], object] = lambda _: None,
    ) -> None:
        """`send`: takes a message, and never waits; who cannot take more calls `pause` first.

        `on_idle`: called when it is not `busy` any more; `on_failed`: when the peer turns out not to be trusted then.
        """
        self._push = push
        self._send = send
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._inbox: deque[Iterator[None]] = deque()
        """What has arrived and is not done."""
        self.consumer_group = ""
        self._window_bytes = push.window_bytes_max
        self._outstanding_bytes = 0
        """Pushed and not taken."""
        self._lanes: dict[int, Lane] = {}
        self._marked: OrderedDict[Lane, None] = OrderedDict()
        """Whose turn it is, in this order."""
        self._blocked = False
        """The first of them wants more than the window has room for."""
        self._loading = Loading(push.memory, push.loop)
        self._leases: Counter[int] = Counter()
        """By slot; none is 0."""
        self._scheduled = self._paused = self._lost = False
        push.totals.connections += 1

    # -- from the reader -----------------------------------------------------------------------------------------

    def received(self, kind: Kind, body: bytes) -> None:
        """A message has arrived. Raises `ProtocolError`."""
        if kind == Kind.TAKEN and not self._inbox:
            self._taken(taken_of(body))
            return
        self._inbox.append(self._handled(kind, body))
        if len(self._inbox) == 1 and self._handle():
            self._push.slices.add(self._handle_more)

    @property
    def busy(self) -> bool:
        """Whether it has yet to do what has arrived: read no more from the peer for now."""
        return bool(self._inbox)

    def _handle(self) -> bool:
        """Do a little of what has arrived; returns whether there is more."""
        inbox = self._inbox
        for _ in range(STEPS_AT_ONCE):
            if not inbox:
                break
            if next(inbox[0], inbox) is inbox:
                inbox.popleft()
        return bool(inbox)

    def _handle_more(self) -> bool:
        try:
            if self._handle():
                return True
        except ProtocolError as error:
            self._inbox.clear()
            self._on_failed(error)
            return False
        if not self._lost:
            self._on_idle()
        return False

    def _handled(self, kind: Kind, body: bytes) -> Iterator[None]:
        """Do what a message asks for; yields after each part."""
        match kind:
            case Kind.RELEASE:
                yield from self._release(numbers_of(body))
            case Kind.TAKEN:
                self._taken(taken_of(body))
            case Kind.SUBSCRIBE:
                yield from self._subscribe(parse(push_pb2.PushSubscribe, body))
            case Kind.CANCEL:
                yield from self._cancel(numbers_of(body))
            case _:
                raise ProtocolError(f"a reader does not send {kind.name}")

    def _cancel(self, numbers: tuple[int, ...]) -> Iterator[None]:
        ends: list[bytes] = []
        for number in numbers:
            lane = self._lanes.get(number)
            if lane is not None:  # if not, its end is on its way
                ends.append(self._end(lane, Reason.CANCELLED))
            if len(ends) == FLUSH_LANES_MAX:
                self._send(b"".join(ends))
                ends.clear()
            yield
        if ends:
            self._send(b"".join(ends))

    def _subscribe(self, message: push_pb2.PushSubscribe) -> Iterator[None]:
        if len(message.consumer_group.encode()) > CONSUMER_GROUP_BYTES_MAX:
            raise ProtocolError("consumer_group is too long", limit=CONSUMER_GROUP_BYTES_MAX)
        self.consumer_group = message.consumer_group or self.consumer_group
        if message.window_bytes:
            self._window_bytes = min(message.window_bytes, self._push.window_bytes_max)
            self._blocked = False
        for wanted in message.lanes:
            if wanted.lane in self._lanes:
                raise ProtocolError(f"lane {wanted.lane} is in use", lane=wanted.lane)
            lane = Lane(self, wanted.lane, wanted)
            if len(self._lanes) == LANES_MAX:
                self._send(self._ended(lane, Reason.PULL))
            else:
                self._lanes[lane.number] = lane
                self._push.totals.lanes += 1
                self.mark(lane)
            yield
        self._schedule()

    def _taken(self, taken_bytes: int) -> None:
        if taken_bytes > self._outstanding_bytes:
            raise ProtocolError(
                f"the reader has taken {taken_bytes} bytes of {self._outstanding_bytes}", taken_bytes=taken_bytes
            )
        self._outstanding_bytes -= taken_bytes
        self._blocked = False
        self._schedule()

    def _release(self, slots: tuple[int, ...]) -> Iterator[None]:
        leases, arena = self._leases, self._push.arena
        for index in slots:
            left = leases[index] - 1
            if left < 0:
                raise ProtocolError(f"slot {index} is not leased to this reader", slot=index)
            if left:
                leases[index] = left
            else:
                del leases[index]
            arena.slot(index).release()
            yield

    def pause(self) -> None:
        """Send nothing more for now: the reader does not take it."""
        self._paused = True

    def resume(self) -> None:
        """End what `pause` began."""
        self._paused = False
        self._schedule()

    def lost(self) -> None:
        """The connection is gone, and with it its lanes and leases; may be repeated."""
        if self._lost:
            return
        self._lost = True
        self._inbox.clear()
        self._push.totals.connections -= 1
        leases, self._leases = self._leases, Counter()
        for index, count in leases.items():
            self._push.arena.slot(index).release(count)
        if self._forget_some():
            self._push.slices.add(self._forget_some)

    def _forget_some(self) -> bool:
        for _ in range(min(len(self._lanes), STEPS_AT_ONCE)):
            self._forget(self._lanes.popitem()[1])
        return bool(self._lanes)

    # -- to the reader -------------------------------------------------------------------------------------------

    def mark(self, lane: Lane) -> None:
        """There may be something for a lane."""
        lane.marked = True
        self._marked[lane] = None
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        """Flush in the next round, if that is of any use."""
        if (
            self._marked
            and self._outstanding_bytes < self._window_bytes
            and not (self._scheduled or self._blocked or self._paused or self._lost)
        ):
            self._scheduled = True
            self._push.slices.add(self._flush)

    def _flush(self) -> bool:
        """Push what there is, for one lane after the other. If there is more, it has scheduled itself."""
        if self._paused or self._lost:
            self._scheduled = False
            return False
        marked = self._marked
        runs: list[bytes] = []
        ends: list[bytes] = []
        for _ in range(FLUSH_LANES_MAX):
            if not marked or self._outstanding_bytes >= self._window_bytes or len(runs) >= FLUSH_RUNS_MAX:
                break
            lane, _ = marked.popitem(last=False)
            lane.marked = False
            try:
                if not self._advance(lane, runs, ends):
                    self.mark(lane)
                    marked.move_to_end(lane, last=False)
                    self._blocked = True  # by the window; it keeps its turn
                    break
            except KeraError as error:
                ends.append(self._end(lane, Reason.FAILED, error))
            except Exception as error:  # as of a request: whatever happens is told
                log.exception("cannot push", address=list(lane.address), position=list(lane.position))
                ends.append(self._end(lane, Reason.FAILED, error))
        self._loading.next()
        self._scheduled = False  # from here on: what was marked meanwhile was seen
        if runs:
            self._send(encode(Kind.RUNS, b"".join(runs)))
        if ends:  # behind the runs of the same lanes
            self._send(b"".join(ends))
        self._schedule()
        return False

    def _advance(self, lane: Lane, runs: list[bytes], ends: list[bytes]) -> bool:
        """Take the next step of a lane; False when it has to wait for the window. Raises as `plan_read`."""
        if lane.error is not None:
            raise lane.error
        push = self._push
        stream_id, streamlet_id, index = lane.address
        streamlet = push.streams.get(stream_id).streamlet(streamlet_id)
        entry = entry_of(streamlet, index)
        if lane.entry is None and lane.end is not None:
            _check_end(streamlet, entry, lane.end)
        push.watches.watch(lane, entry)
        outstanding = self._outstanding_bytes
        plan = plan_read(
            streamlet,
            index,
            lane.position,
            lane.end,
            min(self._window_bytes - outstanding, RUN_BYTES_MAX),
            strict=outstanding > 0,
        )
        behind = plan.next < entry.end
        all_given = self._give(lane, streamlet, entry, plan, runs, behind=behind)
        if not all_given or (plan.missing is not None and self._holds_too_much()):
            ends.append(self._end(lane, Reason.PULL))
        elif lane.end is not None and plan.next >= lane.end:
            ends.append(self._end(lane, Reason.REACHED))
        elif plan.moved:
            ends.append(self._end(lane, Reason.MOVED))
        elif plan.missing is not None and self._outstanding_bytes < self._window_bytes:
            self._loading.load(lane, entry, plan.missing)
        elif behind or (entry.gaps and entry.gap_at(plan.next) is not None):
            if not plan.ranges and outstanding:
                return False
            if plan.ranges or plan.missing is not None:
                self.mark(lane)  # behind the others
        return True

    def _holds_too_much(self) -> bool:
        """Whether all readers hold half of the memory, or this one a quarter.

        Of the latter, what is being written to does not count: it is in memory in any case, and many lanes that follow
        their entries lease all of it for a moment.
        """
        arena = self._push.arena
        slots = arena.slot_count
        if 2 * arena.leased_slots > slots:
            return True
        return 4 * len(self._leases) > slots and 4 * sum([not arena.slot(index).open for index in self._leases]) > slots

    def _give(
        self, lane: Lane, streamlet: Streamlet, entry: Entry, plan: ReadPlan, runs: list[bytes], *, behind: bool
    ) -> bool:
        """Lease what a plan has found, say where it is, and advance the lane; False if not all of it may be had.

        `behind`: there is more in the entry than the plan.
        """
        push, leases, length = self._push, self._leases, 0
        position, first = plan.next, len(runs)
        lags = [0]  # of a single range that is all there is, as of each append when its reader keeps up
        if behind or len(plan.ranges) != 1:
            lags = [lag_records(streamlet, entry, Position(*segment.key, end)) for segment, _, end in plan.ranges]
        for (segment, begin, end), lag in zip(plan.ranges, lags, strict=True):
            group_id, segment_id = segment.key
            if self._holds_too_much() or not push.memory.may_lease(segment):
                position = Position(group_id, segment_id, begin)
                break
            slot = segment.slot
            slot.lease()
            leases[slot.index] += 1
            push.memory.touched(segment)
            length += end - begin
            runs.append(
                RUN.pack(
                    lane.number,
                    slot.index,
                    slot.generation,
                    slot.arena_offset + begin,
                    end - begin,
                    segment_id,
                    group_id,
                    begin,
                    lag,
                )
            )
        lane.position = position
        lane.reads_at(entry, position)
        self._outstanding_bytes += length
        streamlet.bytes_read += length
        push.totals.runs += len(runs) - first
        push.totals.bytes += length
        return len(runs) - first == len(plan.ranges)

    def _end(self, lane: Lane, reason: Reason.ValueType, error: BaseException | None = None) -> bytes:
        """End a lane; returns the message that says so."""
        self._forget(lane)
        return self._ended(lane, reason, error)

    def _ended(self, lane: Lane, reason: Reason.ValueType, error: BaseException | None = None) -> bytes:
        self._push.totals.ends[Reason.Name(reason).lower()] += 1
        message = push_pb2.PushEnd(lane=lane.number, reason=reason, next=lane.cursor(lane.position))
        if error is not None:
            message.error.CopyFrom(error_to_message(error))
        return encode(Kind.END, message.SerializeToString())

    def _forget(self, lane: Lane) -> None:
        self._lanes.pop(lane.number, None)
        self._marked.pop(lane, None)
        self._push.totals.lanes -= 1
        self._loading.stop(lane)
        lane.unwatch()


def _check_end(streamlet: Streamlet, entry: Entry, end: Position) -> None:
    """Refuse an end that will not come: what is not there yet cannot be known to be the end of a chunk."""
    interval = interval_of(streamlet.intervals, end.group_id)
    if interval is not None and not interval.closed and end > end_of(streamlet, entry)[0]:
        raise InvalidCursor(
            f"the end {tuple(end)} is behind the durable head {tuple(entry.end)} of streamlet {streamlet.streamlet_id}",
            streamlet_id=streamlet.streamlet_id,
            entry=entry.index,
            position=list(end),
        )
