"""Registrations and heartbeats of brokers and backups, and what they tell of their streamlets."""

from __future__ import annotations

from collections.abc import Iterable

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.intervals import broker_of_group, emptied, index_of_group
from kera.coordinator.cluster.membership import InfoT, Membership, RecordT, Registration
from kera.coordinator.cluster.starts import merged, without_interval
from kera.coordinator.cluster.state import STARTS, State, last_epoch, last_id, member_key, streamlet_key
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch, Streamlet
from kera.coordinator.operations.restored import Restored
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.store.ledger import Changes, number
from kera.core.errors import InvalidArgument, UnknownStream
from kera.core.lineage import comes_from
from kera.core.telemetry import get_logger
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

REPORTED_MAX = 4096
"""In each list of a heartbeat; brokers tell of 1,000, and of the others with the next one."""


class Members:
    """The operations of brokers and backups."""

    def __init__(self, state: State, recoveries: Recoveries, restored: Restored) -> None:
        self._state = state
        self._recoveries = recoveries
        self._restored = restored
        self._work = Work()
        self.loads: dict[Launch, dict[Streamlet, int]] = {}
        """What brokers measured last: bytes per second, appended and read, by streamlet."""

    async def register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        """Make a launch of a broker the current one; returns it, and exactly the streams that it has to know.

        A launch that registers again gets the same answer. A new one fences the one before it; where it has lost the
        data of a streamlet, its group ids start above those it had (see `GROUPS_PER_LAUNCH`). What is being recovered
        is not its own any more, and replicated streamlets are recovered if it has lost its memory. A stream of which it
        knows assignments that we do not is none of them, until these have been taken up (``unknown``). A launch that is
        younger than the metadata keeps its epoch, and what it serves.

        Raises `InvalidArgument`, `StaleEpoch` for a launch that was given up for lost, and `Unavailable` while it has
        to wait, as the metadata may be older than the cluster (``restored``).
        """
        await self._restored.registers(request)
        return await self._state.to_the_end(self._register_broker(request))

    async def _register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        state, recoveries = self._state, self._recoveries
        async with state.changing:
            runs = self._restored.is_later_launch(request.broker.broker_id, request.broker.broker_epoch)
            registration = self._decide(state.brokers, request, keeps_epoch=runs)
            broker_id, epoch = registration.member_id, registration.epoch
            later = self._restored.going_on().union(
                one.stream_id for one in request.held_streams if self._is_later(one)
            )
            changed: list[coordinator_pb2.RecoveryInfo] = []
            moved: list[common_pb2.StreamInfo] = []
            if registration.new_launch and not registration.new_member and not runs:
                changed, stays = recoveries.at_registration(broker_id, epoch, lost_memory=request.lost_memory)
                relaunched = state.catalog.relaunched(
                    broker_id, epoch, stays, coordinator_epoch=state.coordinator_epoch, but=later
                )
                moved = await state.in_slices(relaunched)
            info = await self._admit(state.brokers, registration, recoveries.records(changed), moved)
            recoveries.admitted(changed)
            log.info(
                "broker registered",
                broker_id=broker_id,
                broker_epoch=epoch,
                new_launch=registration.new_launch,
                streams_moved=len(moved),
                address=info.grpc_address,
            )
            known = state.catalog.of_launch(broker_id, epoch)
            return info, [stream for stream in known if stream.stream_id not in later]

    def _is_later(self, held: coordinator_pb2.HeldStream) -> bool:
        """Whether a broker knows assignments of a stream that are not in the metadata: see ``unknown``."""
        catalog = self._state.catalog
        return held.stream_id in catalog and not comes_from(catalog.with_id(held.stream_id), held.assignments_version)

    async def elsewhere(
        self,
        broker_id: int,
        held: Iterable[coordinator_pb2.HeldStream],
        told: Iterable[common_pb2.StreamInfo],
    ) -> list[int]:
        """Of the streams that a broker holds, those of which others have everything, `told` aside.

        Not those of which it knows assignments that we do not, as after our metadata were restored from an older copy:
        what it has of them may be the only one there is.
        """
        catalog, going_on = self._state.catalog, self._restored.going_on()
        concerning = {*going_on} | {stream.stream_id for stream in (*told, *catalog.concerning(broker_id))}
        found, pace = [], self._state.pace()
        for one in held:
            await pace.step()
            if one.stream_id in catalog and one.stream_id not in concerning and not self._is_later(one):
                found.append(one.stream_id)
        return found

    async def register_backup(self, request: coordinator_pb2.RegisterBackupRequest) -> common_pb2.BackupInfo:
        """Make a launch of a backup the current one; returns it.

        A launch that registers again gets the same answer. A new one fences the one before it.
        Raises `InvalidArgument`.
        """
        return await self._state.to_the_end(self._register_backup(request))

    async def _register_backup(self, request: coordinator_pb2.RegisterBackupRequest) -> common_pb2.BackupInfo:
        async with self._state.changing:
            registration = self._decide(self._state.backups, request)
            info = await self._admit(self._state.backups, registration, {}, [])
        self._recoveries.advance()  # it has to be fenced, and may have replicas that somebody waits for
        log.info(
            "backup registered",
            backup_id=info.backup_id,
            backup_epoch=info.backup_epoch,
            new_launch=registration.new_launch,
            address=info.grpc_address,
        )
        return info

    def _decide(
        self, members: Membership[RecordT, InfoT], request: RecordT, *, keeps_epoch: bool = False
    ) -> Registration[RecordT]:
        noun = members.kind.noun
        return members.decide(
            request,
            next_id=self._state.ledger.next_number(last_id(noun)),
            next_epoch=self._state.next_epoch(noun),
            keeps_epoch=keeps_epoch,
        )

    async def _admit(
        self,
        members: Membership[RecordT, InfoT],
        registration: Registration[RecordT],
        consequences: Changes,
        streams: Iterable[common_pb2.StreamInfo],
    ) -> InfoT:
        """Store a registration with what follows from it; then it counts."""
        if registration.changed:
            noun = members.kind.noun
            changes: dict[str, bytes | None] = {
                member_key(noun, registration.member_id): registration.record.SerializeToString(),
                **consequences,
            }
            if registration.new_member:
                given = self._state.ledger.next_number(last_id(noun)) - 1
                changes[last_id(noun)] = number(max(given, registration.member_id))
            if registration.new_launch:
                last = self._state.ledger.last_number(last_epoch(noun))
                changes[last_epoch(noun)] = number(max(last, registration.epoch))
            await self._state.write(changes, streams)
        return members.admit(registration)

    async def heartbeat(self, request: coordinator_pb2.HeartbeatRequest) -> None:
        """A broker says that it lives, and what has changed; that is stored when this returns.

        Raises `StaleEpoch` when it must end.
        """
        launch = Launch(request.broker_id, request.broker_epoch)
        self._state.brokers.heartbeat(*launch)
        for name in ("loads", "starts", "empty_intervals"):
            if len(getattr(request, name)) > REPORTED_MAX:
                raise InvalidArgument(
                    f"a heartbeat tells of at most {REPORTED_MAX} {name}, not {len(getattr(request, name))}",
                    field=name,
                    limit=REPORTED_MAX,
                )
        self.loads[launch] = {
            Streamlet(one.stream_id, one.streamlet_id): one.bytes_per_s + one.read_bytes_per_s for one in request.loads
        }
        self._recoveries.report(launch, request.recoveries)
        self._recoveries.unneeded.note(launch, request.unneeded_backup_ids)
        if request.starts or request.empty_intervals:
            for stream in await self._state.change(self._write_report(request)):
                version = (stream.stream_id, stream.assignments_version)
                self._work.start(version, lambda stream=stream: self._tell(stream))  # type: ignore[misc]

    async def _tell(self, stream: common_pb2.StreamInfo) -> None:
        await self._state.tell(stream, otherwise="broker does not know yet that an interval has gone")

    async def close(self) -> None:
        """End what is under way."""
        await self._work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._work.idle()

    def backup_heartbeat(self, request: coordinator_pb2.BackupHeartbeatRequest) -> None:
        """A backup says that it lives, and what it has free. Raises `StaleEpoch` when it must end."""
        self._state.backups.heartbeat(
            request.backup_id,
            request.backup_epoch,
            free_memory_bytes=request.free_memory_bytes,
            free_disk_bytes=request.free_disk_bytes,
        )

    async def _write_report(self, request: coordinator_pb2.HeartbeatRequest) -> list[common_pb2.StreamInfo]:
        """Write where entries start and which intervals have gone; returns the streams whose assignments changed."""
        report, pace = _Report(self._state), self._state.pace()
        for start in request.starts:
            await pace.step()
            report.start(request.broker_id, start)
        for empty in request.empty_intervals:
            await pace.step()
            if not self._state.catching_up:  # it is told again
                report.empty(request.broker_id, empty)
        streams = report.streams()
        await self._state.write(report.changes(), streams)
        return streams

    def has_beaten(self, broker_id: int) -> bool:
        """Whether the current launch of a broker has sent a heartbeat."""
        return Launch(broker_id, self._state.brokers.epoch(broker_id)) in self.loads

    def forget_loads(self) -> None:
        """Drop what brokers said that are not current any more."""
        brokers = self._state.brokers
        self.loads = {
            launch: loads
            for launch, loads in self.loads.items()
            if brokers.is_alive(launch.member_id) and brokers.epoch(launch.member_id) == launch.epoch
        }


class _Report:
    """What one heartbeat changes. What it says of streamlets that the broker does not have any more is void."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._assignments: dict[Streamlet, common_pb2.StreamletAssignment] = {}
        self._starts: dict[Streamlet, list[common_pb2.EntryStart]] = {}

    def start(self, broker_id: int, start: common_pb2.EntryStart) -> None:
        streamlet = Streamlet(start.start.stream_id, start.start.streamlet_id)
        assignment = self._assignment(streamlet)
        # Groups that it had and has given back are another one's: what it says of these came late.
        if assignment is not None and broker_of_group(assignment, start.start.group_id) == broker_id:
            self._starts[streamlet] = merged(assignment, self._known(streamlet), [start])

    def empty(self, broker_id: int, interval: coordinator_pb2.EmptyInterval) -> None:
        streamlet = Streamlet(interval.stream_id, interval.streamlet_id)
        assignment = self._assignment(streamlet)
        if assignment is None:
            return
        changed = emptied(assignment, broker_id, interval.first_group_id)
        if changed != assignment:
            gone = index_of_group(assignment, interval.first_group_id)
            self._starts[streamlet] = without_interval(assignment, self._known(streamlet), gone)
            self._assignments[streamlet] = changed

    def streams(self) -> list[common_pb2.StreamInfo]:
        by_stream: dict[int, list[common_pb2.StreamletAssignment]] = {}
        for streamlet, assignment in self._assignments.items():
            by_stream.setdefault(streamlet.stream_id, []).append(assignment)
        state = self._state
        return [
            with_assignments(state.catalog.with_id(one), changed, state.coordinator_epoch)
            for one, changed in by_stream.items()
        ]

    def changes(self) -> dict[str, bytes | None]:
        values = {
            streamlet_key(STARTS, *streamlet): broker_pb2.TakeOverStream(starts=starts).SerializeToString()
            for streamlet, starts in self._starts.items()
        }
        return {key: value or None for key, value in values.items() if value != (self._state.ledger.get(key) or b"")}

    def _assignment(self, streamlet: Streamlet) -> common_pb2.StreamletAssignment | None:
        if streamlet in self._assignments:
            return self._assignments[streamlet]
        try:
            stream = self._state.catalog.with_id(streamlet.stream_id)
        except UnknownStream:
            return None
        return stream.assignments[streamlet.streamlet_id] if streamlet.streamlet_id < len(stream.assignments) else None

    def _known(self, streamlet: Streamlet) -> list[common_pb2.EntryStart]:
        if streamlet not in self._starts:
            value = self._state.ledger.get(streamlet_key(STARTS, *streamlet))
            self._starts[streamlet] = list(broker_pb2.TakeOverStream.FromString(value or b"").starts)
        return self._starts[streamlet]
