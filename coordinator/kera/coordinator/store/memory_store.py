"""A metadata store that lasts as long as the process: the fake beside the real ones, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kera.coordinator.store.metadata import Check, MetadataStoreFailed, StoredRecord, Write, check_writes, conflict
from kera.core.errors import KeraError


class MemoryStore:
    """See `kera.coordinator.store.metadata.MetadataStore`. Give one to several coordinators in turn to restart them."""

    def __init__(self, records: Mapping[str, StoredRecord] | None = None) -> None:
        self._records = dict(records or {})
        self.failure: KeraError | None = None
        """The error of each write; if it is `MetadataStoreFailed`, the write is carried out nevertheless."""

    @property
    def records(self) -> dict[str, StoredRecord]:
        """A copy of all records, from which another store can be made."""
        return dict(self._records)

    async def get(self, key: str) -> StoredRecord | None:
        """See `MetadataStore.get`."""
        return self._records.get(key)

    async def get_each(self, keys: Sequence[str]) -> Sequence[StoredRecord | None]:
        """See `MetadataStore.get_each`."""
        return [await self.get(key) for key in keys]

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """See `MetadataStore.list`."""
        return {key: record for key, record in sorted(self._records.items()) if key.startswith(prefix)}

    async def keys(self) -> set[str]:
        """See `MetadataStore.keys`."""
        return set(self._records)

    async def write(self, *writes: Write | Check) -> None:
        """See `MetadataStore.write`."""
        check_writes(writes)
        if self.failure is not None and not isinstance(self.failure, MetadataStoreFailed):
            raise self.failure
        for write in writes:
            record = self._records.get(write.key)
            found_version = record.version if record else 0
            if found_version != write.expected_version:
                raise conflict(write, found_version)
        for write in writes:
            if isinstance(write, Check):
                continue
            if write.value is None:
                self._records.pop(write.key, None)
            else:
                self._records[write.key] = StoredRecord(write.value, write.expected_version + 1)
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(0)  # other tasks run before the write returns, as with every real store

    async def close(self) -> None:
        """See `MetadataStore.close`."""
