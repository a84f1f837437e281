"""The feeder, a separate process: it replays the tables into KerA as if they were happening.

It writes six hours at a time: first the weather of these hours, then the flights, and the next hours only when KerA has
acknowledged these. So readers always see a piece of history without a gap older than six hours, at any speed. At the
end a last row in each stream, a year later, shows event-time queries that history is over.

It reports each step on stdout as a line of JSON: how many rows are acknowledged, up to what event time, and when.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import itertools
import json
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from demo.data import STREAMS, Data, load
from kera.client import Client, Producer
from kera.core.base.process import die_with_parent

STEP_US = 6 * 3600 * 1_000_000
YEAR = dt.timedelta(days=365)


async def create_streams(bootstrap: str) -> None:
    """Create both streams, with the columns of the tables."""
    async with await Client.connect(bootstrap) as client:
        for name, settings in STREAMS.items():
            await client.admin.create_stream(name, **settings)


class Step(NamedTuple):
    """Six hours of history."""

    end_us: int
    weather: slice
    """The rows of the weather table."""
    flights: slice


async def begin(bootstrap: str, data: Data) -> None:
    """Write the first step only; `replay` with ``begun`` writes the others."""
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        await _send(producer, data, next(_steps(data)))


async def replay(bootstrap: str, data: Data, seconds: float, *, begun: bool) -> None:
    """Write both tables within about `seconds`."""
    async with await Client.connect(bootstrap) as client, client.producer() as producer:
        began = time.monotonic()
        for step in itertools.islice(_steps(data), 1 if begun else 0, None):
            await _send(producer, data, step)
            report = {
                "flights": step.flights.stop,
                "weather": step.weather.stop,
                "event_time_us": step.end_us,
                "at": time.time(),
            }
            print(json.dumps(report), flush=True)
            due = began + seconds * step.flights.stop / data.flights.num_rows
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        for stream, table in (("weather", data.weather), ("flights", data.flights)):
            await producer.send_batch(stream, _a_year_later(table[-1:]))


async def _send(producer: Producer, data: Data, step: Step) -> None:
    for stream, rows in (("weather", data.weather[step.weather]), ("flights", data.flights[step.flights])):
        if rows.num_rows:
            await producer.send_batch(stream, rows)
            await producer.flush()


def _steps(data: Data) -> Iterator[Step]:
    flight_times, weather_times = _times(data.flights["event_time"]), _times(data.weather["hour"])
    flights_done = weather_done = 0
    first, last = min(flight_times[0], weather_times[0]), max(flight_times[-1], weather_times[-1])
    for end_us in range(first + STEP_US, last + STEP_US + 1, STEP_US):
        flights_now, weather_now = (bisect_left(times, end_us) for times in (flight_times, weather_times))
        yield Step(end_us, slice(weather_done, weather_now), slice(flights_done, flights_now))
        flights_done, weather_done = flights_now, weather_now


def _times(column: pa.ChunkedArray) -> list[int]:
    times: list[int] = column.cast(pa.int64()).to_pylist()
    return times


def _a_year_later(row: pa.Table) -> pa.Table:
    values = row.to_pylist()[0]
    moved = {name: value + YEAR if isinstance(value, dt.datetime) else value for name, value in values.items()}
    return pa.Table.from_pylist([moved], schema=row.schema)


def main() -> None:
    """Run the feeder; `demo.__main__` starts it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bootstrap")
    parser.add_argument("--flights", type=int)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--begun", action="store_true", help="the first step is written already")
    arguments = parser.parse_args()
    die_with_parent()
    asyncio.run(replay(arguments.bootstrap, load(arguments.flights), arguments.seconds, begun=arguments.begun))


if __name__ == "__main__":
    main()
