"""The lanes of one stream, and the known owners of its streamlets."""

from __future__ import annotations

from typing import NamedTuple

from kera.client.producing.lanes.lane import Lane, LaneIdentity
from kera.client.producing.lanes.lane_columns import NOBODY, LaneColumns
from kera.client.types import StreamDescription
from kera.core.errors import UnknownStream


class ProducerIdentity(NamedTuple):
    """The identity that the coordinator has given to a producer."""

    producer_id: int
    first_epoch: int
    last_epoch: int
    """The last of this instance's epochs."""


class StreamLanes:
    """The lanes of one stream, with the known owners of its streamlets. `Routes` keeps it up to date."""

    def __init__(self, stream: StreamDescription, identity: ProducerIdentity) -> None:
        self.stream = stream
        self.deleted: UnknownStream | None = None
        """The error of a stream that no longer exists."""
        self.columns = LaneColumns(stream.config.streamlets, identity.first_epoch)
        self.lanes = [
            Lane(
                LaneIdentity(
                    stream.name, stream.stream_id, streamlet, identity.producer_id, stream.codec, stream.typed
                ),
                self.columns,
                streamlet,
                last_epoch=identity.last_epoch,
            )
            for streamlet in range(stream.config.streamlets)
        ]

    def owner(self, lane: Lane) -> int:
        """Return the broker that owns a lane's streamlet."""
        return self.stream.assignments[lane.identity.streamlet_id].broker_id

    def settle(self, lane: Lane, broker_id: int) -> None:
        """Note that the broker owns the lane's streamlet, as the stream is now, and serves it."""
        self.columns.settle(lane.identity.streamlet_id, broker_id)

    def unsettle(self, lane: Lane) -> None:
        """Forget which broker serves the lane's streamlet."""
        self.columns.settle(lane.identity.streamlet_id, NOBODY)

    def update(self, stream: StreamDescription) -> bool:
        """Replace the description by `stream`, unless that is older. Returns whether streamlets have moved."""
        if stream.is_older_than(self.stream):
            return False
        moved = stream.assignments != self.stream.assignments
        if stream is not self.stream:
            self.stream = stream
            self.columns.unsettle()
        return moved

    def delete(self, error: UnknownStream) -> None:
        """Note that the stream no longer exists."""
        self.deleted = error
