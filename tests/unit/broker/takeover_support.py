"""Support for tests of recovery: real backups and brokers in one process, which a test kills and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from kera.backup.engine import Engine as BackupEngine
from kera.backup.metrics import RequestCounters
from kera.backup.reader import ReplicaReader
from kera.backup.service import BackupService
from kera.backup.settings import BackupSettings
from kera.broker.counters import Counters
from kera.broker.engine import LogEngine
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.orders import Orders
from kera.broker.recovery.rebuild import RebuildLimits
from kera.broker.recovery.scan import VirtualKey
from kera.broker.serving.service import BrokerService
from kera.broker.settings import BrokerSettings
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.settings import KIB
from kera.core.errors import DataLost, StaleEpoch, Unavailable
from kera.core.format.chunk import ChunkHeader, iterate_chunks
from kera.core.rpc import Call, Method, Reply, Service, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.method import Peer
from kera.v1 import backup_pb2, broker_pb2, common_pb2, coordinator_pb2
from tests.unit.broker.support import SLOT_BYTES, STREAM_ID, chunk, next_of, read_range, stream_info

SLOTS = 24
WAIT_S = 20.0
PRODUCERS = 4


QUICK = RebuildLimits(retry_s=0.02, rescan_s=0.05)
"""Short waits between a new owner's tries."""
IN_FILES = RebuildLimits(parallel_max=1, read_bytes_max=4096, assembled_bytes_max=0)
"""Recovered chunks are put into files piece by piece."""


class ReadsOfReplicas:
    """Reads of whole replicas from all backups: a test can hold them back or let them fail. Reads of headers go on."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.left: int | None = None
        """The number of reads to answer before the next ones are held back; None: no limit."""
        self.lists = 0
        """The number of requests that list replicas."""
        self.fail: Callable[[VirtualKey], bool] = lambda _: False
        self.chunks: dict[VirtualKey, list[ChunkHeader]] = {}
        """Headers of all chunks in answers, by virtual segment, in the order in which the segments were first read."""

    def release(self) -> None:
        """Answer all reads from now on."""
        self.left = None
        self.open.set()

    def through(self, service: Service, stopping: asyncio.Event) -> Service:
        """A backup's handlers, with these controls before them; `stopping`: once set, reads fail."""

        async def read(call: Call[backup_pb2.ReadReplicaRequest]) -> Reply[backup_pb2.ReadReplicaResponse]:
            if call.message.headers_only:
                return await answer(api.READ_REPLICA, call)
            if self.left == 0:
                self.open.clear()
            elif self.left is not None:
                self.left -= 1
            waits = [asyncio.ensure_future(each.wait()) for each in (self.open, stopping)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            if stopping.is_set():
                raise Unavailable("the backup stops")
            key = VirtualKey(call.message.broker_id, call.message.virtual_segment_id)
            if self.fail(key):
                raise Unavailable("a bad moment")
            reply = await answer(api.READ_REPLICA, call)
            headers = [header for header, _ in iterate_chunks(b"".join(map(bytes, reply.bulk)))]
            self.chunks.setdefault(key, []).extend(headers)
            return reply

        async def lists(call: Call[backup_pb2.ListReplicasRequest]) -> Reply[backup_pb2.ListReplicasResponse]:
            self.lists += 1
            return await answer(api.LIST_REPLICAS, call)

        async def answer(method: Method[Any, Any], call: Call[Any]) -> Reply[Any]:
            found = service[method](call)
            return found if isinstance(found, Reply) else await found

        return {**service, api.READ_REPLICA: read, api.LIST_REPLICAS: lists}


class Backup:
    """A backup that can stop and start again."""

    def __init__(self, backup_id: int, root: Path, reads: ReadsOfReplicas | None = None) -> None:
        self.backup_id = backup_id
        self.reads = reads or ReadsOfReplicas()
        self.root = root
        self.address = ""
        self.draining = False
        self.engine: BackupEngine | None = None

    async def start(self) -> None:
        settings = BackupSettings.for_testing(self.root, "nobody:1").model_copy(
            update={"memory_bytes": ByteSize(2048 * KIB), "segment_bytes": ByteSize(16 * KIB), "ephemeral": False}
        )
        self.root.mkdir(parents=True, exist_ok=True)
        self.engine = await BackupEngine.start(settings, self.root, (self.backup_id, "cluster"))
        service = BackupService(self.engine, RequestCounters(), read_bytes_max=1 << 20)
        service.registered()
        self._stopping = asyncio.Event()
        self._server = FrameServer(self.reads.through(service.service(), self._stopping), bulk_bytes_max=1 << 20)
        self.address = f"127.0.0.1:{await self._server.listen_tcp('127.0.0.1', 0)}"

    async def stop(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self._stopping.set()
            await self._server.close()
            await engine.close()

    @property
    def info(self) -> common_pb2.BackupInfo:
        return common_pb2.BackupInfo(
            backup_id=self.backup_id,
            node_id=f"node-{self.backup_id}",
            frames_address=self.address,
            segment_bytes=16 * KIB,
            free_memory_bytes=1 << 20,
            alive=self.engine is not None,
            draining=self.draining,
        )

    @property
    def reader(self) -> ReplicaReader:
        assert self.engine is not None
        return self.engine.reader

    def replicas(self, broker_id: int) -> list[backup_pb2.ReplicaInfo]:
        assert self.engine is not None
        return [replica.info() for replica in self.engine.store.replicas.after(broker_id, 0, 10_000)[0]]

    async def free(self, broker_id: int, before_epoch: int) -> None:
        channel = await FrameChannel.connect_tcp(self.address, timeout_s=30)
        fence = backup_pb2.FenceBrokerRequest(broker_id=broker_id, broker_epoch=before_epoch)
        with contextlib.suppress(StaleEpoch):  # fence it now: the backup may have been away before
            await channel.submit(api.FENCE_BROKER, fence, timeout_s=30)
        request = backup_pb2.FreeReplicasRequest(broker_id=broker_id, before_epoch=before_epoch)
        await channel.submit(api.FREE_REPLICAS, request, timeout_s=30)
        await channel.close()


class Node:
    """A broker that can be killed and started again."""

    def __init__(self, broker_id: int, root: Path, shm_dir: Path, backups: Sequence[Backup]) -> None:
        self.broker_id = broker_id
        self.epoch = 0
        self.peer = Peer("tcp", "")
        self._backups = backups
        self.limits = RebuildLimits()
        """The limits of recovery in the background."""
        self.open_retry_s = 1.0
        self.settings = BrokerSettings(
            data_dir=root,
            shm_dir=shm_dir,
            segment_bytes=ByteSize(SLOT_BYTES),
            arena_bytes=ByteSize(SLOTS * SLOT_BYTES),
            coordinator="nobody:1",
            repair_delay_ms=60_000,
        )

    async def start(
        self,
        epoch: int,
        *streams: common_pb2.StreamInfo,
        recovered_before_epoch: int = 0,
        elsewhere: Iterable[int] = (),
        has_holes: bool = False,
    ) -> None:
        self.epoch = epoch
        engine = await self.begin()
        await engine.own(streams, self.broker_id, epoch, recovered_before_epoch, elsewhere, has_holes=has_holes)
        self.service.registered(self.broker_id, streams, epoch)

    async def begin(self) -> LogEngine:
        """Begin a launch that has yet to be registered."""
        self.settings.data_dir.mkdir(parents=True, exist_ok=True)
        engine = await LogEngine.start(self.settings, self.settings.data_dir, rebuild_limits=self.limits)
        self.engine = engine
        self.service = BrokerService(
            engine.streams,
            engine.memory,
            engine.replication,
            Counters(),
            pump=engine.replicator.pump,
            orders=Orders(
                engine.streams,
                engine.memory,
                engine.takeovers,
                coordinator=CoordinatorEpoch(confirmed=False),
                retry_interval_s=self.open_retry_s,
            ),
            check_payloads=False,
        )
        self.handlers = self.service.service()
        self.told()
        return engine

    def told(self) -> None:
        """Pass the current backups to the broker, as the coordinator would."""
        self.engine.replicator.update_backups([backup.info for backup in self._backups])

    async def kill(self, *, memory: bool = False) -> None:
        """End the broker as a signal would, without a flush; `memory`: its host is gone, too."""
        await self.service.close()
        await self.engine.close(flush=False)
        if memory:
            self.engine.arena.path.unlink()

    async def stop(self) -> None:
        await self.service.close()
        await self.engine.close()

    async def ask(self, method: object, message: object, bulk: bytes = b"") -> Reply:  # type: ignore[type-arg]
        found = self.handlers[method](Call(message, memoryview(bulk), self.peer))  # type: ignore[index]
        return found if isinstance(found, Reply) else await found

    async def write(self, *chunks: bytes) -> list[broker_pb2.ChunkStatus]:
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(chunks))
        async with asyncio.timeout(WAIT_S):
            return list((await self.ask(api.MULTI_WRITE_CHUNKS, request, b"".join(chunks))).message.statuses)

    async def read(
        self, start: Position = EARLIEST, *, entry: int = 0, streamlet: int = 0, skip_lost: bool = False
    ) -> tuple[list[bytes], Position]:
        """All chunks from a position on, and the position behind them."""
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            while True:
                request = broker_pb2.MultiReadChunksRequest(
                    ranges=[read_range(start, entry=entry, streamlet=streamlet)]
                )
                reply = await self.ask(api.MULTI_READ_CHUNKS, request)
                (result,) = reply.message.results
                if result.error.code in {"recovering", "unavailable"}:  # unavailable: no room to load it just now
                    continue
                if result.error.code == "data_lost" and skip_lost:
                    start = Position(*json.loads(result.error.attributes["available_from"]))
                    continue
                if result.error.code == "data_lost":
                    raise DataLost(result.error.message)
                assert not result.error.code, result.error
                data = b"".join(bytes(piece) for piece in reply.bulk)
                reply.bulk = ()
                if not data:
                    return found, next_of(result)
                found += [data[at : at + header.chunk_bytes] for header, at in iterate_chunks(data)]
                start = next_of(result)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.told()
                await asyncio.sleep(0.01)  # sleep: between looks

    async def until_restored(self, *refs: tuple[int, int]) -> None:
        wanted = set(refs or [(STREAM_ID, 0)])

        def restored() -> bool:
            found = self.engine.takeovers.progress()
            return bool(found) and all(
                wanted <= {(ref.stream_id, ref.streamlet_id) for ref in each.restored} for each in found
            )

        await self.until(restored)


class Cluster:
    """Backups, brokers, and the coordinator's part for one stream."""

    def __init__(self, root: Path, shm_dir: Path, backups: int) -> None:
        self.reads = ReadsOfReplicas()
        self.backups = [Backup(number + 1, root / f"backup-{number + 1}", self.reads) for number in range(backups)]
        self.nodes = {number: Node(number, root / f"broker-{number}", shm_dir, self.backups) for number in (1, 2, 3)}
        self.last_epoch = 10
        self.sequences: dict[int, int] = {}

    def epoch(self) -> int:
        self.last_epoch += 1
        return self.last_epoch

    def chunks(self, producer: int, count: int, **fields: int) -> list[bytes]:
        """The next chunks of a producer."""
        first = self.sequences.get(producer, 0)
        self.sequences[producer] = first + count
        return [self.chunk(producer, number, **fields) for number in range(first, first + count)]

    @staticmethod
    def chunk(producer: int, number: int, **fields: int) -> bytes:
        """The chunk with this sequence."""
        return chunk(producer, number, size=(1024, 512, 2048)[number % 3], fill=bytes([65 + number % 26]), **fields)

    async def take_over(
        self,
        info: common_pb2.StreamInfo,
        lost: int,
        by: int,
        *,
        given: Sequence[common_pb2.StreamletState] = (),
        **fields: Any,
    ) -> tuple[broker_pb2.TakeOverResponse, common_pb2.StreamInfo]:
        """Do the coordinator's part for a stream of a lost broker; return the response and the changed stream.

        `given`: the states to hand over with the order to open the stream.
        """
        node = self.nodes[by]
        before = node.epoch if lost == by else self.epoch()  # a launch that has lost its memory may be the next owner
        source = common_pb2.RecoverySource(broker_id=lost, before_epoch=before)
        request = broker_pb2.TakeOverRequest(
            source=source,
            streams=[
                broker_pb2.TakeOverStream(
                    stream=info, streamlet_ids=[each.streamlet_id for each in info.assignments], **fields
                )
            ],
            backups=[backup.info for backup in self.backups],
        )
        response = (await node.ask(api.TAKE_OVER, request)).message
        if response.waits_for:
            return response, info
        after = common_pb2.StreamInfo()
        after.CopyFrom(info)
        after.assignments_version += 1
        for assignment in after.assignments:
            assignment.broker_id, assignment.broker_epoch = by, node.epoch
            del assignment.intervals[:]
            assignment.sources.append(source)
        await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=after, handed_over=given))
        return response, after


@asynccontextmanager
async def cluster(root: Path, shm_dir: Path, backups: int) -> AsyncIterator[Cluster]:
    """A cluster of running backups; a test starts and ends its brokers."""
    found = Cluster(root, shm_dir, backups)
    for backup in found.backups:
        await backup.start()
    try:
        yield found
    finally:
        for backup in found.backups:
            with contextlib.suppress(OSError):
                await backup.stop()


def payloads(chunks: Iterable[bytes]) -> list[tuple[int, int, bytes]]:
    """Producer, sequence and payload of each chunk."""
    return [(header.producer_id, header.sequence, data[128:]) for data, header in ((d, header_of(d)) for d in chunks)]


def header_of(data: bytes) -> ChunkHeader:
    return next(iter(iterate_chunks(data)))[0]


def owned_by(broker_id: int, epoch: int, **config: Any) -> common_pb2.StreamInfo:
    settings = {"replication": 2, "durability": common_pb2.DURABILITY_REPLICATED, "entries": 2} | config
    info: common_pb2.StreamInfo = stream_info(owners=[broker_id], **settings)
    for assignment in info.assignments:
        assignment.broker_epoch = epoch
    info.assignments_version = 1
    return info


async def written(world: Cluster, count: int, **config: Any) -> tuple[common_pb2.StreamInfo, list[bytes]]:
    """A stream of broker 1, which is gone, with the stored chunks of two producers."""
    node = world.nodes[1]
    info = owned_by(1, world.epoch(), **config)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    for _ in range(count):
        for producer in (0, 1):
            await acknowledged(node, *world.chunks(producer, 2))
    stored = [data for entry in range(info.config.entries) for data in (await node.read(entry=entry))[0]]
    await node.kill(memory=True)
    return info, stored


async def acknowledged(node: Node, *chunks: bytes) -> None:
    await node.until(lambda: node.engine.replication.backups.up_count >= 2)
    statuses = await node.write(*chunks)
    assert not any(status.error.code for status in statuses), statuses


def progress(node: Node) -> list[coordinator_pb2.RecoveryProgress]:
    return node.engine.takeovers.progress()


def arriving(node: Node) -> Path:
    """The directory of incomplete files."""
    return node.engine.restart.store.arriving_path(0).parent


def order(world: Cluster, info: common_pb2.StreamInfo, source: common_pb2.RecoverySource) -> broker_pb2.TakeOverRequest:
    return broker_pb2.TakeOverRequest(
        source=source,
        streams=[broker_pb2.TakeOverStream(stream=info, streamlet_ids=[0])],
        backups=[backup.info for backup in world.backups],
    )


async def everything(world: Cluster, broker_id: int, entries: int = 2) -> list[bytes]:
    return [data for entry in range(entries) for data in (await world.nodes[broker_id].read(entry=entry))[0]]


async def moved_from_second_to_first(world: Cluster) -> tuple[common_pb2.StreamInfo, common_pb2.StreamletState, Any]:
    """A streamlet whose older group is at broker 2 and whose newer group is at broker 1, with the chunks of both."""
    first, second = world.nodes[1], world.nodes[2]
    info = owned_by(2, world.epoch(), entries=1)
    await second.start(info.assignments[0].broker_epoch, info)
    await second.until(lambda: second.engine.replication.backups.up_count == 3)
    await second.write(*world.chunks(0, 10))
    stored, end = await second.read()
    streamlet = second.engine.streams.get(STREAM_ID).streamlet(0)
    state = common_pb2.StreamletState(
        next_group_id=streamlet.next_group_id,
        next_records=[10],
        producers=[common_pb2.ProducerState(producer_id=0, next_sequence=10)],
    )
    moved = common_pb2.StreamInfo()
    moved.CopyFrom(info)
    moved.assignments_version = 2
    (assignment,) = moved.assignments
    assignment.intervals.add(first_group_id=0, broker_id=2)
    assignment.intervals.add(first_group_id=state.next_group_id, broker_id=1, first_records=[10])
    assignment.broker_id, assignment.broker_epoch = 1, world.epoch()
    await second.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=moved))
    await first.start(assignment.broker_epoch)
    await first.until(lambda: first.engine.replication.backups.up_count == 3)
    await first.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=moved, handed_over=[state]))
    assert not any(status.error.code for status in await first.write(*world.chunks(0, 10)))
    newer = (await first.read(Position(state.next_group_id, 1, 0)))[0]
    assert len(newer) == 10
    return moved, state, (stored, end, newer)
