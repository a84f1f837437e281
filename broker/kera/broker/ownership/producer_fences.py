"""Fences: producers that have a later instance, according to the coordinator, so that earlier ones are refused.

A streamlet by itself refuses an earlier instance only after a chunk of the later one, and only while it remembers that.
Fences hold for all streamlets from when they are noted, whatever the streamlets remember. All streamlets of a broker
share them.
"""

from __future__ import annotations

from kera.v1 import coordinator_pb2


class ProducerFences:
    """The newest instance of each fenced producer. Streamlets refuse chunks of earlier instances."""

    def __init__(self) -> None:
        self.version = 0
        """Version of the coordinator's fences; all fences up to it are noted here."""
        self.first_epochs: dict[int, int] = {}
        """The first accepted epoch of each fenced producer, which never goes back."""

    def note(self, fences: coordinator_pb2.ProducerFences) -> None:
        """Note the coordinator's fences."""
        for producer_id, first_epoch in zip(fences.producer_ids, fences.first_epochs, strict=True):
            self.first_epochs[producer_id] = max(first_epoch, self.first_epochs.get(producer_id, 0))
        self.version = fences.version
