"""Streams in batches, each of which fits into one write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from kera.v1 import broker_pb2, common_pb2

WRITE_BYTES_MAX = 256 << 10
"""Maximum of the streams in one write: less than the limit of a transaction in any store."""

T = TypeVar("T", common_pb2.StreamInfo, broker_pb2.TakeOverStream)


def in_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists that each fit into one write."""
    batch: list[T] = []
    total_bytes = 0
    for item in items:
        batch.append(item)
        total_bytes += item.ByteSize()
        if total_bytes >= WRITE_BYTES_MAX:
            yield batch
            batch, total_bytes = [], 0
    if batch:
        yield batch
