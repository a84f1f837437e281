"""A cluster in one process whose streamlets move, whose brokers and backups crash, and a client that believes nothing.

Everything is real, brokers, backups, their disks and connections, and the coordinator, except the time in which it
notices who is lost, and the way in which it reaches the others. What was acknowledged is remembered, and looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.recovery.rebuild import RebuildLimits
from kera.coordinator.cluster.intervals import broker_ids_of, index_of_group, intervals_of
from kera.coordinator.coordinator import Coordinator
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.memory_store import MemoryStore
from kera.core.chunk import HEADER_BYTES, ChunkHeader, iterate_chunks, verify_header
from kera.core.clock import FakeClock
from kera.core.errors import KeraError, StaleEpoch, Unavailable, Uncertain
from kera.core.ids import EARLIEST, Position
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import backup_pb2, broker_pb2, common_pb2, coordinator_pb2
from tests.unit.broker.support import SLOT_BYTES, chunk, cursor, next_of, read_range
from tests.unit.broker.takeover_support import Backup, Node, header_of

BROKERS = 3
BACKUPS = 3
REPLICATION = 2
WAIT_S = 30.0
PULSE_S = 0.02
SETTINGS = CoordinatorSettings.for_testing(Path("unused")).model_copy(
    update={"heartbeats_missed_max": 3, "report_grace_ms": 0, "seal_wait_ms": 3000}
)
LIMITS = RebuildLimits(retry_s=0.05, rescan_s=0.2)
OPEN_RETRY_S = 0.05
TRANSIENT = {
    "not_owner",
    "unavailable",
    "too_few_backups",
    "not_replicated",
    "not_persisted",
    "out_of_sequence",
    "recovering",
    "unknown_stream",
    "lease_lost",
    "stale_epoch",
    "arena_full",
    "uncertain",
}

Ref = tuple[str, int]
"""A stream, by its name, and a streamlet."""
ChunkId = tuple[int, int, int]
"""Producer, its epoch, sequence."""
Answer = TypeVar("Answer")


class Launch:
    """A process of a broker, which can be ended at any time."""

    def __init__(self, node: Node, launch_id: str) -> None:
        self.node = node
        self.launch_id = launch_id
        self.silent = False
        """It sends no heartbeats."""
        self.died = asyncio.Event()
        self.calls: set[asyncio.Task[Any]] = set()
        self.report: HeartbeatReport | None = None
        self.fenced: asyncio.Task[None] | None = None

    async def ask(self, method: object, message: Any, bulk: bytes = b"") -> Any:
        """Have the broker do something. Raises `Uncertain` when it dies meanwhile."""
        if self.died.is_set():
            raise Unavailable("nobody listens")
        call = asyncio.ensure_future(self.node.ask(method, message, bulk))
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            if self.died.is_set() and call.cancelled():
                raise Uncertain("the broker died") from None
            raise
        except KeraError:
            raise
        except Exception:
            if self.died.is_set():
                raise Uncertain("the broker died") from None
            raise

    async def kill(self, *, memory: bool) -> None:
        self.died.set()
        if self.fenced is not None:
            self.fenced.cancel()
        for call in list(self.calls):
            call.cancel()
        if self.calls:
            await asyncio.wait(list(self.calls))
        await self.node.kill(memory=memory)


class World:
    """All of it; it stands for the ways in which a coordinator reaches brokers, too."""

    def __init__(self, root: Path, shm_dir: Path) -> None:
        self.backups = [Backup(number + 1, root / f"backup-{number + 1}") for number in range(BACKUPS)]
        self.nodes = {
            number: Node(number, root / f"broker-{number}", shm_dir, self.backups) for number in range(1, BROKERS + 1)
        }
        self.launches: dict[int, Launch] = {}
        """Those that run."""
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.coordinator_epoch = 0
        self.coordinator: Coordinator
        self.started = 0
        self.backup_calls = BackupCalls(self)
        self._pulse: asyncio.Task[None] | None = None
        self.defects: list[BaseException] = []

    async def begin(self) -> None:
        await self.lead()
        for backup in self.backups:
            await self.start_backup(backup)
        for broker_id in self.nodes:
            await self.start(broker_id)
        self._pulse = asyncio.create_task(self._beat())

    async def lead(self) -> None:
        """Another coordinator goes on with what the store has."""
        if self.coordinator_epoch:
            dead = [one for one in self.nodes if not self.coordinator.state.brokers.is_alive(one)]
            await self.coordinator.close()
        else:
            dead = []
        self.coordinator_epoch += 1
        self.coordinator = await Coordinator.load(
            self.store,
            self,
            self.backup_calls,
            self.clock,
            SETTINGS,
            coordinator_epoch=self.coordinator_epoch,
        )
        for broker_id in dead:
            if broker_id in self.coordinator.state.brokers.ids() and broker_id not in self.launches:
                self.coordinator.state.brokers.declare_dead(broker_id)
        for backup in self.backups:
            if backup.engine is None and backup.backup_id in self.coordinator.state.backups.ids():
                self.coordinator.state.backups.declare_dead(backup.backup_id)

    async def close(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.wait([self._pulse])
        await self.coordinator.close()
        for broker_id in list(self.launches):
            await self.kill(broker_id, memory=True)
        for path in next(iter(self.nodes.values())).settings.shm_dir.iterdir():
            path.unlink()  # of those that were killed and never came back
        for backup in self.backups:
            with contextlib.suppress(OSError):
                await backup.stop()

    # -- members ---------------------------------------------------------------------------------------------------

    async def start(self, broker_id: int) -> None:
        """A new launch of a broker, with whatever the last one has left."""
        self.started += 1
        node = self.nodes[broker_id]
        launch = Launch(node, f"launch-{self.started}")
        node.limits, node.open_retry_s = LIMITS, OPEN_RETRY_S
        engine = await node.begin()
        known = broker_id in self.coordinator.state.brokers.ids()
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=common_pb2.BrokerInfo(
                broker_id=broker_id if known else 0,
                node_id=f"node-{broker_id}",
                grpc_address=f"broker-{broker_id}:1",
                segment_bytes=SLOT_BYTES,
                arena_bytes=node.settings.arena_bytes,
            ),
            launch_id=launch.launch_id,
            lost_memory=engine.restart.found.lost_memory,
        )
        answer = await self.coordinator.members.register_broker(request)
        assert answer.broker_id == broker_id
        node.epoch, streams = answer.broker_epoch, list(answer.streams)
        self.launches[broker_id] = launch
        await engine.own(streams, broker_id, node.epoch, answer.recovered_before_epoch)
        node.service.registered(broker_id, streams, node.epoch)
        launch.report = HeartbeatReport(engine.streams, engine.takeovers.progress)
        launch.fenced = asyncio.create_task(self._until_fenced(launch))

    async def _until_fenced(self, launch: Launch) -> None:
        try:
            await launch.node.engine.replicator.until_fenced()
        except StaleEpoch:
            launch.node.service.writer.fence()
            launch.silent = False

    async def kill(self, broker_id: int, *, memory: bool, noticed: bool = True) -> None:
        """End a broker; `memory`: with its host; `noticed`: the coordinator knows at once."""
        launch = self.launches.pop(broker_id, None)
        if launch is not None:
            await launch.kill(memory=memory)
        if noticed:
            self.notice(broker_id)

    def notice(self, broker_id: int) -> None:
        self.coordinator.state.brokers.declare_dead(broker_id)
        self.coordinator.tick()

    async def start_backup(self, backup: Backup) -> None:
        await backup.start()
        self.started += 1
        known = backup.backup_id in self.coordinator.state.backups.ids()
        info = backup.info
        info.backup_id = backup.backup_id if known else 0
        info.grpc_address = backup.address
        await self.coordinator.members.register_backup(
            coordinator_pb2.RegisterBackupRequest(backup=info, launch_id=f"launch-{self.started}")
        )

    async def stop_backup(self, backup: Backup) -> None:
        await backup.stop()
        self.coordinator.state.backups.declare_dead(backup.backup_id)

    async def _beat(self) -> None:
        """Heartbeats of all, and what the coordinator does by itself."""
        while True:
            await asyncio.sleep(PULSE_S)
            try:
                for broker_id, launch in list(self.launches.items()):
                    if not launch.silent and launch.report is not None:
                        await self._heartbeat(broker_id, launch)
                for backup in self.backups:
                    backup.draining = self.coordinator.state.backups.is_draining(backup.backup_id)
                self.coordinator.tick()
            except Exception as error:  # noqa: BLE001 - the test has to see it
                self.defects.append(error)

    async def _heartbeat(self, broker_id: int, launch: Launch) -> None:
        assert launch.report is not None
        request = coordinator_pb2.HeartbeatRequest(broker_id=broker_id, broker_epoch=launch.node.epoch)
        launch.report.fill(request)
        try:
            await self.coordinator.members.heartbeat(request)
        except StaleEpoch:
            launch.node.service.writer.fence()
            if self.launches.get(broker_id) is launch:
                await self.kill(broker_id, memory=False, noticed=False)
            return
        except KeraError:
            return
        if not launch.died.is_set():
            launch.report.answered(coordinator_pb2.HeartbeatResponse())
            launch.node.told()

    # -- brokers, as coordinators reach them -----------------------------------------------------------------------

    async def _order(self, info: common_pb2.BrokerInfo, method: object, request: Any) -> Any:
        launch = self.launches.get(info.broker_id)
        if launch is None:
            raise Unavailable("nobody listens")
        return (await launch.ask(method, request)).message

    async def open_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream: common_pb2.StreamInfo,
        *,
        coordinator_epoch: int,
        handed_over: Sequence[common_pb2.StreamletState] = (),
    ) -> None:
        copy = common_pb2.StreamInfo()
        copy.CopyFrom(stream)
        request = broker_pb2.OpenStreamletsRequest(
            stream=copy, coordinator_epoch=coordinator_epoch, handed_over=handed_over
        )
        await self._order(broker, api.OPEN_STREAMLETS, request)

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int, *, coordinator_epoch: int) -> None:
        request = broker_pb2.DropStreamRequest(stream_id=stream_id, coordinator_epoch=coordinator_epoch)
        await self._order(broker, api.DROP_STREAM, request)

    async def seal_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream_id: int,
        streamlet_ids: Sequence[int],
        *,
        wait_ms: int,
        coordinator_epoch: int,
        assignments_version: int,
    ) -> list[common_pb2.StreamletState]:
        request = broker_pb2.SealStreamletsRequest(
            coordinator_epoch=coordinator_epoch,
            stream_id=stream_id,
            streamlet_ids=streamlet_ids,
            wait_ms=wait_ms,
            assignments_version=assignments_version,
        )
        return list((await self._order(broker, api.SEAL_STREAMLETS, request)).states)

    async def take_over(
        self, broker: common_pb2.BrokerInfo, request: broker_pb2.TakeOverRequest
    ) -> broker_pb2.TakeOverResponse:
        answer: broker_pb2.TakeOverResponse = await self._order(broker, api.TAKE_OVER, request)
        return answer

    async def refuses(self, broker: common_pb2.BrokerInfo) -> bool:
        return broker.broker_id not in self.launches


class BackupCalls:
    """The backups, as the coordinator reaches them."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def _ask(self, backup: common_pb2.BackupInfo, method: Any, request: Any) -> Any:
        found = self._world.backups[backup.backup_id - 1]
        if found.engine is None:
            raise Unavailable("nobody listens")
        try:
            channel = await FrameChannel.connect_tcp(found.address, timeout_s=5)
        except OSError as error:
            raise Unavailable(str(error)) from None
        try:
            return await channel.submit(method, request, timeout_s=5)
        finally:
            await channel.close()

    async def headers(self, backup: Backup, info: backup_pb2.ReplicaInfo) -> list[ChunkHeader]:
        """Of all chunks of a replica. Raises `UnknownReplica` when it has gone."""
        request = backup_pb2.ReadReplicaRequest(
            broker_id=info.broker_id,
            virtual_segment_id=info.virtual_segment_id,
            bytes_max=1 << 20,
            headers_only=True,
        )
        found: list[ChunkHeader] = []
        while request.offset < info.length:
            reply = await self._ask(backup.info, api.READ_REPLICA, request)
            data = memoryview(b"".join(reply.bulk))
            found += [verify_header(data, at) for at in range(0, len(data), HEADER_BYTES)]
            assert reply.message.next_offset > request.offset
            assert not reply.message.replica.chunks_damaged
            request.offset = reply.message.next_offset
        return found

    async def fence(self, backup: common_pb2.BackupInfo, broker_id: int, before_epoch: int) -> None:
        request = backup_pb2.FenceBrokerRequest(broker_id=broker_id, broker_epoch=before_epoch)
        await self._ask(backup, api.FENCE_BROKER, request)

    async def free(
        self, backup: common_pb2.BackupInfo, broker_id: int, broker_epoch: int, *, before_epoch: int
    ) -> None:
        request = backup_pb2.FreeReplicasRequest(
            broker_id=broker_id, broker_epoch=broker_epoch, before_epoch=before_epoch
        )
        await self._ask(backup, api.FREE_REPLICAS, request)

    async def count_replicas(self, backup: common_pb2.BackupInfo, broker_ids: Iterable[int]) -> int:
        del backup, broker_ids
        return 0

    async def close(self) -> None:
        pass


@asynccontextmanager
async def world_of(root: Path, shm_dir: Path) -> AsyncIterator[World]:
    world = World(root, shm_dir)
    await world.begin()
    try:
        yield world
    finally:
        await world.close()


@dataclass
class Acknowledged:
    """What a client was promised."""

    data: bytes
    """As it was sent."""
    entry: int
    position: Position | None
    """None: the answer was lost, and nobody says any more where it is."""
    first_record: int


@dataclass
class Model:
    """What a client knows of a streamlet."""

    sequences: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    acknowledged: dict[ChunkId, Acknowledged] = field(default_factory=dict)
    stored: dict[ChunkId, bytes] = field(default_factory=dict)
    """As it was read first."""
    places: dict[Position, ChunkId] = field(default_factory=dict)
    """Whatever was seen anywhere stays there or goes."""
    removed: dict[int, int] = field(default_factory=dict)
    """By entry: what is before this ordinal may be gone."""
    seen: dict[int, int] = field(default_factory=dict)
    """By entry: the highest ordinal that was given."""
    ends: dict[int, list[tuple[Position, int]]] = field(default_factory=dict)
    """By entry, where readers were, and the ordinal of what comes next."""
    lossy: bool = False
    """A broker was lost with what nobody had waited for."""


class Client:
    """Writes, reads, and remembers."""

    def __init__(self, world: World, random: Random, entries: int) -> None:
        self.world = world
        self.random = random
        self.entries = entries
        self.models: dict[Ref, Model] = {}
        self.refused: KeraError | None = None
        """Why a request was not answered."""

    def model(self, ref: Ref) -> Model:
        return self.models.setdefault(ref, Model())

    def stream(self, ref: Ref) -> common_pb2.StreamInfo:
        return self.world.coordinator.state.catalog.named(ref[0])

    def assignment(self, ref: Ref) -> common_pb2.StreamletAssignment:
        return self.stream(ref).assignments[ref[1]]

    # -- writing ---------------------------------------------------------------------------------------------------

    def chunk(self, ref: Ref, producer: int, sequence: int) -> bytes:
        size = (256, 512, 1024, 2048)[(producer + sequence * 7) % 4]
        return chunk(
            producer,
            sequence,
            size=size,
            fill=bytes([65 + (sequence + producer * 5) % 26]),
            stream_id=self.stream(ref).stream_id,
            streamlet_id=ref[1],
            producer_epoch=self.model(ref).epochs.get(producer, 0),
        )

    async def send(self, ref: Ref, chunks: Sequence[bytes], broker_id: int = 0) -> list[broker_pb2.ChunkStatus]:
        """Statuses, or nothing when there is no answer. What is acknowledged is remembered."""
        launch = self.world.launches.get(broker_id or self.assignment(ref).broker_id)
        if launch is None:
            return []
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(chunks))
        try:
            async with asyncio.timeout(WAIT_S):
                reply = await launch.ask(api.MULTI_WRITE_CHUNKS, request, b"".join(chunks))
        except KeraError as error:
            self.refused = transient(error)
            return []
        statuses = list(reply.message.statuses)
        for data, status in zip(chunks, statuses, strict=True):
            if not status.error.code:
                self.learn(ref, data, status)
        return statuses

    def learn(self, ref: Ref, data: bytes, status: broker_pb2.ChunkStatus) -> None:
        model, header = self.model(ref), header_of(data)
        id_ = (header.producer_id, header.producer_epoch, header.sequence)
        position = Position(status.group_id, status.segment_id, status.position) if status.group_id else None
        known = model.acknowledged.get(id_)
        if known is not None and not (model.lossy and not status.duplicate):
            if position is not None and known.position is not None:
                assert (known.position, known.first_record) == (position, status.first_record), (
                    f"{id_} was at {known.position} and is at {position}"
                )
            return
        entry = header.producer_id % self.entries
        model.acknowledged[id_] = Acknowledged(data, entry, position, status.first_record if position else -1)
        if position is not None:
            assert model.places.setdefault(position, id_) == id_, f"{position} is {model.places[position]} and {id_}"
        if position is not None and not status.duplicate:
            if status.first_record < model.seen.get(entry, 0) and not model.lossy:
                raise AssertionError(f"ordinal {status.first_record} of entry {entry} is given twice")
            model.seen[entry] = status.first_record + 1

    async def write(self, ref: Ref, producer: int, count: int) -> None:
        """Chunks of a producer, sent until they are acknowledged."""
        model = self.model(ref)
        first = model.sequences.get(producer, 0)
        told: set[str] = set()
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    chunks = [self.chunk(ref, producer, first + at) for at in range(count)]
                    statuses = await self.send(ref, chunks)
                    codes = {status.error.code for status in statuses}
                    told |= codes
                    if statuses and codes == {""}:
                        break
                    assert codes <= {"", *TRANSIENT}, codes
                    if statuses and statuses[0].error.code == "out_of_sequence":
                        assert model.lossy, f"producer {producer} of {ref}: {statuses[0].error}"
                        model.epochs[producer] = model.epochs.get(producer, 0) + 1
                        first = model.sequences[producer] = 0
                    await asyncio.sleep(0.01)  # sleep: until there is somebody
        except TimeoutError:
            raise AssertionError(
                f"nobody takes chunks of {ref}: {told}, {self.refused}\n{self.assignment(ref)}"
            ) from None
        model.sequences[producer] = first + count

    async def lose_answer(self, ref: Ref, producer: int) -> None:
        """Chunks of which nobody hears what has become of them; they are sent again by the next write."""
        first = self.model(ref).sequences.get(producer, 0)
        chunks = [self.chunk(ref, producer, first + at) for at in range(2)]
        sending = asyncio.ensure_future(self.send(ref, chunks))
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)  # sleep: turns of the loop
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, KeraError):
            await sending

    async def repeat_last(self, ref: Ref) -> None:
        """What was acknowledged and is sent again is known."""
        model = self.model(ref)
        for producer, following in model.sequences.items():
            if not following or model.lossy:
                continue
            data = self.chunk(ref, producer, following - 1)
            async with asyncio.timeout(WAIT_S):
                while True:
                    statuses = await self.send(ref, [data])
                    if statuses and not statuses[0].error.code:
                        break
                    await asyncio.sleep(0.01)  # sleep: until there is somebody
            assert statuses[0].duplicate, f"chunk {following - 1} of producer {producer} of {ref} is not known any more"

    # -- reading ---------------------------------------------------------------------------------------------------

    async def read(
        self, ref: Ref, entry: int, start: Position = EARLIEST, *, one: bool = False
    ) -> tuple[list[bytes], Position, list[str]]:
        """Chunks from a position on by the map, where that ends, and what was said to be lost."""
        found: list[bytes] = []
        lost: list[str] = []
        last = ""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    assignment = self.assignment(ref)
                    intervals = intervals_of(assignment)
                    index = index_of_group(assignment, start.group_id)
                    launch = self.world.launches.get(intervals[index].broker_id)
                    if launch is None:
                        last = f"broker {intervals[index].broker_id} is away"
                        await asyncio.sleep(0.01)  # sleep: until it is there
                        continue
                    where = read_range(start, entry=entry, streamlet=ref[1], stream_id=self.stream(ref).stream_id)
                    request = broker_pb2.MultiReadChunksRequest(ranges=[where])
                    try:
                        reply = await launch.ask(api.MULTI_READ_CHUNKS, request)
                    except KeraError as error:
                        last = transient(error).message
                        await asyncio.sleep(0.01)  # sleep: until it is there
                        continue
                    (result,) = reply.message.results
                    data = b"".join(bytes(piece) for piece in reply.bulk)
                    reply.bulk = ()
                    if result.error.code == "data_lost":
                        lost.append(f"{start}: {result.error.message}")
                        to = Position(*json.loads(result.error.attributes["available_from"]))
                        assert to > start, f"{start} is lost, and available is {to}"
                        start = to
                        continue
                    if result.error.code:
                        assert result.error.code in TRANSIENT, result.error
                        last = f"{start}: {result.error.message}"
                        await asyncio.sleep(0.01)  # sleep: until it is there
                        continue
                    following = next_of(result)
                    found += [data[at : at + header.chunk_bytes] for header, at in iterate_chunks(data)]
                    if one and found:
                        return found[:1], following, lost
                    if not data and (following == start or index_of_group(assignment, following.group_id) == index):
                        if index == len(intervals) - 1:
                            return found, following, lost
                        last = f"{start} of {ref} goes on at {following}, which is no other interval"
                        await asyncio.sleep(0.01)  # sleep: the map may be new
                    start = following
        except TimeoutError:
            raise AssertionError(f"cannot read {ref} entry {entry}: {last}\n{self.assignment(ref)}") from None

    async def check(self, ref: Ref) -> None:
        """Everything is there, once, in its order and its place."""
        model = self.model(ref)
        for entry in range(self.entries):
            await self._check_entry(ref, model, entry)

    async def _check_entry(self, ref: Ref, model: Model, entry: int) -> None:
        removed = model.removed.get(entry, 0)
        found, end, lost = await self.read(ref, entry)
        assert not lost or model.lossy, f"{ref} entry {entry}: {lost}"
        headers = [header_of(data) for data in found]
        next_record = headers[0].first_record if headers else 0
        assert next_record <= removed or model.lossy, f"{ref} entry {entry} starts at {next_record}, not {removed}"
        there: dict[tuple[int, int], list[int]] = {}
        for header, data in zip(headers, found, strict=True):
            if model.lossy:
                assert header.first_record >= next_record, f"{ref} entry {entry}: {header}"
            else:
                assert header.first_record == next_record, f"{ref} entry {entry}: {header} is not at {next_record}"
            next_record = header.first_record + header.record_count
            id_ = (header.producer_id, header.producer_epoch, header.sequence)
            there.setdefault(id_[:2], []).append(header.sequence)
            known = model.stored.setdefault(id_, data)
            assert known == data, f"{ref} {id_} has changed: {header_of(known)} {header}"
        ids = {(*producer, sequence) for producer, sequences in there.items() for sequence in sequences}
        for producer, sequences in there.items():
            assert sequences == sorted(set(sequences)), f"{ref} {producer} has {sequences}"
            if not model.lossy:
                assert sequences == list(range(sequences[0], sequences[0] + len(sequences))), f"{producer} {sequences}"
                assert sequences[0] == 0 or removed
        groups = [header.group_id for header in headers]
        assert groups == sorted(groups)
        for id_, promised in model.acknowledged.items():
            if promised.entry != entry:
                continue
            if promised.position is None and id_ in model.stored:
                promised.first_record = header_of(model.stored[id_]).first_record
            if id_ not in ids and not model.lossy:
                assert promised.first_record < removed, (
                    f"{ref} misses {id_} at {promised.position}, {promised.first_record}"
                )
        self._remember(model, entry, end, next_record)
        await self._check_places(ref, model, entry, removed)

    @staticmethod
    def _remember(model: Model, entry: int, end: Position, next_record: int) -> None:
        if end != EARLIEST and next_record:
            model.ends[entry] = [*model.ends.get(entry, [])[-4:], (end, next_record)]

    async def _check_places(self, ref: Ref, model: Model, entry: int, removed: int) -> None:
        mine = [(id_, known) for id_, known in model.acknowledged.items() if known.entry == entry and known.position]
        for id_, known in self.random.sample(mine, min(6, len(mine))):
            assert known.position is not None
            again, _, lost = await self.read(ref, entry, known.position, one=True)
            if lost:
                assert model.lossy or known.first_record < removed, f"{ref} {known.position}: {lost}"
                continue
            if not again:  # what was lost may have been the last of it, and the end is before it now
                assert model.lossy, f"{ref} nothing at {known.position}"
                continue
            header = header_of(again[0])
            if (header.producer_id, header.producer_epoch, header.sequence) != id_:
                gone = model.lossy or known.first_record < removed
                assert gone, f"{ref} entry {entry} {known.position} was {id_} and is {header}"
        for position, record in model.ends.get(entry, []):
            again, _, lost = await self.read(ref, entry, position, one=True)
            assert not lost or model.lossy or record < removed, f"{ref} entry {entry} from {position} on: {lost}"
            if again and not lost:
                header = header_of(again[0])
                skipped = header.first_record != record
                assert not skipped or (record < removed and header.first_record > record), (
                    f"{ref} entry {entry}: {position} was {record} and is {header.first_record}"
                )

    async def truncate(self, ref: Ref) -> None:
        """Remove what is before a chunk that was acknowledged."""
        model = self.model(ref)
        mine = [known for known in model.acknowledged.values() if known.position and known.first_record >= 0]
        if not mine:
            return
        known = self.random.choice(sorted(mine, key=lambda one: one.first_record)[: max(1, len(mine) // 2)])
        assert known.position is not None
        model.removed[known.entry] = max(model.removed.get(known.entry, 0), known.first_record)
        where = cursor(known.position, stream_id=self.stream(ref).stream_id, streamlet=ref[1], entry=known.entry)
        for broker_id in broker_ids_of(self.assignment(ref)):
            launch = self.world.launches.get(broker_id)
            if launch is not None:
                with contextlib.suppress(KeraError):
                    await launch.ask(api.TRUNCATE_STREAMLETS, broker_pb2.TruncateStreamletsRequest(cursors=[where]))


def transient(error: KeraError) -> KeraError:
    """An error that a client takes for a reason to try again; any other is raised."""
    if error.code not in TRANSIENT:
        raise error
    return error


async def eventually(look: Callable[[], Awaitable[str]], wait_s: float = WAIT_S) -> None:
    """Wait until nothing is wrong any more."""
    until_s = asyncio.get_running_loop().time() + wait_s
    while wrong := await look():
        assert asyncio.get_running_loop().time() < until_s, wrong
        await asyncio.sleep(0.02)  # sleep: between looks
