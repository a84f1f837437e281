"""Rows are cut at the ends of epochs, as by a loop over the rows, and stay in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kera.client.producing.encoding.epoch_cuts import (
    NEVER_US,
    cut_at_epochs,
    epoch_end_us,
    in_seconds,
    is_one_epoch,
    rows_of_first_epoch,
)
from kera.client.producing.encoding.partitioner import Partition
from kera.client.types import StreamDescription
from tests.unit.client.support import description

Parts = list[tuple[int, list[int | None]]]
EPOCH_MS = 1
TIMES = st.lists(st.integers(-5, 5) | st.integers(-3000, 3000), min_size=1, max_size=12)


def naive(parts: Parts) -> Parts:
    found: Parts = []
    for streamlet, times in parts:
        begun: list[int | None] = []
        for time_us in times:
            latest = max((each for each in begun if each is not None), default=None)
            if time_us is not None and latest is not None and time_us // 1000 > latest // 1000:
                found.append((streamlet, begun))
                begun = []
            begun = [*begun, time_us]
        found.append((streamlet, begun))
    return found


def as_partition(parts: Parts, shuffled: list[int] | None) -> Partition:
    times = [time_us for _, of_streamlet in parts for time_us in of_streamlet]
    order = None
    if shuffled is not None:
        order = np.array(shuffled, np.int64)
        placed: list[int | None] = [0] * len(times)
        for place, time_us in zip(shuffled, times, strict=True):
            placed[place] = time_us
        times = placed
    # After other rows, like a slice of a batch.
    column = pa.array([7, *times], pa.timestamp("us", "UTC")).slice(1)
    batch = pa.RecordBatch.from_arrays([column], ["timestamp"])
    streamlets = np.array([streamlet for streamlet, _ in parts], np.int64)
    return Partition(batch, streamlets, np.cumsum([len(each) for _, each in parts]), order)


@given(st.data())
def test_rows_are_cut_at_epochs_as_by_a_loop(data: Any) -> None:
    ascending = TIMES.map(sorted)
    some = st.lists(st.none() | st.integers(-3000, 3000), min_size=1, max_size=12)
    parts: Parts = list(enumerate(data.draw(st.lists(ascending | TIMES | some, min_size=1, max_size=4)), 3))
    count = sum(len(times) for _, times in parts)
    shuffled = data.draw(st.none() | st.permutations(range(count)))
    stream: StreamDescription = description(epoch_ms=EPOCH_MS)
    found = cut_at_epochs(as_partition(parts, shuffled), stream)
    assert [(streamlet, [value.value for value in rows.column(0)]) for streamlet, rows in found.parts()] == naive(parts)


@given(TIMES.map(sorted) | TIMES | st.lists(st.none() | st.integers(-3000, 3000), min_size=1, max_size=12))
def test_the_rows_of_the_first_epoch_agree_with_a_loop(times: list[int | None]) -> None:
    rows = as_partition([(0, times)], None).batch
    first = naive([(0, times)])[0][1]
    assert rows_of_first_epoch(rows, description(epoch_ms=EPOCH_MS)) == len(first)
    assert rows_of_first_epoch(rows, description(epoch_ms=0)) == len(times)


@given(st.integers(-(1 << 62), 1 << 62), st.integers(-(1 << 62), 1 << 62), st.integers(0, 10**10))
def test_an_epoch_ends_where_the_next_one_begins(one_us: int, other_us: int, epoch_ms: int) -> None:
    end_us = epoch_end_us(one_us, epoch_ms)
    assert one_us < end_us
    low, high = sorted((one_us, other_us))
    assert is_one_epoch(low, high, epoch_ms) == (not epoch_ms or low // (epoch_ms * 1000) == high // (epoch_ms * 1000))
    if epoch_ms:
        assert (end_us % (epoch_ms * 1000), end_us - one_us <= epoch_ms * 1000) == (0, True)
    else:
        assert end_us == NEVER_US


@given(st.integers(1, 1 << 51), st.floats(-3e-6, 3e-6))
def test_an_end_in_seconds_separates_times_as_their_rounding_does(end_us: int, offset_s: float) -> None:
    time_s = end_us / 1e6 + offset_s
    if round(time_s * 1e6) >= end_us:
        assert time_s >= in_seconds(end_us)
    elif round(time_s * 1e6) < end_us - 2:
        assert time_s < in_seconds(end_us)
