"""Support for tests of the push channel: a broker's side without sockets and time, and readers to push to."""

from collections.abc import Callable
from typing import Any

from kera.broker.counters import PushTotals
from kera.broker.log.streamlet import Appended, Streamlet
from kera.broker.serving.limits import PushLimits
from kera.broker.serving.push import Push, PushConnection
from kera.core.base.ids import EARLIEST, Position
from kera.core.format.chunk import iterate_chunks, verify_header
from kera.core.push import Decoder, PushKind, Run, encode, encode_numbers, encode_taken, runs_of
from kera.v1 import common_pb2, push_pb2
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Engine, chunk, cursor, stream_info

SLOTS = 64
"""The slots of a broker's arena, unless a test wants another number."""


class FakeTimer:
    """The timer that `FakeLoop.call_later` returns."""

    def __init__(self, at_s: float, callback: Callable[[], object]) -> None:
        self.at_s = at_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """An event loop whose rounds and time a test controls."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []
        self.timers: list[FakeTimer] = []
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], object]) -> FakeTimer:
        self.timers.append(FakeTimer(self.now_s + delay, callback))
        return self.timers[-1]

    def round(self) -> int:
        """Call the callbacks that are due, and return their number."""
        due, self.soon = self.soon, []
        for callback in due:
            callback()
        return len(due)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        due = [timer for timer in self.timers if timer.at_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.at_s > self.now_s]
        for timer in due:
            if not timer.cancelled:
                timer.callback()


class PushNode:
    """A broker that pushes, called as its server calls it."""

    def __init__(self, engine: Engine, *streams: common_pb2.StreamInfo, limits: PushLimits | None = None) -> None:
        """Open those streamlets of `streams` that belong to `BROKER_ID`; by default one stream with one streamlet."""
        self.engine = engine
        self.loop = FakeLoop()
        self.totals = PushTotals()
        self.push = Push(engine.streams, engine.arena, engine.memory, self.totals, self.loop, limits)
        self.sequences: dict[tuple[int, int], int] = {}
        for info in streams or (stream_info(),):
            engine.streams.open(info, BROKER_ID)

    def streamlet(self, streamlet_id: int = 0) -> Streamlet:
        return self.engine.streams.get(STREAM_ID).streamlet(streamlet_id)

    def append(self, count: int = 1, producer: int = 2, streamlet_id: int = 0, **fields: Any) -> list[Appended]:
        """Append the next chunks of a producer, and let readers see them. Even producers write to entry 0 of two."""
        streamlet = self.streamlet(streamlet_id)
        appended = []
        for _ in range(count):
            sequence = self.sequences.get((streamlet_id, producer), 0)
            data = chunk(producer, sequence, streamlet_id=streamlet_id, **fields)
            appended.append(streamlet.append(memoryview(data), verify_header(data)))
            streamlet.publish(appended[-1])
            self.sequences[streamlet_id, producer] = sequence + 1
        return appended

    def to_disk(self) -> None:
        """Move all closed segments to disk, and out of memory."""
        self.engine.run()
        while self.engine.memory.slots.evict():
            pass

    def run(self, *, disk: bool = True) -> None:
        """Run until nothing is left to do; `disk`: includes the work of the disk."""
        while True:
            if disk:
                self.engine.run()
            if not self.loop.round():
                return


class Reader:
    """The other end of a connection. It sees each run's bytes as they are when the run arrives."""

    def __init__(self, node: PushNode) -> None:
        self.node = node
        self.messages: list[tuple[PushKind, bytes]] = []
        self.runs: list[Run] = []
        self.sequences: dict[int, list[int]] = {}
        """The sequences of the pushed chunks, by lane."""
        self.ends: dict[int, push_pb2.PushEnd] = {}
        self._decoder = Decoder()
        self.connection = PushConnection(node.push, self._take)

    def _take(self, data: bytes) -> None:
        for kind, body in self._decoder.feed(data):
            self.messages.append((kind, body))
            match kind:
                case PushKind.RUNS:
                    for run in runs_of(body):
                        self._run(run)
                case PushKind.END:
                    end = push_pb2.PushEnd.FromString(body)
                    assert end.lane not in self.ends, "a lane ends once"
                    self.ends[end.lane] = end
                case _:
                    raise AssertionError(f"a broker does not send {kind.name}")

    def _run(self, run: Run) -> None:
        assert run.lane not in self.ends, "nothing comes behind the end of a lane"
        slot = self.node.engine.arena.slot(run.slot)
        assert run.generation == slot.generation
        assert slot.leases > 0
        at = run.arena_offset - slot.arena_offset
        assert at == run.offset, "a segment begins where its slot does"
        chunks = [header for header, _ in iterate_chunks(slot.view[at : at + run.length_bytes])]
        assert {(header.group_id, header.segment_id) for header in chunks} == {(run.group_id, run.segment_id)}
        self.sequences.setdefault(run.lane, []).extend(header.sequence for header in chunks)
        self.runs.append(run)

    def say(self, kind: PushKind, body: bytes = b"") -> None:
        """Send one whole message."""
        for each in Decoder().feed(encode(kind, body)):
            self.connection.received(*each)

    def subscribe(self, *lanes: push_pb2.PushLane, window_bytes: int = 0) -> None:
        message = push_pb2.PushSubscribe(consumer_group="test", window_bytes=window_bytes, lanes=lanes)
        self.say(PushKind.SUBSCRIBE, message.SerializeToString())

    def cancel(self, *lanes: int) -> None:
        for kind, body in Decoder().feed(encode_numbers(PushKind.CANCEL, lanes)):
            self.connection.received(kind, body)

    def release(self, *slots: int) -> None:
        for kind, body in Decoder().feed(encode_numbers(PushKind.RELEASE, slots)):
            self.connection.received(kind, body)

    def take(self, taken_bytes: int) -> None:
        for kind, body in Decoder().feed(encode_taken(taken_bytes)):
            self.connection.received(kind, body)

    @property
    def pushed_bytes(self) -> int:
        return sum(run.length_bytes for run in self.runs)

    def end(self, lane: int = 1) -> tuple[str, str, Position]:
        """The reason for the end of a lane, the error's code, and the position to go on from."""
        end = self.ends[lane]
        reason = push_pb2.PushEnd.Reason.Name(end.reason)
        return reason, end.error.code, Position(end.next.group_id, end.next.segment_id, end.next.position)


def lane(number: int = 1, start: Position = EARLIEST, end: Position | None = None, **where: int) -> push_pb2.PushLane:
    """A lane of the first entry, unless `where` names another one."""
    return push_pb2.PushLane(
        lane=number, start=cursor(start, **where), end=None if end is None else cursor(end, **where)
    )
