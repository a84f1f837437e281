"""Streams that brokers know and this coordinator does not, since its metadata were restored from an older copy.

A broker writes down what it learns of a stream, and reports that to a new leader. So the coordinator stores none of it.

* **A stream that is not in the metadata** is never dropped (see ``drops``). An operator sees it in ``kera cluster
  describe``, and can adopt it, with its old id and as its brokers knew it last (`UnknownStreams.adopt`). For that, each
  broker with a part of it has to be alive and have reported it, since the latest version among them counts.
* **A stream that was moved, recovered or altered since the copy** continues as brokers know it, without an operator
  (`UnknownStreams.advance`), if their version derives from the one in the metadata. If both have changed (because a
  coordinator acted before the brokers had reported), neither is destroyed: brokers refuse a version that does not
  derive from theirs (``kera.server.lineage``). An operator sees the problem, and can adopt this stream, too: then the
  brokers' version counts, and records that were written elsewhere since the restore are given up.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from kera.coordinator.cluster.catalog import broker_ids_of, first_group_id_of
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.validation import checked_name, config_of_store
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import StreamletId
from kera.coordinator.operations.migration import Migration
from kera.coordinator.operations.moves import written_again
from kera.coordinator.operations.streams import LAST_STREAM_ID
from kera.coordinator.operations.unknown_reports import UnknownReports
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.recovery.records import records_of
from kera.coordinator.store.ledger import number
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, StreamExists, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.server.lineage import comes_from, join, new_version
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")


class UnknownStreams:
    """Settles streams that brokers know and the restored metadata do not: automatically, or when an operator adopts."""

    def __init__(self, state: State, recoveries: Recoveries, migration: Migration) -> None:
        self._state = state
        self._recoveries = recoveries
        self._migration = migration
        self.reports = UnknownReports(state)
        self._stuck: set[int] = set()
        """Streams that cannot continue as brokers know them, whatever else the brokers report."""
        self.work = Work()

    def is_stuck(self, stream_id: int) -> bool:
        """Whether a stream cannot continue as brokers know it, so that an operator has to decide."""
        return stream_id in self._stuck

    def unsettled(self) -> list[str]:
        """Return the names of the streams that are about to continue as brokers know them."""
        catalog = self._state.catalog
        return [
            catalog.with_id(one).name for one in self.reports.streams() if one in catalog and one not in self._stuck
        ]

    def advance(self) -> None:
        """Have streams of the metadata continue as brokers know them, if that derives from the metadata's version."""
        told = self.reports.streams()
        self.work.forget_failures(frozenset(told).__contains__)
        for stream_id in told:
            if stream_id in self._state.catalog:
                self.work.start(stream_id, lambda stream_id=stream_id: self._take_up(stream_id))  # type: ignore[misc]

    async def go_on_without(self) -> None:
        """Have the brokers own what the metadata say of streams that cannot continue as others know them."""
        for stream_id in sorted(self._stuck):
            stream = await self._state.change(self._write_without(stream_id))
            if stream is not None:
                await self._state.tell(stream, otherwise="broker not yet notified of what it owns of a stream")

    async def recover_lost(self) -> None:
        """Begin to recover what launches younger than the metadata had lost with their memory.

        They have registered again and kept the streamlets that they serve. No broker knows a later version of what they
        lost.
        """
        await self._state.change(self._write_lost())

    async def _write_lost(self) -> None:
        found: dict[tuple[int, int], coordinator_pb2.RecoveryInfo] = {}
        pace = self._state.pace()
        for stream in list(self._state.catalog.streams()):
            await pace.step()
            for info in self._recoveries.records.of_lost_memory(stream):
                found[info.broker_id, info.before_epoch] = info
        if found:
            await self._state.write(records_of(found.values()))
            self._recoveries.admitted(found.values())

    async def _write_without(self, stream_id: int) -> common_pb2.StreamInfo | None:
        told, known = self.reports.told_of(stream_id), self._state.catalog.find(stream_id)
        if not told or known is None:
            return None
        stream = common_pb2.StreamInfo()
        stream.CopyFrom(known)
        knows_later = {launch.member_id for launch in told}
        if not self._renew_launches(stream, knows_later, recovers=True):
            return None
        new_version(stream, self._state.coordinator_epoch)
        await self._state.write({}, [stream])
        return stream

    async def _take_up(self, stream_id: int) -> None:
        try:
            written = await self._state.change(self._write_later(stream_id))
        except InvalidArgument:
            self._stuck.add(stream_id)
            raise
        self._stuck.discard(stream_id)
        if written is not None:
            stream, also = written
            log.warning(
                "a stream continues as its brokers know it: the metadata may have been restored from an older copy",
                stream=stream.name,
                stream_id=stream_id,
            )
            await self._state.tell(stream, otherwise="broker not yet notified of how a stream continues", also=also)

    async def _write_later(self, stream_id: int) -> tuple[common_pb2.StreamInfo, set[int]] | None:
        """Return the stream from now on, and the brokers that may still consider themselves owners of moved
        streamlets.
        """
        told, known = self.reports.told_of(stream_id), self._state.catalog.find(stream_id)
        if not told or known is None:
            return None
        also = self._holders_so_far(stream_id)
        later = [one.stream for one in told.values()]
        self.reports.check_told(known, *later)
        stream = _later_version(known, later)
        lost: list[coordinator_pb2.RecoveryInfo] = []
        moves: dict[str, bytes | None] = {}
        moved: list[StreamletId] = []
        if stream.assignments_version != known.assignments_version:
            self._check_recovered(stream)
            self._check_members(stream)
            lost = self._recoveries.records.of_lost_memory(stream)
            if self._renew_launches(stream, recovers=True):
                new_version(stream, self._state.coordinator_epoch)
            moves, moved = written_again(self._state.ledger, stream)
        await self._state.write({**records_of(lost), **moves}, [stream])
        self._recoveries.admitted(lost)
        self._migration.take_up(moved)
        self.reports.discard(stream_id)
        return stream, also

    def _holders_so_far(self, stream_id: int) -> set[int]:
        """Return the brokers that have reported a stream, and those that have a part of it according to the metadata.

        A broker whose part was moved away may not know that: the coordinator that moved it is gone.
        """
        catalog = self._state.catalog
        holders = catalog.holders(catalog.with_id(stream_id)) if stream_id in catalog else ()
        return {*holders, *(launch.member_id for launch in self.reports.told_of(stream_id))}

    def describe_all(self) -> list[coordinator_pb2.UnknownStream]:
        """Describe each such stream, by id: as the latest of its brokers knows it, with what all of them hold."""
        return [self._described(stream_id) for stream_id in sorted(self.reports.streams())]

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.ADOPT_STREAM: self._answer_adopt}

    async def _answer_adopt(self, request: coordinator_pb2.AdoptStreamRequest) -> coordinator_pb2.AdoptStreamResponse:
        return coordinator_pb2.AdoptStreamResponse(stream=await self.adopt(request.stream, request.name))

    async def adopt(self, which: str, name: str = "") -> common_pb2.StreamInfo:
        """Adopt a stream, given by its name or its id, under `name` or its own; return when brokers serve it.

        Raises `UnknownStream`, `StreamExists`, `InvalidArgument`, and `Unavailable` while a broker that has a part of
        it has not
        reported it.
        """
        return await self._state.to_the_end(self._adopt(which, name))

    async def _adopt(self, which: str, name: str) -> common_pb2.StreamInfo:
        state = self._state
        async with state.changing:
            stream_id = self._find(which)
            also = self._holders_so_far(stream_id)
            if stream_id in state.catalog:
                stream = self._version_of_brokers(stream_id)
                name = name or stream.name
                if name != stream.name:
                    raise InvalidArgument(f"stream {stream.name!r} is in the metadata, and keeps its name")
                moves, moved = written_again(state.ledger, stream)
                await state.write(moves, [stream])
            else:
                stream, moved = await self._adopt_unknown(stream_id, name)
            self.reports.discard(stream_id)
            self._migration.take_up(moved)
        log.warning("stream adopted", stream=stream.name, stream_id=stream.stream_id)
        await state.tell(stream, otherwise="broker not yet notified of an adopted stream", also=also)
        return stream

    async def _adopt_unknown(self, stream_id: int, name: str) -> tuple[common_pb2.StreamInfo, list[StreamletId]]:
        state, stream = self._state, self._version(stream_id)
        stream.name = checked_name(name or stream.name)
        try:
            state.catalog.check_free(stream.name)
        except StreamExists as error:
            raise StreamExists(
                f"{error.message}; choose another one for the stream that is adopted, with --name",
                stream=stream.name,
            ) from error
        state.catalog.check_room(stream)
        last = max(stream.stream_id, state.ledger.next_number(LAST_STREAM_ID) - 1)
        moves, moved = written_again(state.ledger, stream)
        await state.write({LAST_STREAM_ID: number(last), **moves}, [stream])
        return stream, moved

    def _version_of_brokers(self, stream_id: int) -> common_pb2.StreamInfo:
        """Return a stream of the metadata as the latest of its brokers knows it."""
        known = self._state.catalog.with_id(stream_id)
        told = [one.stream for one in self.reports.told_of(stream_id).values()]
        latest = max(told, key=lambda one: one.assignments_version)
        self.reports.check_told(known, latest)
        stream = common_pb2.StreamInfo()
        stream.CopyFrom(latest)
        stream.config.CopyFrom(config_of_store(stream.config))
        stream.name = known.name
        if known.config_version > latest.config_version:
            stream.config.CopyFrom(known.config)
            stream.config_version = known.config_version
            del stream.schemas[:]
            stream.schemas.extend(known.schemas)
        join(stream, known)
        self._check_recovered(stream)
        self._check_members(stream)
        self._renew_launches(stream)
        new_version(stream, self._state.coordinator_epoch)
        return stream

    def _find(self, which: str) -> int:
        known = self.describe_all()
        found = [one.stream.stream_id for one in known if which == str(one.stream.stream_id)]
        found = found or [one.stream.stream_id for one in known if which and which == one.stream.name]
        if len(found) > 1:
            raise InvalidArgument(f"several streams that brokers hold are called {which!r}; name its id: {found}")
        if not found:
            raise UnknownStream(
                f"no broker has reported a stream {which!r} that the metadata lack; see kera cluster describe",
                stream=which,
            )
        return found[0]

    def _version(self, stream_id: int) -> common_pb2.StreamInfo:
        """Return the new version of a stream that is not in the metadata."""
        stream = common_pb2.StreamInfo()
        stream.CopyFrom(self._described(stream_id).stream)
        if not stream.name:
            raise InvalidArgument(
                f"stream {stream_id} cannot be adopted: no broker has its configuration", stream_id=stream_id
            )
        brokers = self._state.brokers
        told = {launch.member_id for launch in self.reports.told_of(stream_id)}
        missing = [one for one in broker_ids_of(stream) if one not in told or not brokers.is_alive(one)]
        if missing:
            raise Unavailable(
                f"stream {stream.name!r} has a part at broker {missing[0]}, which has not reported it; start the"
                " broker, and ask again after its next heartbeats",
                stream=stream.name,
                broker_ids=missing,
            )
        self._check_recovered(stream)
        self._renew_launches(stream)
        new_version(stream, self._state.coordinator_epoch)
        stream.config.CopyFrom(config_of_store(stream.config))  # brokers may have got it long ago
        stream.config_version += 1
        return stream

    def _check_members(self, stream: common_pb2.StreamInfo) -> None:
        members = self._state.brokers.ids()
        missing = [one for one in broker_ids_of(stream) if one not in members]
        if missing:
            raise Unavailable(
                f"stream {stream.name!r} has a part at broker {missing[0]}, which is not in the metadata; start it",
                stream=stream.name,
                broker_ids=missing,
            )

    @staticmethod
    def _check_recovered(stream: common_pb2.StreamInfo) -> None:
        if any(one.sources for one in stream.assignments):
            raise InvalidArgument(
                f"stream {stream.name!r} cannot be taken up: it was being recovered from a lost broker when its brokers"
                " last heard of it",
                stream=stream.name,
            )

    def _renew_launches(
        self, stream: common_pb2.StreamInfo, but: Container[int] = (), *, recovers: bool = False
    ) -> bool:
        """Have the current launches of its brokers, `but` these, own what earlier launches owned; return
        whether that changed any.

        `recovers`: replicated streamlets whose data a broker lost with its memory are left out: they are recovered.
        """
        brokers, renewed = self._state.brokers, False
        for one in stream.assignments:
            epoch = brokers.epoch(one.broker_id)
            lost = recovers and stream.config.replication and brokers.has_lost_memory(one.broker_id)
            if one.broker_epoch < epoch and not (brokers.is_fenced(one.broker_id) or lost or one.broker_id in but):
                one.first_group_id = first_group_id_of(one, epoch)
                one.broker_epoch = epoch
                renewed = True
        return renewed

    def _described(self, stream_id: int) -> coordinator_pb2.UnknownStream:
        told = self.reports.told_of(stream_id)
        latest = max(told.values(), key=lambda one: (one.stream.assignments_version, one.stream.config_version))
        problem = ""
        if stream_id in self._state.catalog:
            problem = (
                self.work.failure(stream_id)
                or self._state.catching_up
                or "it is about to go on as these brokers know it"
            )
        return coordinator_pb2.UnknownStream(
            stream=latest.stream,
            problem=problem,
            bytes=sum(one.bytes for one in told.values()),
            records=sum(one.records for one in told.values()),
            broker_ids=sorted(launch.member_id for launch in told),
        )


def _later_version(known: common_pb2.StreamInfo, told: Iterable[common_pb2.StreamInfo]) -> common_pb2.StreamInfo:
    """Return the brokers' version of a stream that is newer than the metadata's.

    Raises `InvalidArgument` if both have changed.
    """
    stream = common_pb2.StreamInfo()
    stream.CopyFrom(known)
    for one in told:
        if not comes_from(stream, one.assignments_version):
            if not comes_from(one, stream.assignments_version):
                raise InvalidArgument(
                    f"stream {known.name!r}: brokers hold assignments that conflict with the metadata; both are"
                    f" kept, and the data of these brokers are not served. kera cluster adopt {known.name} continues"
                    " the stream from these brokers, and gives up records that other brokers took since the metadata"
                    " were restored",
                    stream=known.name,
                )
            del stream.assignments[:]
            stream.assignments.extend(one.assignments)
            stream.assignments_version = one.assignments_version
            stream.assignments_lineage[:] = one.assignments_lineage
        if one.config_version > stream.config_version:
            stream.config.CopyFrom(one.config)
            del stream.schemas[:]
            stream.schemas.extend(one.schemas)
            stream.config_version = one.config_version
    return stream
