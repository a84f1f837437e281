"""Pandas columns of Python objects: values are taken unchanged, or the batch is refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest

from kera.client.arrow_input import record_batches
from kera.core.errors import InvalidArgument

DAY, NOON = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 12)  # noqa: DTZ001 - one without a zone
UTC = datetime.UTC


def frame(values: list[Any]) -> pd.DataFrame:
    return pd.DataFrame({"x": pd.Series(values, dtype=object)})


@pytest.mark.parametrize(
    "values",
    [
        [1, "a"],
        [b"a", 1],
        [True, 1],
        [1, True],
        [2**64],
        [-1, 2**63],
        [2**53 + 1, 0.5],
        [Decimal("1.1"), 1.1],
        [DAY, NOON],
        [NOON, DAY],
        [pd.Timestamp(NOON), pd.Timestamp(NOON, tz="UTC")],
        [pd.Timestamp(NOON, tz="UTC"), None, pd.Timestamp(NOON)],
        [datetime.time(1), datetime.time(2, tzinfo=UTC)],
        [datetime.timedelta(1), 1],
        [NOON, 1],
        [{"a": 1}, {"a": "x"}],
        [[1], ["a"]],
        [object()],
        [1 + 2j],
    ],
)
def test_objects_of_several_types_are_refused(values: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"pandas\.DataFrame cannot be read as columns: .*"):
        record_batches(frame(values))


@pytest.mark.parametrize(
    "values",
    [
        [DAY, None, datetime.date.min],
        [NOON, None, NOON.replace(year=9999)],
        [NOON.replace(tzinfo=UTC), None],
        [datetime.time(23, 59, 59, 999_999), None],
        [datetime.timedelta(microseconds=1), None],
        [Decimal("1.10"), Decimal("2.00")],
        ["a", None],
        [2**63 - 1, -(2**63)],
    ],
)
def test_objects_of_one_type_are_taken_unchanged(values: list[Any]) -> None:
    (batch,) = record_batches(frame(values))
    assert batch.column("x").to_pylist() == values


@pytest.mark.parametrize("value", [DAY, NOON, datetime.time(1), datetime.timedelta(1)])
def test_every_null_of_pandas_becomes_a_null(value: Any) -> None:
    (batch,) = record_batches(frame([pd.NA, value, None, float("nan"), pd.NaT]))
    assert batch.column("x").to_pylist() == [None, value, None, None, None]
