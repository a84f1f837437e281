"""Makes changes of consumer groups durable: one write for all that have gathered since the one before.

When a write fails, the changed consumer groups go back to their state in the ledger, and the callers that wait for the
write get the error.
"""

from __future__ import annotations

import asyncio

from kera.coordinator.cluster.state import State
from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.registry import ConsumerGroupRegistry, record_key
from kera.coordinator.consumer_groups.uses import Uses


class Durability:
    """Writes gathered changes of consumer groups together, and takes them back when the write fails."""

    def __init__(self, state: State, registry: ConsumerGroupRegistry, uses: Uses) -> None:
        self._state = state
        self._registry = registry
        self._uses = uses
        self._lost: tuple[int, Exception] | None = None
        """The last change that could not be stored, and the error."""
        self._writing = asyncio.Lock()

    async def durable(self) -> None:
        """Wait until all earlier changes are in the store. Raises the store's errors."""
        if self._registry.stored < self._registry.changes:
            await self._state.to_the_end(self._write(self._registry.changes))

    def check_kept(self, consumer_group: ConsumerGroup) -> None:
        """Raise the store's error if changes of a consumer group were taken back since."""
        if self._lost is not None and self._registry.groups.get(consumer_group.name) is not consumer_group:
            raise self._lost[1]

    async def _write(self, wanted: int) -> None:
        async with self._writing:
            if self._lost is not None and wanted <= self._lost[0]:
                raise self._lost[1]
            if self._registry.stored >= wanted:
                return
            through = self._registry.changes
            taken = {each: each.leases.take_dirty() for each in self._registry.take_changed()}
            changes: dict[str, bytes | None] = {}
            pace = self._state.pace()
            for consumer_group, keys in taken.items():
                for key in keys:  # what changes meanwhile is stored again by the next write
                    await pace.step()
                    message = consumer_group.stored(key)
                    changes[record_key(consumer_group.name, *key)] = message and message.SerializeToString()
            uses = self._uses.take_changes(self._state.clock.monotonic_s())
            try:
                if changes or uses:
                    async with self._state.changing:
                        await self._state.write({**changes, **uses})
            except Exception as error:
                self._uses.not_stored(uses)
                self._lost = (self._registry.changes, error)
                self._registry.note_stored(self._registry.changes)
                lost = {consumer_group.name: keys for consumer_group, keys in taken.items()}
                self._registry.take_back(lost, self._state.clock.monotonic_s())
                raise
            self._registry.note_stored(through)
