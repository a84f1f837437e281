"""The workload of a check: producers, readers, members of a consumer group, and a task that looks at the durable ends.

Each has its own client, with its own connections. They survive temporary failures: `Shared.notes` counts a failure, and
the work is begun again. A permanent failure, such as a deleted stream, ends the load (`Shared.give_up`).
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from functools import partial
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from kera.cli._client import connected
from kera.client.checking.history import Place
from kera.client.checking.ledger import Ledger
from kera.client.checking.numbers import STRANGE, Numbers, Values
from kera.core.base.process import descriptor_limit
from kera.core.base.spelling import plural
from kera.core.errors import BufferFull, CorruptChunk, DataLost, InvalidArgument, KeraError, NotAccepted, UnknownStream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from kera.cli.check._options import Options
    from kera.client import ChunkBatch, Producer, StreamDescription

TICK_S = 0.02
"""Time between two sends of a producer."""
OPEN_MAX = 10_000
"""Maximum of a producer's unanswered records: with more, it waits."""
REOPEN_EVERY_S = 5.0
"""How long a reader uses a consumer before it continues with another one, from the same positions."""
AGAIN_S = 0.5
"""Pause before failed work is begun again."""
LOOK_EVERY_S = 1.0
"""Time between two looks at the durable ends."""
MEMBERS_EVERY_S = 5.0
"""Time between two looks at the members of the consumer group."""
SPARE_DESCRIPTORS = 8
"""The fewest file descriptors that a process has to have left: a connection takes some."""
STRANGE_BYTES_MAX = 40
"""How many bytes are shown of a value that another program has written."""


class MemoryReused(Exception):
    """A chunk was in the memory of a broker that has died, and other data are there now: read the chunk again."""


class Shared:
    """The state that all clients of the workload share."""

    def __init__(self, options: Options, bootstrap: str, stream: StreamDescription, consumer_group: str) -> None:
        self.options = options
        self.bootstrap = bootstrap
        self.consumer_group = consumer_group
        self.member_ids: set[str] = set()
        """The ids of all present and former members of this check in the consumer group."""
        self.stream = stream.name
        self.stream_id = stream.stream_id
        self.streamlets = stream.config.streamlets
        self.level = level_of(stream)
        self.stopping = asyncio.Event()
        """Set when producers have to stop sending."""
        self.impossible: str | None = None
        """Why the stream cannot be checked; None: it can."""
        self.gone = False
        """Whether the stream was deleted."""
        self.notes: Counter[str] = Counter()
        """Counts the failures after which work was begun again, by client and error."""

    def give_up(self, why: str, *, gone: bool = False) -> None:
        """End the load, as the stream cannot be checked; `gone`: it was deleted, even if another one has its name."""
        self.gone |= gone
        if self.impossible is None:
            self.impossible = why
        self.stopping.set()

    async def failed(self, who: str, error: KeraError) -> None:
        """Count a failure that may be temporary; return when the work is to be begun again."""
        if isinstance(error, UnknownStream):
            self.is_gone()
        self.notes[f"{who}: {error.code}"] += 1
        self.look_at_descriptors()
        await asyncio.sleep(AGAIN_S)

    def look_at_descriptors(self) -> None:
        """Give up when this process has hardly any left: failures would then say nothing about the cluster."""
        spare: list[int] = []
        try:
            spare += (os.dup(0) for _ in range(SPARE_DESCRIPTORS))
        except OSError:
            self._lack_descriptors()
        finally:
            for each in spare:
                os.close(each)

    async def with_descriptors(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do some of the work; give up when it lacks file descriptors, which anything may need, even an import."""
        try:
            await work()
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
            self._lack_descriptors()

    def _lack_descriptors(self) -> None:
        self.give_up(
            f"this process can open no more files and connections: its limit is {descriptor_limit():,} (ulimit -n);"
            " raise it, or have fewer clients"
        )

    def is_gone(self) -> None:
        """Give up, as the cluster does not know the stream."""
        self.give_up(
            f"stream {self.stream!r} is not there any more: it was deleted meanwhile, or the coordinators' metadata are"
            " older than it; kera cluster health tells which",
            gone=True,
        )

    def recognize(self, values: Values, chunk: ChunkBatch) -> Numbers:
        """Return the values of a chunk as numbers; end the load if another check has written them.

        Raises `MemoryReused`.
        """
        column = chunk.batch.column("value")
        try:
            found = values.recognize(column)
            others = np.flatnonzero(found == STRANGE)
            # A single value of other data is not looked at: Arrow trusts where the column says that it is.
            of_another = chunk.intact and len(others) and values.is_of_another(column[int(others[0])].as_py())
        except Exception as error:
            if chunk.intact:
                raise
            raise MemoryReused from error
        if not chunk.intact:
            raise MemoryReused
        if of_another:
            self.give_up(f"another check writes to stream {self.stream!r}")
        return found

    def connected(self) -> Any:
        """Open a client whose retries last no longer than ``--within``."""
        within_ms = max(1000, round(1000 * self.options.within_s))
        return connected(self.bootstrap, retry_timeout_ms=within_ms, request_timeout_ms=5000)


class Acknowledgements:
    """Times of acknowledgements, and how long a streamlet, or all streamlets, had none."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last_s: dict[int | None, float] = {}
        """Time of the last acknowledgement by streamlet; None: of any streamlet."""
        self._pauses: dict[int | None, tuple[float, float]] = {}
        """Length and beginning of the longest pause, likewise."""

    def note(self, streamlet: int) -> None:
        """Record an acknowledgement."""
        now_s = self._now_s()
        for of in (streamlet, None):
            self._look(of, now_s)
            self._last_s[of] = now_s

    @property
    def last_s(self) -> float:
        """The time of the last acknowledgement; 0: there was none."""
        return self._last_s.get(None, 0.0)

    def since_s(self, streamlets: int) -> float:
        """Return the earliest of the last acknowledgement times of all `streamlets`; 0: one has had none."""
        return min(self._last_s.values()) if len(self._last_s) > streamlets else 0.0

    def begin_period(self) -> None:
        """Forget earlier pauses; a pause that goes on counts from its beginning."""
        self._pauses.clear()

    def pause_s(self, streamlets: Collection[int] | None) -> float:
        """Return the longest pause of one of the streamlets in this period, until now.

        With None, a pause is a time in which no streamlet had an acknowledgement.
        """
        now_s = self._now_s()
        every: Collection[int | None] = [None] if streamlets is None else streamlets
        for of in every:
            self._look(of, now_s)
        return max((self._pauses[of][0] for of in every if of in self._pauses), default=0.0)

    def longest(self, until_s: float) -> tuple[float, float, int | None]:
        """Return length, beginning and streamlet of the longest pause in this period; without any: 0, 0, None."""
        streamlets = [of for of in self._last_s if of is not None]
        for of in streamlets:
            self._look(of, until_s)
        found = ((*self._pauses[of], of) for of in streamlets if of in self._pauses)
        return max(found, key=itemgetter(0), default=(0.0, 0.0, None))

    def _look(self, of: int | None, now_s: float) -> None:
        since_s = self._last_s.get(of, now_s)
        if now_s - since_s > self._pauses.get(of, (0.0, 0.0))[0]:
            self._pauses[of] = now_s - since_s, since_s


class Sending:
    """A producer, which sends records at its rate; the seed chooses the streamlet of each."""

    def __init__(
        self, shared: Shared, ledger: Ledger, values: Values, acknowledgements: Acknowledgements, number: int
    ) -> None:
        self._shared = shared
        self._ledger = ledger
        self._values = values
        self._acknowledgements = acknowledgements
        self._name = f"producer {number}"
        self._random = Random(f"{shared.options.seed} {self._name}")
        self._rate = shared.options.rate / shared.options.producers
        self._share = int(shared.options.rate * shared.options.seconds / shared.options.producers)
        self._sent = 0
        self.open = 0
        """Number of records that wait for an answer."""
        self._settled = asyncio.Event()

    async def run(self) -> None:
        """Send until the load ends, and everything has an answer."""
        shared = self._shared
        begun_s = asyncio.get_running_loop().time()
        async with shared.connected() as client:
            while not shared.stopping.is_set():
                # Each attempt has a new producer number: records of a failed one may yet be stored, at any place.
                producer_number = self._ledger.add_producer()
                timeout_ms = max(1000, round(1000 * shared.options.within_s))
                producer = client.producer(delivery_timeout_ms=timeout_ms)
                try:
                    await producer.prepare(shared.stream)
                    await self._send(producer, producer_number, begun_s)
                    await self._settle()
                except KeraError as error:
                    await shared.failed(self._name, error)
                finally:
                    await producer.close(flush=False)

    async def _send(self, producer: Producer, number: int, begun_s: float) -> None:
        shared, loop = self._shared, asyncio.get_running_loop()
        while not shared.stopping.is_set():
            due = min(self._share, int((loop.time() - begun_s) * self._rate)) - self._sent
            for _ in range(min(due, OPEN_MAX - self.open)):
                await self._send_one(producer, number)
            await asyncio.sleep(TICK_S)

    async def _send_one(self, producer: Producer, producer_number: int) -> None:
        number = self._ledger.send(producer_number)
        value, streamlet = self._values.make(producer_number, number), self._random.randrange(self._shared.streamlets)
        self._sent += 1
        try:
            try:
                pending = producer.send(self._shared.stream, value, streamlet=streamlet)
            except BufferFull:
                await producer.drain()
                pending = producer.send(self._shared.stream, value, streamlet=streamlet)
        except KeraError:
            self._ledger.refuse(producer_number, number)
            raise
        self.open += 1
        pending.add_done_callback(partial(self._answered, producer_number, number))

    def _answered(self, producer_number: int, number: int, pending: Any) -> None:
        self.open -= 1
        if not self.open:
            self._settled.set()
        error = pending.exception()
        if error is None:
            delivery = pending.result()
            place = None
            if delivery.record is not None:
                place = Place(delivery.entry.streamlet_id, delivery.entry.entry, delivery.record)
            self._ledger.acknowledge(producer_number, number, place)
            self._acknowledgements.note(delivery.entry.streamlet_id)
            return
        self._shared.notes[f"{self._name}: {error.code}"] += 1
        if isinstance(error, NotAccepted):
            self._ledger.refuse(producer_number, number)
        else:
            self._ledger.give_up()
        if isinstance(error, UnknownStream):
            self._shared.is_gone()

    async def _settle(self) -> None:
        while self.open:
            self._settled.clear()
            await self._settled.wait()


class Reading:
    """A reader, which reads everything from the beginning, with one consumer after the other."""

    def __init__(self, shared: Shared, ledger: Ledger, values: Values, looking: Looking, number: int) -> None:
        self._shared = shared
        self._ledger = ledger
        self._values = values
        self._looking = looking
        self.pushes = bool(number % 2)
        """Whether it reads in the memory of brokers on this host; otherwise it pulls."""
        self.pushed = False
        """Whether it has read any chunk in a broker's memory."""
        self.name = f"reader {number}"

    async def run(self) -> None:
        """Read until it is cancelled, or there is nothing to check."""
        shared = self._shared
        positions: dict[int, list[Any]] | None = None
        async with shared.connected() as client:
            while shared.impossible is None:
                consumer = client.consumer(
                    shared.stream,
                    start=positions or "earliest",
                    shared_memory="auto" if self.pushes else "never",
                    corrupt_chunks="skip",
                )
                again: ChunkBatch | None = None
                reopens_s = asyncio.get_running_loop().time() + REOPEN_EVERY_S
                try:
                    async for chunk in consumer.batches():
                        if not self._take(chunk):
                            again = chunk
                            break
                        del chunk  # so that its memory is not held while waiting for the next one
                        if asyncio.get_running_loop().time() > reopens_s:
                            break
                except DataLost as error:
                    positions = await self._looking.behind(self.name, error, consumer.positions(), client)
                    continue
                except CorruptChunk as error:
                    self._ledger.note("corrupt", f"{self.name}: {error.message}")
                    return
                except KeraError as error:
                    await shared.failed(self.name, error)
                finally:
                    await consumer.close()
                positions = consumer.positions() or positions
                if again is not None and positions:
                    positions[again.entry.streamlet_id][again.entry.entry] = again.start

    def _take(self, chunk: ChunkBatch) -> bool:
        """Give the records of a chunk to the ledger; False: the broker has reused its memory meanwhile."""
        column, entry = chunk.batch.column("value"), (chunk.entry.streamlet_id, chunk.entry.entry)
        try:
            values = self._shared.recognize(self._values, chunk)
        except MemoryReused:
            return False
        self.pushed |= chunk.pushed
        if not pass_unreadable(self._ledger, self.name, chunk):
            self._ledger.read(self.name, entry, chunk.header.first_record, values, partial(strange, column))
        return True


class Member:
    """A member of the consumer group."""

    def __init__(self, shared: Shared, ledger: Ledger, values: Values, number: int) -> None:
        self._shared = shared
        self._ledger = ledger
        self._values = values
        self._shared_memory = "auto" if number % 2 else "never"
        self._name = f"member {number}"

    async def run(self) -> None:
        """Consume until it is cancelled, or there is nothing to check."""
        shared = self._shared
        async with shared.connected() as client:
            while shared.impossible is None:
                consumer = client.group_consumer(
                    shared.consumer_group,
                    shared.stream,
                    on_lost=lambda _: None,
                    on_data_lost="skip",
                    shared_memory=self._shared_memory,
                    corrupt_chunks="skip",
                )
                shared.member_ids.add(consumer.member_id)
                try:
                    async for chunk in consumer.batches():
                        try:
                            values = shared.recognize(self._values, chunk)
                        except MemoryReused:  # the chunk is not committed, so the group gets it again
                            break
                        self._ledger.process(values)
                        del chunk
                except KeraError as error:
                    await shared.failed(self._name, error)
                finally:
                    await consumer.close()


class Looking:
    """Looks at the durable ends repeatedly, and checks that the stream is still the same."""

    def __init__(self, shared: Shared, ledger: Ledger) -> None:
        self._shared = shared
        self._ledger = ledger
        self._turn = asyncio.Lock()
        self.looked = 0

    async def run(self) -> None:
        """Look until it is cancelled, or there is nothing to check."""
        looks_at_members_s = 0.0
        async with self._shared.connected() as client:
            while self._shared.impossible is None:
                self._shared.look_at_descriptors()
                try:
                    await self.look(client)
                    if asyncio.get_running_loop().time() >= looks_at_members_s:
                        await self._look_at_members(client)
                        looks_at_members_s = asyncio.get_running_loop().time() + MEMBERS_EVERY_S
                except KeraError as error:
                    await self._shared.failed("durable ends", error)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _look_at_members(self, client: Any) -> None:
        """Give up if a foreign member is in the consumer group: it gets records that this check's members then miss."""
        if not self._shared.options.members:
            return
        try:
            group = await client.admin.describe_consumer_group(self._shared.consumer_group)
        except InvalidArgument:
            return  # the group does not exist yet
        if any(member.member_id not in self._shared.member_ids for member in group.members):
            self._shared.give_up(f"others consume in its consumer group {group.consumer_group!r}")

    async def look(self, client: Any) -> dict[tuple[int, int], int]:
        """Look at the durable ends; return the next record of each entry."""
        async with self._turn:  # one look at a time, so that an older answer is not taken for a later one
            return await self._look(client)

    async def _look(self, client: Any) -> dict[tuple[int, int], int]:
        shared, floors = self._shared, self._ledger.floors()
        bounds = await client.bounds(shared.stream)
        stream = await client.admin.describe_stream(shared.stream)
        if stream.stream_id != shared.stream_id:
            ids = f"its id was {shared.stream_id}, and is {stream.stream_id}"
            shared.give_up(f"stream {shared.stream!r} was deleted and created again meanwhile: {ids}", gone=True)
            return {}
        if (level := level_of(stream)) != shared.level:
            shared.give_up(f"the level of stream {shared.stream!r} was {shared.level}, and is {level} since")
            return {}
        found = {}
        for streamlet, entries in bounds.items():
            for number, each in enumerate(entries):
                entry = streamlet, number
                if each.first_record > 0 and each.lost is None:
                    shared.give_up(
                        f"{each.first_record:,} records of streamlet {streamlet}, entry {number} have been removed"
                        " meanwhile, by retention or truncation"
                    )
                    return {}
                self._ledger.ends_at(entry, tuple(each.end), each.next_record, floors.get(entry, 0), each.lost)
                found[entry] = each.next_record
        self.looked += 1
        return found

    async def behind(
        self, reader: str, error: DataLost, positions: dict[int, list[Any]], client: Any
    ) -> dict[int, list[Any]]:
        """Return positions behind lost records. The loss is a finding, unless the durable ends report it as well."""
        lost = error.attributes
        entry = lost["streamlet_id"], lost.get("entry", 0)
        try:
            await self.look(client)
        except KeraError as failure:
            await self._shared.failed(reader, failure)
            return positions
        possible = self._shared.impossible is None
        if possible and self._ledger.tell_lost(entry, error.message, reader):  # the durable ends report no loss
            self._ledger.note("gone", f"{reader} got: {error.message}")
        positions[entry[0]][entry[1]] = lost["available_from"]
        await self._shared.failed(reader, error)
        return positions


def level_of(stream: StreamDescription) -> str:
    """Describe the level of a stream's acknowledgements."""
    return f"durability {stream.config.durability}, {plural(stream.config.replication, 'backup')}"


def pass_unreadable(ledger: Ledger, reader: str, chunk: ChunkBatch) -> bool:
    """Return whether a chunk is unreadable; tell the ledger if so."""
    header = chunk.header
    if chunk.batch.num_rows or not header.record_count:
        return False
    entry, what = (chunk.entry.streamlet_id, chunk.entry.entry), f"the chunk at {tuple(chunk.start)}"
    ledger.unreadable(reader, entry, header.first_record, header.record_count, what)
    return True


def strange(column: Any, at: int) -> str:
    """Describe a value of another program, for people."""
    value = column[at].as_py()
    if value is None:
        return "a record without a value"
    return f"a value of {plural(len(value), 'byte')}, {value[:STRANGE_BYTES_MAX]!r},"
