"""A lane of the producer against a model of the broker, under losses, refusals and restarts.

The promise: an acknowledged chunk is stored exactly once, in the order of adding; no chunk is ever stored twice; a
chunk that failed without `Uncertain` is not stored; and a lane never waits forever. Only a broker that has lost its
memory may lack acknowledged chunks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kera.client.producing.encoding.payloads import Payload
from kera.client.producing.lanes.lane import Failure, Lane, LaneIdentity, PendingChunk
from kera.client.producing.lanes.lane_columns import NOBODY, LaneColumns
from kera.client.producing.outcomes.outcome import Outcome
from kera.core.errors import (
    ArenaFull,
    ClosedError,
    CorruptChunk,
    KeraError,
    OutOfSequence,
    ProducerFenced,
    Unavailable,
    Uncertain,
)
from kera.core.format.chunk import Codec, encode_header, read_header

FOR_EVER_S = float("inf")
RARELY = st.sampled_from([False, False, False, True])
"""For rules that would leave little room for others if all were equally likely."""
REQUEST_CHUNKS_MAX = 3
HERE = np.zeros(1, np.int64)
"""The lane's streamlet, as a column of one chunk."""


@dataclass
class BrokerModel:
    """The broker's rule of deduplication (see `kera.broker.log.streamlet`), and its stored chunks."""

    producer_epoch: int = 0
    next_sequence: int = 0
    stored: list[int] = field(default_factory=list)

    def append(self, number: int, epoch: int, sequence: int) -> KeraError | None:
        """None: the chunk is stored, now or earlier."""
        if epoch < self.producer_epoch:
            return ProducerFenced("fenced")
        expected = self.next_sequence if epoch == self.producer_epoch else 0
        if sequence > expected:
            return OutOfSequence("a gap", expected_sequence=expected)
        if sequence == expected:
            self.producer_epoch, self.next_sequence = epoch, sequence + 1
            self.stored.append(number)
        return None


@dataclass(eq=False)
class Request:
    """Chunks on their way, as bytes: later changes of a chunk by the lane do not change them."""

    chunks: list[PendingChunk]
    contents: list[tuple[int, int, int]]
    """Number, epoch and sequence of each chunk."""
    answers: list[KeraError | None] | None = None
    """Set when the broker has answered."""
    awaited: bool = True
    """The client still waits for the answer."""


class LaneMachine(RuleBasedStateMachine):
    """Requests go in order over one connection at a time; requests of an old one may still arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = BrokerModel()
        self.connections: list[deque[Request]] = [deque()]
        """Each with its requests that the broker has not handled, or whose answers the client has not taken."""
        self.bundled: list[PendingChunk] = []
        """Chunks that go before all chunks waiting in the lane."""
        self.now_s = 0.0
        self.numbers: dict[PendingChunk, int] = {}
        self.acknowledged: set[int] = set()
        self.failed: dict[int, KeraError] = {}

    @initialize(epoch=st.integers(1, 3), epochs=st.sampled_from([1, 2, 1000, 1000, 1000]))
    def start(self, epoch: int, epochs: int) -> None:
        identity = LaneIdentity(stream="s", stream_id=1, streamlet_id=0, producer_id=7, codec=Codec.NONE, typed=False)
        self.epochs = range(epoch, epoch + epochs)
        self.columns = LaneColumns(1, epoch)
        self.columns.settle(0, 5)
        self.lane = Lane(identity, self.columns, last_epoch=self.epochs[-1])

    # -- the application ---------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), patience_s=st.sampled_from([1.0, 3.0, FOR_EVER_S]))
    def add(self, count: int, patience_s: float) -> None:
        for _ in range(count):
            number = len(self.numbers)
            payload = Payload(pa.py_buffer(number.to_bytes(4, "little")), 1, 0, 0, 1)
            chunk = PendingChunk(self.lane, payload, 0, self.now_s + patience_s, Outcome())
            self.numbers[chunk] = number
            self.lane.add(chunk)

    @rule(count=st.integers(1, 3))
    def add_bundled(self, count: int) -> None:
        """Add `count` bundles of one chunk each."""
        for _ in range(count):
            if self.columns.brokers(HERE).tolist() == [NOBODY]:
                return
            _, (sequence,) = (column.tolist() for column in self.columns.join(HERE))
            number = len(self.numbers)
            payload = Payload(number.to_bytes(4, "little"), 1, 0, 0, 1)
            chunk = PendingChunk(self.lane, payload, 0, self.now_s + 3.0, Outcome())
            fields = (1, 0, 1, 1, 0, 1, 7, self.lane.producer_epoch, Codec.NONE, sequence, 0, 0, 0)
            chunk.was_bundled(sequence, encode_header(payload.payload, *fields), sent=False)
            self.numbers[chunk] = number
            self.bundled.append(chunk)

    @rule()
    def take_bundles_apart(self) -> None:
        bundled, self.bundled = self.bundled, []
        for chunk in reversed(bundled):
            self.note(self.lane.put_back(chunk))

    @rule()
    def time_goes_on(self) -> None:
        self.now_s += 1

    # -- the sender --------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, REQUEST_CHUNKS_MAX))
    def send(self, count: int) -> None:
        chunks, self.bundled = self.bundled[:count], self.bundled[count:]
        for chunk in chunks:
            chunk.was_bundled(chunk.sequence, chunk.header, sent=True)
        while not self.bundled and self.lane.next is not None and len(chunks) < count:
            chunks.append(self.lane.take())
        if chunks:
            self.connections[-1].append(Request(chunks, [self.content(chunk) for chunk in chunks]))

    @rule(happens=RARELY)
    def cannot_connect(self, happens: bool) -> None:
        if not happens:
            return
        self.take_bundles_apart()
        for chunk in [self.lane.take() for _ in range(self.lane.ready_count)]:
            self.refused(chunk, Unavailable("nobody listens"))

    @rule()
    def answers_arrive(self) -> None:
        for request in list(self.connections[-1]):
            if request.answers is None:
                return
            self.connections[-1].remove(request)
            if request.awaited:
                self.take_answers(request)

    @rule(which=st.integers(0, 3))
    def time_is_up(self, which: int) -> None:
        """The client gives up a request that may still arrive."""
        awaited = [request for request in self.connections[-1] if request.awaited and request.answers is None]
        if awaited:
            self.give_up(awaited[which % len(awaited)])

    @rule(happens=RARELY, arriving=st.integers(0, 5))
    def connection_is_lost(self, happens: bool, arriving: int) -> None:
        if happens:
            self.lose_connection(arriving)

    def lose_connection(self, arriving: int) -> None:
        """The first `arriving` requests still reach the broker."""
        lost = self.connections[-1]
        self.connections.append(deque())
        for request in list(lost):
            if request.awaited:
                self.give_up(request)
        while len(lost) > arriving:
            lost.pop()

    # -- the broker --------------------------------------------------------------------------------------------

    @rule(
        late=RARELY,
        refusals=st.lists(
            st.tuples(*[st.sampled_from([None, ArenaFull, CorruptChunk])] * REQUEST_CHUNKS_MAX),
            min_size=1,
            max_size=3,
        ),
        answered=st.booleans(),
    )
    def broker_handles_requests(
        self, late: bool, refusals: list[tuple[type[KeraError] | None, ...]], answered: bool
    ) -> None:
        """Handle the next requests of the connection, or of all lost connections."""
        queues = self.connections[:-1] if late else self.connections[-1:]
        unhandled = [request for queue in queues for request in queue if request.answers is None]
        for request, of_chunks in zip(unhandled, refusals, strict=False):
            self.handle(request, of_chunks)
        if answered:
            self.answers_arrive()

    @rule(rounds=st.integers(1, 3))
    def all_goes_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.send(REQUEST_CHUNKS_MAX)
            for request in self.connections[-1]:
                if request.answers is None:
                    self.handle(request, ())
            self.answers_arrive()

    def handle(self, request: Request, refusals: Sequence[type[KeraError] | None]) -> None:
        request.answers = []
        for refusal, (number, epoch, sequence) in zip_longest(refusals[: len(request.contents)], request.contents):
            if refusal is CorruptChunk:  # found before anything else
                request.answers.append(CorruptChunk("a flipped bit"))
            elif refusal is ArenaFull and not self.is_repeat(epoch, sequence):
                request.answers.append(ArenaFull("no room"))
            else:
                request.answers.append(self.broker.append(number, epoch, sequence))

    def is_repeat(self, epoch: int, sequence: int) -> bool:
        return epoch == self.broker.producer_epoch and sequence < self.broker.next_sequence

    @rule(happens=RARELY)
    def broker_is_killed(self, happens: bool) -> None:
        if not happens:
            return
        self.lose_connection(0)
        for connection in self.connections:
            connection.clear()
        self.broker = BrokerModel()
        self.acknowledged.clear()

    # -- promises ----------------------------------------------------------------------------------------------

    @invariant()
    def bundles_know_whether_it_is_busy(self) -> None:
        lane = self.lane
        waits = bool(lane.waiting or lane._returned) or lane.exhausted or lane._hole_in_sequence is not None
        assert self.columns.busy[0] == waits
        assert self.columns.in_flight[0] >= 0

    @invariant()
    def stored_in_order_and_once(self) -> None:
        assert self.broker.stored == sorted(set(self.broker.stored))

    @invariant()
    def acknowledged_is_stored(self) -> None:
        assert self.acknowledged <= set(self.broker.stored)

    @invariant()
    def not_accepted_is_not_stored(self) -> None:
        refused = {number for number, error in self.failed.items() if not isinstance(error, Uncertain)}
        assert not refused & set(self.broker.stored)

    def teardown(self) -> None:
        """From here on everything works: then the lane completes all its chunks, in bounded time."""
        for queue in self.connections[:-1]:  # late arrivals
            for request in queue:
                if request.answers is None:
                    self.handle(request, ())
        for _ in range(6 + 3 * len(self.numbers)):
            self.all_goes_well(1)
            self.note([])
            self.stored_in_order_and_once()
            self.acknowledged_is_stored()
            self.not_accepted_is_not_stored()
        assert self.lane.idle
        assert not any(chunk.in_flight for chunk in self.numbers)

    # -- helpers -----------------------------------------------------------------------------------------------

    def content(self, chunk: PendingChunk) -> tuple[int, int, int]:
        header = read_header(chunk.header)
        number = int.from_bytes(memoryview(chunk.payload.payload), "little")
        assert (number, header.sequence) == (self.numbers[chunk], chunk.sequence)
        assert header.producer_epoch in self.epochs
        return number, header.producer_epoch, header.sequence

    def take_answers(self, request: Request) -> None:
        assert request.answers is not None
        for chunk, error in zip(request.chunks, request.answers, strict=True):
            if error is None:
                self.note(self.lane.acknowledged(chunk))
                self.acknowledged.add(self.numbers[chunk])
            else:
                self.refused(chunk, error)

    def give_up(self, request: Request) -> None:
        request.awaited = False
        for chunk in request.chunks:
            self.refused(chunk, Uncertain("no answer"))

    def refused(self, chunk: PendingChunk, error: KeraError) -> None:
        self.note(self.lane.refused(chunk, error, self.now_s))

    def note(self, failures: list[Failure]) -> None:
        if self.lane.exhausted:  # and now nothing more is sent
            failures = failures + self.lane.abandon(ClosedError("no epochs are left"))
        for chunk, error in failures:
            number = self.numbers[chunk]
            assert number not in self.failed
            assert number not in self.acknowledged
            self.failed[number] = error


def test_a_lane_delivers_in_order_and_exactly_once() -> None:
    # Three times the profile's: the machine has many rules, and the cases that matter need several in a row.
    run_state_machine_as_test(LaneMachine, settings=settings(max_examples=3 * settings().max_examples))
