"""Where the epochs of a stream end, for what a producer makes chunks of: a chunk is of one epoch. Pure functions.

A chunk of several would be of the last one as a whole, and its records of earlier ones late (docs/epochs.md). What is
older than the chunk that it comes to is late wherever it goes, so it goes there.
"""

from __future__ import annotations

import math

import numpy as np

from kera.client.producing.encoding import times_of
from kera.client.producing.partitioner import Partition
from kera.client.types import StreamDescription
from kera.core.punctuation import NO_TIME

NEVER_US = 1 << 63
"""Behind all times: there the epochs of a stream end that has none."""
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
    times = times_of(partition.batch, stream)
    if times is None or times.null_count == len(times):
        return partition
    numbers = known = np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset)
    if times.null_count:
        there = times.is_valid().to_numpy(zero_copy_only=False)
        numbers, known = np.where(there, numbers, NO_TIME), numbers[there]
    if is_one_epoch(int(np.minimum.reduce(known)), int(np.maximum.reduce(known)), stream.config.epoch_ms):
        return partition
    if partition.order is not None:
        numbers = numbers[partition.order]
    epoch_us = stream.config.epoch_ms * 1000
    epochs, ends, start, none = numbers // epoch_us, partition.ends, 0, NO_TIME // epoch_us
    for end in ends.tolist():
        latest = epochs[start:end]
        np.maximum.accumulate(latest, out=latest)
        if times.null_count:
            first = int(np.argmax(latest > none))
            latest[:first] = latest[first]
        start = end
    all_ends = np.union1d(ends, np.flatnonzero(epochs[1:] != epochs[:-1]) + 1)
    return partition._replace(streamlets=partition.streamlets[np.searchsorted(ends, all_ends)], ends=all_ends)
