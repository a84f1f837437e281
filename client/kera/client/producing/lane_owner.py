"""The owner of lanes as senders see it: `kera.client.producing.routes`, and behind it the producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kera.client.producing.broker_times import BrokerTimes
from kera.client.producing.lane import Lane
from kera.client.producing.pace import Due, Pace
from kera.core.errors import KeraError
from kera.core.rpc import Channel

if TYPE_CHECKING:
    from kera.client.producing.sender import Sender


class CloseDueChunks(Protocol):
    """Closes open chunks."""

    def __call__(self, lanes: set[Lane], pace: Pace, *, idle: bool) -> Due:
        """Close those of these lanes that are due; what need not wait for a time is so when nothing is in flight."""
        ...


class LaneOwner(Protocol):
    """Gives lanes to a sender, and is notified about them."""

    @property
    def close_due_chunks(self) -> CloseDueChunks:
        """See there."""
        ...

    @property
    def times(self) -> BrokerTimes:
        """The time of day at brokers."""
        ...

    @property
    def fail(self) -> Callable[[KeraError], None]:
        """The producer can send nothing more."""
        ...

    @property
    def unsettled(self) -> set[Lane]:
        """The lanes that are told of each chunk that is delivered; the others, while they have more to send."""
        ...

    async def connect(self, sender: Sender) -> Channel | None:
        """A connection to a sender's broker; None if no lane needs it any more."""
        ...

    def ready(self, lane: Lane) -> None:
        """A lane may have chunks to send."""
        ...

    def delivered(self, lane: Lane) -> None:
        """A chunk of a lane is delivered."""
        ...

    def lost(self, lane: Lane, error: KeraError) -> None:
        """The broker does not have the lane's streamlet."""
        ...

    def throttled(self, broker_id: int, ms: int) -> None:
        """A broker has held an answer back for so long, as a quota was used up."""
        ...

    def late(self, seconds: float) -> None:
        """A chunk was left beyond its deadline for so long, with nothing in the way; 0: none was."""
        ...
