"""Requests about much are several requests: a message is read in one go, so daemons take none above 512 KiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

CURSORS_MAX = 8192
"""Cursors of a request: of some 40 bytes at most."""
RESET_STREAMLETS_MAX = 1024
"""Maximum of streamlets in one reset of a consumer group: each is a record that the coordinator stores, and it stores
them at once."""
RANGES_MAX = 2048
"""Ranges of a request, of some 80 bytes at most; it may also tell which ones are to be read no more."""


def batched(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """`items` in lists of so many; the last one may have fewer. Of none there is none."""
    iterator = iter(items)
    while batch := list(islice(iterator, count)):
        yield batch
