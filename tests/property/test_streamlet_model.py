"""A streamlet agrees with a simple model of it, over any history of appends, reads, leases and drops.

The model is a list of chunks per entry. It does not know segments, budgets within them, or bytes: it compares the
positions that the streamlet returned. After every step the invariants of the design are checked on the streamlet
itself, byte by byte:

1. an acknowledged chunk is in exactly one place of its entry, once;
2. durable head ≤ head, neither goes back, and readers never see beyond the durable head;
3. per producer (and epoch of it), stored sequences have no gap and no repeat;
4. group ids and segment ids grow by one, and a closed group never changes;
5. a slot is reused only when its segment is retired and no lease holds it.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kera.broker.log.arena import Arena
from kera.broker.log.bounds import lag_records
from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.log.intervals import Holding
from kera.broker.log.read_plan import ReadPlan, first_record, ordinal_of, plan_read
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Appended, Streamlet
from kera.broker.serving.thesis_api import GivenGroups
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.turns import at_once
from kera.core.errors import ArenaFull, DataLost, InvalidCursor, OutOfSequence, ProducerFenced, RecordTooLarge
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, verify_chunk
from tests.property.streamlet_model import Lease, Model, Seen, Stored, chunks_of, encoded, placed_chunks

SLOTS = 10
SLOT_BYTES = 4096
GROUP_SEGMENTS = 2
GROUPS_PER_LAUNCH = 100
PRODUCERS = st.integers(1, 4)
CHUNK_BYTES = st.sampled_from([128, 192, 1024, 2048, 4096])


class StreamletMachine(RuleBasedStateMachine):
    """Steps of producers, readers and owners of one streamlet."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
        self.arena = Arena.create(
            self.folder,
            arena_bytes=SLOTS * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            data_dir=self.folder,
            ephemeral=True,
        )
        self.index = SegmentIndex.open(self.folder / "index", durable=False)
        self.launches = 0
        self.leases: list[Lease] = []
        self.generations = [1] * SLOTS
        self.users: dict[int, tuple[tuple[int, int, int], int]] = {}
        self.budget = 1

    @initialize(entries=st.integers(1, 4))
    def launch(self, entries: int) -> None:
        self.launches += 1
        self.first_group_id = self.launches * GROUPS_PER_LAUNCH
        memory = PersistenceManager(
            self.arena, self.index, PhysicalIds({"next_physical_id": 1}), Events(), reserve_slots=0
        )  # no disk here
        restart = Restart(None, self.index, SegmentStore(self.folder, LocalDisk(self.folder), self.index))
        restored = restart.restore(1, 0, entries, self.first_group_id)
        self.streamlet = Streamlet(
            1,
            0,
            entries=restored.entries,
            group_segments=GROUP_SEGMENTS,
            next_group_id=restored.next_group_id,
            producers=restored.producers,
            memory=memory,
            held=Holding(broker_epoch=self.launches),
        )
        self.model = Model([[] for _ in range(entries)])
        self.first = Position(self.first_group_id, 1, 0)
        self.positions: list[dict[Position, None]] = [{self.first: None} for _ in range(entries)]  # each once, in order
        self.seen: dict[tuple[int, int], Seen] = {}
        self.given: dict[str, list[int]] = {}
        self.given_groups = GivenGroups()

    # -- appending ---------------------------------------------------------------------------------------------

    @rule(
        chunks=st.lists(st.tuples(PRODUCERS, CHUNK_BYTES, st.integers(0, 5)), min_size=2, max_size=12),
        publish=st.booleans(),
    )
    def append_next(self, chunks: list[tuple[int, int, int]], publish: bool) -> None:
        for producer, size, record_count in chunks:
            epoch = self.model.epochs.get(producer, 1)
            sequence = self.model.next_sequences.get((producer, epoch), 0)
            self.append(producer, epoch, sequence, size, record_count, publish=publish)

    @rule(
        producer=PRODUCERS,
        epoch_step=st.sampled_from([-1, 0, 0, 1]),
        sequence_step=st.integers(-6, 2),
        size=CHUNK_BYTES | st.just(SLOT_BYTES + 64),
    )
    def append_any(self, producer: int, epoch_step: int, sequence_step: int, size: int) -> None:
        """Repeats, gaps, zombies and new epochs."""
        epoch = max(0, self.model.epochs.get(producer, 1) + epoch_step)
        sequence = max(0, self.model.next_sequences.get((producer, epoch), 0) + sequence_step)
        self.append(producer, epoch, sequence, size, record_count=1, publish=True)

    def append(self, producer: int, epoch: int, sequence: int, size: int, record_count: int, *, publish: bool) -> None:
        model = self.model
        payload = bytes([producer, epoch & 255, sequence & 255, self.launches & 255]) * ((size - HEADER_BYTES) // 4)
        before = self.trace()
        outcome = self.outcome(encoded(producer, epoch, sequence, payload, record_count))
        expected = model.expected(producer, epoch, sequence)
        if isinstance(expected, type):
            assert outcome is expected
        elif expected is not None:
            stored = model.find(producer, epoch, sequence)
            first = stored.appended
            if stored.payload != payload:
                assert outcome is ProducerFenced
                return
            assert outcome[:6] == first._replace(duplicate=True)[:6]
            assert (outcome.segment, outcome.end) == (first.segment, first.end)
        elif size > SLOT_BYTES:
            assert outcome is RecordTooLarge
        elif outcome is ArenaFull:
            assert self.arena.free_slots == 0
        else:
            assert isinstance(outcome, Appended)
            self.store(Stored((producer, epoch), sequence, payload, record_count, outcome), publish=publish)
            return
        assert self.trace() == before, "a chunk that is refused or repeated leaves no trace"

    def outcome(self, data: bytes) -> Any:
        try:
            return self.streamlet.append(memoryview(data), verify_chunk(data))
        except (ArenaFull, OutOfSequence, ProducerFenced, RecordTooLarge) as error:
            return type(error)

    def store(self, stored: Stored, *, publish: bool) -> None:
        model, appended = self.model, stored.appended
        producer, epoch = stored.producer
        entry = model.entries[producer % len(model.entries)]
        assert appended.entry == producer % len(model.entries)
        assert not appended.duplicate
        assert appended.first_record == sum(chunk.record_count for chunk in entry)
        assert not entry or stored.start > entry[-1].start
        entry.append(stored)
        model.epochs[producer] = epoch
        model.next_sequences[stored.producer] = stored.sequence + 1
        self.positions[appended.entry][stored.start] = None
        if publish:
            self.publish(appended.entry)

    @rule(data=st.data(), count=st.integers(1, 5))
    def publish_some(self, data: st.DataObject, count: int) -> None:
        self.publish(data.draw(st.integers(0, len(self.model.entries) - 1)), count)

    def publish(self, entry: int, count: int | None = None) -> None:
        for chunk in [chunk for chunk in self.model.entries[entry] if not chunk.published][:count]:
            self.streamlet.publish(chunk.appended)
            chunk.published = True

    # -- reading -----------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        budgets=st.lists(st.sampled_from([1, 128, 1200, 2800, 4096, 12000, 1 << 20]), min_size=1, max_size=6),
        bounded=st.sampled_from([None, "forward", "any"]),
        strict=st.booleans(),
        lease=st.booleans(),
    )
    def read(self, data: st.DataObject, budgets: list[int], bounded: str | None, strict: bool, lease: bool) -> None:
        """Read from a position that was returned before, each time from the end of the previous read."""
        entry = data.draw(st.integers(0, len(self.positions) - 1))
        start = data.draw(st.sampled_from(list(self.positions[entry])))
        end = data.draw(st.sampled_from(list(self.positions[entry]))) if bounded else None
        if end is not None and bounded == "forward":
            start, end = sorted((start, end))
        if self.is_beyond_the_durable_head(entry, start):
            return
        for bytes_max in budgets:
            plan = self.read_once(entry, start, end, bytes_max, strict=strict)
            start = plan.next
            for segment, begin, stop in plan.ranges if lease else []:
                slot = segment.slot
                slot.lease()
                self.leases.append(Lease(slot, slot.generation, bytes(slot.view[begin:stop]), begin))

    def read_once(self, entry: int, start: Position, end: Position | None, bytes_max: int, *, strict: bool) -> ReadPlan:
        plan = plan_read(self.streamlet, entry, start, end, bytes_max, strict=strict)
        assert plan.missing is None, "nothing is on disk"
        expected = self.expected(entry, start, end, bytes_max, strict=strict)
        self.check_chunks([found for part in plan.ranges for found in chunks_of(*part)], expected)
        self.check_next(entry, start, end, expected, plan.next)
        return plan

    def expected(
        self, entry: int, start: Position, end: Position | None, bytes_max: int, *, strict: bool
    ) -> list[Stored]:
        expected: list[Stored] = []
        for chunk in self.model.readable(entry):
            if chunk.start < start:
                continue
            if (end is not None and chunk.start >= end) or (chunk.size > bytes_max and (strict or expected)):
                break
            expected.append(chunk)
            bytes_max -= chunk.size
        return expected

    def is_beyond_the_durable_head(self, entry: int, start: Position) -> bool:
        """Whether `start` is of a chunk that readers cannot know yet; checks that a read of it is refused."""
        unpublished = [chunk.start for chunk in self.model.entries[entry] if not chunk.published]
        if not unpublished or start <= unpublished[0]:
            return False
        if start.offset:
            with pytest.raises(InvalidCursor):
                plan_read(self.streamlet, entry, start, None, 1 << 20)
        return True

    def check_chunks(self, found: list[tuple[ChunkHeader, bytes]], expected: list[Stored]) -> None:
        assert [
            ((header.producer_id, header.producer_epoch), header.sequence, header.first_record, payload)
            for header, payload in found
        ] == [(chunk.producer, chunk.sequence, chunk.appended.first_record, chunk.payload) for chunk in expected]

    def check_next(
        self, entry: int, start: Position, end: Position | None, expected: list[Stored], following: Position
    ) -> None:
        """Check that a reader that goes on misses no chunk, gets no chunk twice, and does not pass its end."""
        chunks = self.model.entries[entry]
        if expected:
            behind = chunks.index(expected[-1]) + 1
            assert following > expected[-1].start
        else:
            behind = len([chunk for chunk in chunks if chunk.start < start])
            assert following >= start
        first = self.streamlet.entries[entry].start
        assert following <= (chunks[behind].start if behind < len(chunks) else max(first, self.head(entry)))
        assert end is None or following <= max(start, end, chunks[0].start if chunks else first)
        lag = sum(chunk.record_count for chunk in chunks[behind:] if chunk.published)
        assert lag_records(self.streamlet, self.streamlet.entries[entry], following) == lag
        self.positions[entry][following] = None

    def head(self, entry: int) -> Position:
        tail = self.streamlet.entries[entry].tail
        return Position(*tail[-1].key, tail[-1].head) if tail else EARLIEST

    @rule(data=st.data(), offset=st.integers(1, SLOT_BYTES - 1))
    def read_from_inside_a_chunk(self, data: st.DataObject, offset: int) -> None:
        entry = data.draw(st.integers(0, len(self.model.entries) - 1))
        readable = self.model.readable(entry)
        inside = [chunk.start._replace(offset=chunk.start.offset + offset % chunk.size) for chunk in readable]
        if not inside or not offset % readable[-1].size:
            return
        position = inside[-1]
        for start, end in ((position, None), (self.first, position)):
            with pytest.raises(InvalidCursor) as raised:
                plan_read(self.streamlet, entry, start, end, 1 << 20)
            assert raised.value.attributes["position"] == list(position)

    @rule(data=st.data(), segment_id=st.integers(1, 3), offset=st.integers(0, SLOT_BYTES))
    def read_what_is_gone(self, data: st.DataObject, segment_id: int, offset: int) -> None:
        inside = Position(data.draw(st.integers(1, self.first_group_id - 1)), segment_id, offset)
        start = data.draw(st.sampled_from([inside, EARLIEST]))
        entry = data.draw(st.integers(0, len(self.model.entries) - 1))
        with pytest.raises(DataLost) as raised:
            plan_read(self.streamlet, entry, start, None, 1 << 20)
        assert raised.value.attributes["lost_from"] == list(start)
        assert raised.value.attributes["available_from"] == list(self.first)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).slot.release()

    @rule(consumer_group=st.sampled_from("ab"), groups_max=st.integers(1, 4))
    def next_groups(self, consumer_group: str, groups_max: int) -> None:
        given = self.given.setdefault(consumer_group, [])
        groups = at_once(self.given_groups.next(self.streamlet, consumer_group, groups_max))
        there = sorted({chunk.appended.group_id for entry in self.model.entries for chunk in entry})
        assert [group_id for group_id, _ in groups] == there[len(given) : len(given) + groups_max]
        given += [group_id for group_id, _ in groups]

    # -- owning ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.arena.free_slots <= SLOTS // 3)  # otherwise most steps would see few chunks
    @rule(entries=st.integers(1, 4))
    def drop_and_launch_again(self, entries: int) -> None:
        used = {segment.slot.index for _, segment in self.segments()}
        leased = {lease.slot.index for lease in self.leases}
        free = self.arena.free_slots
        self.streamlet.drop()
        assert self.arena.free_slots == free + len(used - leased)
        self.launch(entries)

    # -- invariants --------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[Entry, Segment]]:
        return [(entry, segment) for entry in self.streamlet.entries for segment in entry.tail]

    def trace(self) -> Any:
        return (
            [(segment.address, segment.closed, segment.slot.index) for _, segment in self.segments()],
            [bytes(slot.view) for slot in self.arena.slots()],
            [entry.next_record for entry in self.streamlet.entries],
            self.arena.free_slots,
        )

    @invariant()
    def every_chunk_is_in_one_place_and_sequences_have_no_gap(self) -> None:  # 1 and 3
        sequences: dict[tuple[int, int], int] = {}
        for index, entry in enumerate(self.model.entries):
            lane = self.streamlet.entries[index]
            assert [segment for _, segment in lane.segments()] == lane.tail == list(lane.resident.values())
            found = [
                (Position(*segment.key, offset), header, payload)
                for segment in lane.tail
                for offset, header, payload in placed_chunks(lane, segment, self.launches)
            ]
            assert [position for position, _, _ in found] == [chunk.start for chunk in entry]
            self.check_chunks([(header, payload) for _, header, payload in found], entry)
            for _, header, _ in found:
                producer = (header.producer_id, header.producer_epoch)
                assert header.sequence == sequences.get(producer, 0)
                sequences[producer] = header.sequence + 1
        assert sequences == self.model.next_sequences

    @invariant()
    def heads_do_not_go_back_and_what_is_closed_does_not_change(self) -> None:  # 2 and 4
        for _, segment in self.segments():
            key = segment.key
            content = bytes(segment.slot.view[: segment.head])
            before = self.seen.get(key)
            assert segment.durable_head <= segment.head
            if before is not None:
                assert segment.head >= before.head
                assert segment.durable_head >= before.durable_head
                assert content[: before.head] == before.content, "behind the head nothing ever changes"
            self.seen[key] = Seen(segment.head, segment.durable_head, content)
        assert set(self.seen) == {segment.key for _, segment in self.segments()}

    @invariant()
    def a_reader_who_follows_gets_everything_that_is_published(self) -> None:  # 2
        self.budget = 100 + self.budget * 7 % 1601  # another one each time
        for entry in range(len(self.model.entries)):
            plan = ReadPlan([], self.first)
            while (plan := self.read_once(entry, plan.next, None, self.budget, strict=False)).ranges:
                pass

    @invariant()
    def what_is_published_is_what_readers_can_see(self) -> None:  # 2
        for index, chunks in enumerate(self.model.entries):
            readable = self.model.readable(index)
            lane = self.streamlet.entries[index]
            records = sum(chunk.record_count for chunk in readable)
            assert ordinal_of(lane, lane.end) == records
            assert first_record(lane) == 0
            assert lag_records(self.streamlet, lane, EARLIEST) == records
            assert [chunk.start < lane.end for chunk in chunks] == [chunk.published for chunk in chunks]
            assert lane.length_bytes == sum(chunk.size for chunk in readable)

    @invariant()
    def group_and_segment_ids_grow_by_one_and_only_the_last_are_open(self) -> None:  # 4
        groups: dict[int, list[Segment]] = {}
        for entry, segment in self.segments():
            group_id, segment_id = segment.key
            groups.setdefault(group_id, []).append(segment)
            assert segment_id == len(groups[group_id]) <= GROUP_SEGMENTS
            assert segment.closed == (segment is not entry.tail[-1])
            assert self.streamlet.entry_of(group_id) is entry
            assert self.streamlet.is_active(group_id, entry) == (group_id == entry.tail[-1].key[0])
        first = self.first_group_id
        assert sorted(groups) == list(range(first, first + len(groups)))
        assert self.streamlet.available_groups() == ((first, first + len(groups) - 1) if groups else (0, 0))
        assert self.streamlet.next_group_id == first + len(groups)

    @invariant()
    def a_slot_is_free_or_used_once_or_leased(self) -> None:  # 5
        used = [segment.slot for _, segment in self.segments()]
        free = [slot for slot in self.arena.slots() if slot.content is None and not slot.leases]
        assert len(free) == self.arena.free_slots
        retired = {lease.slot for lease in self.leases} - set(used)
        assert len({slot.index for slot in used}) == len(used), "two segments in one slot"
        assert not {slot.index for slot in used} & {slot.index for slot in free}
        assert len(used) + len(free) + len(retired) == SLOTS
        for slot, before in zip(self.arena.slots(), self.generations, strict=True):
            assert slot.generation >= before
        self.generations = [slot.generation for slot in self.arena.slots()]
        for _, segment in self.segments():
            content = segment.slot.content
            assert content is not None
            assert content[:5] == segment.address
            assert content[5:] == (segment.first_record, segment.head, segment.durable_head, segment.closed)
            user = (self.launches, *segment.key)
            before_user, generation = self.users.get(segment.slot.index, (user, 0))
            assert user == before_user or segment.slot.generation > generation, "a reader could not tell"
            self.users[segment.slot.index] = (user, segment.slot.generation)
        self.check_leases()

    def check_leases(self) -> None:
        for lease in self.leases:
            assert lease.slot.generation == lease.generation
            assert bytes(lease.slot.view[lease.start :][: len(lease.content)]) == lease.content

    def teardown(self) -> None:
        self.index.close()
        self.arena.close()
        shutil.rmtree(self.folder)


StreamletMachine.TestCase.settings = settings(stateful_step_count=50)
TestStreamlet = StreamletMachine.TestCase
