"""A broker's report on its streamlets in a heartbeat: where entries start now, and which intervals are empty."""

from __future__ import annotations

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.intervals import broker_ids_of, broker_of_group, emptied, index_of_group
from kera.coordinator.cluster.keys import MOVES, STARTS, streamlet_key
from kera.coordinator.cluster.starts import joined, merged, without_interval
from kera.coordinator.cluster.state import State
from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.recovery.decide import is_lost
from kera.coordinator.recovery.records import RecoveryRecords
from kera.core.errors import UnknownStream
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2


class StreamletReport:
    """The changes that one heartbeat makes. Reports on streamlets in which the broker has no part any more are void.

    So are reports on streamlets that others recover from its replicas, as when it is being emptied: those brokers look
    for the records that the replicas had before the report, and must find them.
    """

    def __init__(self, state: State, recoveries: RecoveryRecords, launch: Launch) -> None:
        self._state = state
        self._recoveries = recoveries
        self._launch = launch
        self.refused: list[StreamletId] = []
        """Streamlets whose reported starts are refused: the broker may remove nothing because of them."""
        self._assignments: dict[StreamletId, common_pb2.StreamletAssignment] = {}
        self._starts: dict[StreamletId, list[common_pb2.EntryStart]] = {}

    def start(self, start: common_pb2.EntryStart) -> None:
        """Note where an entry starts at this broker."""
        streamlet = StreamletId(start.start.stream_id, start.start.streamlet_id)
        assignment = self._assignment(streamlet)
        if assignment is None:
            return
        if self._is_recovered(streamlet, assignment):
            self.refused.append(streamlet)
        # Groups that it has had and given back belong to another broker: the report comes too late.
        elif broker_of_group(assignment, start.start.group_id) == self._launch.member_id:
            self._starts[streamlet] = merged(assignment, self._known(streamlet), [start])

    def empty(self, interval: coordinator_pb2.EmptyInterval) -> None:
        """Note that nothing is left of an interval of this broker."""
        streamlet = StreamletId(interval.stream_id, interval.streamlet_id)
        assignment = self._assignment(streamlet)
        if assignment is None or self._is_moving(streamlet) or self._is_recovered(streamlet, assignment):
            return  # the broker reports it again
        changed = emptied(assignment, self._launch.member_id, interval.first_group_id, interval.end_group_id)
        if changed != assignment:
            gone = index_of_group(assignment, interval.first_group_id)
            left = without_interval(assignment, self._known(streamlet), gone)
            # Unless it was the first one, its neighbours may be joined now.
            self._starts[streamlet] = joined(assignment, changed, left) if gone else left
            self._assignments[streamlet] = changed

    def streams(self) -> list[common_pb2.StreamInfo]:
        """Return the new versions of the streams whose assignments change."""
        by_stream: dict[int, list[common_pb2.StreamletAssignment]] = {}
        for streamlet, assignment in self._assignments.items():
            by_stream.setdefault(streamlet.stream_id, []).append(assignment)
        state = self._state
        return [
            with_assignments(state.catalog.with_id(one), changed, state.coordinator_epoch)
            for one, changed in by_stream.items()
        ]

    def changes(self) -> dict[str, bytes | None]:
        """Return the records that change, besides those of streams."""
        values = {
            streamlet_key(STARTS, *streamlet): broker_pb2.TakeOverStream(starts=starts).SerializeToString()
            for streamlet, starts in self._starts.items()
        }
        return {key: value or None for key, value in values.items() if value != (self._state.ledger.get(key) or b"")}

    def _assignment(self, streamlet: StreamletId) -> common_pb2.StreamletAssignment | None:
        if streamlet in self._assignments:
            return self._assignments[streamlet]
        try:
            stream = self._state.catalog.with_id(streamlet.stream_id)
        except UnknownStream:
            return None
        return stream.assignments[streamlet.streamlet_id] if streamlet.streamlet_id < len(stream.assignments) else None

    def _is_recovered(self, streamlet: StreamletId, assignment: common_pb2.StreamletAssignment) -> bool:
        """Whether others need what the broker has in its replicas, or have recovered it by now."""
        broker_id, epoch = self._launch
        stream = self._state.catalog.with_id(streamlet.stream_id)
        return (
            broker_id not in broker_ids_of(assignment)
            or any(one.broker_id == broker_id and epoch < one.before_epoch for one in assignment.sources)
            or any(is_lost(info, stream, assignment) for info in self._recoveries.active_of(broker_id))
        )

    def _is_moving(self, streamlet: StreamletId) -> bool:
        """Whether the owner may lack the state handed over: an interval that was joined does not say where it
        begins.
        """
        return self._state.ledger.get(streamlet_key(MOVES, *streamlet)) is not None

    def _known(self, streamlet: StreamletId) -> list[common_pb2.EntryStart]:
        if streamlet not in self._starts:
            value = self._state.ledger.get(streamlet_key(STARTS, *streamlet))
            self._starts[streamlet] = list(broker_pb2.TakeOverStream.FromString(value or b"").starts)
        return self._starts[streamlet]
