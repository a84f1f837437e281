"""What a query with epochs asks for, how it waits, and what its progress shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kera.client import ChunkPlace, ChunkQuery, Client
from kera.spark_connector.options.reading import parse_read_options
from kera.spark_connector.planning import next_ends
from kera.spark_connector.planning.offsets import EntryName, EpochMark, Offsets
from kera.spark_connector.planning.resolving import Question
from kera.spark_connector.reading.epochs import EpochPlanner
from tests.unit.spark_connector.test_epochs import MS, FakeEntry, World, ones, stored

NEEDED = {"kera.bootstrap.servers": "h:1", "subscribe": "flights", "startingOffsets": "earliest", "epoch": "10ms"}


class Locating:
    """A client that answers where chunks are."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def locate(self, stream: str, queries: Sequence[ChunkQuery]) -> list[ChunkPlace]:
        places = []
        for query in queries:
            assert query.end is not None
            entry = EntryName(stream, query.streamlet_id, query.entry)
            asked = Question(entry, query.start, query.end, query.timestamp_us)
            place = self._world.entries[query.entry].locate(asked)
            places.append(ChunkPlace(place.position, place.record, 0))
        return places


class Query:
    """A launch of a query."""

    def __init__(self, world: World, **options: str) -> None:
        parsed = parse_read_options({**NEEDED, **options})
        assert parsed.cadence is not None
        self.planner, self._world = EpochPlanner(parsed, parsed.cadence), world
        self._client = cast("Client", Locating(world))

    def begin(self) -> Offsets:
        return stored(asyncio.run(self.planner.begin(self._client, self._world.now(), now_us=0)))

    def following(self, given: Offsets, *, first: bool = False) -> Offsets:
        now = self._world.now()
        advance = next_ends(given, now, fail_on_data_loss=True)
        planning = self.planner.plan(self._client, given, now, advance, group="g", first=first)
        return asyncio.run(planning)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long it was waited."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


def test_brokers_are_not_asked_all_the_time_while_an_epoch_is_open(slept: list[float]) -> None:
    world = World([FakeEntry(ones(1, 12))])
    query = Query(world)
    end = query.following(query.begin())
    assert (end.epoch, slept) == (EpochMark(10, 0, 1), [])

    assert query.following(end) is end
    assert slept == [0.05]


def test_a_query_with_an_end_waits_for_nothing(slept: list[float]) -> None:
    world = World([FakeEntry(ones(1, 12))])
    query = Query(world)
    query.planner.end_here(world.now())
    world.entries[0].chunks += ones(25)
    end = query.following(query.begin())

    assert end.epoch == EpochMark(10, 0, 1)
    assert query.following(end) is end
    assert slept == []


def test_what_nobody_has_settled_is_not_read_by_a_query_with_an_end() -> None:
    world = World([FakeEntry([])])
    query = Query(world)
    begins = query.begin()
    query.planner.end_here(world.now())
    world.entries[0].chunks = ones(1, 12, 25)

    assert query.following(begins) is begins


def test_progress_tells_what_waits_and_who_holds_it_up() -> None:
    world = World([FakeEntry(ones(1, 12, 55)), FakeEntry(ones(2, 48))])
    query = Query(world, maxEpochsPerTrigger="1")
    assert query.planner.metrics(None) == {}
    end = query.following(query.begin())

    shown: dict[str, Any] = query.planner.metrics(end)
    assert shown == {
        "closedEpochsWaiting": "3",
        "nextEpochHeldUpBy": "flights/0/1",
        "nextEpochSettledUntil": "1970-01-01T00:00:00.048000+00:00",
    }
    assert query.planner.marked(end).epoch == EpochMark(10, None, 4)
    assert end.group == "g"


def test_a_time_that_no_year_has_is_a_number() -> None:
    far = (1 << 62) // MS
    world = World([FakeEntry(ones(1, far))])
    query = Query(world)
    query.following(query.begin())

    assert query.planner.metrics(None)["nextEpochSettledUntil"] == str(far * MS)


def test_the_first_micro_batch_is_empty_whether_there_is_anything_or_not_where_numbers_say_which_epochs_it_has(
    slept: list[float],
) -> None:
    world = World([FakeEntry(ones(1, 12))])
    counting, other = Query(world, epochsPerTrigger="1"), Query(world)
    begins = counting.begin()

    assert counting.following(begins, first=True) is begins
    assert counting.following(begins, first=True).epoch == EpochMark(10, 0, 1)
    assert other.following(begins, first=True).epoch == EpochMark(10, 0, 1)
    again = Query(world, epochsPerTrigger="1")
    again.planner.begun = True  # it has run the empty one, which was planned by the launch before
    assert again.following(begins, first=True).epoch == EpochMark(10, 0, 1)
    assert slept == []
