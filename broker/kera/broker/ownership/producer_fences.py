"""Producers of which a later instance was given out, as the coordinator tells: what this broker takes of them no more.

A streamlet refuses an earlier instance once it has a chunk of the later one, and only while it remembers that. This
holds for all streamlets, whatever they remember, from when it is noted. The streamlets of a broker share one of it.
"""

from __future__ import annotations

from kera.v1 import coordinator_pb2


class ProducerFences:
    """The newest instance of each fenced producer. Streamlets refuse chunks of earlier instances."""

    def __init__(self) -> None:
        self.version = 0
        """Version of the coordinator's fences; all up to it are noted here."""
        self.first_epochs: dict[int, int] = {}
        """By producer: lower epochs are refused. Never goes back."""

    def note(self, fences: coordinator_pb2.ProducerFences) -> None:
        """Note the coordinator's fences."""
        for producer_id, first_epoch in zip(fences.producer_ids, fences.first_epochs, strict=True):
            self.first_epochs[producer_id] = max(first_epoch, self.first_epochs.get(producer_id, 0))
        self.version = fences.version
