"""Registrations and heartbeats of brokers and backups, and their reports on streamlets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kera.coordinator.cluster.admission import Admission, check_level, decide_admission
from kera.coordinator.cluster.catalog import relaunched
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.keys import last_epoch, last_id, member_key
from kera.coordinator.cluster.member_kinds import InfoT, RecordT
from kera.coordinator.cluster.membership import Membership
from kera.coordinator.cluster.recovering import as_told_to
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch
from kera.coordinator.operations.loads import MeasuredLoads
from kera.coordinator.operations.producers import Producers
from kera.coordinator.operations.restarts import Restarts
from kera.coordinator.operations.restored import Restored
from kera.coordinator.operations.stored import Told
from kera.coordinator.operations.streamlet_report import StreamletReport
from kera.coordinator.operations.unknown import UnknownStreams
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.recovery.records import records_of
from kera.coordinator.store.ledger import Changes, number
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.server.lineage import comes_from
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

REPORTED_MAX = 4096
"""Maximum of each list of a heartbeat; brokers report 1,000 items, and the others with the next one."""


class Members:
    """The operations of brokers and backups."""

    def __init__(  # noqa: PLR0913 - the parts to which members' reports go
        self,
        state: State,
        *,
        recoveries: Recoveries,
        restored: Restored,
        unknown: UnknownStreams,
        producers: Producers,
        restarts: Restarts,
        loads: MeasuredLoads,
        access_heard: Callable[[str, int, int], None],
        stored_heard: Callable[[coordinator_pb2.HeartbeatRequest], Told],
        latency_heard: Callable[[coordinator_pb2.HeartbeatRequest], coordinator_pb2.StreamBudgets | None],
    ) -> None:
        """`access_heard`: takes a kind of member, its id, and the version of users and rules that it applies.

        `stored_heard`: takes what a broker has stored; returns the principals whose streams take no more.
        `latency_heard`: takes
        a broker's measurements; returns new budgets for the buffers of its streams, or None if it has the newest ones.
        """
        self._state = state
        self._recoveries = recoveries
        self._restored = restored
        self._unknown = unknown
        self._producers = producers
        self._restarts = restarts
        self._loads = loads
        self._access_heard = access_heard
        self._stored_heard = stored_heard
        self._latency_heard = latency_heard
        self.work = Work()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {
            api.REGISTER_BROKER: self.register_broker,
            api.HEARTBEAT: self.heartbeat,
            api.REGISTER_BACKUP: self.register_backup,
            api.BACKUP_HEARTBEAT: self.backup_heartbeat,
        }

    async def register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> coordinator_pb2.RegisterBrokerResponse:
        """Make a launch of a broker the current one; the answer has exactly the streams that it has to know.

        A launch that registers again gets the same answer. A new launch fences the one before it; where it has lost the
        data of a streamlet, its group ids start above the earlier ones (see `GROUPS_PER_LAUNCH`). It does not own
        streamlets under recovery any more, and replicated streamlets are recovered if it has lost its memory. The
        answer leaves out a stream whose assignments the broker knows in a later version than the metadata, until that
        version has been taken up (``unknown``). A launch that is younger than the metadata keeps its epoch, and the
        streamlets that it serves.

        Raises `InvalidArgument`, `StaleEpoch` for a launch that was declared lost, and `Unavailable` while it has to
        wait because the metadata may be older than the cluster (``restored``).
        """
        await self._restored.registers(request)
        broker_id, epoch, streams = await self._state.to_the_end(self._register_broker(request))
        response = coordinator_pb2.RegisterBrokerResponse(
            cluster_id=self._state.cluster_id,
            broker_id=broker_id,
            broker_epoch=epoch,
            heartbeat_interval_ms=self._state.settings.heartbeat_interval_ms,
            backups=self._state.backups.describe_all(),
            lease_ms=self._state.settings.lease_ms,
            coordinator_epoch=self._state.coordinator_epoch,
            recovered_before_epoch=self._recoveries.records.recovered_before_epoch(broker_id),
            fences=self._producers.fences(),
            finds_producers=True,
            has_holes=self._recoveries.records.has_holes(broker_id),
            elsewhere_stream_ids=await self._elsewhere(broker_id, request.held_streams, streams),
        )
        pace = self._state.pace()
        for stream in streams:
            await pace.step()
            response.streams.append(as_told_to(self._state.ledger, broker_id, stream))
        return response

    async def _register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> tuple[int, int, list[common_pb2.StreamInfo]]:
        """Register a broker; return its id, its epoch, and the streams that it has to know."""
        state, recoveries = self._state, self._recoveries
        async with state.changing:
            runs = self._restored.is_later_launch(request.broker.broker_id, request.broker.broker_epoch)
            admission = self._decide(state.brokers, request, keeps_epoch=runs)
            broker_id, epoch = admission.member_id, admission.epoch
            later = self._restored.going_on().union(
                one.stream_id for one in request.held_streams if self._is_later(one)
            )
            changed: list[coordinator_pb2.RecoveryInfo] = []
            moved: list[common_pb2.StreamInfo] = []
            if admission.new_launch and not admission.new_member and not runs:
                changed, stays = recoveries.records.at_registration(broker_id, epoch, lost_memory=request.lost_memory)
                new_versions = relaunched(
                    state.catalog, broker_id, epoch, stays, coordinator_epoch=state.coordinator_epoch, but=later
                )
                moved = await state.in_slices(new_versions)
            info = await self._admit(state.brokers, admission, records_of(changed), moved)
            recoveries.admitted(changed)
            log.info(
                "broker registered",
                broker_id=broker_id,
                broker_epoch=epoch,
                new_launch=admission.new_launch,
                streams_moved=len(moved),
                address=info.grpc_address,
            )
            known = state.catalog.concerning(broker_id) + state.catalog.creating(broker_id, epoch)
            return broker_id, epoch, [stream for stream in known if stream.stream_id not in later]

    def _is_later(self, held: coordinator_pb2.HeldStream) -> bool:
        """Whether a broker knows assignments of a stream that are not in the metadata: see ``unknown``."""
        catalog = self._state.catalog
        return held.stream_id in catalog and not comes_from(catalog.with_id(held.stream_id), held.assignments_version)

    async def _elsewhere(
        self,
        broker_id: int,
        held: Iterable[coordinator_pb2.HeldStream],
        told: Iterable[common_pb2.StreamInfo],
    ) -> list[int]:
        """Return the streams that a broker holds, except `told`, in which it has no part any more.

        Streams whose assignments it knows in a version that the metadata lack, as after a restore from an older copy,
        are left out: the broker may have the only data of them.
        """
        catalog, going_on = self._state.catalog, self._restored.going_on()
        concerning = {*going_on} | {stream.stream_id for stream in (*told, *catalog.concerning(broker_id))}
        found, pace = [], self._state.pace()
        for one in held:
            await pace.step()
            if one.stream_id in catalog and one.stream_id not in concerning and not self._is_later(one):
                found.append(one.stream_id)
        return found

    async def register_backup(
        self, request: coordinator_pb2.RegisterBackupRequest
    ) -> coordinator_pb2.RegisterBackupResponse:
        """Make a launch of a backup the current one.

        A launch that registers again gets the same answer. A new one fences the one before it.
        Raises `InvalidArgument`.
        """
        backup = await self._state.to_the_end(self._register_backup(request))
        return coordinator_pb2.RegisterBackupResponse(
            cluster_id=self._state.cluster_id,
            backup_id=backup.backup_id,
            backup_epoch=backup.backup_epoch,
            heartbeat_interval_ms=self._state.settings.heartbeat_interval_ms,
        )

    async def _register_backup(self, request: coordinator_pb2.RegisterBackupRequest) -> common_pb2.BackupInfo:
        async with self._state.changing:
            admission = self._decide(self._state.backups, request)
            info = await self._admit(self._state.backups, admission, {}, [])
        self._recoveries.advance()  # the backup has to be fenced, and may have replicas that a recovery waits for
        log.info(
            "backup registered",
            backup_id=info.backup_id,
            backup_epoch=info.backup_epoch,
            new_launch=admission.new_launch,
            address=info.grpc_address,
        )
        return info

    def _decide(
        self, members: Membership[RecordT, InfoT], request: RecordT, *, keeps_epoch: bool = False
    ) -> Admission[RecordT]:
        noun = members.kind.noun
        check_level(noun, members.kind.info(request), self._state.feature_level)
        return decide_admission(
            members,
            request,
            next_id=self._state.ledger.next_number(last_id(noun)),
            next_epoch=self._state.next_epoch(noun),
            keeps_epoch=keeps_epoch,
        )

    async def _admit(
        self,
        members: Membership[RecordT, InfoT],
        admission: Admission[RecordT],
        consequences: Changes,
        streams: Iterable[common_pb2.StreamInfo],
    ) -> InfoT:
        """Store a registration with its consequences, then apply it."""
        if admission.changed:
            noun = members.kind.noun
            changes: dict[str, bytes | None] = {
                member_key(noun, admission.member_id): admission.record.SerializeToString(),
                **consequences,
            }
            if admission.new_member:
                given = self._state.ledger.next_number(last_id(noun)) - 1
                changes[last_id(noun)] = number(max(given, admission.member_id))
            if admission.new_launch:
                last = self._state.ledger.last_number(last_epoch(noun))
                changes[last_epoch(noun)] = number(max(last, admission.epoch))
            await self._state.write(changes, streams)
        return members.admit(admission.record, admission.passing)

    async def heartbeat(self, request: coordinator_pb2.HeartbeatRequest) -> coordinator_pb2.HeartbeatResponse:
        """Take a broker's heartbeat and its reports; they are stored when this returns.

        Raises `StaleEpoch` if the broker must end, and `UnknownLaunch` if it has to register again.
        """
        await self._restored.beats(request)
        launch = Launch(request.broker_id, request.broker_epoch)
        refused = await self._take_down(launch, request)
        self._producers.noted(launch, request.fences_version)
        self._access_heard("broker", request.broker_id, request.access_version)
        self._unknown.reports.note(launch, request.unknown_streams)
        self._restored.advance()
        if not self._state.catching_up:
            self._restarts.advance()
        if self._restored.takes_up:
            self._unknown.advance()
        unknown = await self._unknown.reports.of(launch, request)
        stored = self._stored_heard(request)
        return coordinator_pb2.HeartbeatResponse(
            backups=self._state.backups.describe_all(),
            lease_ms=self._state.settings.lease_ms,
            coordinator_epoch=self._state.coordinator_epoch,
            fences=self._producers.fences(request.fences_version),
            finds_producers=True,
            unknown_stream_ids=unknown,
            starts_refused=refused,
            full_principals=stored.full,
            full_principals_incomplete=stored.incomplete,
            now_us=self._state.clock.now_us(),
            budgets=self._latency_heard(request),
        )

    async def _take_down(
        self, launch: Launch, request: coordinator_pb2.HeartbeatRequest
    ) -> list[common_pb2.StreamletRef]:
        """Take down the reports; return the streamlets whose starts are refused."""
        self._state.brokers.heartbeat(*launch)
        for name in ("loads", "starts", "empty_intervals", "stored", "latency"):
            if len(getattr(request, name)) > REPORTED_MAX:
                raise InvalidArgument(
                    f"a heartbeat has at most {REPORTED_MAX} {name}, not {len(getattr(request, name))}",
                    field=name,
                    limit=REPORTED_MAX,
                )
        busy = request.loop_busy_permille if request.HasField("loop_busy_permille") else None
        self._loads.note(launch, request.loads, busy)
        self._recoveries.report(launch, request.recoveries)
        self._recoveries.unneeded.note(launch, request.unneeded_backup_ids)
        if not request.starts and not request.empty_intervals:
            return []
        report = StreamletReport(self._state, self._recoveries.records, launch)
        for stream in await self._state.change(self._write_report(report, request)):
            version = (stream.stream_id, stream.assignments_version)
            self.work.start(version, lambda stream=stream: self._tell(stream))  # type: ignore[misc]
        return [common_pb2.StreamletRef(stream_id=one[0], streamlet_id=one[1]) for one in report.refused]

    async def _tell(self, stream: common_pb2.StreamInfo) -> None:
        await self._state.tell(stream, otherwise="broker does not know yet that an interval has gone")

    def backup_heartbeat(
        self, request: coordinator_pb2.BackupHeartbeatRequest
    ) -> coordinator_pb2.BackupHeartbeatResponse:
        """Take a backup's heartbeat with its free space. Raises `StaleEpoch` if the backup must end."""
        self._state.backups.heartbeat(
            request.backup_id,
            request.backup_epoch,
            free_memory_bytes=request.free_memory_bytes,
            free_disk_bytes=request.free_disk_bytes,
        )
        self._access_heard("backup", request.backup_id, request.access_version)
        return coordinator_pb2.BackupHeartbeatResponse()

    async def _write_report(
        self, report: StreamletReport, request: coordinator_pb2.HeartbeatRequest
    ) -> list[common_pb2.StreamInfo]:
        """Write where entries start, and which intervals are empty; return the streams whose assignments changed."""
        pace = self._state.pace()
        for start in request.starts:
            await pace.step()
            report.start(start)
        for empty in request.empty_intervals:
            await pace.step()
            if not self._state.catching_up:  # else the broker reports it again
                report.empty(empty)
        streams = report.streams()
        await self._state.write(report.changes(), streams)
        return streams
