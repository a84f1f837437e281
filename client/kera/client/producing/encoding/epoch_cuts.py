"""Cut a producer's rows where the epochs of a stream end, so that each chunk is of one epoch. Pure functions.

A chunk with rows of several epochs would belong to the last of them as a whole, and its earlier records would be late
(docs/epochs.md). A record that is older than the open chunk is late in any chunk, so it joins this one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.client.producing.encoding.partitioner import Partition
from kera.client.producing.encoding.payloads import times_of
from kera.client.types import StreamDescription

NEVER_US = 1 << 63
"""Later than all times: the end of the only epoch of a stream without epochs."""
_NONE = np.iinfo(np.int64).min
"""The epoch of a row without a time: before all others."""
_MARGIN_S = 1e-6
"""Half of it covers times that are rounded up to an end; and times of day as floats are exact to a quarter of it."""


def epoch_end_us(time_us: int, epoch_ms: int) -> int:
    """Return the end of the epoch that a time is in, in microseconds; it is the first time of the next epoch."""
    if not epoch_ms:
        return NEVER_US
    epoch_us = epoch_ms * 1000
    return (time_us // epoch_us + 1) * epoch_us


def in_seconds(end_us: int) -> float:
    """Return a bound in seconds: every time that reaches `end_us` when rounded to microseconds is later than it."""
    return math.inf if end_us == NEVER_US else end_us / 1e6 - _MARGIN_S


def is_one_epoch(low_us: int, high_us: int, epoch_ms: int) -> bool:
    """Return whether all times from `low_us` to `high_us` are in the same epoch."""
    return not epoch_ms or high_us < epoch_end_us(low_us, epoch_ms)


def cut_at_epochs(partition: Partition, stream: StreamDescription) -> Partition:
    """Cut the rows of each streamlet into parts: a new part begins with each row of a later epoch.

    A row without a time goes with the rows before it, or with those behind it if it is the first of its streamlet. If
    no row has a time, the partition does not change.
    """
    if not stream.config.epoch_ms:
        return partition
    epochs = _epochs_of(partition.batch, stream)
    if epochs is None:
        return partition
    if partition.order is not None:
        epochs = epochs[partition.order]
    ends, start = partition.ends, 0
    for end in ends.tolist():
        _take_running_maximum(epochs[start:end])
        start = end
    all_ends = np.union1d(ends, np.flatnonzero(epochs[1:] != epochs[:-1]) + 1)
    return partition._replace(streamlets=partition.streamlets[np.searchsorted(ends, all_ends)], ends=all_ends)


def rows_of_first_epoch(rows: pa.RecordBatch, stream: StreamDescription) -> int:
    """Return the number of rows before the first row of a later epoch; see `cut_at_epochs`."""
    epochs = _epochs_of(rows, stream) if stream.config.epoch_ms else None
    if epochs is None:
        return int(rows.num_rows)
    _take_running_maximum(epochs)
    return int(np.searchsorted(epochs, epochs[0], side="right"))


def _epochs_of(rows: pa.RecordBatch, stream: StreamDescription) -> npt.NDArray[np.int64] | None:
    """Return the epoch of each row, `_NONE` for a row without a time. None: all rows are of the same epoch."""
    times = times_of(rows, stream)
    if times is None or times.null_count == len(times):
        return None
    numbers = known = np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset)
    there = None
    if times.null_count:
        there = times.is_valid().to_numpy(zero_copy_only=False)
        known = numbers[there]
    if is_one_epoch(int(np.minimum.reduce(known)), int(np.maximum.reduce(known)), stream.config.epoch_ms):
        return None
    epochs: npt.NDArray[np.int64] = numbers // (stream.config.epoch_ms * 1000)
    return epochs if there is None else np.where(there, epochs, _NONE)


def _take_running_maximum(epochs: npt.NDArray[np.int64]) -> None:
    np.maximum.accumulate(epochs, out=epochs)
    if epochs[0] == _NONE:
        first = int(np.argmax(epochs > _NONE))
        epochs[:first] = epochs[first]
