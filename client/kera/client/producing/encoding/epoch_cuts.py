"""Where the epochs of a stream end, for what a producer makes chunks of: a chunk is of one epoch. Pure functions.

A chunk of several would be of the last one as a whole, and its records of earlier ones late (docs/epochs.md). What is
older than the chunk that it comes to is late wherever it goes, so it goes there.
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
"""Behind all times: there the epochs of a stream end that has none."""
_NONE = np.iinfo(np.int64).min
"""The epoch of what has no time: before all others."""
_MARGIN_S = 1e-6
"""Half of it for what is rounded up to an end; and times of day as floats are exact to a quarter of it."""


def epoch_end_us(time_us: int, epoch_ms: int) -> int:
    """Where the epoch of a time ends."""
    if not epoch_ms:
        return NEVER_US
    epoch_us = epoch_ms * 1000
    return (time_us // epoch_us + 1) * epoch_us


def in_seconds(end_us: int) -> float:
    """A time of day, in seconds, before all that are at or behind an end when they are rounded to microseconds."""
    return math.inf if end_us == NEVER_US else end_us / 1e6 - _MARGIN_S


def is_one_epoch(low_us: int, high_us: int, epoch_ms: int) -> bool:
    """Whether all from one time to another is in the same epoch."""
    return not epoch_ms or high_us < epoch_end_us(low_us, epoch_ms)


def cut_at_epochs(partition: Partition, stream: StreamDescription) -> Partition:
    """The same, with the rows of a streamlet in several parts: a new one begins with each row of a later epoch.

    A row without a time goes with those before it, or with those behind it, if it is the first of its streamlet. Where
    none has a time, all of it is as it was.
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
    """How many of the first rows come before the first one of a later epoch; see `cut_at_epochs`."""
    epochs = _epochs_of(rows, stream) if stream.config.epoch_ms else None
    if epochs is None:
        return int(rows.num_rows)
    _take_running_maximum(epochs)
    return int(np.searchsorted(epochs, epochs[0], side="right"))


def _epochs_of(rows: pa.RecordBatch, stream: StreamDescription) -> npt.NDArray[np.int64] | None:
    """The epoch of each row, `_NONE` for those without a time. None: no two are of different ones."""
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
