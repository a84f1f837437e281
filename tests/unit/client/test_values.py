"""Values outside of the range of Python's `datetime`."""

from __future__ import annotations

import datetime

import pyarrow as pa

from kera.client.consuming.delivering.values import rows_of, values_of

FAR = 1 << 62
DAY_MS = 86_400_000


def test_only_a_time_outside_of_pythons_years_becomes_a_number() -> None:
    column = pa.array([1, FAR, None], pa.timestamp("us", tz="UTC"))
    first, far, missing = values_of(column)
    assert first == datetime.datetime(1970, 1, 1, microsecond=1, tzinfo=datetime.UTC)
    assert (far, missing) == (FAR, None)


def test_times_outside_of_pythons_years_become_numbers_in_every_type_and_nested() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "date64": pa.array([DAY_MS << 36], pa.date64()),
            "date32": pa.array([(1 << 31) - 1], pa.date32()),
            "list": pa.array([[FAR, 1]], pa.list_(pa.timestamp("s", tz="UTC"))),
            "map": pa.array([[("k", FAR)]], pa.map_(pa.string(), pa.duration("s"))),
            "struct": pa.array([{"x": FAR, "y": "text"}], pa.struct([("x", pa.timestamp("ms")), ("y", pa.string())])),
        }
    )
    assert rows_of(batch) == [
        {
            "date64": DAY_MS << 36,
            "date32": (1 << 31) - 1,
            "list": [FAR, datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)],
            "map": [("k", FAR)],
            "struct": {"x": FAR, "y": "text"},
        }
    ]


def test_rows_of_ordinary_batches_are_those_of_arrow() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, None], "b": ["x", "y"]})
    assert rows_of(batch) == batch.to_pylist()
