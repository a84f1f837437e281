"""Splits large requests into several: a message is read in one go, so daemons accept none above 512 KiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

CURSORS_MAX = 8192
"""Maximum number of cursors in a request: each has 40 bytes at most."""
RESET_STREAMLETS_MAX = 1024
"""Maximum number of streamlets in one reset of a consumer group: each is a record that the coordinator stores, and it
stores all of a request at once."""
RANGES_MAX = 2048
"""Maximum number of ranges in a request: each has 80 bytes at most; the request may also name ranges to end."""


def batched(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield `items` in lists of `count`; the last one may have fewer. Yields nothing if there are no items."""
    iterator = iter(items)
    while batch := list(islice(iterator, count)):
        yield batch
