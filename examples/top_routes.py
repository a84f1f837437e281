"""Taxi rides: the ten routes that were driven most within 30 minutes, told each time that these change.

The first query of the DEBS Grand Challenge 2015, over rides that are made up. Four depots write the rides of their
taxis, each at a pace of its own. Who reads while they come and who reads a day later tell the same changes in the same
order, as both read epochs (docs/epochs.md). No Spark is needed.
"""

# %% A cluster that runs
import argparse
import asyncio
import hashlib
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from typing import Any, TypeAlias

import pyarrow as pa

from kera.client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--bootstrap", default="127.0.0.1:7400", help="address of the coordinator")
bootstrap = parser.parse_known_args()[0].bootstrap

# %% Rides of three quarters of an hour, the same each time that this is run
DEPOTS, RIDES, MINUTES = 4, 6_000, 45
BEGIN = datetime(2013, 1, 1, 8, tzinfo=UTC)
SCHEMA = pa.schema(
    {
        "dropped_off": pa.timestamp("us", "UTC"),
        "from_latitude": pa.float64(),
        "from_longitude": pa.float64(),
        "to_latitude": pa.float64(),
        "to_longitude": pa.float64(),
    }
)
# Centre of cell 1.1 and the size of a cell, 500 m, in degrees: the grid is that of the challenge, 300 cells wide.
NORTH, WEST, SOUTHWARDS, EASTWARDS, CELLS = 41.474937, -74.913585, 0.004491556, 0.005986, 300


def made_up_rides() -> list[list[dict[str, Any]]]:
    """Of each depot, in the order in which they end. Some places are much in demand, and a few are not in the grid."""
    chance = random.Random(2013)
    places = [(40.70 + chance.random() * 0.1, -74.02 + chance.random() * 0.1) for _ in range(24)]
    places[-1] = (38.9, -77.0)
    demand = [1 / (rank + 1) for rank in range(len(places))]
    found: list[list[dict[str, Any]]] = [[] for _ in range(DEPOTS)]
    for second in sorted(chance.randrange(60 * MINUTES) for _ in range(RIDES)):
        start, stop = chance.choices(places, demand, k=2)
        while stop == start:
            (stop,) = chance.choices(places, demand)
        row = (BEGIN + timedelta(seconds=second), *start, *stop)
        found[chance.randrange(DEPOTS)].append(dict(zip(SCHEMA.names, row, strict=True)))
    return found


# %% A stream with epochs of a minute; what is over is told by those who write, as its times are not now
rides = f"rides-{time.time_ns()}"
FIRST = int(BEGIN.timestamp()) // 60
"""The number of the first epoch: minutes since 1970."""


async def create(client: Client) -> None:
    await client.admin.create_stream(
        rides,
        streamlets=DEPOTS,
        schema=SCHEMA,
        timestamp_column="dropped_off",
        epoch_ms=60_000,
        punctuation="producers",
    )


async def write(client: Client, depot: int, rows: list[dict[str, Any]], all_began: asyncio.Barrier) -> None:
    """A depot, with a streamlet of its own; the higher its number, the slower it is."""
    async with client.producer() as producer:
        await producer.prepare(rides)
        for minute in range(MINUTES):
            begin = BEGIN + timedelta(minutes=minute)
            batch = [row for row in rows if begin <= row["dropped_off"] < begin + timedelta(minutes=1)]
            await producer.send_batch(rides, pa.RecordBatch.from_pylist(batch, SCHEMA), streamlet=depot)
            if not minute:
                await producer.flush()
                await all_began.wait()  # who reads a streamlet before anything was written to it does not wait for it
            await asyncio.sleep(depot * 0.005)
        await producer.flush()
    await all_began.wait()


async def end(client: Client) -> None:
    """Say that nothing older comes: then the last minute is over, too."""
    async with client.producer() as producer:
        await producer.prepare(rides)
        await producer.punctuate(rides, int((BEGIN + timedelta(minutes=MINUTES)).timestamp()) * 1_000_000)


# %% The query: rides within 30 minutes by the time of their end, counted by route
WINDOW = timedelta(minutes=30)
Cell: TypeAlias = tuple[int, int]
Route: TypeAlias = tuple[Cell, Cell]


def cell(latitude: float, longitude: float) -> Cell | None:
    """East of and south of the first one; None: it is not in the grid."""
    x, y = round((longitude - WEST) / EASTWARDS) + 1, round((NORTH - latitude) / SOUTHWARDS) + 1
    return (x, y) if 1 <= x <= CELLS and 1 <= y <= CELLS else None


class TopTen:
    """Of the routes in a window that slides with the rides."""

    def __init__(self) -> None:
        self._window: deque[tuple[datetime, Route]] = deque()
        self._counts: Counter[Route] = Counter()
        self._latest: dict[Route, int] = {}
        """The number of the ride that was the last one of a route: of two with as many rides it comes first."""
        self._seen = 0
        self._ten: list[Route] = []

    def add(self, rows: list[dict[str, Any]]) -> Iterator[str]:
        """Take rides in the order of their ends; a line each time that the ten or their order have changed."""
        for at, row in enumerate(rows):
            now = row["dropped_off"]
            start = cell(row["from_latitude"], row["from_longitude"])
            stop = cell(row["to_latitude"], row["to_longitude"])
            if start and stop:
                self._seen += 1
                self._window.append((now, (start, stop)))
                self._counts[start, stop] += 1
                self._latest[start, stop] = self._seen
            if at + 1 < len(rows) and rows[at + 1]["dropped_off"] == now:
                continue  # there are others of this second
            while self._window and self._window[0][0] < now - WINDOW:
                _, route = self._window.popleft()
                self._counts[route] -= 1
                if not self._counts[route]:
                    del self._counts[route], self._latest[route]
            ten = nlargest(10, self._counts, key=lambda route: (self._counts[route], self._latest[route]))
            if ten != self._ten:
                self._ten = ten
                yield f"{now:%H:%M:%S} " + ", ".join(f"{_named(*route)} {self._counts[route]}" for route in ten)


def _named(start: Cell, stop: Cell) -> str:
    return f"from {start[0]}.{start[1]} to {stop[0]}.{stop[1]}:"


async def query(client: Client) -> list[str]:
    """All changes. Rows of an epoch are sorted by time, and those of one time by streamlet: the same for all."""
    top, changes = TopTen(), list[str]()
    async with client.epochs(rides, start=FIRST, end=FIRST + MINUTES) as epochs:
        async for epoch in epochs:
            changes += top.add(epoch.rows().to_pylist())
        print(f"{epochs.epochs_read} epochs with {epochs.records_read} rides, {epochs.late_records} of them late")
    return changes


# %% Depots write, one reader reads meanwhile, and another one later
async def run() -> tuple[list[str], list[str]]:
    async with await Client.connect(bootstrap) as client, asyncio.TaskGroup() as tasks:
        await create(client)
        all_began = asyncio.Barrier(DEPOTS + 1)
        for depot, rows in enumerate(made_up_rides()):
            tasks.create_task(write(client, depot, rows, all_began))
        await all_began.wait()
        live = tasks.create_task(query(client))
        await all_began.wait()
        await end(client)
        await live
        return live.result(), await query(client)


live, later = asyncio.run(run())

# %% What they tell
print(f"the ten have changed {len(live)} times; the last time, with their rides:")
print(live[-1].replace(", ", "\n         "))
print("the other reader tells", "the same" if later == live else "something else")
print("digest of all changes:", hashlib.sha256("\n".join(live).encode()).hexdigest()[:16])


# %% The end
async def delete() -> None:
    async with await Client.connect(bootstrap) as client:
        await client.admin.delete_stream(rides)


asyncio.run(delete())
