"""The options of micro-batches that end with epochs: see ``planning.epochs``."""

from __future__ import annotations

from collections.abc import Mapping

from kera.spark_connector.options.names import (
    BYTES_MAX,
    DELAY_MAX,
    EPOCH,
    EPOCH_COLUMN,
    EPOCHS_EXACTLY,
    EPOCHS_MAX,
    LATENCY_TARGET,
    RECORDS_MAX,
    RECORDS_MIN,
    STRATEGY,
)
from kera.spark_connector.options.values import duration_ms, flag, whole_number, wrong
from kera.spark_connector.planning.epochs import Cadence

EPOCH_MS_MAX = 366 * 24 * 3_600_000
"""As for epochs of streams."""
EPOCHS_TOLD_MAX = 256
"""Maximum epochs of a micro-batch whose rows have their epoch, where each epoch is a partition for each entry."""
_OTHERWISE = {
    **dict.fromkeys(
        (RECORDS_MAX, BYTES_MAX, RECORDS_MIN, DELAY_MAX),
        f"counts what happens to be there, and with {EPOCH} a micro-batch has the same records whenever it is read:"
        f" leave it out, or use {EPOCHS_MAX}",
    ),
    LATENCY_TARGET: f"lets micro-batches begin and end by the clock, and with {EPOCH} they have the same records"
    " whenever they are read: leave it out, or make epochs shorter",
    STRATEGY: f"has no meaning with {EPOCH}, which waits for the time where a query begins: leave it out",
}
"""Options that cannot be combined with epochs, and why."""


def cadence_of(given: Mapping[str, str]) -> Cadence | None:
    """Return the cadence of the options; None: micro-batches end anywhere. Raises `InvalidArgument`."""
    if EPOCH not in given:
        for name in (EPOCHS_MAX, EPOCHS_EXACTLY, EPOCH_COLUMN):
            if name in given:
                raise wrong(name, f"is for {EPOCH}, which is not given: leave it out")
        return None
    epoch_ms = duration_ms(EPOCH, given[EPOCH])
    if not 1 <= epoch_ms <= EPOCH_MS_MAX:
        raise wrong(EPOCH, "must be from 1ms to 366d", given[EPOCH])
    for name, why in _OTHERWISE.items():
        if name in given:
            raise wrong(name, why)
    if EPOCHS_MAX in given and EPOCHS_EXACTLY in given:
        raise wrong(EPOCHS_MAX, f"has no meaning where {EPOCHS_EXACTLY} says how many: leave one of them out")
    numbers = {name: whole_number(name, given[name]) for name in (EPOCHS_MAX, EPOCHS_EXACTLY) if name in given}
    at_most = numbers.get(EPOCHS_MAX)
    if tells_epoch(given):
        for name, number in numbers.items():
            if number > EPOCHS_TOLD_MAX:
                raise wrong(name, f"with {EPOCH_COLUMN} must be at most {EPOCHS_TOLD_MAX}", given[name])
        at_most = at_most or EPOCHS_TOLD_MAX
    return Cadence(epoch_ms, numbers.get(EPOCHS_EXACTLY), at_most)


def tells_epoch(given: Mapping[str, str]) -> bool:
    """Whether rows are to have a column with their epoch."""
    return EPOCH_COLUMN in given and flag(EPOCH_COLUMN, given[EPOCH_COLUMN])
