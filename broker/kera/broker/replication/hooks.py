"""Hooks that plug into replication, which works without them.

A plug-in (`VirtualLogs.plug_in`) may delay batches, so that more data goes together. It is called for runs of chunks
and for batches, never for a single record, and must not raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kera.broker.log.segment import Segment
from kera.broker.replication.virtual_segment import Batch

if TYPE_CHECKING:
    from kera.broker.replication.virtual_log import VirtualLog


class ReplicationHooks(Protocol):
    """Called by the virtual logs of a broker. A plug-in may keep its note about a batch in `Batch.noted`."""

    def on_appended(self, log: VirtualLog, batch: Batch, segment: Segment, start: int, end: int) -> None:
        """Called when chunks of a segment, from `start` to `end`, were added to a batch."""
        ...

    def on_waiting(self, batch: Batch, segment: Segment, start: int, requests: int) -> None:
        """Called when `requests` more requests wait for a batch; their producer's chunks begin at `start`."""
        ...

    def puts_off(self, log: VirtualLog, batch: Batch) -> bool:
        """Whether to delay the next batch of a log. If so, a later `on_pump` has to return the log.

        Called only for a log's last batch, if it was never sent and no writer waits for room.
        """
        ...

    def on_dropped(self, log: VirtualLog) -> None:
        """Called when a log was dropped, so nothing of it is sent any more."""
        ...

    def on_pump(self) -> Iterable[VirtualLog]:
        """Called before batches are sent. Return the logs whose delay has ended."""
        ...
