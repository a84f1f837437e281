"""Changes of consumer groups made durable: one write for all that have gathered since the one before.

When a write fails, memory goes back to what is in the ledger, of the consumer groups that have changed, and whoever
waited for it gets the error.
"""

from __future__ import annotations

import asyncio

from kera.coordinator.cluster.state import State
from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.registry import ConsumerGroupRegistry, record_key
from kera.coordinator.consumer_groups.uses import Uses


class Durability:
    """Writes gathered changes of consumer groups in one go, and takes them back when the write fails."""

    def __init__(self, state: State, registry: ConsumerGroupRegistry, uses: Uses) -> None:
        self._state = state
        self._registry = registry
        self._uses = uses
        self._lost: tuple[int, Exception] | None = None
        """Up to here it could not be stored, and why."""
        self._writing = asyncio.Lock()

    async def durable(self) -> None:
        """Return when all that was changed before is in the store. Raises what the store raises."""
        if self._registry.stored < self._registry.changes:
            await self._state.to_the_end(self._write(self._registry.changes))

    def check_kept(self, consumer_group: ConsumerGroup) -> None:
        """Raise what the store has raised, if what was changed of a consumer group had to be taken back since."""
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
                for key in keys:  # what changes meanwhile is stored once more, with what comes next
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
