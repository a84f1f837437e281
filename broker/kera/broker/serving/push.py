"""Push: tells readers on this node where new chunks lie in memory (thesis 7.4.2). State only, no sockets.

    append, load, move ──wake()──► subscription, marked ──call_soon──► flush ──► RUNS, END
                                                                         ▲
                                      TAKEN opens the window, RELEASE ends leases

* A **subscription** is a range of an entry that is pushed over one connection (`lane` in messages). Each run begins
  where the last one ended, by the rules of ``kera.broker.log.read_plan``. So data that is loaded from disk and data
  that is appended meanwhile follow each other without gap or repeat.
* A **flush** happens at most once per connection and round of the loop. A run has all that has become readable of a
  segment since the last one. Subscriptions take turns, and so do connections (``kera.broker.slices``).
* The broker **holds** back appended data of streams whose latency constraint leaves time for that, until it is due or
  large (``kera.broker.latency.holding``): then one flush announces all of it. Only consumers in groups wait.
* The broker carries out small requests of a reader at once, and others in slices, in their order.
* The **window** bounds the data that was pushed and not taken yet. A run may exceed it when nothing else is
  outstanding, or a large chunk would never be pushed. Until then, the subscription keeps its turn.
* A **lease** per run keeps its slot until the reader releases it or disconnects. Readers that hold too much of the
  memory, or need segments from its reserve, have to pull: they get copies, and others get the memory.

`ProtocolError` means that the peer cannot be trusted any more: the caller of `received` then closes the connection.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping

from kera.broker.counters import PushTotals
from kera.broker.latency.hold_timer import HoldTimer
from kera.broker.latency.holding import HELD_BYTES_MAX, Held, Hold, Holds
from kera.broker.log.arena import Arena, Slot
from kera.broker.log.arena_file import ArenaFile
from kera.broker.log.bounds import end_of, lag_records
from kera.broker.log.entry import Entry
from kera.broker.log.intervals import interval_of
from kera.broker.log.read_plan import ReadPlan, entry_of, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.streams import Streams
from kera.broker.serving.following import Follower, Loading, Watches
from kera.broker.serving.inbox import Inbox
from kera.broker.serving.limits import CONSUMER_GROUP_BYTES_MAX, PushLimits
from kera.broker.slices import Loop, Slices
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.ids import Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidCursor, KeraError, ProtocolError
from kera.core.format.chunk import created_us_at
from kera.core.push import RUN, PushKind, encode, numbers_of, taken_of, window_bytes_max
from kera.core.rpc.wire import error_to_message, parse
from kera.v1 import push_pb2

log = get_logger("kera.push")

Reason = push_pb2.PushEnd.Reason


class ReaderLeases:
    """The slots of memory that a reader on this node holds: a leased slot is not reused. Belongs to one connection."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._counts: Counter[int] = Counter()
        """Number of leases by slot; never 0."""

    def add(self, slot: Slot) -> None:
        """Lease a slot for another run that the reader gets."""
        slot.lease()
        self._counts[slot.index] += 1

    def release(self, index: int) -> None:
        """End one lease of a slot. Raises `ProtocolError` if the reader has none."""
        left = self._counts[index] - 1
        if left < 0:
            raise ProtocolError(f"slot {index} is not leased to this reader", slot=index)
        if left:
            self._counts[index] = left
        else:
            del self._counts[index]
        self._arena.slot(index).release()

    def release_all(self) -> None:
        """End all leases; may be repeated."""
        counts, self._counts = self._counts, Counter()
        for index, count in counts.items():
            self._arena.slot(index).release(count)

    @property
    def too_many(self) -> bool:
        """Whether all readers hold more than half of the memory, or this one more than a quarter.

        Open segments do not count towards the quarter: they are in memory in any case, and a reader with many
        subscriptions that keep up leases all of them for a moment.
        """
        arena, mine = self._arena, self._counts
        slots = arena.slot_count
        if 2 * arena.leased_slots > slots:
            return True
        return 4 * len(mine) > slots and 4 * sum([not arena.slot(index).open for index in mine]) > slots


class Push:
    """The state that all connections share."""

    def __init__(
        self,
        streams: Streams,
        arena: Arena,
        memory: PersistenceManager,
        totals: PushTotals,
        loop: Loop,
        limits: PushLimits | None = None,
        holds: Holds | None = None,
        hold_timer: HoldTimer | None = None,
    ) -> None:
        """`holds`: how long data of a stream may be held back from readers; None: it never is.

        `hold_timer`: calls back when held data is due; required with `holds`.
        """
        self.limits = limits or PushLimits()
        self._holds = holds
        self._hold_timer = hold_timer
        self.waits: Mapping[int, Hold] = {} if holds is None else holds.of
        """The streams whose data may be held back; looked at for each append."""
        self._held = Held[Subscription]()
        if hold_timer is not None:
            hold_timer.listen(self.give_due)
        self.streams = streams
        self.arena = arena
        self.memory = memory
        self.totals = totals
        self.loop = loop
        self.slices = Slices(loop)
        self.watches = Watches(self.slices)
        self.window_bytes_max = window_bytes_max(arena.slot_count, arena.slot_bytes)

    def holds_back(self, subscription: Subscription) -> bool:
        """Whether a subscription's new data may wait for more; if so, the subscription is marked when it is due."""
        holds, entry = self._holds, subscription.entry
        if holds is None or entry is None or subscription.address[0] not in holds.of:
            return False
        position, end = subscription.position, entry.end
        segment = entry.resident.get((position.group_id, position.segment_id))
        new_bytes = end.offset - position.offset
        if segment is None or end[:2] != position[:2] or not 0 < new_bytes < HELD_BYTES_MAX:
            self._held.discard(subscription)
            return False
        if subscription not in self._held:
            until_s = holds.until_s(subscription.address[0], created_us_at(segment.slot.view, position.offset))
            if not until_s:
                return False
            self._held.hold(subscription, until_s, holds.now_s())
            self._set_timer(holds)
        return True

    def let_go(self, subscription: Subscription) -> None:
        """Forget that a subscription, which has ended, is held back."""
        self._held.discard(subscription)

    def give_due(self) -> None:
        """Mark the held subscriptions that are due."""
        if self._holds is not None and self._held:
            for subscription in self._held.take(self._holds.now_s() if self._holds.of else math.inf):
                if not subscription.marked and subscription.missing is None:
                    subscription.mark(subscription)
            self._set_timer(self._holds)

    def _set_timer(self, holds: Holds) -> None:
        if self._held and self._hold_timer is not None:
            self._hold_timer.set_in(self._held.next_s - holds.now_s())


class Subscription(Follower):
    """A range of an entry, and how far it has been pushed."""

    __slots__ = ("_connection", "_waits", "number")

    def __init__(
        self, connection: PushConnection, number: int, wanted: push_pb2.PushLane, waits: Mapping[int, Hold]
    ) -> None:
        """`waits`: the streams whose data may be held back."""
        super().__init__(wanted.start, wanted.end if wanted.HasField("end") else None, connection.mark)
        self.number = number
        self._connection = connection
        self._waits = waits

    def wake(self) -> None:
        """Mark it, unless it is marked already, waits for a load, or its new data may be held back."""
        if not self.marked and self.missing is None:
            if self._waits and self._connection.holds_back(self):
                self.listen()  # further appends may make the data too large to wait
            else:
                self.mark(self)


class PushConnection:
    """The subscriptions, window and leases of one reader. Flushes send the runs of each entry in order."""

    def __init__(
        self,
        push: Push,
        send: Callable[[bytes], object],
        *,
        file: ArenaFile | None = None,
        may_read: Callable[[int], None] | None = None,
        on_idle: Callable[[], object] = lambda: None,
        on_failed: Callable[[ProtocolError], object] = lambda _: None,
    ) -> None:
        """`send`: takes a message without waiting; a transport that cannot take more calls `pause` first.

        `file`: the file that the reader has mapped; None: the default domain's file.
        `may_read`: raises an error for the id of a stream that the peer may not read; None: it may read all.

        `on_idle`: called when a later slice has ended `busy`; `on_failed`: called when it raises `ProtocolError`.
        """
        self._push = push
        self._send = send
        self._may_read = may_read
        self._file = file or push.arena.file()
        """The file that the reader has mapped: it gets references to chunks in it, and has to pull others."""
        self._inbox = Inbox(push.slices, push.limits.steps_at_once, on_idle=on_idle, on_failed=on_failed)
        self.consumer_group = ""
        self._window_bytes = push.window_bytes_max
        self._outstanding_bytes = 0
        """Bytes that were pushed and not taken yet."""
        self._subscriptions: dict[int, Subscription] = {}
        self._marked: OrderedDict[Subscription, None] = OrderedDict()
        """The subscriptions whose turn it is, in this order."""
        self._blocked = False
        """Whether the first marked subscription needs more room than the window has."""
        self._loading = Loading(push.memory, push.loop, at_once_max=push.limits.loads_at_once)
        self._leases = ReaderLeases(push.arena)
        self._scheduled = self._paused = self._lost = False
        push.totals.connections += 1

    # -- from the reader -----------------------------------------------------------------------------------------

    def received(self, kind: PushKind, body: bytes) -> None:
        """Handle a message of the reader. Raises `ProtocolError`."""
        if kind == PushKind.TAKEN and not self.busy:
            self._taken(taken_of(body))
        else:
            self._inbox.add(self._handled(kind, body))

    @property
    def busy(self) -> bool:
        """Whether earlier messages are not handled completely yet: then read no more from the peer for now."""
        return self._inbox.busy

    def _handled(self, kind: PushKind, body: bytes) -> Iterator[None]:
        """Handle a message; yields after each part."""
        match kind:
            case PushKind.RELEASE:
                yield from self._release(numbers_of(body))
            case PushKind.TAKEN:
                self._taken(taken_of(body))
            case PushKind.SUBSCRIBE:
                yield from self._subscribe(parse(push_pb2.PushSubscribe, body))
            case PushKind.CANCEL:
                yield from self._cancel(numbers_of(body))
            case _:
                raise ProtocolError(f"a reader does not send {kind.name}")

    def _cancel(self, numbers: tuple[int, ...]) -> Iterator[None]:
        ends: list[bytes] = []
        for number in numbers:
            subscription = self._subscriptions.get(number)
            if subscription is not None:  # otherwise its end is on its way
                ends.append(self._end(subscription, Reason.CANCELLED))
            if len(ends) == self._push.limits.flush_subscriptions_max:
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
            if wanted.lane in self._subscriptions:
                raise ProtocolError(f"lane {wanted.lane} is in use", lane=wanted.lane)
            subscription = Subscription(self, wanted.lane, wanted, self._push.waits)
            if len(self._subscriptions) == self._push.limits.subscriptions_max:
                self._send(self._ended(subscription, Reason.PULL))
            elif (refusal := self._refusal(wanted.start.stream_id)) is not None:
                self._send(self._ended(subscription, Reason.FAILED, refusal))
            else:
                self._subscriptions[subscription.number] = subscription
                self._push.totals.subscriptions += 1
                self.mark(subscription)
            yield
        self._schedule()

    def _refusal(self, stream_id: int) -> KeraError | None:
        try:
            if self._may_read is not None:
                self._may_read(stream_id)
        except KeraError as error:
            return error
        return None

    def _taken(self, taken_bytes: int) -> None:
        if taken_bytes > self._outstanding_bytes:
            raise ProtocolError(
                f"the reader has taken {taken_bytes} bytes of {self._outstanding_bytes}", taken_bytes=taken_bytes
            )
        self._outstanding_bytes -= taken_bytes
        self._blocked = False
        self._schedule()

    def _release(self, slots: tuple[int, ...]) -> Iterator[None]:
        for index in slots:
            self._leases.release(index)
            yield

    def pause(self) -> None:
        """Send nothing more for now, because the reader does not take messages."""
        self._paused = True

    def resume(self) -> None:
        """Send again after `pause`."""
        self._paused = False
        self._schedule()

    def lost(self) -> None:
        """End the subscriptions and leases of a connection that is gone; may be repeated."""
        if self._lost:
            return
        self._lost = True
        self._inbox.close()
        self._push.totals.connections -= 1
        self._leases.release_all()
        if self._forget_some():
            self._push.slices.add(self._forget_some)

    def _forget_some(self) -> bool:
        for _ in range(min(len(self._subscriptions), self._push.limits.steps_at_once)):
            self._forget(self._subscriptions.popitem()[1])
        return bool(self._subscriptions)

    # -- to the reader -------------------------------------------------------------------------------------------

    def holds_back(self, subscription: Subscription) -> bool:
        """Whether a subscription's new data may wait for more."""
        return bool(self.consumer_group) and self._push.holds_back(subscription)

    def mark(self, subscription: Subscription) -> None:
        """Mark a subscription, which may have new data, and schedule a flush."""
        subscription.marked = True
        self._marked[subscription] = None
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        """Schedule a flush in the next round, if it could send anything."""
        if (
            self._marked
            and self._outstanding_bytes < self._window_bytes
            and not (self._scheduled or self._blocked or self._paused or self._lost)
        ):
            self._scheduled = True
            self._push.slices.add(self._flush)

    def _flush(self) -> bool:
        """Push the data of marked subscriptions in turn. If more is left, this schedules the next flush."""
        if self._paused or self._lost:
            self._scheduled = False
            return False
        marked = self._marked
        runs: list[bytes] = []
        ends: list[bytes] = []
        limits = self._push.limits
        for _ in range(limits.flush_subscriptions_max):
            if not marked or self._outstanding_bytes >= self._window_bytes or len(runs) >= limits.flush_runs_max:
                break
            subscription, _ = marked.popitem(last=False)
            subscription.marked = False
            try:
                if not self._advance(subscription, runs, ends):
                    self.mark(subscription)
                    marked.move_to_end(subscription, last=False)
                    self._blocked = True  # by the window; it keeps its turn
                    break
            except KeraError as error:
                ends.append(self._end(subscription, Reason.FAILED, error))
            except Exception as error:  # as for a request, the reader gets every error
                log.exception("cannot push", address=list(subscription.address), position=list(subscription.position))
                ends.append(self._end(subscription, Reason.FAILED, error))
        self._loading.next()
        self._scheduled = False  # only here: `_schedule` below sees what was marked meanwhile
        if runs:
            self._send(encode(PushKind.RUNS, b"".join(runs)))
        if ends:  # behind the runs of the same subscriptions
            self._send(b"".join(ends))
        self._schedule()
        return False

    def _advance(self, subscription: Subscription, runs: list[bytes], ends: list[bytes]) -> bool:
        """Push the next data of a subscription; False if it has to wait for the window. Raises as `plan_read`."""
        if subscription.error is not None:
            raise subscription.error
        push = self._push
        stream_id, streamlet_id, index = subscription.address
        streamlet = push.streams.streamlet(stream_id, streamlet_id)
        entry = entry_of(streamlet, index)
        if subscription.entry is None and subscription.end is not None:
            _check_end(streamlet, entry, subscription.end)
        push.watches.watch(subscription, entry)
        outstanding = self._outstanding_bytes
        plan = plan_read(
            streamlet,
            index,
            subscription.position,
            subscription.end,
            min(self._window_bytes - outstanding, push.limits.run_bytes_max),
            strict=outstanding > 0,
        )
        behind = plan.next < entry.end
        all_given = self._give(subscription, streamlet, entry, plan, runs, behind=behind)
        if not all_given or (plan.missing is not None and self._leases.too_many):
            ends.append(self._end(subscription, Reason.PULL))
        elif subscription.end is not None and plan.next >= subscription.end:
            ends.append(self._end(subscription, Reason.REACHED))
        elif plan.moved:
            ends.append(self._end(subscription, Reason.MOVED))
        elif plan.missing is not None and self._outstanding_bytes < self._window_bytes:
            self._loading.load(subscription, entry, plan.missing)
        elif behind or (entry.gaps and entry.gap_at(plan.next) is not None):
            if not plan.ranges and outstanding:
                return False
            if plan.ranges or plan.missing is not None:
                self.mark(subscription)  # behind the others
        return True

    def _give(
        self,
        subscription: Subscription,
        streamlet: Streamlet,
        entry: Entry,
        plan: ReadPlan,
        runs: list[bytes],
        *,
        behind: bool,
    ) -> bool:
        """Lease the ranges of a plan, add their runs, and advance the subscription; False if some cannot be leased.

        `behind`: the entry has data behind the plan.
        """
        push, leases, length = self._push, self._leases, 0
        position, first = plan.next, len(runs)
        lags = [0]  # for a single range up to the end of the entry: the usual case for a reader that keeps up
        if behind or len(plan.ranges) != 1:
            lags = [lag_records(streamlet, entry, Position(*segment.key, end)) for segment, _, end in plan.ranges]
        for (segment, begin, end), lag in zip(plan.ranges, lags, strict=True):
            group_id, segment_id = segment.key
            slot = segment.slot
            if slot.file is not self._file or leases.too_many or not push.memory.slots.may_lease(segment):
                position = Position(group_id, segment_id, begin)
                break
            leases.add(slot)
            push.memory.slots.touched(segment)
            length += end - begin
            runs.append(
                RUN.pack(
                    subscription.number,
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
        subscription.position = position
        subscription.reads_at(entry, position)
        self._outstanding_bytes += length
        streamlet.bytes_read += length
        push.totals.runs += len(runs) - first
        push.totals.bytes += length
        return len(runs) - first == len(plan.ranges)

    def _end(self, subscription: Subscription, reason: Reason.ValueType, error: BaseException | None = None) -> bytes:
        """End a subscription; return the message that tells the reader."""
        self._forget(subscription)
        return self._ended(subscription, reason, error)

    def _ended(self, subscription: Subscription, reason: Reason.ValueType, error: BaseException | None = None) -> bytes:
        self._push.totals.ends[Reason.Name(reason).lower()] += 1
        message = push_pb2.PushEnd(
            lane=subscription.number, reason=reason, next=subscription.cursor(subscription.position)
        )
        if error is not None:
            message.error.CopyFrom(error_to_message(error))
        return encode(PushKind.END, message.SerializeToString())

    def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.pop(subscription.number, None)
        self._marked.pop(subscription, None)
        self._push.totals.subscriptions -= 1
        self._loading.stop(subscription)
        self._push.let_go(subscription)
        subscription.unwatch()


def _check_end(streamlet: Streamlet, entry: Entry, end: Position) -> None:
    """Raise `InvalidCursor` for an end beyond the durable head: no chunk is known to end there."""
    interval = interval_of(streamlet.intervals, end.group_id)
    if interval is not None and not interval.closed and end > end_of(streamlet, entry)[0]:
        raise InvalidCursor(
            f"the end {tuple(end)} is beyond the durable head {tuple(entry.end)} of streamlet {streamlet.streamlet_id}",
            streamlet_id=streamlet.streamlet_id,
            entry=entry.index,
            position=list(end),
        )
