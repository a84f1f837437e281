"""How many records consumer groups have yet to read, asked of brokers from time to time, for the metrics.

The coordinator knows the cursors of consumer groups, and brokers know how many records follow a cursor. The figures are
as old as the last round of questions. If a broker does not answer, the figures of the streams concerned stay as they
were. The number of cursors is not bounded, so the coordinator asks about the first consumer groups by name, up to a
limit, and counts what it leaves out. Asking takes a twentieth of the time at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kera.coordinator.cluster.intervals import broker_of_group, index_of_group, intervals_of
from kera.coordinator.cluster.state import State
from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.progress import StreamletProgress, cursor_of, position_of
from kera.coordinator.consumer_groups.registry import ConsumerGroupRegistry
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import DataLost, KeraError
from kera.core.rpc.wire import error_from_message
from kera.v1 import common_pb2

log = get_logger("kera.consumer_groups")

PLACES_MAX = 50_000
"""Maximum of places in streams that are asked about in a round."""
CURSORS_MAX = 1000
"""Maximum of cursors in a request."""
TRIES_MAX = 3
"""Maximum of attempts of a request, as the records at its cursors may be removed meanwhile."""
SHARE = 20
"""The pause between two rounds is at least this many times as long as a round."""


class Key(NamedTuple):
    """The consumer group and the stream that a lag is about."""

    consumer_group: str
    stream: str


class Place(NamedTuple):
    """A cursor from which a broker is to count its records, and the lag that they belong to."""

    key: Key
    cursor: common_pb2.Cursor


class GroupLags:
    """Asks brokers for the lags of consumer groups, in bounded time and number, for the metrics.

    Belongs to the coordinator's loop; other threads may read `records`.
    """

    def __init__(
        self, state: State, registry: ConsumerGroupRegistry, interval_ms: int, *, places_max: int = PLACES_MAX
    ) -> None:
        """`interval_ms`: the pause between two rounds; 0: no rounds."""
        self._state = state
        self._registry = registry
        self._interval_s = interval_ms / 1000
        self._places_max = places_max
        self._asking: asyncio.Task[None] | None = None
        self.records: dict[Key, int] = {}
        """Lags by consumer group and stream; replaced as a whole."""
        self.left_out = 0
        """The number of consumer groups whose lags are unknown, because there are too many places."""

    def start(self) -> None:
        """Begin to ask in rounds."""
        if self._interval_s:
            self._asking = asyncio.create_task(self._ask_again())

    async def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    async def _ask_again(self) -> None:
        loop, pause_s, failing = asyncio.get_running_loop(), self._interval_s, Repeated(log)
        while True:
            await asyncio.sleep(pause_s)
            begun_s = loop.time()
            try:
                await self.ask()
                failing.over("lags of consumer groups are computed again")
            except Exception as error:  # noqa: BLE001 - it is logged
                failing.goes_on("cannot compute lags of consumer groups", level="error", exc_info=error)
            pause_s = max(self._interval_s, SHARE * (loop.time() - begun_s))

    async def ask(self) -> None:
        """Ask all brokers, one after the other."""
        found: Counter[Key] = Counter()
        unknown: set[Key] = set()
        places = await self._places(found)
        for broker_id, wanted in sorted(places.items()):
            if not self._state.brokers.is_alive(broker_id):  # a call would wait for its time-out, again and again
                unknown.update(place.key for place in wanted)
                continue
            for first in range(0, len(wanted), CURSORS_MAX):
                some = wanted[first : first + CURSORS_MAX]
                try:
                    unknown.update(await self._count(self._state.brokers.describe(broker_id), some, found))
                except KeraError:
                    unknown.update(place.key for place in some)
        before = self.records
        for key in unknown:
            found[key] = before.get(key, 0)
        self.records = {key: max(0, count) for key, count in found.items()}

    async def _places(self, found: Counter[Key]) -> dict[int, list[Place]]:
        """Return the places by broker, and subtract the records that are done behind cursors from `found`."""
        places: defaultdict[int, list[Place]] = defaultdict(list)
        room, self.left_out = self._places_max, 0
        for name in heapq.nsmallest(self._places_max, self._registry.groups):
            consumer_group = self._registry.groups.get(name)
            if consumer_group is None:
                continue
            of_group = await self._places_of(consumer_group, room)
            if of_group is None:
                self.left_out += 1
                continue
            asked, done = of_group
            found.subtract(done)
            room -= len(asked)
            for broker_id, place in asked:
                places[broker_id].append(place)
        return places

    async def _places_of(
        self, consumer_group: ConsumerGroup, room: int
    ) -> tuple[list[tuple[int, Place]], Counter[Key]] | None:
        """Return the places of a consumer group, each with its broker, and the records that are done behind cursors.

        None: there are more than `room` places.
        """
        if len(consumer_group.streamlets) > room:
            return None
        asked, done, pace = list[tuple[int, Place]](), Counter[Key](), self._state.pace()
        for (stream_id, streamlet_id), progress in list(consumer_group.streamlets.items()):
            await pace.step()
            stream = self._state.catalog.find(stream_id)
            if stream is None:
                continue
            key = Key(consumer_group.name, stream.name)
            done[key] += done_behind_cursors(progress)
            for broker_id, cursor in where_to_ask(progress, stream.assignments[streamlet_id]):
                asked.append((broker_id, Place(key, cursor)))
            if len(asked) > room:  # one for each entry and each broker that has groups of it
                return None
        return asked, done

    async def _count(self, broker: common_pb2.BrokerInfo, places: Sequence[Place], found: Counter[Key]) -> set[Key]:
        """Add the records that a broker has; return the keys for which it does not know the number now.

        If records were removed before they were read, the count starts behind them.
        """
        unknown: set[Key] = set()
        for _ in range(TRIES_MAX):
            lags = await self._state.broker_calls.measure_lag(broker, [place.cursor for place in places])
            again: list[Place] = []
            for place, lag in zip(places, lags, strict=True):
                if not lag.HasField("error"):
                    found[place.key] += lag.records
                    continue
                error = error_from_message(lag.error)
                if error.retriable:
                    unknown.add(place.key)
                elif (behind := self._behind(broker.broker_id, place, error)) is not None:
                    again.append(behind)
            if not again:
                return unknown
            places = again
        return unknown | {place.key for place in places}

    def _behind(self, broker_id: int, place: Place, lost: KeraError) -> Place | None:
        """Return the place of the next records that still exist, if they are at the same broker; else None."""
        cursor = place.cursor
        if not isinstance(lost, DataLost):
            return None
        behind = Position(*lost.attributes.get("available_from", ()) or EARLIEST)
        stream = self._state.catalog.find(cursor.stream_id)
        if behind <= position_of(cursor) or stream is None:
            return None
        if broker_of_group(stream.assignments[cursor.streamlet_id], behind.group_id) != broker_id:
            return None
        return place._replace(cursor=cursor_of(EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry), behind))


def where_to_ask(
    progress: StreamletProgress, assignment: common_pb2.StreamletAssignment
) -> Iterator[tuple[int, common_pb2.Cursor]]:
    """Yield each broker that has groups at or behind the cursor of an entry, and the cursor from which it
    should count.
    """
    intervals = intervals_of(assignment)
    for entry, position in enumerate(progress.cursors):
        first, asked = index_of_group(assignment, position.group_id), set[int]()
        for number, interval in enumerate(intervals[first:]):
            if interval.broker_id not in asked:
                start = Position(max(1, interval.first_group_id), 1, 0) if number else position
                yield interval.broker_id, cursor_of(EntryId(progress.stream_id, progress.streamlet_id, entry), start)
            asked.add(interval.broker_id)


def done_behind_cursors(progress: StreamletProgress) -> int:
    """Return how many records behind the cursors are done, while earlier ones are not; unknown numbers are left out."""
    records = 0
    for group in progress.groups.values():
        end = group.end_record if group.done else group.next_record
        if group.next > progress.cursors[group.entry] and None not in (group.first_record, end):
            records += (end or 0) - (group.first_record or 0)
    return records
