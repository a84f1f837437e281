"""Punctuations, the chunks without records that brokers write for epochs: both engines skip them everywhere."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kera.client import Client
from tests.spark.support import Kera, columnar_first, start, wait_until

YEAR_S = 366 * 86_400


async def send_late(client: Client, stream: str, numbers: range) -> None:
    """Send records of a year ago, each in a chunk after a punctuation, because the broker has made a new promise."""
    long_ago_us = time.time_ns() // 1000 - YEAR_S * 1_000_000
    async with client.producer() as producer:
        await producer.prepare(stream)
        for number in numbers:
            while not await is_due(client, stream):
                await asyncio.sleep(0.01)
            producer.send(stream, b"%d" % number, keys=b"k", timestamp_us=long_ago_us)
            await producer.flush()


async def is_due(client: Client, stream: str) -> bool:
    """Whether the broker has made a promise that is not in the log yet."""
    (entry,) = (await client.bounds(stream, promise=True))[0]
    return entry.promised_us is not None and entry.promised_us > (entry.watermark_us or 0)


@columnar_first
@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("never", marks=pytest.mark.slow)])
def test_batches_and_queries_skip_punctuations(kera: Kera, stream: str, tmp_path: Path, shared_memory: str) -> None:
    kera.create(stream, epoch_ms=100, epoch_grace_ms=1)
    kera.run(lambda client: send_late(client, stream, range(4)))
    (entry,) = kera.run(lambda client: client.bounds(stream))[0]
    assert entry.watermark_us is not None
    assert entry.watermark_us > (time.time() - YEAR_S / 2) * 1_000_000, "there are punctuations"

    expected = [b"%d" % number for number in range(4)]
    options = {"sharedMemory": shared_memory}
    frame = kera.read(stream, **options)
    assert [row.value for row in frame.orderBy("offset").collect()] == expected
    assert frame.count() == 4
    found: dict[int, list[object]] = {}
    query = start(
        kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger="1", **options),
        tmp_path / "checkpoint",
        found,  # type: ignore[arg-type]
    )
    try:
        wait_until(lambda: query.exception() or sum(map(len, found.values())) >= 4, "the records")
        kera.run(lambda client: send_late(client, stream, range(4, 6)))
        wait_until(lambda: query.exception() or sum(map(len, found.values())) >= 6, "those that came later")
    finally:
        query.stop()
    assert query.exception() is None
    assert sum(map(len, found.values())) == 6
