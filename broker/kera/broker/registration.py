"""The broker's tie to the coordinator: its identity on disk, its registration, its heartbeats.

The files are ``broker.json`` and ``broker.copy.json``, see ``kera.core.data_dir``. Everything else in the data
directory belongs to the log (``kera.broker.engine``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.ownership.clock_offset import ClockOffset
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.producer_fences import ProducerFences
from kera.broker.ownership.producer_owners import ProducerOwners
from kera.core import data_dir
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.data_dir import FORMAT
from kera.core.errors import InvalidArgument, PathNotWritable, StaleEpoch, UnknownLaunch
from kera.core.rpc import api
from kera.core.runtime import MACHINE, Runtime
from kera.server import registration
from kera.server.registration import CALL_TIMEOUT_S, TIMING, RegistrationTiming
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.registration")

OnBackups = Callable[[list[common_pb2.BackupInfo]], None]


class BrokerIdentity(data_dir.MemberIdentity):
    """The identity of a broker in its cluster."""

    role: ClassVar[str] = "broker"
    formats: ClassVar[frozenset[int]] = frozenset({1, FORMAT})


class BrokerDirectory(data_dir.DataDirectory):
    """The owner of a broker's data directory."""

    identity: ClassVar[type[data_dir.MemberIdentity]] = BrokerIdentity
    data_pattern: ClassVar[str | None] = "log/segments/*/*"


class BrokerRegistration(registration.Registration):
    """The registration of one launch of a broker at the coordinator."""

    def __init__(  # noqa: PLR0913 - what it tells, and whom
        self,
        coordinator: str,
        directory: data_dir.DataDirectory,
        on_backups: OnBackups = lambda _: None,
        *,
        leader: CoordinatorEpoch | None = None,
        report: HeartbeatReport | None = None,
        lease: Lease | None = None,
        fences: ProducerFences | None = None,
        owners: ProducerOwners | None = None,
        clock_offset: ClockOffset | None = None,
        access_version: Callable[[], int] = lambda: 0,
        chosen_id: int = 0,
        timing: RegistrationTiming = TIMING,
        runtime: Runtime = MACHINE,
    ) -> None:
        """`on_backups` gets all known backups, alive or not, with each answer of the coordinator.

        Each answer passes the coordinator's epoch to `leader`, renews `lease`, adds to `fences`, lets `clock_offset`
        measure, and says whether `owners` can ask. `leader` may want a heartbeat at once. `report` fills each
        heartbeat. `access_version`: returns the version of the users and rules in effect.
        """
        self._leader = leader or CoordinatorEpoch()
        super().__init__(coordinator, directory, chosen_id, hurry=self._leader.wanted, timing=timing, runtime=runtime)
        self._on_backups = on_backups
        self._cannot_store = Repeated(log)
        self._report = report
        self._lease = lease or Lease()
        self._fences = fences or ProducerFences()
        self._owners = owners or ProducerOwners()
        self._clock_offset = clock_offset or ClockOffset()
        self._clock = runtime.clock
        self._access_version = access_version
        self._info = common_pb2.BrokerInfo()
        """The broker's description, as it was registered."""
        self._lost_memory = False
        self._cluster_id = ""
        self.broker_id = 0
        self.broker_epoch = 0
        self.elsewhere_stream_ids: list[int] = []
        """Held streams that belong to other brokers now."""
        self.recovered_before_epoch = 0
        """Other brokers recover, or have recovered, the data of launches before this epoch."""
        self.has_holes = False
        """Whether data that a launch had in memory was lost, and other brokers still have to recover it."""

    async def register(
        self,
        info: common_pb2.BrokerInfo,
        timeout_s: float,
        *,
        lost_memory: bool = False,
        held: Mapping[int, int] | None = None,
    ) -> list[common_pb2.StreamInfo]:
        """Register this launch; return the streams that it has parts of.

        `held`: the streams that have data here, each with the latest version of its assignments. `lost_memory`: the
        last launch did not stop cleanly, and its memory is gone. Waits up to `timeout_s` for a coordinator that cannot
        be reached, then raises `CoordinatorUnreachable`.
        """
        info.broker_id = await self.identify(timeout_s)
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=info,
            launch_id=self.launch_id,
            lost_memory=lost_memory,
            chosen_id=self.id_is_chosen,
            directory_id=self.directory_id,
            known_coordinator_epoch=self.known_coordinator_epoch,
            held_streams=[
                coordinator_pb2.HeldStream(stream_id=stream_id, assignments_version=version)
                for stream_id, version in sorted((held or {}).items())
            ],
        )
        answer = await self.ask(api.REGISTER_BROKER, request, timeout_s)
        self._info, self._lost_memory = info, lost_memory
        self._cluster_id = answer.cluster_id
        self.remember(
            answer.broker_id,
            answer.cluster_id,
            answer.heartbeat_interval_ms,
            coordinator_epoch=answer.coordinator_epoch,
        )
        self.broker_id, self.broker_epoch = answer.broker_id, answer.broker_epoch
        self.recovered_before_epoch = answer.recovered_before_epoch
        self.has_holes = answer.has_holes
        self.elsewhere_stream_ids = list(answer.elsewhere_stream_ids)
        self._apply(answer)
        return list(answer.streams)

    async def register_again(self, reason: UnknownLaunch) -> None:
        """Register this launch at a coordinator whose metadata is older than the launch, which keeps its streams.

        Heartbeats report these streams, because the coordinator's information about them may be outdated, too.
        """
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=self._info,
            launch_id=self.launch_id,
            directory_id=self.directory_id,
            lost_memory=self._lost_memory,
        )
        request.broker.broker_id, request.broker.broker_epoch = self.broker_id, self.broker_epoch
        try:
            answer = await self._call(api.REGISTER_BROKER, request, CALL_TIMEOUT_S)
        except InvalidArgument as error:
            raise StaleEpoch(error.message, **error.attributes) from error
        if (answer.broker_id, answer.broker_epoch) != (self.broker_id, self.broker_epoch):
            raise StaleEpoch(reason.message, **reason.attributes)
        self._apply(answer)

    async def keep_alive(self) -> None:
        """Send heartbeats without end. Raises `StaleEpoch` if this launch is not the current one: it must end."""
        await self.beat(api.HEARTBEAT, self._heartbeat, self._answered)

    async def find_producers(
        self, request: coordinator_pb2.FindProducersRequest
    ) -> coordinator_pb2.FindProducersResponse:
        """Ask the coordinator for the owners of producer ids, once. Raises the coordinator's error."""
        return await self._coordinators.ask(api.FIND_PRODUCERS, request, timeout_s=CALL_TIMEOUT_S)

    async def hand_over(self, wait_ms: int) -> coordinator_pb2.PrepareRestartResponse | None:
        """Let other brokers take this one's streamlets, within `wait_ms`; returns None as `announce` does."""
        return await self.announce(self._restart(wait_ms=wait_ms))

    async def stops(self) -> None:
        """Announce that this launch takes no more data, and is about to end, in order to start again."""
        self.stopping = True
        await self.announce(self._restart(stopping=True))

    def _restart(self, *, wait_ms: int = 0, stopping: bool = False) -> coordinator_pb2.PrepareRestartRequest:
        return coordinator_pb2.PrepareRestartRequest(
            broker_id=self.broker_id, epoch=self.broker_epoch, wait_ms=wait_ms, stopping=stopping
        )

    def _heartbeat(self) -> coordinator_pb2.HeartbeatRequest:
        request = coordinator_pb2.HeartbeatRequest(
            broker_id=self.broker_id,
            broker_epoch=self.broker_epoch,
            fences_version=self._fences.version,
            access_version=self._access_version(),
        )
        if self._report is not None and not self.stopping:
            self._report.fill(request)
        return request

    def _answered(self, answer: coordinator_pb2.HeartbeatResponse) -> None:
        if self.stopping:
            return
        self._clock_offset.note(answer.now_us, self._clock.boottime_s() - self.last_sent_s)
        if self._report is not None:
            self._report.answered(answer)
        if answer.coordinator_epoch > self.known_coordinator_epoch:
            try:
                self._directory.store(self.broker_id, self._cluster_id, answer.coordinator_epoch)
            except PathNotWritable as error:
                self._cannot_store.goes_on("cannot store which coordinator leads", error=error.message)
            else:
                self._cannot_store.over("stored which coordinator leads")
        self._apply(answer)

    def _apply(self, answer: coordinator_pb2.RegisterBrokerResponse | coordinator_pb2.HeartbeatResponse) -> None:
        if answer.HasField("fences"):
            self._fences.note(answer.fences)
        self._owners.note_coordinator(finds_producers=answer.finds_producers)
        self._lease.renew(self.last_sent_s, answer.lease_ms)
        self._leader.observe(answer.coordinator_epoch)
        self._on_backups(list(answer.backups))
