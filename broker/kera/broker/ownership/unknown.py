"""Reports to the coordinator about streams that this broker holds and the coordinator does not know, or knows
differently.

    who leads is new  ──► all ids and versions that are here ──► the answer names those that it does not know
                                                                 ──► what they are and have, with the next heartbeats

They are there when the coordinator's metadata were restored from an older copy. Whether a broker has registered anew
since makes no difference: it may still serve such a stream, or keep it unserved (`Streams.unknown`).
"""

from __future__ import annotations

from collections.abc import Callable

from kera.broker.ownership.stream import Stream
from kera.broker.ownership.stream_records import assignments_version, stream_record
from kera.broker.ownership.streams import Streams
from kera.broker.storage.restart import Unserved
from kera.v1 import common_pb2, coordinator_pb2

TOLD_MAX = 100
"""Streams of which one heartbeat tells."""
TOLD_BYTES = 256 << 10
"""About so much it tells of them, or of one: of a stream with thousands of streamlets there is as much to tell."""
HELD_MAX = 16384
"""Streams that one heartbeat names, of some 30 bytes each."""


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
        """The coordinator to which `_left` has yet to be named."""
        self._left: list[int] = []
        self._pending: list[int] = []
        """Unknown, and not told of yet."""
        self._sent: list[int] = []

    def fill(self, request: coordinator_pb2.HeartbeatRequest) -> None:
        """Put into a heartbeat what there is to tell now."""
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
        """The last heartbeat that was filled has arrived."""
        if self._sent_held:
            if answer.coordinator_epoch != self._naming_to:
                self._naming_to = -1  # another one leads by now, and is told all
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
        """Whether what was told of a stream is older than what is known here."""
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
