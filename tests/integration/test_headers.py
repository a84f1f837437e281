"""Headers with a repeated name, a null, and bytes that are not text, through real daemons: none is lost or moved."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client, Record
from kera.client.headers import Header
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.local.cluster import RunningCluster
from tests.integration.command_line import run_kera

SENT: list[list[Header]] = [
    [("a", b"1"), ("none", None), ("a", b""), ("", b"\xff\x00"), ("ü", b"x"), ("a", b"1")],
    [],
    [("b", b"2")],
]
READERS: list[dict[str, Any]] = [{"shared_memory": "always"}, {"shared_memory": "never"}, {"joined_bytes_max": 0}]
EXPECTED = [tuple(headers) for headers in SENT] * 2


async def fill(client: Client, stream: str, **settings: Any) -> None:
    """Write the records one by one, and then as a batch."""
    async with client.producer(**settings) as producer:
        await producer.prepare(stream)
        for headers in SENT:
            await producer.send(stream, b"", headers=headers)
        batch = pa.record_batch(
            {"value": [b""] * len(SENT), "headers": pa.array(SENT, DEFAULT_SCHEMA.field("headers").type)}
        )
        await (await producer.send_batch(stream, batch))


@pytest.mark.parametrize("payload", ["lean", "arrow"])
async def test_all_readers_get_all_headers_in_order(cluster: RunningCluster, payload: str) -> None:
    stream = f"headers-{payload}"
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(stream, codec="lz4" if payload == "arrow" else "none")
        await fill(client, stream, payload=payload)
        for settings in READERS:
            async with client.consumer(stream, start="earliest", end="latest", **settings) as consumer:
                assert [record.headers.pairs async for record in consumer] == EXPECTED
            async with client.consumer(stream, start="earliest", end="latest", **settings) as consumer:
                columns = [chunk.batch["headers"].to_pylist() async for chunk in consumer.batches()]
            assert [tuple(headers or ()) for column in columns for headers in column] == EXPECTED
        found: list[Record] = []
        async with client.group_consumer(f"{stream}-readers", stream) as member:
            while len(found) < len(EXPECTED):
                found += await member.poll()
        assert [record.headers.pairs for record in found] == EXPECTED


def test_the_command_line_sends_and_shows_repeated_headers(cluster: RunningCluster) -> None:
    def kera(*arguments: str, **more: Any) -> bytes:
        done = run_kera(*arguments, "--bootstrap", cluster.bootstrap, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    kera("stream", "create", "headers-cli")
    kera("produce", "headers-cli", "-H", "a=1", "-H", "b=x=y", "-H", "a=2", "-H", "a=", stdin=b"v\n")
    assert kera("consume", "headers-cli", "--until-end", "--format", r"%s %h\n") == b"v a=1,b=x=y,a=2,a=\n"
    lines = kera("consume", "headers-cli", "--until-end", "--json")
    assert json.loads(lines)["headers"] == [["a", "1"], ["b", "x=y"], ["a", "2"], ["a", ""]]
    kera("stream", "create", "headers-again")
    kera("produce", "headers-again", "--json", stdin=lines)
    assert kera("consume", "headers-again", "--until-end", "--format", r"%s %h\n") == b"v a=1,b=x=y,a=2,a=\n"
