"""A backup in this process, over real connections and a real disk."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.backup import answers
from kera.backup.application import serve
from kera.backup.errors import ReplicaOffset, UnknownReplica
from kera.backup.log_file import NAME, LogFile
from kera.backup.settings import BackupSettings
from kera.core.base.settings import KIB
from kera.core.errors import CorruptChunk, DiskFailed, InvalidArgument, StaleEpoch, Unavailable, Uncertain
from kera.core.rpc import Channel, Reply, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.v1 import backup_pb2
from tests.unit.backup.support import BROKER_ID, EPOCH, STREAM_ID, Segment, chain, placed, request
from tests.unit.broker.fake_coordinator import FakeCoordinator, serving
from tests.unit.broker.support import ADDRESS

A, B, C = (
    placed(number, ADDRESS._replace(streamlet_id=number % 2), size=1024, fill=bytes([number + 1]))
    for number in range(3)
)


READ = api.READ_REPLICA.request(broker_id=BROKER_ID, virtual_segment_id=1)


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    async with serving(FakeCoordinator()) as coordinator:
        yield coordinator


@pytest.fixture
def settings(coordinator: FakeCoordinator, tmp_path: Path) -> BackupSettings:
    settings = BackupSettings.for_testing(tmp_path / "backup", coordinator.address)
    return settings.model_copy(update={"ephemeral": False, "memory_bytes": 256 * KIB})


@asynccontextmanager
async def connected(settings: BackupSettings, transport: str = "unix") -> AsyncIterator[Channel]:
    """A connection to a backup that runs as long as the connection."""
    async with serve(settings) as ready:
        channel: Channel
        if transport == "unix":
            channel = await FrameChannel.connect_unix(ready["frames_unix_path"], timeout_s=30)
        elif transport == "tcp":
            channel = await FrameChannel.connect_tcp(ready["frames_address"], timeout_s=30)
        else:
            channel = GrpcChannel(ready["grpc_address"])
        yield channel
        await channel.close()


async def send(channel: Channel, message: backup_pb2.ReplicateRequest, *chunks: bytes) -> tuple[int, int]:
    """The length and the durable length in the answer."""
    reply = await channel.submit(api.REPLICATE, message, list(chunks), timeout_s=10)
    return reply.message.length, reply.message.durable_length


async def read(channel: Channel, number: int = 1, **fields: Any) -> Reply[backup_pb2.ReadReplicaResponse]:
    message = api.READ_REPLICA.request(broker_id=BROKER_ID, virtual_segment_id=number, **fields)
    return await channel.submit(api.READ_REPLICA, message, timeout_s=10)


async def content(channel: Channel, number: int = 1, **fields: Any) -> bytes:
    return b"".join((await read(channel, number, **fields)).bulk)


async def replicas(channel: Channel, **fields: Any) -> list[backup_pb2.ReplicaInfo]:
    answer = await call(
        channel, api.LIST_REPLICAS, api.LIST_REPLICAS.request(broker_id=BROKER_ID, **fields), timeout_s=30
    )
    return list(answer.replicas)


async def free(channel: Channel, *numbers: int, epoch: int = EPOCH) -> None:
    message = api.FREE_REPLICAS.request(broker_id=BROKER_ID, broker_epoch=epoch, virtual_segment_ids=numbers)
    await call(channel, api.FREE_REPLICAS, message, timeout_s=30)


async def fence(channel: Channel, epoch: int) -> None:
    message = api.FENCE_BROKER.request(broker_id=BROKER_ID, broker_epoch=epoch)
    await call(channel, api.FENCE_BROKER, message, timeout_s=30)


@pytest.mark.parametrize("transport", ["unix", "tcp", "grpc"])
async def test_a_replica_can_be_written_read_closed_listed_and_freed(settings: BackupSettings, transport: str) -> None:
    async with connected(settings, transport) as channel:
        segment = Segment()
        assert await send(channel, segment.next(A), A) == (1024, 0)
        assert await send(channel, segment.next(B, persist=True), B) == (2048, 2048)
        assert await content(channel) == A + B
        assert (await send(channel, segment.next(C, close=True, persist=True), C)) == (3072, 3072)
        (info,) = await replicas(channel)
        assert (info.closed, info.length, info.checksum, info.chunk_count) == (True, 3072, chain(A, B, C), 3)
        assert await content(channel) == A + B + C
        await free(channel, 1, 99)
        assert await replicas(channel) == []


@pytest.mark.parametrize("transport", ["unix", "grpc"])
async def test_wrong_requests_are_refused_and_the_connection_goes_on(settings: BackupSettings, transport: str) -> None:
    async with connected(settings, transport) as channel:
        segment = Segment()
        await send(channel, segment.next(A), A)
        damaged = bytearray(B)
        damaged[200] ^= 1
        with pytest.raises(CorruptChunk):
            await send(channel, request(offset=1024, checksum=chain(A, B)), bytes(damaged))
        with pytest.raises(CorruptChunk, match="checksum"):
            await send(channel, request(offset=1024, checksum=7), B)
        with pytest.raises(ReplicaOffset) as raised:
            await send(channel, request(offset=2048, checksum=chain(A, B)), B)
        assert raised.value.attributes == {"length": 1024, "offset": 2048}
        with pytest.raises(StaleEpoch):
            await send(channel, request(offset=1024, checksum=chain(A, B), epoch=EPOCH - 1), B)
        with pytest.raises(UnknownReplica):
            await read(channel, 2)
        with pytest.raises(InvalidArgument, match="cannot be read from 1025"):
            await read(channel, offset=1025)
        assert await send(channel, segment.next(B), B) == (2048, 0)


async def test_reads_are_refused_while_untaken_answers_fill_the_memory(
    settings: BackupSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "ANSWERS_BYTES_MAX", 8 * 1024)
    async with connected(settings) as channel:
        segment = Segment()
        await send(channel, segment.next(A), A)
        taken, refused = [], 0
        for each in [channel.submit(api.READ_REPLICA, READ, timeout_s=10) for _ in range(20)]:
            try:
                taken.append(await each)
            except Unavailable:
                refused += 1
        assert len(taken) >= 2
        assert refused  # only two of one connection at once
        with pytest.raises(InvalidArgument):
            await read(channel, offset=1025)
        assert await content(channel) == A  # as soon as the others have been sent


async def test_requests_of_one_connection_are_carried_out_in_order(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        segment = Segment()
        sent = []
        for number in range(50):
            data = placed(number)
            message = segment.next(data, persist=number % 3 == 0, close=number == 49)
            sent.append(channel.submit(api.REPLICATE, message, [data], timeout_s=10))
        answers = await asyncio.gather(*sent)

        assert [answer.message.length for answer in answers] == [1024 * (number + 1) for number in range(50)]
        assert await content(channel) == segment.content


async def test_reads_filter_by_streamlet_and_go_on_from_an_offset(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        segment = Segment()
        await send(channel, segment.next(A, B, C), A, B, C)
        streamlets = [backup_pb2.StreamletSet(stream_id=STREAM_ID, streamlet_ids=[0])]
        assert await content(channel, streamlets=streamlets) == A + C
        first = await read(channel, bytes_max=1500)
        assert (b"".join(first.bulk), first.message.next_offset) == (A, 1024)
        rest = await read(channel, offset=1024)
        assert (b"".join(rest.bulk), rest.message.next_offset) == (B + C, 3072)
        assert rest.message.replica.length == 3072
        assert await content(channel, offset=3072) == b""


async def test_replicas_are_listed_in_order_and_in_parts(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        for number in (3, 1, 2, 4):
            await send(channel, Segment(number).next(A), A)
        assert [info.virtual_segment_id for info in await replicas(channel)] == [1, 2, 3, 4]
        assert [info.virtual_segment_id for info in await replicas(channel, after_virtual_segment_id=3)] == [4]
        assert [info.virtual_segment_id for info in await replicas(channel, replicas_max=2)] == [1, 2]


async def test_a_disk_failure_fails_only_the_request_that_waits_for_the_disk(
    settings: BackupSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with connected(settings) as channel:
        segment = Segment()
        await send(channel, segment.next(A), A)
        with monkeypatch.context() as patched:
            patched.setattr(LogFile, "write", fail)
            with pytest.raises(DiskFailed):
                await send(channel, segment.next(B, persist=True), B)
            assert await content(channel) == A + B
        assert await send(channel, segment.end(2, persist=True)) == (2048, 2048), "it is tried again"


async def test_a_stopped_backup_keeps_chunks_that_were_only_in_memory(
    settings: BackupSettings,
) -> None:
    open_segment, closed_segment = Segment(1), Segment(2)
    async with connected(settings) as channel:
        await send(channel, open_segment.next(A, B), A, B)
        await send(channel, closed_segment.next(C, close=True), C)
    for _ in range(2):
        async with connected(settings) as channel:
            infos = await replicas(channel)
            assert [(info.length, info.durable_length, info.closed) for info in infos] == [
                (2048, 2048, False),
                (1024, 1024, True),
            ]
            assert await content(channel, 1) == A + B
            assert await content(channel, 2) == C


async def test_an_ephemeral_backup_writes_nothing_at_its_end(settings: BackupSettings) -> None:
    ephemeral = settings.model_copy(update={"ephemeral": True})
    async with connected(ephemeral) as channel:
        await send(channel, Segment().next(A), A)
    async with connected(ephemeral) as channel:
        assert await replicas(channel) == []


async def test_a_read_reports_a_damaged_chunk_and_returns_the_others(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        await send(channel, Segment().next(A, B, C, close=True, persist=True), A, B, C)
        path = settings.data_dir / "log" / NAME
        with path.open("r+b") as file:
            file.seek(8192 + 1024 + 300)
            file.write(b"?")
        found = await read(channel)
        for _ in range(2):
            assert b"".join(found.bulk) == A + C
            assert found.message.replica.chunks_damaged == 1
            found = await read(channel)


async def test_an_unreadable_disk_fails_the_read(settings: BackupSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with connected(settings) as channel:
        await send(channel, Segment().next(A, close=True, persist=True), A)
        with monkeypatch.context() as patched:
            patched.setattr(LogFile, "read", fail)
            with pytest.raises(DiskFailed, match=r"replicas\.log"):
                await read(channel)
        assert await content(channel) == A


async def test_a_disconnected_reader_delays_freeing_only_until_its_read_ends(
    settings: BackupSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    really = LogFile.read

    def slowly(*arguments: Any) -> int:
        entered.set()
        go_on.wait(10)
        return really(*arguments)

    async with connected(settings) as channel:
        await send(channel, Segment().next(A, close=True, persist=True), A)
        path = str(settings.data_dir / "backup.sock")
        reader = await FrameChannel.connect_unix(path, timeout_s=30)
        with monkeypatch.context() as patched:
            patched.setattr(LogFile, "read", slowly)
            reading = asyncio.ensure_future(read(reader))
            await asyncio.to_thread(entered.wait, 10)
            await reader.close()
            with pytest.raises(Uncertain):
                await reading
            freeing = asyncio.create_task(free(channel, 1))
            while await replicas(channel):
                await asyncio.sleep(0.001)
            assert not freeing.done(), "its frame is being read"
            go_on.set()
            await freeing
        assert await replicas(channel) == []


async def test_older_launches_stay_fenced_after_a_restart(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        await send(channel, Segment().next(A), A)
        await fence(channel, EPOCH + 5)
        await fence(channel, EPOCH + 5)
        with pytest.raises(StaleEpoch):
            await send(channel, Segment(2).next(A), A)
    async with connected(settings) as channel:
        for attempt in (send(channel, Segment(2).next(A), A), free(channel, 1), fence(channel, EPOCH + 4)):
            with pytest.raises(StaleEpoch) as raised:
                await attempt
            assert raised.value.attributes["broker_epoch"] == EPOCH + 5
        await free(channel, 1, epoch=EPOCH + 5)


async def test_all_replicas_of_fenced_launches_can_be_freed_at_once(settings: BackupSettings) -> None:
    async def free_before(epoch: int) -> None:
        message = api.FREE_REPLICAS.request(broker_id=BROKER_ID, broker_epoch=epoch, before_epoch=epoch)
        await call(channel, api.FREE_REPLICAS, message, timeout_s=30)

    async with connected(settings) as channel:
        for number in (1, 2):
            await send(channel, Segment(number).next(A), A)
        with pytest.raises(InvalidArgument, match="not fenced"):
            await free_before(EPOCH + 1)
        await fence(channel, EPOCH + 2)
        newer = Segment(3).next(B)
        newer.broker_epoch = EPOCH + 2
        await send(channel, newer, B)
        await free_before(EPOCH + 1)
        await free_before(EPOCH + 1)
        assert [info.virtual_segment_id for info in await replicas(channel)] == [3]


async def test_a_read_can_ask_for_headers_only(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        segment = Segment()
        await send(channel, segment.next(A), A)
        await send(channel, segment.next(B, close=True, persist=True), B)
        assert await content(channel, headers_only=True) == A[:128] + B[:128]


async def test_a_fence_that_cannot_be_made_durable_is_an_error(settings: BackupSettings) -> None:
    async with connected(settings) as channel:
        (settings.data_dir / "fences.tmp").mkdir()
        with pytest.raises(DiskFailed):
            await fence(channel, EPOCH + 1)
        (settings.data_dir / "fences.tmp").rmdir()
        await fence(channel, EPOCH + 1)


async def test_requests_before_the_registration_are_unavailable(
    settings: BackupSettings, coordinator: FakeCoordinator
) -> None:
    coordinator.registration_errors = [Unavailable("later")] * 10_000
    patient = settings.model_copy(update={"coordinator_timeout_ms": 60_000})
    context = serve(patient)
    starting = asyncio.create_task(context.__aenter__())
    path = settings.data_dir / "backup.sock"
    while not path.is_socket():
        await asyncio.sleep(0.005)
    channel = await FrameChannel.connect_unix(str(path), timeout_s=30)
    with pytest.raises(Unavailable, match="is starting"):
        await replicas(channel)
    coordinator.registration_errors.clear()
    await starting
    assert await replicas(channel) == []
    await channel.close()
    await context.__aexit__(None, None, None)


async def test_replicas_are_spread_over_the_disks(settings: BackupSettings, tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    spread = settings.model_copy(update={"log_dirs": directories, "disk_bytes_max": 1 << 20})
    async with connected(spread) as channel:
        for number in (1, 2):
            await send(channel, Segment(number).next(A, close=True, persist=True), A)
    assert all((directory / NAME).stat().st_size > 64 * KIB // 8 for directory in directories)
    async with connected(spread) as channel:
        assert [info.virtual_segment_id for info in await replicas(channel)] == [1, 2]


@pytest.mark.parametrize("at_once", [False, True])
async def test_several_readers_of_a_replica_read_its_disk_once(
    settings: BackupSettings, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    chunks = [placed(number, ADDRESS._replace(streamlet_id=number % 2), size=1024) for number in range(40)]
    read_bytes: list[int] = []
    real = LogFile.read

    def counted(self: LogFile, offset: int, into: memoryview) -> int:
        read_bytes.append(len(into))
        return real(self, offset, into)

    async with connected(settings) as channel:
        await send(channel, request(checksum=chain(*chunks), persist=True, close=True), *chunks)
        monkeypatch.setattr(LogFile, "read", counted)
        wanted = [[backup_pb2.StreamletSet(stream_id=STREAM_ID, streamlet_ids=[number % 2])] for number in range(6)]
        if at_once:
            found = await asyncio.gather(*(content(channel, streamlets=each) for each in wanted))
        else:
            found = [await content(channel, streamlets=each) for each in wanted]

    assert found == [b"".join(chunks[number % 2 :: 2]) for number in range(6)]
    assert sum(read_bytes) == 40 * 1024
