"""Planning of queries with epochs: requests to brokers, waits, and progress."""

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
    """A client that only answers where chunks are."""

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
    """The durations of all sleeps."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


def test_the_planner_sleeps_between_requests_while_an_epoch_is_open(slept: list[float]) -> None:
    world = World([FakeEntry(ones(1, 12))])
    query = Query(world)
    end = query.following(query.begin())
    assert (end.epoch, slept) == (EpochMark(10, 0, 1), [])

    assert query.following(end) is end
    assert slept == [0.05]


def test_a_query_with_an_end_does_not_wait(slept: list[float]) -> None:
    world = World([FakeEntry(ones(1, 12))])
    query = Query(world)
    query.planner.end_here(world.now())
    world.entries[0].chunks += ones(25)
    end = query.following(query.begin())

    assert end.epoch == EpochMark(10, 0, 1)
    assert query.following(end) is end
    assert slept == []


def test_a_query_with_an_end_reads_no_epochs_that_close_later() -> None:
    world = World([FakeEntry([])])
    query = Query(world)
    begins = query.begin()
    query.planner.end_here(world.now())
    world.entries[0].chunks = ones(1, 12, 25)

    assert query.following(begins) is begins


def test_progress_shows_the_closed_epochs_and_the_entry_that_holds_up_the_next() -> None:
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


def test_a_time_beyond_the_calendar_is_shown_as_a_number() -> None:
    far = (1 << 62) // MS
    world = World([FakeEntry(ones(1, far))])
    query = Query(world)
    query.following(query.begin())

    assert query.planner.metrics(None)["nextEpochSettledUntil"] == str(far * MS)


def test_with_epochs_per_trigger_the_first_micro_batch_is_empty_once(slept: list[float]) -> None:
    world = World([FakeEntry(ones(1, 12))])
    counting, other = Query(world, epochsPerTrigger="1"), Query(world)
    begins = counting.begin()

    assert counting.following(begins, first=True) is begins
    assert counting.following(begins, first=True).epoch == EpochMark(10, 0, 1)
    assert other.following(begins, first=True).epoch == EpochMark(10, 0, 1)
    again = Query(world, epochsPerTrigger="1")
    again.planner.begun = True  # it has run the empty micro-batch, which the launch before had planned
    assert again.following(begins, first=True).epoch == EpochMark(10, 0, 1)
    assert slept == []
