"""The metadata are put back to any earlier copy, at any time: nothing is given twice, and nothing is destroyed.

Streams are created, written, altered, moved and deleted, brokers join and start again, producers come; now and then the
coordinator goes on with what its metadata once were. An oracle of its own knows what was acknowledged, and what each
copy knows. Promised, and checked after each step and at the end:

* no id, epoch or number of a schema is given to two;
* what can be read of a stream was written to it;
* a stream that a copy does not know is reported, with its id; it is taken up again with all its records, writable;
* a stream that a copy does know has all its records, wherever it was moved since; unless it was deleted since.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kera.coordinator.cluster.intervals import index_of_group, intervals_of
from kera.coordinator.store.metadata import StoredRecord
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import UnknownStream
from kera.core.format.chunk import HEADER_BYTES, iterate_chunks
from kera.core.format.schema import schema_to_bytes
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from tests.examples import examples
from tests.property.restored_world import World
from tests.unit.broker.support import chunk, next_of, read_range

BROKERS, BROKERS_MAX, BACKUPS = 2, 4, 2
STREAMLETS = 2
WAIT_S = 20.0
EXAMPLES = int(os.environ.get("KERA_FUZZ_EXAMPLES", examples(12, quick=6)))
"""Histories; each takes a second or two."""
INSTANCE_S = 1_900.0
"""So much time goes by between a copy and its return for each instance of a named producer that came meanwhile."""
RESULT = TypeVar("RESULT")


@dataclass
class Known:
    """What the oracle knows of a stream."""

    stream_id: int
    name: str
    written: list[set[bytes]] = field(default_factory=lambda: [set() for _ in range(STREAMLETS)])
    """Acknowledged, by streamlet."""
    schemas: dict[int, bytes] = field(default_factory=dict)
    deleted: bool = False
    lost: bool = False
    """A copy was put back that does not know that it was deleted: a documented loss."""


@dataclass
class Copy:
    """Metadata as they were, and what the oracle knew then."""

    records: dict[str, StoredRecord]
    stream_ids: frozenset[int]
    """Of the streams that there were."""
    instances: int


class Restored(RuleBasedStateMachine):
    """See the head of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="kera-test-"))
        self.shm = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
        self.world: World
        self.streams: dict[int, Known] = {}
        self.copies: list[Copy] = []
        self.numbers = 0
        self.instances = 0

    def do(self, what: Coroutine[Any, Any, RESULT]) -> RESULT:
        async def bounded() -> RESULT:
            async with asyncio.timeout(WAIT_S):
                return await what

        return self.runner.run(bounded())

    @initialize()
    def begin(self) -> None:
        async def begin() -> None:
            self.world = World(self.root, self.shm, brokers=BROKERS, backups=BACKUPS)
            await self.world.begin()
            await self.world.settle()

        self.do(begin())
        self.copy()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.do(self.end())
        finally:
            with contextlib.suppress(Exception):
                self.do(self.world.close())
            self.runner.close()
            shutil.rmtree(self.root)
            shutil.rmtree(self.shm)

    async def end(self) -> None:
        await self.world.settle()
        for known in list(self.streams.values()):
            await self.check(known)
        for known in [one for one in self.streams.values() if self.is_unknown(one)]:
            await self.adopted(known)
        assert not self.world.coordinator.unknown.describe_all()

    # -- streams ---------------------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Any:
        return self.world.coordinator

    def there(self, known: Known) -> bool:
        return known.stream_id in self.coordinator.state.catalog

    def is_unknown(self, known: Known) -> bool:
        return not known.deleted and not self.there(known)

    def pick(self, number: int) -> Known | None:
        found = [one for one in self.streams.values() if self.there(one)]
        return found[number % len(found)] if found else None

    @rule(replication=st.integers(0, 1), again=st.booleans())
    def create(self, replication: int, again: bool) -> None:
        """`again`: under the name of one that is not known any more, if there is one."""
        names = [one.name for one in self.streams.values() if self.is_unknown(one)] if again else []
        taken = {stream.name for stream in self.coordinator.state.catalog.streams()}
        name = next((name for name in names if name not in taken), f"stream-{len(self.streams)}")

        async def create() -> None:
            schema = pa.schema([("a", pa.int64())])
            stream = await self.coordinator.streams.create(
                name,
                common_pb2.StreamConfig(
                    streamlets=STREAMLETS, entries=1, group_segments=2, replication=replication, virtual_logs=1
                ),
                common_pb2.StreamSchema(arrow_schema=schema_to_bytes(schema), typed=True),
            )
            self.world.given.note("id of a stream", stream.stream_id, object())
            self.streams[stream.stream_id] = Known(stream.stream_id, name)
            self.note_schemas(stream)

        self.do(create())

    def note_schemas(self, stream: common_pb2.StreamInfo) -> None:
        for schema in stream.schemas:
            self.world.given.note("id of a schema", schema.schema_id, schema.arrow_schema, within=stream.stream_id)

    @rule(number=st.integers(0, 9))
    def alter(self, number: int) -> None:
        """A column comes to it."""
        known = self.pick(number)
        if known is None:
            return
        self.numbers += 1
        columns = schema_to_bytes(pa.schema([(f"column_{self.numbers}", pa.int64())]))
        request = coordinator_pb2.AlterStreamRequest(name=self.name_of(known), add_columns=columns)
        stream = self.do(self.coordinator.streams.alter(request))
        self.note_schemas(stream)
        for one in stream.assignments:
            here = self.world.launches[one.broker_id].node.engine.streams.get(stream.stream_id)
            newest = max(schema.schema_id for schema in stream.schemas)
            assert newest in here.schemas, f"broker {one.broker_id} does not go by what {known} is now"

    def name_of(self, known: Known) -> str:
        return str(self.coordinator.state.catalog.with_id(known.stream_id).name)

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        known = self.pick(number)
        if known is not None:
            known.deleted = True
            self.do(self.coordinator.streams.delete(self.name_of(known)))

    @rule(number=st.integers(0, 9), streamlet=st.integers(0, STREAMLETS - 1), to=st.integers(0, BROKERS_MAX))
    def move(self, number: int, streamlet: int, to: int) -> None:
        known = self.pick(number)
        if known is None or known.lost:
            return
        ids = sorted(self.world.launches)
        before = self.coordinator.state.catalog.with_id(known.stream_id).assignments[streamlet].broker_id
        target = ids[to % len(ids)]
        if target != before:
            self.do(self.coordinator.migration.move(self.name_of(known), streamlet, target))

    @rule(number=st.integers(0, 9), count=st.integers(1, 6))
    def write(self, number: int, count: int) -> None:
        known = self.pick(number)
        if known is not None and not known.lost:
            self.do(self.written(known, count))

    async def written(self, known: Known, count: int) -> None:
        """Acknowledged by the owner that the coordinator names, from a new producer."""
        producer, _ = await self.coordinator.producers.init()
        self.world.given.note("id of a producer", producer, object())
        for streamlet in range(STREAMLETS):
            chunks = []
            for sequence in range(count):
                self.numbers += 1
                fill = b"%d/%d;" % (known.stream_id, self.numbers)
                where = {"stream_id": known.stream_id, "streamlet_id": streamlet}
                chunks.append(chunk(producer, sequence, size=512, fill=fill, **where))
            for data in chunks:
                await self.send(known, streamlet, data)
                known.written[streamlet].add(data[HEADER_BYTES:])

    async def send(self, known: Known, streamlet: int, data: bytes) -> None:
        """Until it is acknowledged; backups that have started again are not connected yet."""
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
        while True:
            assignment = self.coordinator.state.catalog.with_id(known.stream_id).assignments[streamlet]
            reply = await self.world.launches[assignment.broker_id].ask(api.MULTI_WRITE_CHUNKS, request, data)
            (status,) = reply.message.statuses
            assert not status.duplicate, f"{known}: a new producer's chunk was known"
            if not status.error.code:
                return
            assert status.error.code in {"too_few_backups", "not_replicated"}, f"{known}: {status.error}"
            await asyncio.sleep(0.01)  # sleep: between tries

    async def check(self, known: Known) -> None:
        """What is to be read of a stream, if it is known, or that it is reported."""
        if known.deleted and not self.there(known):
            return
        if not self.there(known):
            told = {one.stream.stream_id: one for one in self.coordinator.unknown.describe_all()}
            if any(known.written):
                assert known.stream_id in told, f"{known} is reported by nobody"
            return
        for streamlet in range(STREAMLETS):
            found = await self.read(known, streamlet)
            assert all(data.startswith(b"%d/" % known.stream_id) for data in found), f"{known} has others' records"
            assert len(found) == len(set(found))
            if not known.lost:
                assert set(found) == known.written[streamlet], f"{known}: {len(found)} are there"

    async def read(self, known: Known, streamlet: int) -> list[bytes]:
        """All of a streamlet, by the map of the coordinator."""
        found: list[bytes] = []
        start = EARLIEST
        until_s = asyncio.get_running_loop().time() + (0.2 if known.lost else WAIT_S / 2)
        while True:
            assignment = self.coordinator.state.catalog.with_id(known.stream_id).assignments[streamlet]
            intervals = intervals_of(assignment)
            index = index_of_group(assignment, start.group_id)
            launch = self.world.launches[intervals[index].broker_id]
            where = read_range(start, streamlet=streamlet, stream_id=known.stream_id)
            reply = await launch.ask(api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(ranges=[where]))
            (result,) = reply.message.results
            if result.error.code:
                if asyncio.get_running_loop().time() > until_s:
                    assert known.lost, f"{known}: {result.error}"
                    return found
                await asyncio.sleep(0.01)  # sleep: until it is loaded
                continue
            data = b"".join(bytes(piece) for piece in reply.bulk)
            reply.bulk = ()
            found += [data[at + HEADER_BYTES : at + one.chunk_bytes] for one, at in iterate_chunks(data)]
            following: Position = next_of(result)
            if not data and following == start and index == len(intervals) - 1:
                return found
            start = following

    # -- brokers and producers -------------------------------------------------------------------------------------

    @rule(number=st.integers(0, BROKERS_MAX))
    def restart(self, number: int) -> None:
        ids = sorted(self.world.launches)
        self.do(self.world.relaunch(ids[number % len(ids)]))
        self.do(self.world.settle())

    @precondition(lambda self: len(self.world.launches) < BROKERS_MAX)
    @rule()
    def join(self) -> None:
        self.do(self.world.join())

    @rule(name=st.sampled_from(["", "one", "two"]))
    def producer(self, name: str) -> None:
        async def init() -> tuple[int, int]:
            asked: asyncio.Future[tuple[int, int]] = asyncio.ensure_future(self.coordinator.producers.init(name))
            while not asked.done():
                await asyncio.sleep(0)  # sleep: a turn of the loop
                await self.world.beat()
            return await asked

        producer_id, epoch = self.do(init())
        self.instances += bool(name)
        self.world.given.note("instance of a producer", epoch, object(), within=producer_id)
        if not name:
            self.world.given.note("id of a producer", producer_id, object())

    # -- copies ----------------------------------------------------------------------------------------------------

    @rule()
    def copy(self) -> None:
        stream_ids = frozenset(one.stream_id for one in self.streams.values() if self.there(one))
        self.copies.append(Copy(self.world.copy(), stream_ids, self.instances))

    @rule(number=st.integers(0, 9), order=st.none() | st.permutations(range(BROKERS_MAX)))
    def restore(self, number: int, order: Sequence[int] | None) -> None:
        """`order`: all brokers are started again, and first ask to register in this one."""
        ids = sorted(self.world.launches)
        stopped = [ids[one] for one in order or () if one < len(ids)]
        copy = self.copies[number % len(self.copies)]
        for one in self.streams.values():
            if one.stream_id in copy.stream_ids:
                one.lost |= one.deleted
                one.deleted = False
        self.do(self.world.restore(copy.records, 2.0 + (self.instances - copy.instances) * INSTANCE_S, stopped=stopped))
        for one in self.streams.values():
            self.do(self.check(one))

    @rule(number=st.integers(0, 9))
    def adopt(self, number: int) -> None:
        unknown = [one for one in self.streams.values() if self.is_unknown(one)]
        if unknown:
            self.do(self.adopted(unknown[number % len(unknown)]))

    async def adopted(self, known: Known) -> None:
        """All of it is there again, and it takes more."""
        try:
            await self.coordinator.unknown.adopt(str(known.stream_id), f"again-{known.stream_id}")
        except UnknownStream:
            if any(known.written):
                raise
            known.deleted = True  # nothing of it is anywhere
            return
        await self.check(known)
        if not known.lost:
            await self.written(known, 1)
            await self.check(known)


@contextlib.contextmanager
def history() -> Iterator[Restored]:
    """One whose steps are told."""
    machine = Restored()
    machine.begin()
    try:
        yield machine
    except BaseException:
        machine.streams.clear()  # that it ends somehow will do
        raise
    finally:
        machine.teardown()


def test_brokers_that_are_younger_than_a_copy_come_back_with_their_ids_and_what_they_have() -> None:
    with history() as one:
        one.join()
        one.join()
        one.create(replication=0, again=False)
        one.move(0, streamlet=0, to=3)
        one.write(0, count=3)
        one.restore(0, None)
        one.join()
        one.adopt(0)


def test_a_stream_that_moved_since_a_copy_goes_on_where_it_is_and_keeps_what_was_written_there() -> None:
    with history() as one:
        one.create(replication=0, again=False)
        one.write(0, count=3)
        one.copy()
        one.move(0, streamlet=0, to=0)
        one.move(0, streamlet=0, to=1)
        one.move(0, streamlet=1, to=0)
        one.write(0, count=3)
        one.restore(1, None)
        one.write(0, count=3)
        one.restart(0)
        one.restore(1, None)
        one.restart(1)
        one.write(0, count=3)
        one.move(0, streamlet=0, to=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_stream_that_moved_since_a_copy_goes_on_where_it_is_whoever_is_started_first(order: tuple[int, int]) -> None:
    with history() as one:
        one.create(replication=1, again=False)
        one.write(0, count=3)
        one.copy()
        one.move(0, streamlet=0, to=1)
        one.move(0, streamlet=1, to=1)
        one.write(0, count=3)
        one.restore(1, order)
        one.write(0, count=3)
        one.move(0, streamlet=0, to=0)
        one.write(0, count=3)
        assert not one.coordinator.unknown.describe_all()


def test_a_schema_that_a_copy_does_not_know_leaves_its_number_to_no_other() -> None:
    with history() as one:
        one.create(replication=0, again=False)
        one.copy()
        one.alter(0)
        one.restore(1, None)
        one.alter(0)


def test_an_instance_of_a_name_that_a_copy_does_not_know_leaves_its_epochs_to_no_other() -> None:
    with history() as one:
        one.producer("one")
        one.copy()
        one.producer("one")
        one.restore(1, None)
        one.producer("one")


def test_nothing_is_given_twice_or_destroyed_when_the_metadata_go_back() -> None:
    run_state_machine_as_test(
        Restored, settings=settings(max_examples=EXAMPLES, stateful_step_count=14, deadline=None, print_blob=True)
    )
