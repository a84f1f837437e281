"""The log engine does what a list does, in any history: the invariants of the design, over random histories.

The model is a list of chunks per entry, with the promises about each. Against it run appends, retries, closes,
reads, spills, loads, retention, truncation, kills, clean stops, loss of the host's memory, loss of the index, and a
disk that tears writes, refuses them (ENOSPC, EIO), fails to read, and flips bits. After each restart, and often in
between, everything is read back and compared:

* acknowledged chunks are present, once, in order, byte-equal, and at their acknowledged places (1, 3, 4, 9);
* heads never go back, readers never see beyond the durable head (2);
* bytes that a reader holds do not change (5);
* a missing chunk was lost by an event that may lose it, and the reader gets the exact gap (`DataLost`).

Replay a failure with ``make fuzz-log SEED=<the seed that was printed>``.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kera.broker.log.arena import Slot
from kera.broker.log.entry import Entry
from kera.broker.log.read_plan import first_record, ordinal_of, plan_read, resolve
from kera.broker.log.retention import Rules, new_starts
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Appended, Streamlet
from kera.broker.records import SegmentRecord
from kera.broker.storage.jobs import DiskTotals, IndexJob, StoreJob
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import ArenaFull, DataLost, DiskFailed, DiskFull, InvalidCursor, KeraError, OutOfSequence
from kera.core.format.chunk import HEADER_BYTES, encode_chunk, iterate_chunks, verify_chunk, verify_header
from kera.v1 import common_pb2
from tests.examples import examples, run_until
from tests.property.log_world import BROKER_ID, Crash, World

SEED = int(os.environ.get("KERA_FUZZ_SEED", "1"))
STEPS_MIN = 10_000
APPENDS_PER_LAUNCH = 12
EXAMPLES = int(os.environ.get("KERA_FUZZ_EXAMPLES", examples(400, quick=50)))
STEPS_PER_EXAMPLE = int(os.environ.get("KERA_FUZZ_STEPS", "60"))
LEADER, PERSISTED = 1, 2
DOMAINS = {LEADER: "default", PERSISTED: "eu"}
"""Two domains, so their segments take slots from each other, in two files."""
ENTRIES = 2
PRODUCERS = 4
CHUNK_BYTES = st.sampled_from([192, 512, 1024, 2048, 4096, 8192])

steps = 0
"""The number of steps in all examples of this process."""
happened = DiskTotals()
"""The totals of all examples: they show that histories had spills, loads, evictions, damage and errors."""


def stream(stream_id: int, durability: int) -> common_pb2.StreamInfo:
    return common_pb2.StreamInfo(
        stream_id=stream_id,
        name=f"stream-{stream_id}",
        config=common_pb2.StreamConfig(
            streamlets=1,
            entries=ENTRIES,
            group_segments=2,
            durability=durability,  # type: ignore[arg-type]
            memory_domain=DOMAINS[stream_id],
        ),
        schemas=[common_pb2.StreamSchema(schema_id=1)],
        assignments=[common_pb2.StreamletAssignment(streamlet_id=0, broker_id=BROKER_ID)],
    )


@dataclass
class Chunk:
    """A chunk of the model."""

    producer: int
    sequence: int
    payload: bytes
    position: Position
    end: Position
    first_record: int
    records: int
    acknowledged: bool = False
    damaged: bool = False
    """One of its bits on disk was flipped: only this chunk may be missing."""


@dataclass
class Log:
    """An entry of the model."""

    chunks: list[Chunk] = field(default_factory=list)
    start: Position = EARLIEST
    undecided: Position = EARLIEST
    """The position of a requested truncation with an unknown outcome."""
    removed: dict[Position, Chunk] = field(default_factory=dict)
    """Truncated chunks: they may come back if the index, which knows of the truncation, is lost."""


@dataclass
class Held:
    """Bytes that a reader looks at."""

    slot: Slot
    view: memoryview
    content: bytes


class LogMachine(RuleBasedStateMachine):
    """See the head of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(world=st.integers(0, 1 << 16), slots=st.sampled_from([4, 6, 16]))
    def begin(self, world: int, slots: int) -> None:
        self.world = World(world, streams=[stream(LEADER, 1), stream(PERSISTED, 3)], slots=slots)
        self.logs: dict[tuple[int, int], Log] = defaultdict(Log)
        self.next_sequences: dict[tuple[int, int], int] = defaultdict(int)
        self.sent: dict[tuple[int, int, int], bytes] = {}
        """Chunks by stream, producer and sequence."""
        self.names: dict[tuple[int, int], int] = {}
        self.last_name = PRODUCERS
        self.held: list[Held] = []
        self.ends: dict[tuple[int, int], Position] = {}
        self.counter = 0
        self.restarted_at = 0
        self.flipped = False

    def teardown(self) -> None:
        if self.world is not None:
            self.held.clear()
            self.world.close()
            for name in happened.__slots__:
                setattr(happened, name, getattr(happened, name) + getattr(self.world.totals, name))

    # -- helpers ---------------------------------------------------------------------------------------------------

    @property
    def up(self) -> World:
        assert self.world is not None
        return self.world

    def streamlet(self, stream_id: int) -> Streamlet:
        return self.up.streams.get(stream_id).streamlet(0)

    def entry(self, key: tuple[int, int]) -> Entry:
        return self.streamlet(key[0]).entries[key[1]]

    def producer(self, stream_id: int, number: int) -> int:
        return self.names.setdefault((stream_id, number), number)

    def data(self, stream_id: int, producer: int, sequence: int, size: int) -> tuple[bytes, bytes]:
        self.counter += 1
        payload = (b"%d/%d/%d/%d." % (stream_id, producer, sequence, self.counter)).ljust(size - HEADER_BYTES, b"#")
        encoded = encode_chunk(
            pa.py_buffer(payload),
            record_count=1 + self.counter % 3,
            stream_id=stream_id,
            streamlet_id=0,
            schema_id=1,
            producer_id=producer,
            producer_epoch=1,
            sequence=sequence,
            created_us=self.up.now_ms * 1000,
            min_timestamp_us=0,
            max_timestamp_us=0,
        )
        return encoded.to_bytes(), payload

    def crashed(self) -> None:
        """A crash in the middle of work: the process dies, or its host."""
        if self.counter % 2:
            self.restart("kill")
        else:
            self.restart("lose_host")

    def has_run(self) -> bool:
        """Whether there were enough appends since the last restart to make another one interesting."""
        return self.counter - self.restarted_at >= APPENDS_PER_LAUNCH

    def restart(self, how: str) -> None:
        self.restarted_at = self.counter
        self.held.clear()  # the views of a dead broker's readers are gone
        self.ends.clear()
        at_the_end = {
            key: plan_read(self.streamlet(PERSISTED), key[1], self.entry(key).end, None, 1).next
            for key in self.logs
            if key[0] == PERSISTED and self.entry(key).end != EARLIEST
        }
        getattr(self.up, how)()
        for chunk_key, log in self.logs.items():
            self.reconcile(chunk_key, log, how)
        if how != "lose_index":
            self.check_cursors(at_the_end)
        if how.startswith("lose_"):
            self.up.settle()  # records the possible loss: a kill before that would make it unknown
        self.check_everything()

    def check_cursors(self, cursors: dict[tuple[int, int], Position]) -> None:
        """Readers that had read everything on disk can go on from their cursors."""
        for key, cursor in cursors.items():
            if not any(chunk.damaged for chunk in self.logs[key].chunks) and not self.flipped:
                resolve(self.streamlet(key[0]), self.entry(key), max(cursor, self.entry(key).start))

    def reconcile(self, key: tuple[int, int], log: Log, how: str) -> None:
        """Find the remaining chunks of an entry after a restart, check them, and adopt them as the model."""
        actual = self.read_all(key)
        present = {chunk.position for chunk in actual}
        entry = self.entry(key)
        if log.undecided > log.start and entry.start > log.start:
            log.start = max(log.start, min(entry.start, log.undecided))
            log.removed |= {chunk.position: chunk for chunk in log.chunks if chunk.position < log.start}
            log.chunks = [chunk for chunk in log.chunks if chunk.position >= log.start]
        undecided, log.undecided = log.undecided, EARLIEST
        if how == "lose_index":
            back = [log.removed[chunk.position] for chunk in actual if chunk.position in log.removed]
            log.chunks = sorted([*log.chunks, *back], key=lambda chunk: chunk.position)
            log.start = min([log.start, *(chunk.position for chunk in back)])
        pending = {segment.key: segment.head for segment in entry.tail}  # in memory, and not durable yet
        missing = [
            chunk
            for chunk in log.chunks
            if chunk.position not in present
            and chunk.position >= log.start
            and not (chunk.position >= entry.end and chunk.end.offset <= pending.get(chunk.position[:2], 0))
        ]
        for chunk in missing:
            if chunk.damaged or chunk.position < undecided:
                continue
            assert how in {"lose_host", "lose_both"}, f"{how} lost {chunk.position} of {key}, {chunk.acknowledged=}"
            assert key[0] == LEADER or not chunk.acknowledged, f"a persisted chunk is lost: {chunk.position}"
            later = [other for other in actual if other.position > chunk.position]
            assert not later, f"a hole in the log before {later[0].position}: {chunk.position}"
            if chunk.acknowledged:
                self.check_told(key, chunk)
        gone = {id(chunk) for chunk in missing}
        log.chunks = [chunk for chunk in log.chunks if id(chunk) not in gone or chunk.damaged]
        for producer in {chunk.producer for chunk in log.chunks} | set(self.names.values()):
            if producer % ENTRIES != key[1]:
                continue
            state = self.streamlet(key[0]).producers.get(producer)
            known = [chunk.sequence for chunk in log.chunks if chunk.producer == producer]
            if state is None:
                if self.next_sequences[key[0], producer] and how in {"lose_index", "lose_both"}:
                    self.rename(key[0], producer)
                    continue
                assert not known, f"producer {producer} of {key} is forgotten, which has stored {known}"
                self.next_sequences[key[0], producer] = 0
                continue
            assert not known or state.next_sequence == known[-1] + 1
            self.next_sequences[key[0], producer] = state.next_sequence

    def check_told(self, key: tuple[int, int], chunk: Chunk) -> None:
        """A read at a lost chunk gets `DataLost`."""
        with pytest.raises(DataLost) as told:
            resolve(self.streamlet(key[0]), self.entry(key), chunk.position)
        assert Position(*told.value.attributes["lost_from"]) <= chunk.position
        assert chunk.position < Position(*told.value.attributes["available_from"])

    def rename(self, stream_id: int, producer: int) -> None:
        """A forgotten producer begins anew, as another one of the same entry."""
        for name, number in self.names.items():
            if name[0] == stream_id and number == producer:
                self.last_name += ENTRIES * PRODUCERS
                self.names[name] = self.last_name - self.last_name % ENTRIES + producer % ENTRIES

    def load(self, entry: Entry, key: tuple[int, int]) -> KeraError | None:
        """Wait for a segment, as the service does."""
        outcome: list[KeraError | None] = []
        self.up.memory.loads.load(entry, key, outcome.append)
        for number in range(2000):
            if outcome:
                return outcome[0]
            self.up.plan()
            if self.up.jobs:
                self.up.perform_one()
            elif number > 10:
                self.release_all()  # this test pins every slot, or the load waits for a full disk
                self.up.disk.full = False
                self.up.tick(6000)
        raise AssertionError(f"segment {key} is never loaded")

    def release_all(self) -> None:
        for held in self.held:
            self.let_go(held)
        self.held.clear()

    def let_go(self, held: Held) -> None:
        assert bytes(held.view) == held.content, "what a reader holds has changed"
        held.slot.release()

    def read_all(self, key: tuple[int, int]) -> list[Chunk]:
        """All chunks that a reader of an entry gets, from the start; checks that gaps may be lost."""
        entry, streamlet = self.entry(key), self.streamlet(key[0])
        position, found = EARLIEST, []
        failures = 0
        while True:
            try:
                plan = plan_read(streamlet, key[1], position, None, 4096)
            except DataLost as error:
                gap = Position(*error.attributes["lost_from"]), Position(*error.attributes["available_from"])
                assert gap[0] >= position
                assert gap[1] > gap[0]
                self.check_gap(key, *gap)
                position = gap[1]
                continue
            for segment, start, end in plan.ranges:
                assert end <= segment.durable_head
                found += self.chunks(segment, start, end)
            position = plan.next
            if plan.ranges:
                continue
            if plan.missing is None:
                return found
            error_of_load = self.load(entry, plan.missing)
            if error_of_load is not None:
                failures += 1
                assert isinstance(error_of_load, DiskFailed)
                assert failures < 10

    def chunks(self, segment: Segment, start: int, end: int) -> list[Chunk]:
        found = []
        view = segment.slot.view
        for header, at in iterate_chunks(view, start, end):
            verify_chunk(view, at)
            found.append(
                Chunk(
                    header.producer_id,
                    header.sequence,
                    bytes(view[at + HEADER_BYTES : at + HEADER_BYTES + header.payload_bytes]),
                    Position(*segment.key, at),
                    Position(*segment.key, at + header.chunk_bytes),
                    header.first_record,
                    header.record_count,
                )
            )
        return found

    def check_gap(self, key: tuple[int, int], start: Position, end: Position) -> None:
        """Check that no chunk in a gap was promised."""
        for chunk in self.logs[key].chunks:
            if start <= chunk.position < end and chunk.position >= self.logs[key].start and not chunk.damaged:
                assert key[0] == LEADER or not chunk.acknowledged, f"gap {start}..{end} has {chunk.position}"

    # -- rules -----------------------------------------------------------------------------------------------------

    @rule(stream_id=st.sampled_from([LEADER, PERSISTED]), number=st.integers(1, PRODUCERS), size=CHUNK_BYTES)
    def append(self, stream_id: int, number: int, size: int) -> None:
        producer = self.producer(stream_id, number)
        sequence = self.next_sequences[stream_id, producer]
        data, payload = self.data(stream_id, producer, sequence, size)
        header = verify_header(data)
        streamlet = self.streamlet(stream_id)
        before = streamlet.entries[producer % ENTRIES].next_record
        try:
            if stream_id == PERSISTED:
                self.up.memory.disk.check()
            appended = streamlet.append(memoryview(data), header)
        except (ArenaFull, DiskFull):
            assert streamlet.entries[producer % ENTRIES].next_record == before
            return
        assert not appended.duplicate
        assert appended.first_record == before
        chunk = Chunk(
            producer,
            sequence,
            payload,
            Position(appended.group_id, appended.segment_id, appended.position),
            Position(appended.group_id, appended.segment_id, appended.end),
            before,
            header.record_count,
        )
        log = self.logs[stream_id, appended.entry]
        assert not log.chunks or chunk.position >= log.chunks[-1].end, "positions go back"
        log.chunks.append(chunk)
        if log.start == EARLIEST:
            log.start = self.entry((stream_id, appended.entry)).start
        self.next_sequences[stream_id, producer] = sequence + 1
        self.sent[stream_id, producer, sequence] = data
        self.acknowledge(stream_id, streamlet, appended, chunk)

    def acknowledge(self, stream_id: int, streamlet: Streamlet, appended: Appended, chunk: Chunk) -> None:
        if stream_id == LEADER:
            streamlet.publish(appended)
            chunk.acknowledged = True
            return
        assert appended.segment is not None

        def done(error: KeraError | None) -> None:
            chunk.acknowledged = chunk.acknowledged or error is None

        self.up.memory.commits.persist([(appended.segment, appended.end)], done)

    @rule(
        stream_id=st.sampled_from([LEADER, PERSISTED]),
        numbers=st.lists(st.integers(1, PRODUCERS), min_size=4, max_size=16),
        size=CHUNK_BYTES,
    )
    def append_many(self, stream_id: int, numbers: list[int], size: int) -> None:
        """Append enough to fill segments, with disk work in between."""
        for number in numbers:
            self.append(stream_id, number, size)
            if number == 1:
                self.work(number, 2)

    @rule(stream_id=st.sampled_from([LEADER, PERSISTED]), number=st.integers(1, PRODUCERS), back=st.integers(1, 3))
    def resend(self, stream_id: int, number: int, back: int) -> None:
        producer = self.producer(stream_id, number)
        sequence = self.next_sequences[stream_id, producer] - back
        if sequence < 0:
            return
        data = self.sent[stream_id, producer, sequence]
        appended = self.streamlet(stream_id).append(memoryview(data), verify_header(data))
        assert appended.duplicate
        log = self.logs[stream_id, producer % ENTRIES]
        known = [chunk for chunk in log.chunks if (chunk.producer, chunk.sequence) == (producer, sequence)]
        if appended.segment is not None and known:
            assert known[0].position == Position(appended.group_id, appended.segment_id, appended.position)
            if stream_id == PERSISTED:
                self.acknowledge(stream_id, self.streamlet(stream_id), appended, known[0])

    @rule(stream_id=st.sampled_from([LEADER, PERSISTED]), number=st.integers(1, PRODUCERS))
    def append_too_early(self, stream_id: int, number: int) -> None:
        producer = self.producer(stream_id, number)
        data, _ = self.data(stream_id, producer, self.next_sequences[stream_id, producer] + 1, 512)
        with pytest.raises(OutOfSequence):
            self.streamlet(stream_id).append(memoryview(data), verify_header(data))

    @rule(number=st.integers(0, 7), times=st.integers(1, 4))
    def work(self, number: int, times: int) -> None:
        try:
            for _ in range(times):
                self.up.perform_one(number)
        except Crash:
            self.crashed()

    @rule()
    def settle(self) -> None:
        try:
            if self.up.settle():
                for chunk in (chunk for key in self.logs if key[0] == PERSISTED for chunk in self.logs[key].chunks):
                    assert (
                        chunk.acknowledged
                        or chunk.position < self.logs[PERSISTED, chunk.producer % ENTRIES].start
                        or (self.durable(chunk))
                    )
        except Crash:
            self.crashed()

    def durable(self, chunk: Chunk) -> bool:
        """Whether a chunk was written later, after its producer got an error."""
        return chunk.end <= self.entry((PERSISTED, chunk.producer % ENTRIES)).end

    @rule(by_ms=st.sampled_from([100, 1500, 6000]))
    def time_passes(self, by_ms: int) -> None:
        self.up.tick(by_ms)

    @rule(
        stream_id=st.sampled_from([LEADER, PERSISTED]),
        index=st.integers(0, ENTRIES - 1),
        number=st.integers(0, 1 << 16),
        reader=st.integers(1, 3),
    )
    def read_somewhere(self, stream_id: int, index: int, number: int, reader: int) -> None:
        key = (stream_id, index)
        log = self.logs[key]
        if not log.chunks:
            return
        chunk = log.chunks[number % len(log.chunks)]
        entry = self.entry(key)
        entry.readers[reader] = (chunk.position.group_id, chunk.position.segment_id)
        plan = None
        try:
            for _ in range(10):
                plan = plan_read(self.streamlet(stream_id), index, chunk.position, None, 1 << 16)
                if plan.ranges or plan.missing is None:
                    break
                self.load(entry, plan.missing)
        except DataLost as error:
            allowed = chunk.damaged or chunk.position < max(log.start, log.undecided)
            assert allowed, error  # noqa: PT017 - one outcome of several
            return
        except InvalidCursor:
            assert chunk.end > entry.end, "a chunk behind the durable head has no cursor"
            return
        except Crash:
            self.crashed()
            return
        assert plan is not None
        if not plan.ranges:
            assert plan.missing is not None or chunk.end > entry.end  # the disk failed again and again
            return
        segment, start, end = plan.ranges[0]
        assert self.chunks(segment, start, end)[0].payload == chunk.payload
        segment.slot.lease()
        view = segment.slot.view[start:end]
        self.held.append(Held(segment.slot, view, bytes(view)))
        self.up.memory.slots.touched(segment)
        if len(self.held) > 3:
            self.let_go(self.held.pop(0))

    @rule()
    def readers_leave(self) -> None:
        self.release_all()
        for key in list(self.logs):
            self.entry(key).readers.clear()

    @rule(
        stream_id=st.sampled_from([LEADER, PERSISTED]),
        index=st.integers(0, ENTRIES - 1),
        number=st.integers(0, 1 << 16),
    )
    def truncate(self, stream_id: int, index: int, number: int) -> None:
        key = (stream_id, index)
        log, entry = self.logs[key], self.entry(key)
        candidates = [chunk for chunk in log.chunks if entry.start < chunk.position and chunk.end <= entry.end]
        if not candidates:
            return
        position = candidates[number % len(candidates)].position
        segment_key = (position.group_id, position.segment_id)
        try:
            if position.offset and isinstance(entry.find(segment_key), SegmentRecord):
                self.load(entry, segment_key)
            resolve(self.streamlet(stream_id), entry, position)
        except DataLost:
            assert candidates[number % len(candidates)].damaged
            return
        except Crash:
            self.crashed()
            return
        self.move_start(key, position, ordinal_of(entry, position))

    @rule(stream_id=st.sampled_from([LEADER, PERSISTED]), segments=st.integers(1, 4))
    def retain(self, stream_id: int, segments: int) -> None:
        launch = self.up.launches
        for entry, position, record in new_starts(
            self.streamlet(stream_id), Rules(bytes_max=segments * 8192), self.up.now_ms * 1000
        ):
            if self.up.launches == launch:  # a crash makes all plans void
                self.move_start((stream_id, entry.index), position, record)

    def move_start(self, key: tuple[int, int], position: Position, record: int) -> None:
        entry, log = self.entry(key), self.logs[key]
        assert position >= entry.start
        entry.start, entry.start_record = position, record
        done: list[KeraError | None] = []
        self.up.memory.removals.collect(entry, done.append)
        try:
            for _ in range(2000):
                if done:
                    break
                self.up.perform_one()
                if not self.up.jobs and self.up.memory.disk.error is not None:
                    self.up.disk.full = False
                    self.up.tick(2000)
        except Crash:
            log.undecided = position  # without an answer, either outcome is possible
            self.crashed()
            return
        log.removed |= {chunk.position: chunk for chunk in log.chunks if chunk.position < position}
        if not done or done[0] is not None:
            log.undecided = position
            return
        log.start = position
        log.chunks = [chunk for chunk in log.chunks if chunk.position >= position]

    @rule(number=st.sampled_from([errno.ENOSPC, errno.EIO]), times=st.integers(1, 3))
    def disk_fails(self, number: int, times: int) -> None:
        self.up.disk.fail += [number] * times

    @rule(full=st.booleans())
    def disk_full(self, full: bool) -> None:
        self.up.disk.full = full

    @precondition(has_run)
    @rule(changes=st.integers(1, 6))
    def crash_soon(self, changes: int) -> None:
        self.up.disk.crash_in = changes

    @rule(number=st.integers(0, 1 << 16), bit=st.integers(0, (1 << 20) - 1))
    def flip_bit(self, number: int, bit: int) -> None:
        """Flip a bit in the file of a complete segment, not in memory."""
        records = [
            (address, record)
            for address, record in self.up.index.all_segments()
            if not record.open and self.up.store.path(record.physical_id) in self.up.disk.files
        ]
        if not records:
            return
        address, record = records[number % len(records)]
        key = (address.stream_id, address.entry)
        at = bit % (record.length * 8)
        file = self.up.disk.files[self.up.store.path(record.physical_id)]
        file[at // 8] ^= 1 << (at % 8)
        self.flipped = True
        for chunk in self.logs[key].chunks:
            if (chunk.position.group_id, chunk.position.segment_id) == (address.group_id, address.segment_id) and (
                chunk.position.offset <= at // 8 < chunk.end.offset
            ):
                chunk.damaged = True

    @precondition(has_run)
    @rule(stream_id=st.sampled_from([LEADER, PERSISTED]))
    def renew_memory(self, stream_id: int) -> None:
        """Replace a file of the arena, so that processes that mapped the old one cannot read new chunks."""
        before = self.up.arena.file(DOMAINS[stream_id])
        self.up.arena.renew(DOMAINS[stream_id])
        self.up.memory.close_all_of(DOMAINS[stream_id])
        assert self.up.arena.file(DOMAINS[stream_id]) is not before

    @precondition(has_run)
    @rule()
    def kill(self) -> None:
        self.restart("kill")

    @precondition(has_run)
    @rule()
    def lose_host(self) -> None:
        self.restart("lose_host")

    @precondition(has_run)
    @rule()
    def stop_and_start(self) -> None:
        self.release_all()
        self.up.disk.crash_in = 0
        self.restart("stop")

    @precondition(lambda self: self.has_run() and not self.flipped)  # damage and a lost index at once: out of scope
    @rule()
    def lose_index(self) -> None:
        self.restart("lose_index")

    @rule()
    def check_everything(self) -> None:
        """Read everything back and compare."""
        self.release_all()
        self.up.disk.fail.clear()
        self.up.disk.crash_in = 0
        self.up.disk.full = False
        for key, log in self.logs.items():
            actual = self.read_all(key)
            entry = self.entry(key)
            expected = [chunk for chunk in log.chunks if chunk.position >= max(log.start, log.undecided)]
            by_position = {chunk.position: chunk for chunk in expected}
            assert [chunk.position for chunk in actual] == sorted({chunk.position for chunk in actual})
            for chunk in actual:
                if chunk.position < log.undecided:
                    continue
                if chunk.position not in by_position:
                    assert chunk.position < log.start, f"a chunk that nobody wrote: {chunk.position}"
                    continue
                model = by_position[chunk.position]
                assert chunk.payload == model.payload, f"{chunk.position} of {key} has another chunk's data"
                assert (chunk.producer, chunk.sequence) == (model.producer, model.sequence)
                assert chunk.first_record == model.first_record, f"records of {key} are counted anew"
            present = {chunk.position for chunk in actual}
            for chunk in expected:
                assert (
                    chunk.position in present or chunk.damaged or (not chunk.acknowledged and chunk.end > entry.end)
                ), f"{chunk.position} of {key} is missing"
            assert ordinal_of(entry, entry.end) >= first_record(entry)

    # -- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def counted(self) -> None:
        global steps  # noqa: PLW0603 - one count for all examples of the process
        steps += 1

    @invariant()
    def heads_never_go_back(self) -> None:
        if self.world is None:
            return
        for key in self.logs:
            entry = self.entry(key)
            assert entry.end >= self.ends.get(key, EARLIEST), "the durable head went back"
            self.ends[key] = entry.end
            for segment in entry.tail:
                assert segment.durable_head <= segment.head <= len(segment.slot.view)
                assert segment.closed or segment is entry.tail[-1]

    @invariant()
    def only_what_is_under_way_is_locked(self) -> None:
        if self.world is None:
            return
        working = {part.segment.entry for job in self.up.jobs if isinstance(job, StoreJob) for part in job.parts}
        removals = [job for job in (*self.up.jobs, self.up.memory.index_writer.failed) if isinstance(job, IndexJob)]
        working |= {entry for job in removals for entry in job.entries}
        assert self.up.memory.locked == working

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        if self.world is None:
            return
        used: set[int] = set()
        for key in self.logs:
            for segment in self.entry(key).resident.values():
                assert segment.slot.index not in used
                assert not segment.slot.retired
                assert segment.slot.has_memory
                assert segment.slot.file.domain == segment.entry.memory_domain
                used.add(segment.slot.index)
        arena = self.up.arena
        free = {slot.index for free in (*arena._files.values(), arena._bare) for slot in free}
        assert arena.free_slots == len(free)
        assert not used & free
        for held in self.held:
            assert held.slot.index not in free


@pytest.mark.timeout(600)
def test_the_log_keeps_its_promises_over_random_histories() -> None:
    try:
        run_until(
            seed(SEED)(LogMachine),
            lambda: {name for name in happened.__slots__ if not getattr(happened, name)},
            settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS_PER_EXAMPLE,
                derandomize=False,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except BaseException as error:
        error.add_note(f"replay with: make fuzz-log SEED={SEED} EXAMPLES={EXAMPLES}")
        raise
    assert steps >= min(STEPS_MIN, EXAMPLES * STEPS_PER_EXAMPLE // 2)
