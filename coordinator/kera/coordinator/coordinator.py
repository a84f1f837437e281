"""The coordinator: a cluster's state machine, put together from its parts.

    streams          creating, altering and deleting streams     state        what all parts share
    members          registrations and heartbeats                catalog      the streams and who owns their streamlets
    recoveries       a lost broker's streamlets go to others     membership   members, and their current launches
    migration        streamlets move                             intervals    the brokers of a streamlet's groups
    balancing        load is evened out                          placement    where new streamlets go
    drains           members are emptied                         changing     changes take turns
    restarts         members stop, and are back a moment later   work         tasks in the background
    forgetting       members that are gone for good
    drops            brokers forget streams that are gone
    rereading        records that somebody else changed in the store are put back
    feature_levels   what all daemons of the cluster understand
    producers        ids and names of producers, and the fencing of earlier ones
    consumer_groups  which consumer reads what, and its progress
    access           who may do what: users, rules, tokens
    schemas          schemas of values, and which changes of them are compatible
    latency          limits on the latency of records, and how long buffers may wait within them
    restored         catching up with a cluster that is ahead of restored metadata
    control          noticing which brokers are lost

Invariants:

1. A response is sent only once its changes are in the store. Memory changes after the store, never before.
2. Changes are made one at a time (`State.changing` is held from the decision to the end of the write), and run to their
   end even when the caller is gone: a caller that gives up halfway must not leave memory behind the store.
3. The brokers of a stream's streamlets have opened the stream before it becomes visible.
4. Each streamlet has one owner, and groups change hands only by a write. A broker that was declared lost gets no more
   acknowledgements, from before the first of its streamlets has a new owner.
5. Background work is in the store before the coordinator calls anybody for it, and can be interrupted anywhere.

Each part answers the requests that concern it (`handlers`). ``service`` counts them. ``leadership`` decides which of
several coordinators leads, and when another one has to load the metadata anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kera.coordinator.access.service import AccessService
from kera.coordinator.access.telling import TellMember, tell_nobody
from kera.coordinator.cluster.backup_calls import BackupCalls
from kera.coordinator.cluster.broker_calls import BrokerCalls
from kera.coordinator.cluster.changing import Changing
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.shares import Shares
from kera.coordinator.cluster.state import State
from kera.coordinator.consumer_groups.lags import GroupLags
from kera.coordinator.consumer_groups.service import ConsumerGroups
from kera.coordinator.control import Control
from kera.coordinator.latency.service import LatencyService
from kera.coordinator.operations.balancing import Balancing
from kera.coordinator.operations.creators import Creators
from kera.coordinator.operations.drains import Drains
from kera.coordinator.operations.drops import Drops
from kera.coordinator.operations.feature_levels import FeatureLevels
from kera.coordinator.operations.forgetting import Forgetting
from kera.coordinator.operations.loads import MeasuredLoads
from kera.coordinator.operations.members import Members
from kera.coordinator.operations.migration import Migration, ObserveMove
from kera.coordinator.operations.producers import Producers
from kera.coordinator.operations.rereading import Rereading
from kera.coordinator.operations.restarts import Restarts
from kera.coordinator.operations.restored import Restored
from kera.coordinator.operations.stored import StoredBytes
from kera.coordinator.operations.streams import StreamOperations
from kera.coordinator.operations.unknown import UnknownStreams
from kera.coordinator.recovery.carry_out import ObservePhase, Recoveries
from kera.coordinator.schemas.service import SchemaService
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.ledger import Ledger
from kera.coordinator.store.metadata import MetadataStore
from kera.coordinator.store.metadata_copy import CLUSTER_ID, packing
from kera.coordinator.stored_records import check_records
from kera.core.base.clock import Clock
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.core.rpc.method import Method
from kera.core.runtime import random_id
from kera.server.access.guard import Guard
from kera.server.feature_level import FEATURE_LEVEL
from kera.v1 import coordinator_pb2 as messages

log = get_logger("kera.coordinator")

COPY_BYTES_MAX = 30 << 20
"""Maximum size of a compressed copy of the metadata: it is one message, of at most 32 MiB."""


class Coordinator:
    """The state machine of a cluster; belongs to one event loop. Make it with `load`."""

    def __init__(
        self,
        state: State,
        *,
        feature_level_of_coordinators: Callable[[], int],
        observe_phase: ObservePhase,
        observe_move: ObserveMove,
        guard: Guard | None = None,
        tell_member: TellMember = tell_nobody,
    ) -> None:
        """`guard`: the guard of this coordinator, None if security is off; `tell_member`: see ``access``."""
        self.state = state
        self.access = AccessService(state, guard, tell_member)
        shares = Shares(guard, state.settings.principal_share_percent)
        self.schemas = SchemaService(state, guard, shares)
        self.consumer_groups = ConsumerGroups(state, state.settings.unnamed_group_retention_ms, shares=shares)
        shown = state.settings.metrics_port is not None
        lag_interval_ms = state.settings.group_lag_interval_ms if shown else 0
        self.group_lags = GroupLags(state, self.consumer_groups.registry, lag_interval_ms)
        self.latency = LatencyService(state, guard, self.consumer_groups.registry, shares)
        loads = MeasuredLoads(state.brokers)
        self.stored = StoredBytes(state.brokers, guard)
        self.rereading = Rereading(state)
        self._drops = Drops(state)
        self.producers = Producers(state, shares)
        self.recoveries = Recoveries(state, self.consumer_groups.registry.cursors_of, observe_phase=observe_phase)
        self.migration = Migration(state, self.recoveries.records, observe_move=observe_move)
        self.unknown = UnknownStreams(state, self.recoveries, self.migration)
        self._restored = Restored(state, self.unknown)
        self.restarts = Restarts(state, self.migration, loads)
        self.members = Members(
            state,
            recoveries=self.recoveries,
            restored=self._restored,
            unknown=self.unknown,
            producers=self.producers,
            restarts=self.restarts,
            loads=loads,
            access_heard=self.access.heard,
            stored_heard=self.stored.heard,
            latency_heard=self.latency.planning.heard,
        )
        self.drains = Drains(state, self.recoveries, self.migration)
        self.forgetting = Forgetting(state, self.recoveries, self.migration)
        self.balancing = Balancing(state, self.migration, loads)
        self.feature_levels = FeatureLevels(state, feature_level_of_coordinators)
        creators = Creators(state.catalog, self.stored, guard, shares)
        self.streams = StreamOperations(
            state,
            self._drops,
            self.balancing.spread,
            creators,
            self.schemas.columns,
            self.feature_levels,
            self.producers.owners,
        )
        advancing = (
            self.migration,
            self.drains,
            self.restarts,
            self._drops,
            self.balancing,
            self.feature_levels,
            self.latency.planning,
        )
        self.control = Control(
            state, self.recoveries, self._restored, loads, advancing=[part.advance for part in advancing]
        )
        self._active = (
            self.control,
            self._drops.work,
            self.balancing.work,
            self.drains,
            self.restarts.work,
            self.migration,
            self.recoveries,
            self.members.work,
            self.unknown.work,
            self._restored.work,
            self.feature_levels.work,
            self.latency.planning.work,
            self.access.telling,
        )
        """The parts that have background work, in the order in which they end."""
        self._copying = Changing()

    @classmethod
    async def load(  # noqa: PLR0913 - the parts that it is made of, and those that it informs
        cls,
        store: MetadataStore,
        brokers: BrokerCalls,
        backups: BackupCalls,
        clock: Clock,
        settings: CoordinatorSettings,
        *,
        coordinator_epoch: int = 1,
        new_id: Callable[[], str] = random_id,
        feature_level_of_coordinators: Callable[[], int] = lambda: FEATURE_LEVEL,
        observe_phase: ObservePhase = lambda *_: None,
        observe_move: ObserveMove = lambda *_: None,
        guard: Guard | None = None,
        tell_member: TellMember = tell_nobody,
    ) -> Coordinator:
        """Return the coordinator of the metadata in `store`; an empty store becomes a new cluster.

        It answers requests from now on; its background work begins with `start`. `coordinator_epoch` belongs to this
        term of leadership, and grows with each term. Raises `UnknownFormat` if this version is too old for the cluster,
        and `MetadataDamaged` if a record cannot be read, or is missing.
        """
        ledger = await Ledger.load(store)
        check_records(ledger.snapshot())
        await ledger.check()
        state = State(ledger, brokers, backups, clock, settings, coordinator_epoch)
        if state.ledger.get(CLUSTER_ID) is None:
            await state.write({CLUSTER_ID: new_id().encode()})
        state.load()
        self = cls(
            state,
            feature_level_of_coordinators=feature_level_of_coordinators,
            observe_phase=observe_phase,
            observe_move=observe_move,
            guard=guard,
            tell_member=tell_member,
        )
        for part in (
            self.feature_levels,
            self.consumer_groups,
            self.recoveries,
            self.migration,
            self.restarts,
            self._drops,
            self.producers,
            self._restored,
            self.access,
            self.schemas,
            self.latency,
        ):
            part.load()
        log.info(
            "metadata loaded",
            cluster_id=state.cluster_id,
            streams=len(state.catalog),
            brokers=len(state.brokers.ids()),
            backups=len(state.backups.ids()),
            recoveries=len(self.recoveries.describe_all()),
        )
        return self

    def start(self) -> None:
        """Begin to notice lost brokers and consumers, and continue the work that was begun before."""
        self.control.start()
        self.consumer_groups.start()
        self.group_lags.start()
        if self.state.settings.zookeeper:  # nobody else can write to a store that is locked
            self.rereading.start()

    async def close(self) -> None:
        """Cancel the background work, and let changes that have begun complete, which takes bounded time.

        The store and the clients of brokers and backups are closed by their owners.
        """
        await self.rereading.close()
        await self.group_lags.close()
        await self.consumer_groups.close()
        self.producers.close()
        for part in self._active:
            await part.close()
        await self.schemas.close()
        await self.state.close()

    def tick(self) -> None:
        """Look at everything now; after `start` this happens every heartbeat interval."""
        self.control.tick()

    async def idle(self) -> None:
        """Wait until no background work is under way."""
        for part in self._active:
            await part.idle()

    # --- requests ----------------------------------------------------------------------------------------------

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        handlers: dict[Method[Any, Any], Callable[[Any], Any]]
        handlers = {api.DESCRIBE_CLUSTER: self._describe, api.READ_METADATA: self._answer_copy}
        for part in (
            self.streams,
            self.members,
            self.producers,
            self.recoveries,
            self.migration,
            self.balancing,
            self.drains,
            self.restarts,
            self.forgetting,
            self.unknown,
            self.control,
            self.consumer_groups,
            self.access,
            self.schemas,
            self.latency,
        ):
            handlers.update(part.handlers())
        return handlers

    def _describe(self, _: messages.DescribeClusterRequest) -> messages.DescribeClusterResponse:
        return messages.DescribeClusterResponse(
            cluster_id=self.state.cluster_id,
            brokers=self.state.brokers.describe_all(),
            backups=self.state.backups.describe_all(),
            unknown_streams=self.unknown.describe_all(),
            catching_up=self.state.catching_up,
            feature_level=self.state.feature_level,
            security=self.access.is_on,
        )

    async def _answer_copy(self, _: messages.ReadMetadataRequest) -> messages.ReadMetadataResponse:
        return messages.ReadMetadataResponse(copy=await self.copy_metadata())

    async def copy_metadata(self) -> bytes:
        """Return all metadata as a file, see ``metadata_copy``. Raises `InvalidArgument` if no message can hold it."""
        async with self._copying:  # each takes as much memory as there is metadata
            copy = await self.state.in_slices(packing(self.state.ledger.snapshot(), self.state.clock.now_us()))
        if len(copy) > COPY_BYTES_MAX:
            raise InvalidArgument(
                f"the copy of the metadata would take {len(copy)} bytes, and a message takes {COPY_BYTES_MAX}; stop the"
                " coordinator, and copy its data directory",
                limit_bytes=COPY_BYTES_MAX,
            )
        return copy
