"""In any history, each lane of the push channel gives the log from its start to its end: no gap, no repeat.

The model is a list of chunks per entry. Against it run appends of many sizes, chunks that become durable later,
evictions and loads, readers that subscribe, take, let go, cancel and are cut off, windows, and time that runs out.
After every step:

* a lane has given the chunks of the list from the lane's start on, in order, and not beyond the durable head;
* the leases of a slot equal the runs that readers hold in it;
* a run came only when its reader's window had room for it, or no bytes were outstanding;

and in the end, when all readers have taken everything, no lane waits for a present chunk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import astuple, dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kera.broker.log.arena import Arena
from kera.broker.log.streamlet import Appended
from kera.broker.serving.limits import PushLimits
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import ArenaFull
from kera.core.format.chunk import iterate_chunks, verify_header
from kera.core.push import Run, window_bytes_max
from kera.v1 import push_pb2
from tests.examples import examples, run_until
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import BROKER_ID, SLOT_BYTES, Engine, chunk, position, stream_info

ENTRIES = 2
READERS = 3
EXAMPLES = examples(300, quick=50)
SIZES = st.sampled_from([136, 300, 1000, 2048, 4096])
Reason = push_pb2.PushEnd

happened: Counter[str] = Counter()
"""The events of all examples of this process: they show that the histories had the events under test."""


@dataclass
class Chunk:
    """A chunk of the model."""

    producer: int
    sequence: int
    appended: Appended
    durable: bool = False

    @property
    def start(self) -> Position:
        return position(self.appended)

    @property
    def end(self) -> Position:
        return self.start._replace(offset=self.appended.end)


@dataclass
class Expected:
    """The chunks that a lane should give."""

    entry: int
    first: int
    """Index of its first chunk in its log."""
    stop: int | None
    """Index behind its last one."""
    given: list[tuple[int, int]] = field(default_factory=list)


class CheckingReader(Reader):
    """A reader that holds its runs until the test releases them."""

    def __init__(self, node: PushNode) -> None:
        super().__init__(node)
        self.lanes: dict[int, Expected] = {}
        self.next_lane = 0
        self.window_bytes = window_bytes_max(node.engine.arena.slot_count, SLOT_BYTES)
        self.outstanding: list[int] = []
        self.held: list[int] = []

    def _run(self, run: Run) -> None:
        super()._run(run)
        outstanding = sum(self.outstanding)
        assert not outstanding or outstanding + run.length_bytes <= self.window_bytes
        self.outstanding.append(run.length_bytes)
        self.held.append(run.slot)
        slot = self.node.engine.arena.slot(run.slot)
        view = slot.view[run.offset : run.offset + run.length_bytes]
        self.lanes[run.lane].given += [(header.producer_id, header.sequence) for header, _ in iterate_chunks(view)]
        happened["runs"] += 1


class Pushing(RuleBasedStateMachine):
    """See the head of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.root: Path | None = None

    @initialize(slots=st.sampled_from([4, 16, 64]))
    def begin(self, slots: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
        self.arena = Arena.create(
            self.root, arena_bytes=slots * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=Path("/data"), ephemeral=True
        )
        self.engine = Engine(self.arena, self.root)
        self.node = PushNode(
            self.engine,
            stream_info(owners=(BROKER_ID,), entries=ENTRIES),
            limits=PushLimits(loads_at_once=1),  # so that lanes wait for their turn
        )
        self.logs: list[list[Chunk]] = [[] for _ in range(ENTRIES)]
        self.sequences: Counter[int] = Counter()
        self.readers = [CheckingReader(self.node) for _ in range(READERS)]

    def teardown(self) -> None:
        if self.root is not None:
            self.settle()
            self.engine.close()
            self.arena.close()
            shutil.rmtree(self.root)

    # -- events --------------------------------------------------------------------------------------------------

    @rule(producer=st.integers(0, 3), sizes=st.lists(SIZES, min_size=1, max_size=6), durable=st.booleans())
    def append(self, producer: int, sizes: list[int], durable: bool) -> None:
        streamlet = self.node.streamlet()
        for size in sizes:
            data = chunk(producer, self.sequences[producer], size=size)
            try:
                appended = streamlet.append(memoryview(data), verify_header(data))
            except ArenaFull:
                happened["memory full"] += 1
                break
            self.logs[appended.entry].append(Chunk(producer, self.sequences[producer], appended))
            self.sequences[producer] += 1
        if durable:
            self.publish(producer % ENTRIES)

    @rule(entry=st.integers(0, ENTRIES - 1))
    def publish(self, entry: int) -> None:
        for each in self.logs[entry]:
            if not each.durable:
                each.durable = True
                self.node.streamlet().publish(each.appended)

    @rule()
    def evict(self) -> None:
        """Move chunks to disk, unless readers hold them. A chunk on disk is durable."""
        self.node.to_disk()
        self.written()

    @rule()
    def disk(self) -> None:
        self.engine.run()
        self.written()

    def written(self) -> None:
        for entry, log in enumerate(self.logs):
            end = self.node.streamlet().entries[entry].end
            for each in log:
                each.durable = each.durable or each.end <= end

    @rule()
    def round(self) -> None:
        self.node.loop.round()

    @rule()
    def rounds(self) -> None:
        for _ in range(3):
            self.node.loop.round()

    @rule(taking=st.booleans())
    def run(self, taking: bool) -> None:
        """Run until no work is left; with `taking`, readers take their runs and so come to hold many."""
        for _ in range(8 if taking else 1):
            self.node.run()
            self.written()
            for reader in self.readers if taking else ():
                reader.take(sum(reader.outstanding))
                reader.outstanding = []

    @rule(reader=st.integers(0, READERS - 1), entry=st.integers(0, ENTRIES - 1), seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, reader: int, entry: int, seconds: float) -> None:
        """Wait for the disk, which may be too slow for a lane."""
        self.evict()
        self.subscribe(reader, entry, 0.0, None, earliest=False)
        self.node.loop.round()
        self.node.loop.advance(seconds)

    @rule(
        reader=st.integers(0, READERS - 1),
        entry=st.integers(0, ENTRIES - 1),
        first=st.floats(0, 1),
        length=st.none() | st.floats(0, 1),
        earliest=st.booleans(),
    )
    def subscribe(self, reader: int, entry: int, first: float, length: float | None, *, earliest: bool) -> None:
        of = self.readers[reader]
        durable = [each for each in self.logs[entry] if each.durable]
        index = 0 if earliest else int(first * len(durable))
        start = EARLIEST
        if not earliest and durable:
            start = durable[index].start if index < len(durable) else durable[-1].end
        stop = end = None
        if length is not None and durable:
            stop = index + int(length * (len(durable) - index))
            end = durable[stop - 1].end if stop else durable[0].start
        number, of.next_lane = of.next_lane, of.next_lane + 1
        of.lanes[number] = Expected(entry, index, stop)
        of.subscribe(lane(number, start, end, entry=entry))

    @rule(reader=st.integers(0, READERS - 1), window_bytes=st.sampled_from([100, 1024, 5000, 1 << 30]))
    def open_window(self, reader: int, window_bytes: int) -> None:
        of = self.readers[reader]
        of.window_bytes = min(window_bytes, window_bytes_max(self.arena.slot_count, SLOT_BYTES))
        of.subscribe(window_bytes=window_bytes)

    @rule(reader=st.integers(0, READERS - 1), count=st.integers(1, 10))
    def take(self, reader: int, count: int) -> None:
        of = self.readers[reader]
        taken, of.outstanding = of.outstanding[:count], of.outstanding[count:]
        of.take(sum(taken))

    @rule(reader=st.integers(0, READERS - 1), start=st.integers(0, 20), count=st.integers(1, 20))
    def release(self, reader: int, start: int, count: int) -> None:
        of = self.readers[reader]
        released = of.held[start : start + count]
        del of.held[start : start + count]
        of.release(*released)

    @rule(reader=st.integers(0, READERS - 1), which=st.floats(0, 1))
    def cancel(self, reader: int, which: float) -> None:
        of = self.readers[reader]
        if of.lanes:
            number = list(of.lanes)[min(int(which * len(of.lanes)), len(of.lanes) - 1)]
            of.cancel(number)
            assert number in of.ends

    @rule(reader=st.integers(0, READERS - 1), held=st.booleans())
    def hold_back(self, reader: int, held: bool) -> None:
        connection = self.readers[reader].connection
        if held:
            connection.pause()
        else:
            connection.resume()

    @rule(reader=st.integers(0, READERS - 1))
    def cut_off(self, reader: int) -> None:
        self.check_lanes()
        self.readers[reader].connection.lost()
        self.readers[reader] = CheckingReader(self.node)

    # -- invariants ----------------------------------------------------------------------------------------------

    @invariant()
    def check_lanes(self) -> None:
        if self.root is None:
            return
        for reader in self.readers:
            for number, expected in reader.lanes.items():
                log = self.logs[expected.entry]
                wanted = [
                    (each.producer, each.sequence) for each in log[expected.first : expected.stop] if each.durable
                ]
                assert expected.given == wanted[: len(expected.given)]
                if number in reader.ends:
                    self.check_end(reader.ends[number], expected, wanted)

    def check_end(self, end: push_pb2.PushEnd, expected: Expected, wanted: list[tuple[int, int]]) -> None:
        at = Position(end.next.group_id, end.next.segment_id, end.next.position)
        following = expected.first + len(expected.given)
        log = self.logs[expected.entry]
        assert not expected.given or at >= log[following - 1].end, "nothing that was given comes again"
        assert following == len(log) or not log[following].durable or at <= log[following].start, (
            "and nothing is left out"
        )
        match end.reason:
            case Reason.REACHED:
                assert expected.stop is not None
                assert expected.given == wanted
            case Reason.FAILED:
                assert end.error.code == "unavailable", end.error.message
            case _:
                assert end.reason in (Reason.CANCELLED, Reason.PULL)

    @invariant()
    def check_leases(self) -> None:
        if self.root is None:
            return
        held = Counter(slot for reader in self.readers for slot in reader.held)
        assert {slot.index: slot.leases for slot in self.arena.slots() if slot.leases} == dict(held)
        assert self.arena.leased_slots == len(held)
        totals = self.node.totals
        assert totals.connections == READERS
        assert totals.subscriptions == sum(len(reader.lanes) - len(reader.ends) for reader in self.readers)

    def settle(self) -> None:
        """Let all readers take and release everything, until no more runs come.

        With enough time: segments loaded for departed readers do not keep the memory from others.
        """
        self.written()
        done = None
        while done != (now := (sum(len(reader.runs) for reader in self.readers), astuple(self.engine.memory.totals))):
            done = now
            for reader in self.readers:
                reader.connection.resume()
                reader.take(sum(reader.outstanding))
                reader.release(*reader.held)
                reader.outstanding, reader.held = [], []
            self.engine.memory.slots.expire(1 << 60)
            self.node.run()
            self.written()
        self.check_lanes()
        for reader in self.readers:
            for number, expected in reader.lanes.items():
                if number in reader.ends:
                    happened[Reason.Reason.Name(reader.ends[number].reason)] += 1
                else:
                    durable = [each for each in self.logs[expected.entry] if each.durable]
                    assert expected.given == [(each.producer, each.sequence) for each in durable[expected.first :]]
                    assert expected.stop is None, "it has reached its end"
                    happened["follows"] += 1
            reader.connection.lost()
        assert self.arena.leased_slots == 0
        assert (self.node.totals.connections, self.node.totals.subscriptions) == (0, 0)
        assert all(not entry.waiters and not entry.readers for entry in self.node.streamlet().entries)
        happened["loads"] += self.engine.memory.totals.segments_loaded


def test_every_lane_gives_the_log_from_its_start_to_its_end() -> None:
    wanted = {"runs", "loads", "memory full", "follows", "REACHED", "CANCELLED", "PULL", "FAILED"}
    run_until(
        Pushing,
        lambda: wanted - happened.keys(),
        settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None, print_blob=False),
    )
