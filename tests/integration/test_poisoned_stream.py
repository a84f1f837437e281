"""A stream with chunks on which Arrow would crash a process, as an older broker has accepted them.

Every reader reports such a chunk with `CorruptChunk`, or skips it and continues after it. A broker that checks chunks
accepts none, over any transport.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from playwright.async_api import expect

from kera.client import Client, Record, StreamDescription
from kera.core.base.ids import PRODUCER_IDS
from kera.core.base.settings import KIB, MIB
from kera.core.errors import CorruptChunk
from kera.core.format import lean
from kera.core.format.chunk import ARROW_CODECS, ARROW_VERSION, LEAN_VERSION, Codec, encode_chunk, encode_payload
from kera.core.format.payload import open_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.local.running import RunningCluster, run_in_thread
from kera.v1 import broker_pb2
from tests.chaos.arrow_structures import restructured
from tests.chaos.chunk_uses import HEADER
from tests.chaos.lean_structures import structured
from tests.chaos.unchecked import UncheckedCluster
from tests.integration.console_support import a_browser, a_console, needs_chromium

BOUND_S = 60.0
STREAM = "poisoned"
BEFORE, BEHIND = [b"before", b"also before"], [b"behind", b"also behind"]
PAIRS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
RANDOM, RANDOM_ARROW = 12, 8


class Poison:
    """A payload of one record of `DEFAULT_SCHEMA` that readers must refuse."""

    def __init__(self, payload: bytes, version: int, codec: Codec = Codec.NONE) -> None:
        self.payload, self.version, self.codec = payload, version, codec

    def chunk(self, stream: StreamDescription, producer: int, sequence: int = 0) -> bytes:
        """A chunk with the right checksums."""
        return encode_chunk(
            pa.py_buffer(self.payload),
            record_count=1,
            stream_id=stream.stream_id,
            streamlet_id=0,
            schema_id=stream.schema_id,
            producer_id=PRODUCER_IDS.start + producer,
            producer_epoch=1,
            sequence=sequence,
            created_us=1,
            min_timestamp_us=1,
            max_timestamp_us=1,
            codec=self.codec,
            version=self.version,
        ).to_bytes()


def _null_header_name() -> pa.RecordBatch:
    """A record whose header has no name: as lists, since Arrow has no such map."""
    kinds = [*DEFAULT_SCHEMA.types[:3], PAIRS]
    values = ([0], [[b"key"]], [b"value"], [[{"key": None, "value": b"x"}]])
    columns = [pa.array(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return pa.record_batch(columns, DEFAULT_SCHEMA.names)


def _null_time() -> pa.RecordBatch:
    """A record without a time."""
    kinds = DEFAULT_SCHEMA.types
    values: tuple[list[Any], ...] = ([None], [[b"key"]], [b"value"], [[("a", b"x")]])
    columns = [pa.array(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return pa.record_batch(columns, DEFAULT_SCHEMA.names)


def _poisons() -> dict[str, Poison]:
    found = {}
    for name, batch in {"null header name": _null_header_name(), "null time": _null_time()}.items():
        for codec in Codec:
            payload = lean.encode(batch, ARROW_CODECS.get(codec), bytes_max=MIB)
            found[f"{name}, {codec.name}"] = Poison(payload or b"", LEAN_VERSION, codec)
        found[f"{name}, Arrow"] = Poison(encode_payload(batch).to_pybytes(), ARROW_VERSION)
    random_ = random.Random(7)
    while len(found) < 8 + RANDOM:
        poison = Poison(structured(DEFAULT_SCHEMA, 1, None, random_), LEAN_VERSION)
        if _is_refused(poison):
            found[f"structure {len(found)}"] = poison
    record = {"timestamp": 1, "keys": [b"key"], "value": b"value", "headers": [("a", b"x")]}
    message = encode_payload(pa.RecordBatch.from_pylist([record], DEFAULT_SCHEMA)).to_pybytes()
    while len(found) < 8 + RANDOM + RANDOM_ARROW:
        poison = Poison(restructured(message, DEFAULT_SCHEMA, None, random_), ARROW_VERSION)
        if _is_refused(poison):
            found[f"structure {len(found)}, Arrow"] = poison
    return found


def _is_refused(poison: Poison) -> bool:
    header = HEADER._replace(version=poison.version, codec=poison.codec, record_count=1)
    try:
        open_payload(poison.payload, DEFAULT_SCHEMA, header)
    except CorruptChunk:
        return True
    return False


POISONS = _poisons()


async def _sent(channel: Channel, *chunks: bytes) -> list[str]:
    """The broker's error code for each chunk; empty if it accepted the chunk."""
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(chunks))
    reply = await channel.submit(api.MULTI_WRITE_CHUNKS, request, list(chunks), timeout_s=BOUND_S)
    return [status.error.code for status in reply.message.statuses]


async def _channel(stream: StreamDescription, transport: str) -> Channel:
    broker = stream.brokers[stream.assignments[0].broker_id]
    if transport == "grpc":
        return GrpcChannel(broker.grpc_address)
    if transport == "unix":
        return await FrameChannel.connect_unix(broker.frames_unix_path, timeout_s=BOUND_S)
    return await FrameChannel.connect_tcp(broker.frames_address, timeout_s=BOUND_S)


async def _produced(client: Client, values: list[bytes]) -> None:
    async with client.producer() as producer:
        await producer.prepare(STREAM)
        for value in values:
            await producer.send(STREAM, value)  # a chunk each


async def _poison(bootstrap: str) -> None:
    """A stream with good records, all of `POISONS`, and good records after them."""
    async with await Client.connect(bootstrap) as client:
        stream = await client.admin.create_stream(STREAM, streamlets=1)
        await _produced(client, BEFORE)
        channel = await _channel(stream, "tcp")
        for number, poison in enumerate(POISONS.values()):
            assert await _sent(channel, poison.chunk(stream, number)) == [""]
        await channel.close()
        await _produced(client, BEHIND)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A broker that has accepted all of `POISONS`, and now checks chunks."""
    directory = tmp_path_factory.mktemp("poisoned")  # without one, everything would be gone with the first broker
    unchecked = UncheckedCluster(data_dir=directory, brokers=1, arena_bytes=64 * MIB, segment_bytes=512 * KIB)
    with run_in_thread(unchecked) as running:
        asyncio.run(_poison(running.bootstrap))
        unchecked.checked = True
        running.restart("broker-1")
        yield running


# -- readers -----------------------------------------------------------------------------------------------------------


async def _read(reader: AsyncIterable[Record]) -> tuple[list[bytes | None], Exception | None]:
    """The values of a reader's records, and the error that ends them."""
    found: list[bytes | None] = []
    try:
        async for record in reader:
            found += [record.value]
    except CorruptChunk as error:
        return found, error
    return found, None


@pytest.mark.parametrize("shared_memory", ["always", "never"])
@pytest.mark.parametrize("joined_bytes_max", [0, 1 * MIB], ids=["each", "joined"])
async def test_a_consumer_skips_poisoned_chunks_or_reports_the_first(
    cluster: RunningCluster, shared_memory: str, joined_bytes_max: int
) -> None:
    """Pushed through shared memory or pulled, chunk by chunk or several at once."""
    settings: dict[str, Any] = {"shared_memory": shared_memory, "joined_bytes_max": joined_bytes_max}
    async with await Client.connect(cluster.bootstrap) as client:
        async with client.consumer(STREAM, start="earliest", end="latest", corrupt_chunks="skip", **settings) as reader:
            found = [value async for batch in reader.batches() for value in batch.batch.column("value").to_pylist()]
        assert found == BEFORE + BEHIND
        async with client.consumer(STREAM, start="earliest", end="latest", **settings) as reader:
            found, told = await _read(reader)
        assert found == BEFORE
        assert isinstance(told, CorruptChunk)
        assert told.attributes["stream"] == STREAM


async def test_a_consumer_group_skips_poisoned_chunks_or_reports_the_first(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        async with client.group_consumer("readers", STREAM, corrupt_chunks="skip") as reader:
            found = []
            async for record in reader:
                found.append(record.value)
                if len(found) == 4:
                    break
            await reader.commit()
        assert found == BEFORE + BEHIND
        async with client.group_consumer("strict", STREAM) as reader:
            found, told = await _read(reader)
        assert found == BEFORE
        assert isinstance(told, CorruptChunk)


def _kera(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, since the test checks that no signal ends it."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("KERA_")}
    done = subprocess.run(
        [sys.executable, "-m", "kera.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode != -signal.SIGABRT, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_kera_consume_skips_poisoned_chunks_or_reports_the_first_in_one_line(cluster: RunningCluster) -> None:
    arguments = ("consume", STREAM, "--bootstrap", cluster.bootstrap, "--until-end")
    ended = _kera(*arguments)
    assert (ended.returncode, ended.stdout) == (1, "before\nalso before\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kera: error: chunk at ")
    skipped = _kera(*arguments, "--corrupt-chunks", "skip")
    assert (skipped.returncode, skipped.stdout) == (0, "before\nalso before\nbehind\nalso behind\n")
    assert len(skipped.stderr.splitlines()) == len(POISONS)


def test_a_copy_ends_with_an_error_that_names_the_poisoned_chunk(cluster: RunningCluster, tmp_path: Path) -> None:
    done = _kera(
        "connect", "copy", f"kera:{STREAM}", f"{tmp_path}/out/", "--format", "jsonl", "--bootstrap", cluster.bootstrap
    )
    assert done.returncode == 1, done.stderr
    assert "chunk at" in done.stderr.splitlines()[-1]


@needs_chromium
@pytest.mark.slow
async def test_the_console_shows_the_records_around_poisoned_chunks(cluster: RunningCluster) -> None:
    async with a_console(bootstrap=cluster.bootstrap) as console, a_browser() as look:
        assert await look.go(f"{console.url}/streams/{STREAM}/messages") == 200
        await look.page.get_by_role("button", name="Show").click()
        await expect(look.page.locator("table.messages tbody tr")).to_have_count(4, timeout=BOUND_S * 1000)
        text = await look.text()
        assert all(value.decode() in text for value in (*BEFORE, *BEHIND)), text
        assert not look.complaints


# -- the broker
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "unix", "grpc"])
async def test_a_broker_refuses_poisoned_lean_chunks(cluster: RunningCluster, transport: str) -> None:
    """Alone, and as the second of two chunks of a producer in one request, which the core would accept without the
    check.
    """
    async with await Client.connect(cluster.bootstrap) as client:
        stream = await client.admin.create_stream(f"door-{transport}", streamlets=1)
        channel = await _channel(stream, transport)
        good = Poison(_good(), LEAN_VERSION)
        try:
            for number, (name, poison) in enumerate(POISONS.items()):
                if poison.version == LEAN_VERSION:
                    assert await _sent(channel, good.chunk(stream, number)) == [""]
                    assert await _sent(channel, poison.chunk(stream, number, 1)) == ["corrupt_chunk"], name
        finally:
            await channel.close()


def _good() -> bytes:
    batch = pa.RecordBatch.from_pylist([{"timestamp": 1, "value": b"good"}], DEFAULT_SCHEMA)
    return lean.encode(batch, None, bytes_max=MIB) or b""
