"""The coordinator: a cluster's state machine, put together from its parts.

    streams     creating, altering and deleting streams          state       what all parts share
                                                                 changing    whose turn it is to change something
    restored    catching up with a cluster that is younger   catching_up what is waited for then
    members     registrations and heartbeats                     catalog     the streams and who owns their streamlets
    recoveries  what a lost broker had goes to others            membership  who is there, and which launch is current
    migration   streamlets move                                  intervals   where the groups of a streamlet are
    drains      members are emptied                              recovery    what a recovery does next
    restarts    members stop, and are back a moment later
    forgetting  members that are gone for good
    drops       brokers forget streams that are gone             work        tasks in the background
    producers   ids, names, and that earlier ones are refused
    control     noticing who is lost, evening out load           placement, rebalancing   where streamlets go

Invariants:

1. What was answered is in the store. Memory changes after the store, never before.
2. Changes are made one at a time (`State.changing` is held from the decision to the end of the write), and run to their
   end even when the caller is gone: a caller that gives up in the middle must not leave memory behind the store.
3. A stream that can be seen has been opened by the brokers of its streamlets.
4. Each streamlet has one owner, and groups change hands only by a write. A broker that was given up for lost gets
   nothing acknowledged any more from before the first of its streamlets has a new owner.
5. What is begun in the background is in the store before anybody is asked for anything, and can be cut short anywhere.

Requests and answers as messages, and their counting, are left to ``service``; who of several coordinators leads, and
when another one has to load anew, to ``leadership``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable

from kera.coordinator.cluster.backups import Backups, GrpcBackups
from kera.coordinator.cluster.brokers import Brokers
from kera.coordinator.cluster.changing import Changing
from kera.coordinator.cluster.state import State
from kera.coordinator.control import Control
from kera.coordinator.ids import Launch
from kera.coordinator.operations.drains import Drains
from kera.coordinator.operations.drops import Drops
from kera.coordinator.operations.forgetting import Forgetting
from kera.coordinator.operations.members import Members
from kera.coordinator.operations.migration import Migration, Moved, ObserveMove
from kera.coordinator.operations.producers import Producers
from kera.coordinator.operations.restarts import Restarts
from kera.coordinator.operations.restored import Restored
from kera.coordinator.operations.streams import Streams
from kera.coordinator.operations.unknown import UnknownStreams
from kera.coordinator.recovery.carry_out import CursorsOf, ObservePhase, Recoveries
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.ledger import Ledger
from kera.coordinator.store.metadata import MetadataStore
from kera.coordinator.store.metadata_copy import CLUSTER_ID, packing
from kera.core.clock import Clock
from kera.core.errors import InvalidArgument, KeraError, invariant
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

COPY_BYTES_MAX = 30 << 20
"""Of a copy of the metadata, compressed: it is one message, of at most 32 MiB."""


class Coordinator:
    """The state machine of a cluster. Belongs to one event loop; made with `load`."""

    def __init__(self, state: State, *, observe_phase: ObservePhase, observe_move: ObserveMove) -> None:
        self.state = state
        """For other state machines over the same store: they hold `State.changing` when they write."""
        self._drops = Drops(state)
        self._streams = Streams(state, self._drops)
        self._producers = Producers(state)
        self._recoveries = Recoveries(state, observe_phase=observe_phase)
        self._migration = Migration(state, self._recoveries, observe_move=observe_move)
        self._unknown = UnknownStreams(state, self._recoveries)
        self._restored = Restored(state, self._unknown)
        self._members = Members(state, self._recoveries, self._restored)
        self._drains = Drains(state, self._recoveries, self._migration)
        self._restarts = Restarts(state, self._migration, has_beaten=self._members.has_beaten)
        self._forgetting = Forgetting(state, self._recoveries, self._migration)
        self._control = Control(
            state,
            self._members,
            self._recoveries,
            self._migration,
            self._drains,
            self._drops,
            self._restarts,
            self._restored,
        )
        self._parts = (
            self._control,
            self._drops,
            self._drains,
            self._restarts,
            self._migration,
            self._recoveries,
            self._members,
            self._unknown,
            self._restored,
        )
        """That do something by themselves, in the order in which they end."""
        self._own_backup_calls: Backups | None = None
        self._copying = Changing()
        self.coordinator_epoch = state.coordinator_epoch
        """Of the time for which it leads; grows with each coordinator that begins to."""
        self.heartbeat_interval_ms = state.settings.heartbeat_interval_ms
        self.lease_ms = self.heartbeat_interval_ms * state.settings.heartbeats_missed_max
        """For how long, from a heartbeat that was answered, no broker is given up for lost."""

    @classmethod
    async def load(
        cls,
        store: MetadataStore,
        brokers: Brokers,
        clock: Clock,
        settings: CoordinatorSettings,
        *,
        coordinator_epoch: int = 1,
        backups: Backups | None = None,
        observe_phase: ObservePhase = lambda *_: None,
        observe_move: ObserveMove = lambda *_: None,
    ) -> Coordinator:
        """The coordinator of what `store` has; an empty store becomes a new cluster.

        It answers from now on; what it does by itself begins with `start`. `backups` is how backups are reached; None:
        over their open interface.
        """
        backup_calls = backups or GrpcBackups(timeout_ms=settings.broker_timeout_ms)
        state = State(await Ledger.load(store), brokers, backup_calls, clock, settings, coordinator_epoch)
        if state.ledger.get(CLUSTER_ID) is None:
            await state.write({CLUSTER_ID: uuid.uuid4().hex.encode()})
        state.load()
        self = cls(state, observe_phase=observe_phase, observe_move=observe_move)
        self._own_backup_calls = None if backups is backup_calls else backup_calls
        self._recoveries.load()
        self._migration.load()
        self._restarts.load()
        self._drops.load()
        self._producers.load()
        self._restored.load()
        log.info(
            "loaded",
            cluster_id=self.cluster_id,
            streams=self.stream_count,
            brokers=len(state.brokers.ids()),
            backups=len(state.backups.ids()),
            recoveries=len(self._recoveries.describe_all()),
        )
        return self

    def start(self) -> None:
        """Begin to notice who is lost, and go on with what was begun before."""
        self._control.start()

    async def close(self) -> None:
        """End what it does by itself, and let changes that have begun end, which takes bounded time.

        The store and what reaches brokers and backups are closed by their owners.
        """
        self._producers.close()
        for part in self._parts:
            await part.close()
        await self.state.close()
        if self._own_backup_calls is not None:
            await self._own_backup_calls.close()

    def tick(self) -> None:
        """Look at everything now; `start` has it done every heartbeat interval."""
        self._control.tick()

    async def idle(self) -> None:
        """Wait until nothing is under way that it does by itself."""
        for part in self._parts:
            await part.idle()

    @property
    def lost(self) -> asyncio.Future[KeraError]:
        """See `State.lost`: once it is done, this coordinator is of no use any more."""
        return self.state.lost

    def use_cursors(self, cursors_of: CursorsOf) -> None:
        """How far consumer groups have read a stream: what is behind that is recovered first."""
        self._recoveries.cursors_of = cursors_of

    # --- what is there -----------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        """Made once, with the cluster."""
        value = self.state.ledger.get(CLUSTER_ID)
        invariant(value is not None, "a cluster has an id")
        return (value or b"").decode()

    @property
    def stream_count(self) -> int:
        """How many streams there are."""
        return len(self.state.catalog)

    @property
    def brokers_alive(self) -> int:
        """How many brokers are alive."""
        return len(self.state.brokers.live_ids())

    @property
    def backups_alive(self) -> int:
        """How many backups are alive."""
        return len(self.state.backups.live_ids())

    @property
    def members_restarting(self) -> int:
        """How many brokers and backups stop, or have stopped, in order to start again."""
        return sum(one.restarting for one in self.brokers()) + sum(one.restarting for one in self.backups())

    def stream(self, name: str) -> common_pb2.StreamInfo:
        """The stream of this name. Raises `UnknownStream`."""
        return self.state.catalog.named(name)

    def stream_with_id(self, stream_id: int) -> common_pb2.StreamInfo:
        """The stream with this id. Raises `UnknownStream`."""
        return self.state.catalog.with_id(stream_id)

    def streams(self) -> list[common_pb2.StreamInfo]:
        """All streams, by name."""
        return self.state.catalog.streams()

    def page_of_streams(self, after: str, bytes_max: int) -> tuple[list[common_pb2.StreamInfo], bool]:
        """See `Catalog.page`."""
        return self.state.catalog.page(after, bytes_max)

    def brokers(self) -> list[common_pb2.BrokerInfo]:
        """All brokers that ever registered, each with whether it is alive."""
        return self.state.brokers.describe_all()

    def backups(self) -> list[common_pb2.BackupInfo]:
        """All backups that ever registered, each with whether it is alive and what it has free."""
        return self.state.backups.describe_all()

    def brokers_of(self, stream: common_pb2.StreamInfo) -> list[common_pb2.BrokerInfo]:
        """The brokers that have streamlets of `stream`, or older groups of some."""
        return self.state.brokers_of(stream)

    def recoveries(self) -> list[coordinator_pb2.RecoveryInfo]:
        """The recoveries of lost brokers, the last one first, each with how far it is."""
        return self._recoveries.describe_all()

    # --- streams: see `Streams` --------------------------------------------------------------------------------

    async def create_stream(
        self,
        name: str,
        config: common_pb2.StreamConfig,
        schema: common_pb2.StreamSchema,
        creation_id: str = "",
    ) -> common_pb2.StreamInfo:
        """See `Streams.create`."""
        return await self._streams.create(name, config, schema, creation_id)

    async def alter_stream(self, request: coordinator_pb2.AlterStreamRequest) -> common_pb2.StreamInfo:
        """See `Streams.alter`; with `brokers`, it is spread over so many when this returns, see `Control.spread`."""
        stream = await self._streams.alter(request)
        return await self._control.spread(request.name) if request.HasField("brokers") else stream

    async def delete_stream(self, name: str) -> int:
        """See `Streams.delete`."""
        return await self._streams.delete(name)

    # --- members: see `Members` --------------------------------------------------------------------------------

    async def register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        """See `Members.register_broker`."""
        return await self._members.register_broker(request)

    async def elsewhere(
        self,
        broker_id: int,
        held: Iterable[coordinator_pb2.HeldStream],
        told: Iterable[common_pb2.StreamInfo],
    ) -> list[int]:
        """See `Members.elsewhere`."""
        return await self._members.elsewhere(broker_id, held, told)

    def recovered_before_epoch(self, broker_id: int) -> int:
        """See `Recoveries.recovered_before_epoch`."""
        return self._recoveries.recovered_before_epoch(broker_id)

    async def heartbeat(self, request: coordinator_pb2.HeartbeatRequest) -> None:
        """See `Members.heartbeat`."""
        await self._restored.beats(request)
        await self._members.heartbeat(request)
        launch = Launch(request.broker_id, request.broker_epoch)
        self._producers.noted(launch, request.fences_version)
        self._unknown.note(launch, request.unknown_streams)
        self._restored.advance()
        if not self.state.catching_up:
            self._restarts.advance()
        if self._restored.takes_up:
            self._unknown.advance()

    @property
    def catching_up(self) -> str:
        """What is waited for as the metadata are older than the cluster; empty: nothing. See ``restored``."""
        return self.state.catching_up

    def unknown(self) -> list[coordinator_pb2.UnknownStream]:
        """See `UnknownStreams.describe_all`."""
        return self._unknown.describe_all()

    async def unknown_of(self, request: coordinator_pb2.HeartbeatRequest) -> list[int]:
        """See `UnknownStreams.of`."""
        return await self._unknown.of(Launch(request.broker_id, request.broker_epoch), request)

    async def adopt_stream(self, which: str, name: str = "") -> common_pb2.StreamInfo:
        """See `UnknownStreams.adopt`."""
        return await self._unknown.adopt(which, name)

    async def copy_metadata(self) -> bytes:
        """All metadata as a file, see ``metadata_copy``. Raises `InvalidArgument` when it fits into no message."""
        async with self._copying:  # each takes as much memory as there is metadata
            copy = await self.state.in_slices(packing(self.state.ledger.snapshot(), self.state.clock.now_us()))
        if len(copy) > COPY_BYTES_MAX:
            raise InvalidArgument(
                f"the copy of the metadata would take {len(copy)} bytes, and a message takes {COPY_BYTES_MAX}; stop the"
                " coordinator, and copy its data directory",
                limit_bytes=COPY_BYTES_MAX,
            )
        return copy

    async def register_backup(self, request: coordinator_pb2.RegisterBackupRequest) -> common_pb2.BackupInfo:
        """See `Members.register_backup`."""
        return await self._members.register_backup(request)

    def backup_heartbeat(self, request: coordinator_pb2.BackupHeartbeatRequest) -> None:
        """See `Members.backup_heartbeat`."""
        self._members.backup_heartbeat(request)

    # --- where streamlets are ----------------------------------------------------------------------------------

    def report_broker(self, request: coordinator_pb2.ReportBrokerRequest) -> None:
        """See `Control.report`."""
        self._control.report(request)

    async def move_streamlet(self, stream: str, streamlet_id: int, broker_id: int) -> Moved:
        """See `Migration.move`."""
        return await self._migration.move(stream, streamlet_id, broker_id, "asked for")

    async def rebalance(self, *, dry_run: bool) -> coordinator_pb2.RebalanceResponse:
        """See `Control.rebalance`."""
        return await self._control.rebalance(dry_run=dry_run)

    async def drain(self, request: coordinator_pb2.DrainRequest) -> coordinator_pb2.DrainResponse:
        """See `Drains.drain`."""
        return await self._drains.drain(request)

    async def prepare_restart(
        self, request: coordinator_pb2.PrepareRestartRequest
    ) -> coordinator_pb2.PrepareRestartResponse:
        """See `Restarts.prepare`."""
        return await self._restarts.prepare(request)

    async def forget_member(self, request: coordinator_pb2.ForgetMemberRequest) -> coordinator_pb2.ForgetMemberResponse:
        """See `Forgetting.forget`."""
        return await self._forgetting.forget(request)

    # --- producers ---------------------------------------------------------------------------------------------

    async def init_producer(self, name: str = "") -> tuple[int, int]:
        """A producer's id and the first of its epochs.

        Without a name the id is one that nobody had before. With one it is the name's, and the epochs are above all
        that its earlier instances have: no broker that lives takes anything of them any more, see `Producers.init`.
        """
        return await self._producers.init(name)

    def fences(self, version: int = 0) -> coordinator_pb2.ProducerFences | None:
        """See `Producers.fences`."""
        return self._producers.fences(version)
