"""Reports to the coordinator about streams that this broker holds and the coordinator does not know, or knows
differently.

    new coordinator leads  ──► all ids and versions that are here ──► the answer names the unknown ones
                                                             ──► their description and size, with the next heartbeats

Such streams exist when the coordinator's metadata was restored from an older copy. It does not matter whether the
broker has registered again since: it may still serve such a stream, or keep it unserved (`Streams.unknown`).
"""

from __future__ import annotations

from collections.abc import Callable

from kera.broker.ownership.stream import Stream
from kera.broker.ownership.stream_records import assignments_version, stream_record
from kera.broker.ownership.streams import Streams
from kera.broker.storage.restart import Unserved
from kera.v1 import common_pb2, coordinator_pb2

TOLD_MAX = 100
"""Maximum number of streams that one heartbeat describes."""
TOLD_BYTES = 256 << 10
"""Approximate maximum size of these descriptions; a single one may be larger, with thousands of streamlets."""
HELD_MAX = 16384
"""Maximum number of streams that one heartbeat names, with about 30 bytes each."""


class UnknownReport:
    """Reports to each new coordinator the streams that this broker holds and the metadata lack or contradict."""

    def __init__(
        self,
        streams: Streams,
        leader_epoch: Callable[[], int],
        *,
        held_max: int = HELD_MAX,
        told_bytes: int = TOLD_BYTES,
    ) -> None:
        self._held_max = held_max
        self._told_bytes = told_bytes
        self._streams = streams
        self._leader_epoch = leader_epoch
        self._asked_epoch = -1
        """Epoch of the coordinator that has reported which streams it does not know."""
        self._sent_held = False
        self._naming_to = -1
        """Epoch of the coordinator that `_left` is being reported to."""
        self._left: list[int] = []
        self._pending: list[int] = []
        """Unknown streams that were not described yet."""
        self._sent: list[int] = []

    def fill(self, request: coordinator_pb2.HeartbeatRequest) -> None:
        """Put the next ids or descriptions into a heartbeat."""
        leader_epoch = self._leader_epoch()
        self._sent_held = leader_epoch != self._asked_epoch
        self._sent = []
        if self._sent_held:
            if leader_epoch != self._naming_to:
                self._naming_to, self._pending = leader_epoch, []
                self._left = sorted({*(one.stream_id for one in self._streams), *self._streams.unknown})
            request.held_streams_told = len(self._left) <= self._held_max
            request.held_streams.extend(map(self._held, self._left[: self._held_max]))
            return
        told_bytes = 0
        for stream_id in self._pending[:TOLD_MAX]:
            described = self._described(stream_id)
            told_bytes += described.ByteSize()
            if self._sent and told_bytes > self._told_bytes:
                break
            self._sent.append(stream_id)
            request.unknown_streams.append(described)

    def answered(self, answer: coordinator_pb2.HeartbeatResponse) -> None:
        """Handle the answer to the last heartbeat that was filled."""
        if self._sent_held:
            if answer.coordinator_epoch != self._naming_to:
                self._naming_to = -1  # another coordinator leads by now, and needs the whole list
                return
            self._pending += answer.unknown_stream_ids
            self._left = self._left[self._held_max :]
            if not self._left:
                self._asked_epoch, self._naming_to = answer.coordinator_epoch, -1
        else:
            late = [one for one in self._sent if self._is_being_written(one)]
            self._pending = self._pending[len(self._sent) :] + late

    def _held(self, stream_id: int) -> coordinator_pb2.HeldStream:
        known: Stream | common_pb2.StreamInfo | None = None
        if stream_id in self._streams:
            known = self._streams.get(stream_id)
        else:
            known = stream_record(self._streams.index, stream_id)
        return coordinator_pb2.HeldStream(
            stream_id=stream_id,
            assignments_version=0 if known is None else known.assignments_version,
            config_version=0 if known is None else known.config_version,
        )

    def _is_being_written(self, stream_id: int) -> bool:
        """Whether the record of a stream, which was reported, is older than its present assignments."""
        if stream_id not in self._streams:
            return False
        known = self._streams.get(stream_id).assignments_version
        return assignments_version(self._streams.index, stream_id) < known

    def _described(self, stream_id: int) -> coordinator_pb2.UnknownStream:
        info = stream_record(self._streams.index, stream_id) or common_pb2.StreamInfo(stream_id=stream_id)
        if stream_id in self._streams:
            stream = self._streams.get(stream_id)
            return coordinator_pb2.UnknownStream(stream=info, bytes=_bytes(stream), records=_records(stream))
        held = self._streams.unknown.get(stream_id, Unserved())
        return coordinator_pb2.UnknownStream(stream=info, bytes=held.bytes, records=held.records)


def _bytes(stream: Stream) -> int:
    return sum(each.length_bytes for each in stream.streamlets.values())


def _records(stream: Stream) -> int:
    return sum(entry.next_record for each in stream.streamlets.values() for entry in each.entries.made)
