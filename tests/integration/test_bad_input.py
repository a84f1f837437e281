"""Bad input and bad surroundings: a clear error names the problem and the way out, and existing data is not lost."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kera.client import Client, ClientSettings
from kera.core.base.settings import KIB, MIB
from kera.core.errors import (
    RecordTooLarge,
    SchemaMismatch,
    StreamExists,
    StreamletOutOfRange,
    Unavailable,
    UnknownStream,
    error_from_wire,
)
from kera.core.format import lean
from kera.core.format.chunk import ARROW_VERSION, LEAN_VERSION, encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.local.cluster import RunningCluster
from kera.v1 import broker_pb2

TIMEOUT_S = 60.0
FIRST = [b"first", b"second"]
ROW = {"timestamp": 0, "keys": None, "value": b"x", "headers": None}


async def create(client: Client, name: str, **options: object) -> None:
    """A stream with two records, which bad input must not harm."""
    await client.admin.create_stream(name, **options)  # type: ignore[arg-type]
    async with client.producer() as producer:
        await producer.send_batch(name, pa.record_batch({"value": FIRST}), streamlet=0)


async def values(client: Client, name: str) -> list[bytes | None]:
    """Everything in a stream."""
    async with client.consumer(name, start="earliest", end="latest") as consumer:
        return [record.value async for record in consumer]


def null_header_name() -> bytes:
    """A lean payload of one record whose only header has no name."""
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    types = [*DEFAULT_SCHEMA.types[:3], pairs]
    values = ([0], [[b"key"]], [b"value"], [[{"key": None, "value": b"x"}]])
    columns = [pa.array(value, kind) for value, kind in zip(values, types, strict=True)]
    return lean.encode(pa.record_batch(columns, DEFAULT_SCHEMA.names), None, bytes_max=MIB) or b""


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a daemon that cannot start, to its end."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("KERA_")}
    return subprocess.run(
        [sys.executable, "-m", "kera.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The error of a daemon that did not start: one line, the last one, and exit code 2."""
    assert result.returncode == 2, result.stderr
    assert not result.stdout, "a daemon that does not serve says so nowhere but in its error"
    assert "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("kera: error: ")
    return line


async def test_an_unknown_stream_is_an_error(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client, client.producer() as producer:
        with pytest.raises(UnknownStream, match="nowhere"):
            await producer.prepare("nowhere")
        with pytest.raises(UnknownStream, match="nowhere"):
            await client.bounds("nowhere")
        with pytest.raises(UnknownStream, match="nowhere"):
            await client.consumer("nowhere").start()


async def test_a_streamlet_out_of_range_is_rejected(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        await create(client, "range", streamlets=2)
        async with client.producer() as producer:
            await producer.prepare("range")
            with pytest.raises(StreamletOutOfRange, match="0 to 1, not 2") as caught:
                producer.send("range", b"lost?", streamlet=2)
            assert caught.value.attributes == {"stream": "range", "streamlet_id": 2, "streamlets": 2}
            await producer.send("range", b"kept", streamlet=0)
        assert await values(client, "range") == [*FIRST, b"kept"]


@pytest.mark.parametrize("transport", ["unix", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_chunk_with_a_bad_checksum_is_refused_and_its_neighbours_are_stored(
    cluster: RunningCluster, transport: str
) -> None:
    name = f"checksum-{transport}"
    async with await Client.connect(cluster.bootstrap) as client:
        await create(client, name, streamlets=3)
        stream = await client.describe(name)
        owner = stream.broker_of(0)
        assert owner is not None
        mine = [streamlet for streamlet, item in stream.assignments.items() if item.broker_id == owner.broker_id]
        assert len(mine) == 2, "three streamlets on two brokers"

        def chunk(streamlet: int, value: bytes, sequence: int = 0, lean_payload: bytes | None = None) -> bytearray:
            payload = encode_payload(pa.RecordBatch.from_pylist([{**ROW, "value": value}], DEFAULT_SCHEMA))
            encoded = encode_chunk(
                payload if lean_payload is None else lean_payload,
                record_count=1,
                stream_id=stream.stream_id,
                streamlet_id=streamlet,
                schema_id=stream.schema_id,
                producer_id=1 << 40,
                producer_epoch=1,
                sequence=sequence,
                created_us=0,
                min_timestamp_us=0,
                max_timestamp_us=0,
                version=ARROW_VERSION if lean_payload is None else LEAN_VERSION,
            )
            return bytearray(encoded.to_bytes())

        bad = chunk(mine[0], b"bad")
        bad[-100] ^= 1
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=2)
        channel: Channel = GrpcChannel(owner.grpc_address)
        if transport == "unix":
            channel = await FrameChannel.connect_unix(owner.frames_unix_path, timeout_s=TIMEOUT_S)
        reply = await channel.submit(
            api.MULTI_WRITE_CHUNKS, request, [bytes(bad), bytes(chunk(mine[1], b"good"))], timeout_s=TIMEOUT_S
        )
        refusal, stored = reply.message.statuses
        assert refusal.error.code == "corrupt_chunk"
        error = error_from_wire(refusal.error.code, refusal.error.message, dict(refusal.error.attributes))
        assert "does not match its checksum" in str(error)
        assert error.attributes["streamlet_id"] == mine[0]
        assert not stored.HasField("error")
        # A null key of a map would end every process that reads it.
        poison = await channel.submit(
            api.MULTI_WRITE_CHUNKS,
            broker_pb2.MultiWriteChunksRequest(chunk_count=1),
            [bytes(chunk(mine[0], b"", lean_payload=null_header_name()))],
            timeout_s=TIMEOUT_S,
        )
        assert poison.message.statuses[0].error.code == "corrupt_chunk"
        assert "nulls among the keys" in poison.message.statuses[0].error.message
        # Nothing of the bad chunks was kept: the same sequence is still expected.
        again = await channel.submit(
            api.MULTI_WRITE_CHUNKS,
            broker_pb2.MultiWriteChunksRequest(chunk_count=1),
            [bytes(chunk(mine[0], b"mended"))],
            timeout_s=TIMEOUT_S,
        )
        assert not again.message.statuses[0].HasField("error")
        await channel.close()
        assert sorted(filter(None, await values(client, name))) == sorted([*FIRST, b"good", b"mended"])


async def test_a_record_larger_than_a_segment_is_rejected(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        await create(client, "oversize")
        async with client.producer() as producer:
            await producer.prepare("oversize")
            with pytest.raises(RecordTooLarge, match=f"segment of stream 'oversize' .{512 * KIB} bytes"):
                producer.send("oversize", bytes(512 * KIB))
            with pytest.raises(RecordTooLarge, match="--segment-bytes"):
                await producer.send_batch("oversize", pa.record_batch({"value": [b"small", bytes(1 * MIB)]}))
            await producer.send("oversize", b"kept")
        assert await values(client, "oversize") == [*FIRST, b"kept"], "a batch is refused as a whole"


async def test_a_batch_that_does_not_match_the_schema_is_rejected(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        schema = pa.schema([("carrier", pa.string()), ("delay", pa.int32())])
        await client.admin.create_stream("typed", schema=schema, key_column="carrier")
        good = pa.record_batch([["UA", "AA"], pa.array([1, 2], pa.int32())], schema=schema)
        async with client.producer() as producer:
            await producer.send_batch("typed", good)
            for bad, text in (
                (good.set_column(1, "delay", pa.array([1, 2], pa.int64())), "'delay' is int32, the batch has int64"),
                (good.append_column("extra", pa.array([1, 2])), "has no column 'extra'"),
            ):
                with pytest.raises(SchemaMismatch, match=text):
                    await producer.send_batch("typed", bad)
            with pytest.raises(SchemaMismatch, match="use send_batch"):
                producer.send("typed", b"no row")
        async with client.consumer("typed", start="earliest", end="latest") as consumer:
            assert [record.row async for record in consumer] == good.to_pylist()


async def test_creating_an_existing_stream_fails_and_changes_nothing(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        await create(client, "twice")
        with pytest.raises(StreamExists, match="twice"):
            await client.admin.create_stream("twice", streamlets=7)
        assert (await client.admin.describe_stream("twice")).config.streamlets == 1
        assert await values(client, "twice") == FIRST


async def test_the_error_names_the_coordinator_that_cannot_be_reached(tmp_path: Path, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    broker = start(
        *("broker", "--coordinator", address, "--data-dir", str(tmp_path), "--arena-bytes", "16MiB"),
        *("--coordinator-timeout-ms", "300"),
    )
    assert f"no coordinator at {address} within 0.3 s; start one (kera coordinator)" in refused(broker)
    async with await Client.connect(address, ClientSettings(retry_timeout_ms=200)) as client:
        with pytest.raises(Unavailable, match=address):
            await client.admin.list_streams()


async def test_a_daemon_does_not_start_on_a_taken_port(cluster: RunningCluster, tmp_path: Path) -> None:
    port = cluster.bootstrap.rpartition(":")[2]
    coordinator = start("coordinator", "--port", port, "--data-dir", str(tmp_path / "coordinator"))
    error = refused(coordinator)
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "choose another port" in error
    for flag in ("--port", "--frames-port", "--metrics-port"):
        broker = start(
            *("broker", "--coordinator", cluster.bootstrap, flag, port, "--arena-bytes", "16MiB"),
            *("--data-dir", str(tmp_path / "broker"), "--ephemeral"),
        )
        assert f"cannot listen on 127.0.0.1:{port}" in refused(broker)
    async with await Client.connect(cluster.bootstrap) as client:
        assert sum(broker.alive for broker in (await client.admin.describe_cluster()).brokers) == 2


def test_a_broker_does_not_start_with_too_little_shared_memory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm_dir:
        broker = start("broker", "--data-dir", str(tmp_path), "--arena-bytes", "1TiB", "--shm-dir", shm_dir)
        assert not list(Path(shm_dir).iterdir()), "no part of an arena is left"
    line = refused(broker)
    assert f"{shm_dir} has " in line
    assert "the arena needs 10485" in line, "in MiB"
    assert "smaller --arena-bytes" in line


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of 4 MiB, as a container may have it."""
    path = tmp_path / "shm"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_broker_does_not_start_when_shared_memory_is_almost_full(small_mount: Path, tmp_path: Path) -> None:
    """The arena would fit into an empty mount; if the lack went unnoticed, it would be a bus error later."""
    (small_mount / "other").write_bytes(bytes(3 * MIB))
    sizes = ("--arena-bytes", "2MiB", "--segment-bytes", "512KiB")
    line = refused(start("broker", "--data-dir", str(tmp_path / "data"), "--shm-dir", str(small_mount), *sizes))
    assert f"{small_mount} has 1 MiB free, the arena needs 3 MiB" in line
    assert [path.name for path in small_mount.iterdir()] == ["other"]


@pytest.mark.parametrize("daemon", ["coordinator", "broker"])
def test_a_daemon_does_not_start_with_an_unwritable_data_directory(daemon: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    result = start(daemon, "--data-dir", str(file / "data"), "--port", "0")
    assert f"cannot write data directory {file}/data" in refused(result)
    assert "--data-dir" in refused(result)
