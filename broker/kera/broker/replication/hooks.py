"""The place at which something can be plugged into replication. Nothing of it is needed to replicate.

Who plugs something in (`VirtualLogs.plug_in`) may put off what is to be sent, so that more goes together. It is called
for runs of chunks and for batches, never for a single record, and must not raise. Without it none of this is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kera.broker.log.segment import Segment
from kera.broker.replication.virtual_segment import Batch

if TYPE_CHECKING:
    from kera.broker.replication.virtual_log import VirtualLog


class ReplicationHooks(Protocol):
    """Called by the virtual logs of a broker. What is noted of a batch may be kept in `Batch.noted`."""

    def on_appended(self, log: VirtualLog, batch: Batch, segment: Segment, start: int, end: int) -> None:
        """Chunks of a segment, from `start` to `end`, have come to a batch."""
        ...

    def on_waiting(self, batch: Batch, segment: Segment, start: int, requests: int) -> None:
        """So many requests more wait for a batch; chunks of their producer start there in the segment."""
        ...

    def puts_off(self, log: VirtualLog, batch: Batch) -> bool:
        """Whether the next batch of a log is not sent now. Whoever puts it off sees to it that `on_pump` names the log.

        Asked only of a batch that was never sent, that is the last one, and for which no writer waits for room.
        """
        ...

    def on_dropped(self, log: VirtualLog) -> None:
        """Nothing of a log is sent any more."""
        ...

    def on_pump(self) -> Iterable[VirtualLog]:
        """Batches that can be sent are about to be. Returns the logs that were put off, and are not any more."""
        ...
