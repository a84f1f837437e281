"""Fences: producers that have a later instance, according to the coordinator, so that earlier ones are refused.

A streamlet by itself refuses an earlier instance only after a chunk of the later one, and only while it remembers that.
Fences hold for all streamlets from when they are noted, whatever the streamlets remember. All streamlets of a broker
share them.
"""

from __future__ import annotations

from kera.core.base.telemetry import get_logger
from kera.v1 import coordinator_pb2

log = get_logger("kera.access")


class ProducerFences:
    """The newest instance of each fenced producer. Streamlets refuse chunks of earlier instances."""

    def __init__(self) -> None:
        self.version = 0
        """Version of the coordinator's fences; all fences up to it are noted here."""
        self.first_epochs: dict[int, int] = {}
        """The first accepted epoch of each fenced producer, which never goes back."""

    def note(self, fences: coordinator_pb2.ProducerFences) -> None:
        """Note the coordinator's fences. A message that is not whole is ignored, and the next heartbeat asks again."""
        if len(fences.producer_ids) != len(fences.first_epochs):
            log.error(
                "the coordinator's fences are not whole; they are ignored",
                producer_ids=len(fences.producer_ids),
                first_epochs=len(fences.first_epochs),
            )
            return
        for producer_id, first_epoch in zip(fences.producer_ids, fences.first_epochs, strict=True):
            self.first_epochs[producer_id] = max(first_epoch, self.first_epochs.get(producer_id, 0))
        self.version = fences.version
