"""Streamlets that move between two brokers, which are killed and started again, against lists of what was appended.

Whatever happens, a reader who goes by the map gets each entry's chunks once and in order, ordinals have no gap, and a
chunk that is sent twice is stored once. Hosts are not lost here: then what is in memory is lost, moved or not.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kera.broker.log.read_plan import plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.orders import Orders
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import ArenaFull, NotOwner
from kera.core.format.chunk import iterate_chunks, verify_header
from kera.v1 import broker_pb2, common_pb2
from tests.examples import examples
from tests.property.log_world import World
from tests.unit.broker.moving_support import assign, moved
from tests.unit.broker.support import EVERYTHING, STREAM_ID, Outcome, chunk, stream_info

ENTRIES = 2
PRODUCERS = 3
SLOTS = 12
STEPS_MAX = 10_000

Stored = tuple[int, int]
"""Producer and sequence of a chunk of one record."""


class Moving(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 30))
    def start(self, seed: int) -> None:
        self.runner = asyncio.Runner()
        self.info: common_pb2.StreamInfo = stream_info(owners=(1,), entries=ENTRIES)
        self.worlds = {
            number: World(seed + number, streams=[self._copy()], slots=SLOTS, broker_id=number) for number in (1, 2)
        }
        self.orders = {number: self._orders(number) for number in self.worlds}
        self.sequences: defaultdict[int, int] = defaultdict(int)
        self.sizes: dict[tuple[int, int], int] = {}
        self.stored: list[list[Stored]] = [[] for _ in range(ENTRIES)]
        self.readers: list[tuple[Position, int]] = [(EARLIEST, 0)] * ENTRIES
        """Of each entry: where one is, and how many chunks it has got."""

    def teardown(self) -> None:
        if hasattr(self, "worlds"):
            for entry in range(ENTRIES):
                assert self._read_all(entry) == self.stored[entry]
            for world in self.worlds.values():
                world.close()
            self.runner.close()

    # -- helpers -----------------------------------------------------------------------------------------------

    def _copy(self) -> common_pb2.StreamInfo:
        info = common_pb2.StreamInfo()
        info.CopyFrom(self.info)
        return info

    def _orders(self, number: int) -> Orders:
        world = self.worlds[number]
        orders = Orders(world.streams, world.memory, coordinator=CoordinatorEpoch(confirmed=False))
        orders.registered(number, 0, [])
        return orders

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Carry out what a coordinator orders; disks do what they are told meanwhile."""

        async def drive() -> Any:
            task = asyncio.ensure_future(work)
            for _ in range(STEPS_MAX):
                await asyncio.sleep(0)
                if task.done():
                    return task.result()
                for world in self.worlds.values():
                    world.perform_one()
            raise AssertionError("an order never ends")

        return self.runner.run(drive())

    @property
    def owner(self) -> int:
        return int(self.info.assignments[0].broker_id)

    def _streamlet(self, number: int) -> Streamlet:
        return self.worlds[number].streams.get(STREAM_ID).streamlet(0)

    def _append(self, producer: int, sequence: int, size: int) -> Any:
        data = chunk(producer, sequence, size=size)
        world, streamlet = self.worlds[self.owner], self._streamlet(self.owner)
        assert streamlet.takes_chunks
        for _ in range(STEPS_MAX):
            try:
                appended = streamlet.append(memoryview(data), verify_header(data))
            except ArenaFull:
                world.settle()
                continue
            streamlet.publish(appended)
            return appended
        raise AssertionError("there is never room")

    def _where(self, position: Position) -> int:
        assignment = self.info.assignments[0]
        found = int(assignment.broker_id)
        for number, interval in enumerate(assignment.intervals):
            if number == 0 or interval.first_group_id <= position.group_id:
                found = interval.broker_id
        return found

    def _read(self, entry: int, position: Position, bytes_max: int) -> tuple[list[Stored], Position]:
        number = self._where(position)
        streamlet, world = self._streamlet(number), self.worlds[number]
        plan = plan_read(streamlet, entry, position, None, bytes_max)
        while plan.missing is not None and not plan.ranges:
            outcome = Outcome()
            world.memory.loads.load(streamlet.entries[entry], plan.missing, outcome)
            world.settle()
            assert outcome.calls == [None]
            plan = plan_read(streamlet, entry, position, None, bytes_max)
        found = []
        for segment, begin, end in plan.ranges:
            world.memory.slots.touched(segment)
            for header, _ in iterate_chunks(segment.slot.view[begin:end]):
                found.append((header.producer_id, header.sequence))
        return found, plan.next

    def _read_all(self, entry: int) -> list[Stored]:
        position, found = EARLIEST, list[Stored]()
        for _ in range(STEPS_MAX):
            some, following = self._read(entry, position, EVERYTHING)
            found += some
            if not some and following == position:
                return found
            position = following
        raise AssertionError("a reader goes round in circles")

    def _seal(self) -> common_pb2.StreamletState:
        request = broker_pb2.SealStreamletsRequest(stream_id=STREAM_ID, streamlet_ids=[0], wait_ms=1000)
        (state,) = self._run(self.orders[self.owner].seal(request))
        return state  # type: ignore[no-any-return]

    def _open(self, number: int, *states: common_pb2.StreamletState) -> None:
        request = broker_pb2.OpenStreamletsRequest(stream=self.info, handed_over=states)
        self._run(self.orders[number].open(request))

    def _start_again(self, number: int, *, killed: bool) -> None:
        world = self.worlds[number]
        world.infos = [self._copy()]
        if killed:
            world.kill()
        else:
            assert world.stop()
        self.orders[number] = self._orders(number)

    # -- what happens ------------------------------------------------------------------------------------------

    @rule(producer=st.integers(0, PRODUCERS - 1), count=st.integers(1, 6), size=st.sampled_from([512, 1024, 2048]))
    def append(self, producer: int, count: int, size: int) -> None:
        for _ in range(count):
            sequence = self.sequences[producer]
            self.sizes[producer, sequence] = size
            appended = self._append(producer, sequence, size)
            assert not appended.duplicate
            assert appended.first_record == len(self.stored[appended.entry])
            self.stored[appended.entry].append((producer, sequence))
            self.sequences[producer] += 1

    @precondition(lambda self: any(self.sequences.values()))
    @rule(data=st.data())
    def append_again(self, data: st.DataObject) -> None:
        producer = data.draw(st.sampled_from([each for each, count in self.sequences.items() if count]))
        sequence = data.draw(st.integers(0, self.sequences[producer] - 1))
        assert self._append(producer, sequence, self.sizes[producer, sequence]).duplicate

    @rule(killed=st.sampled_from(["", "old before", "new before", "new after", "old after"]))
    def move(self, killed: str) -> None:
        old, new = self.owner, 3 - self.owner
        state = self._seal()
        self.info = moved(self.info, state, new)
        if killed == "old before":
            self._start_again(old, killed=True)
        if killed == "new before":
            self._start_again(new, killed=True)
        self._open(new, state)
        if killed == "new after":
            self._start_again(new, killed=True)
        if killed != "old after":
            self._open(old)
        else:
            self._start_again(old, killed=True)
        if not self.worlds[old].streams.get(STREAM_ID).streamlets:
            return
        assert not self._streamlet(old).takes_chunks

    @rule()
    def seal_and_think_better_of_it(self) -> None:
        self._seal()
        self.info = assign(
            self.info,
            self.owner,
            [(each.first_group_id, each.broker_id, each.first_records) for each in self.info.assignments[0].intervals],
        )
        self._open(self.owner)

    @rule(number=st.integers(1, 2))
    def tell_again(self, number: int) -> None:
        self._open(number)

    @rule(number=st.integers(1, 2), killed=st.booleans())
    def start_again(self, number: int, killed: bool) -> None:
        self._start_again(number, killed=killed)

    @rule(number=st.integers(1, 2), jobs=st.integers(1, 4))
    def write_to_disk(self, number: int, jobs: int) -> None:
        for job in range(jobs):
            self.worlds[number].perform_one(job)

    @rule(number=st.integers(1, 2))
    def close_segments(self, number: int) -> None:
        self.worlds[number].memory.segments.close_all()

    @rule(entry=st.integers(0, ENTRIES - 1), bytes_max=st.integers(1, 6000))
    def read_on(self, entry: int, bytes_max: int) -> None:
        position, count = self.readers[entry]
        found, following = self._read(entry, position, bytes_max)
        assert found == self.stored[entry][count : count + len(found)]
        if not found and following == position:
            assert count == len(self.stored[entry]), "a reader waits for what is there"
        self.readers[entry] = following, count + len(found)

    @invariant()
    def one_broker_takes_chunks(self) -> None:
        if not hasattr(self, "worlds"):
            return
        taking = []
        for number in self.worlds:
            try:
                taking += [number] if self._streamlet(number).takes_chunks else []
            except NotOwner:
                continue
        assert taking == [self.owner]


TestMoving = Moving.TestCase
TestMoving.settings = settings(
    max_examples=examples(100, quick=20),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
