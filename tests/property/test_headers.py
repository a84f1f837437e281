"""Headers arrive as they were sent: all of them, in order, by each way of sending and reading."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kera.client import Client, ClientSettings, Headers
from kera.client.headers import Header
from kera.client.serializers import JsonDeserializer, JsonSerializer
from kera.client.sync import Client as SyncClient
from kera.client.testing import FakeCluster
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.examples import fuzz_examples

pytestmark = pytest.mark.usefixtures("either_core")

NAMES = st.sampled_from(["", "a", "b", "\0"]) | st.text(max_size=4)
VALUES = st.none() | st.sampled_from([b"", b"\xff\x00"]) | st.binary(max_size=40)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=5)
WAYS = 7
"""The number of times that each row is sent."""


def batch_of(number: int, row: Sequence[Header]) -> pa.RecordBatch:
    kind = DEFAULT_SCHEMA.field("headers").type
    return pa.record_batch({"value": [b"%d" % number], "headers": pa.array([row], kind)})


async def send(client: Client, rows: Sequence[list[Header]], payload: Any) -> None:
    """Send each row in all ways of a producer; its number is the value."""
    async with client.producer(payload=payload) as producer:
        await producer.prepare("s")
        for number, row in enumerate(rows):
            value, repeats = b"%d" % number, len(dict(row)) < len(row)
            producer.send("s", value, headers=row)
            producer.send("s", value, headers=iter(row), keys=b"k")
            producer.send("s", value, headers=Headers(row))
            producer.send("s", value, headers=row if repeats else dict(row))
            await producer.send_batch("s", batch_of(number, row))
    async with client.producer(serializer=JsonSerializer(), payload=payload) as producer:
        await producer.prepare("s")
        for number, row in enumerate(rows):
            producer.send("s", number, headers=row)


def send_without_asyncio(bootstrap: str, settings: ClientSettings, rows: Sequence[list[Header]]) -> Counter[Any]:
    """Likewise; returns the records of a consumer without asyncio."""
    with SyncClient(bootstrap, settings) as client:
        with client.producer() as producer:
            for number, row in enumerate(rows):
                given = list(row)
                producer.send("s", b"%d" % number, headers=given)
                given.append(("added later", b""))
        with client.consumer("s", start="earliest", end="latest") as consumer:
            return Counter((int(record.value), record.headers.pairs) for record in consumer)


@settings(max_examples=fuzz_examples(100, 3))
@example([[("a", b"1"), ("b", None), ("a", b"")], [], [("", b"\xff")]], "lean")
@given(st.lists(HEADERS, min_size=1, max_size=4), st.sampled_from(["arrow", "lean"]))
def test_headers_arrive_as_they_were_sent(rows: list[list[Header]], payload: str) -> None:
    async def run() -> None:
        async with FakeCluster() as cluster:
            client = cluster.client()
            await client.admin.create_stream("s")
            await send(client, rows, payload)
            without_asyncio = await asyncio.to_thread(send_without_asyncio, cluster.bootstrap, cluster.settings(), rows)
            expected = Counter((number, tuple(row)) for number, row in enumerate(rows) for _ in range(WAYS))
            assert without_asyncio == expected
            options: dict[str, Any] = {"start": "earliest", "end": "latest"}
            async with client.consumer("s", **options, deserializer=JsonDeserializer()) as consumer:
                assert Counter([(record.value, record.headers.pairs) async for record in consumer]) == expected
            async with client.consumer("s", **options) as consumer:
                columns = [chunk.batch.select(["value", "headers"]).to_pydict() async for chunk in consumer.batches()]
            found = [pair for each in columns for pair in zip(each["value"], each["headers"], strict=True)]
            assert Counter((int(value), tuple(headers or ())) for value, headers in found) == expected

    asyncio.run(run())
