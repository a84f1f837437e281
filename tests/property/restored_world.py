"""A cluster in one process whose metadata are put back to earlier copies, while its brokers keep what they have.

Everything is real, brokers, backups, their disks and connections, and the coordinator, except the time in which it
notices who is lost, and the way in which it reaches the others. Brokers register and beat as their processes do, with
the identity that is in their data directory, and each that is told that it is not current starts again. Whatever is
given out, the world remembers, and from whom.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.ownership.unknown import UnknownReport
from kera.coordinator.coordinator import Coordinator
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import StoredRecord
from kera.coordinator.store.numbers import SINCE_US, next_epoch
from kera.core.base.clock import FakeClock
from kera.core.errors import KeraError, StaleEpoch, Unavailable, Uncertain, UnknownLaunch
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import backup_pb2, broker_pb2, common_pb2, coordinator_pb2
from tests.unit.broker.support import SLOT_BYTES
from tests.unit.broker.takeover_support import Backup, Node

SETTINGS = CoordinatorSettings.for_testing(Path("unused")).model_copy(
    update={"heartbeats_missed_max": 60, "report_grace_ms": 0, "seal_wait_ms": 3000}
)
"""Nobody dies here."""
TODAY_US = SINCE_US + 2_500 * 86_400_000_000
BEATS = 6
"""Heartbeats of each broker in which all that there is to tell is told."""


class Given:
    """Numbers that came from coordinators. None may come again, whatever they are for."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int, int], object] = {}

    def note(self, what: str, number: int, to: object, within: int = 0) -> None:
        """`within`: of which the number is one; the same number may be told again to the same."""
        known = self._given.setdefault((what, within, number), to)
        assert known == to, f"{what} {number} was given to {known} and to {to}"


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
    """See the head of this module. Nothing happens by itself: `beat` lets time go by."""

    def __init__(self, root: Path, shm_dir: Path, *, brokers: int, backups: int) -> None:
        self.clock = FakeClock(TODAY_US)
        self.store = MemoryStore()
        self.coordinator_epoch = 0
        self.coordinator: Coordinator
        self.backups = [Backup(number + 1, root / f"backup-{number + 1}") for number in range(backups)]
        self.backup_calls = BackupCalls(self)
        self.nodes: dict[int, Node] = {}
        self.launches: dict[int, Launch] = {}
        """Those that run."""
        self.started = 0
        self.identities: dict[Path, int] = {}
        """Which broker each data directory is of."""
        self.given = Given()
        self._root = root
        self._shm_dir = shm_dir
        self._brokers = brokers

    async def begin(self) -> None:
        await self.lead()
        for backup in self.backups:
            await self.start_backup(backup)
        for _ in range(self._brokers):
            await self.join()

    async def lead(self) -> None:
        """A coordinator begins with what the store has."""
        if self.coordinator_epoch:
            await self.coordinator.close()
        last = await self.store.get("leader")
        epoch = next_epoch(int(json.loads(last.value)["epoch"]) if last else 0, self.clock.now_us())
        self.given.note("epoch of a coordinator", epoch, object())
        previous = json.loads(last.value)["epoch"] if last else 0
        leader = {"epoch": epoch, "previous_epoch": previous}
        self.store = MemoryStore({**self.store.records, "leader": StoredRecord(json.dumps(leader).encode(), 1)})
        self.coordinator_epoch = epoch
        self.coordinator = await Coordinator.load(
            self.store, self, self.backup_calls, self.clock, SETTINGS, coordinator_epoch=epoch
        )

    async def close(self) -> None:
        await self.coordinator.close()
        for launch in self.launches.values():
            await launch.kill(memory=True)
        for path in self._shm_dir.iterdir():
            path.unlink()  # of those that were killed and never came back
        for backup in self.backups:
            with contextlib.suppress(OSError):
                await backup.stop()

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy(self) -> dict[str, StoredRecord]:
        return self.store.records

    async def restore(self, copy: dict[str, StoredRecord], seconds: float, *, stopped: Sequence[int] = ()) -> None:
        """The coordinator ends, and after a while another one begins with a copy.

        `stopped`: these brokers have ended, too, and ask to register in this order, again and again.
        """
        ended = [self.launches.pop(broker_id) for broker_id in stopped]
        for launch in ended:
            await launch.kill(memory=False)
        await self.coordinator.close()
        self.store = MemoryStore(copy)
        self.clock.advance(seconds)
        self.coordinator_epoch = 0
        await self.lead()
        for backup in self.backups:  # their heartbeats are refused: they start again, and register
            await self.start_backup_again(backup)
        starting = [await self.begin_launch(launch.node) for launch in ended]
        while starting:
            starting = [one for one in starting if not await self.is_admitted(one)]
            await self.wait()
        await self.settle()
        while self.coordinator.state.catching_up:
            await self.wait()
        await self.settle()

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

    async def start_backup_again(self, backup: Backup) -> None:
        await backup.stop()
        await self.start_backup(backup)

    async def wait(self) -> None:
        """Some time goes by: a second, and a heartbeat of each broker."""
        self.clock.advance(1.0)
        await self.beat()

    async def settle(self) -> None:
        """Until everybody has said what there is to say."""
        for _ in range(BEATS):
            await self.beat()

    # -- brokers ---------------------------------------------------------------------------------------------------

    async def join(self) -> int:
        """A broker with a new data directory."""
        number = len(self.identities) + 1
        node = Node(0, self._root / f"broker-{number}", self._shm_dir, self.backups)
        return await self.launch(node)

    async def launch(self, node: Node) -> int:
        """A process with a data directory; returns the broker's id."""
        launch = await self.begin_launch(node)
        while not await self.is_admitted(launch):
            await self.wait()
        return node.broker_id

    async def is_admitted(self, launch: Launch) -> bool:
        """Whether a process that has started could register."""
        try:
            await self._register(launch)
        except Unavailable as error:
            if not error.attributes.get("catching_up"):
                raise
            return False
        return True

    async def begin_launch(self, node: Node) -> Launch:
        """A process that has yet to register."""
        self.started += 1
        self.clock.advance(1.0)  # epochs are given once a second at most, see ``kera.coordinator.store.numbers``
        launch = Launch(node, f"launch-{self.started}")
        await node.begin()
        return launch

    async def _register(self, launch: Launch) -> None:
        node, engine, directory = launch.node, launch.node.engine, launch.node.settings.data_dir
        held = await asyncio.to_thread(engine.held_streams)
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=common_pb2.BrokerInfo(
                broker_id=self.identities.get(directory, 0),
                node_id=directory.name,
                grpc_address=f"{directory.name}:1",
                segment_bytes=SLOT_BYTES,
                arena_bytes=node.settings.arena_bytes,
            ),
            launch_id=launch.launch_id,
            directory_id=directory.name,
            lost_memory=engine.restart.found.lost_memory,
            held_streams=[
                coordinator_pb2.HeldStream(stream_id=stream_id, assignments_version=version)
                for stream_id, version in held.items()
            ],
        )
        answer = await self.coordinator.members.register_broker(request)
        broker_id, epoch, streams = answer.broker_id, answer.broker_epoch, list(answer.streams)
        self.given.note("id of a broker", broker_id, directory)
        self.given.note("epoch of a broker", epoch, launch.launch_id)
        assert self.identities.setdefault(directory, broker_id) == broker_id
        node.broker_id, node.epoch = broker_id, epoch
        self.nodes[broker_id], self.launches[broker_id] = node, launch
        elsewhere = answer.elsewhere_stream_ids
        await engine.own(streams, broker_id, epoch, answer.recovered_before_epoch, elsewhere=elsewhere)
        node.service.registered(broker_id, streams, epoch)
        launch.report = HeartbeatReport(
            engine.streams,
            engine.takeovers.progress,
            unknown=UnknownReport(engine.streams, lambda: self.coordinator_epoch),
        )
        launch.fenced = asyncio.create_task(self._until_fenced(launch))

    async def _register_again(self, launch: Launch) -> None:
        """As a launch does that the coordinator does not know."""
        node = launch.node
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=common_pb2.BrokerInfo(
                broker_id=node.broker_id,
                broker_epoch=node.epoch,
                node_id=node.settings.data_dir.name,
                grpc_address=f"{node.settings.data_dir.name}:1",
                segment_bytes=SLOT_BYTES,
                arena_bytes=node.settings.arena_bytes,
            ),
            launch_id=launch.launch_id,
            directory_id=node.settings.data_dir.name,
        )
        info = await self.coordinator.members.register_broker(request)
        assert (info.broker_id, info.broker_epoch) == (node.broker_id, node.epoch)

    async def relaunch(self, broker_id: int) -> None:
        """The process of a broker ends, and another one goes on with its disk and its memory."""
        launch = self.launches.pop(broker_id)
        await launch.kill(memory=False)
        await self.launch(launch.node)

    async def beat(self) -> None:
        """A heartbeat of each broker, and of what the coordinator does by itself."""
        self.clock.advance(SETTINGS.heartbeat_interval_ms / 1000)
        for backup in self.backups:
            self.coordinator.state.backups._members[backup.backup_id].heard_s = self.clock.monotonic_s()
        for broker_id, launch in list(self.launches.items()):
            await self._heartbeat(broker_id, launch)
        self.coordinator.tick()
        await self.coordinator.idle()

    async def _heartbeat(self, broker_id: int, launch: Launch) -> None:
        assert launch.report is not None
        request = coordinator_pb2.HeartbeatRequest(
            broker_id=broker_id,
            broker_epoch=launch.node.epoch,
            fences_version=launch.node.service.writer._streams.fences.version,
        )
        launch.report.fill(request)
        try:
            answer = await self.coordinator.members.heartbeat(request)
        except UnknownLaunch:
            await self._register_again(launch)
            return
        except StaleEpoch:
            await self.relaunch(broker_id)
            return
        if answer.HasField("fences"):
            launch.node.engine.streams.fences.note(answer.fences)
        launch.report.answered(answer)
        launch.node.told()

    async def _until_fenced(self, launch: Launch) -> None:
        try:
            await launch.node.engine.replicator.until_fenced()
        except StaleEpoch:
            launch.node.service.writer.fence()
            launch.silent = False

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
        created: bool = False,
    ) -> list[int]:
        copy = common_pb2.StreamInfo()
        copy.CopyFrom(stream)
        request = broker_pb2.OpenStreamletsRequest(
            stream=copy, coordinator_epoch=coordinator_epoch, handed_over=handed_over, created=created
        )
        return list((await self._order(broker, api.OPEN_STREAMLETS, request)).lacking)

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

    async def where_ended(
        self, broker: common_pb2.BrokerInfo, stream_id: int, streamlet_id: int, *, coordinator_epoch: int
    ) -> common_pb2.StreamletState:
        request = broker_pb2.SealStreamletsRequest(
            coordinator_epoch=coordinator_epoch, stream_id=stream_id, streamlet_ids=[streamlet_id], ended=True
        )
        state: common_pb2.StreamletState = (await self._order(broker, api.SEAL_STREAMLETS, request)).states[0]
        return state

    async def take_over(
        self, broker: common_pb2.BrokerInfo, request: broker_pb2.TakeOverRequest
    ) -> broker_pb2.TakeOverResponse:
        answer: broker_pb2.TakeOverResponse = await self._order(broker, api.TAKE_OVER, request)
        return answer

    async def measure_lag(
        self, broker: common_pb2.BrokerInfo, cursors: Sequence[common_pb2.Cursor]
    ) -> list[broker_pb2.Lag]:
        raise NotImplementedError  # nobody looks at metrics here

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
