"""The right answer, computed from the source tables without KerA or Spark, to compare with the result of both.

All sums are whole numbers, so a row that is lost, duplicated or joined with the wrong hour shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import pyarrow.compute as pc

from demo.data import Data

K = TypeVar("K")

SKIES = ("fair", "rain", "murk", "unknown")
"""Rain means rain or snow, murk a visibility below 3 miles without them, unknown a missing observation of the hour."""
VISIBILITY_LOW_MILES = 3.0


class Tally(NamedTuple):
    """Sums over some flights, without unknown values."""

    flights: int = 0
    departed: int = 0
    dep_delay: int = 0
    """Sum over the flights that departed, in minutes."""
    arrived: int = 0
    arr_delay: int = 0
    distance: int = 0


Tallies = dict[tuple[str, str], Tally]
"""Tallies by carrier and sky."""


def expected(data: Data) -> Tallies:
    """Compute the tallies of the source tables."""
    flights = data.flights.append_column("hour", pc.floor_temporal(data.flights["event_time"], unit="hour"))
    joined = flights.join(data.weather, ["origin", "hour"], join_type="left outer")
    murky = pc.less(joined["visib"], VISIBILITY_LOW_MILES)
    rainy = pc.greater(joined["precip"], 0)
    sky = pc.if_else(
        joined["precip"].is_null(), "unknown", pc.if_else(rainy, "rain", pc.if_else(murky, "murk", "fair"))
    )
    grouped = (
        joined.append_column("sky", sky)
        .group_by(["carrier", "sky"])
        .aggregate(
            [
                ([], "count_all"),
                ("dep_delay", "count"),
                ("dep_delay", "sum"),
                ("arr_delay", "count"),
                ("arr_delay", "sum"),
                ("distance", "sum"),
            ]
        )
    )
    rows = grouped.rename_columns(["carrier", "sky", *Tally._fields]).to_pylist()
    return {(row["carrier"], row["sky"]): tally_of(row) for row in rows}


def tally_of(row: Mapping[str, int | None]) -> Tally:
    """Return the tally in a row of results; an empty sum is 0."""
    return Tally(*(row[name] or 0 for name in Tally._fields))


def add(tallies: dict[K, Tally], key: K, tally: Tally) -> None:
    """Add `tally` to the tally of `key`."""
    tallies[key] = total([tallies.get(key, Tally()), tally])


def total(some: Iterable[Tally]) -> Tally:
    """Return the sum of some tallies."""
    return Tally(*(sum(column) for column in zip(Tally(), *some, strict=True)))


def differences(found: Tallies, right: Tallies) -> list[str]:
    """Describe the differences between two sets of tallies."""
    return [
        f"{carrier}, {sky}: {name} is {its:,}, should be {should:,}"
        for carrier, sky in sorted(found.keys() | right.keys())
        for name, its, should in zip(
            Tally._fields, found.get((carrier, sky), Tally()), right.get((carrier, sky), Tally()), strict=True
        )
        if its != should
    ]
