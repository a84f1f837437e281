"""All metadata, in memory and in the store: what the coordinator reads without waiting and writes before it acts.

The coordinator is the store's only writer, so what it has in memory is what is there, and reading costs nothing. Should
another coordinator write as well, the versions no longer agree, and `Ledger.write` fails instead of undoing its work.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from kera.coordinator.store import census
from kera.coordinator.store.metadata import MetadataStore, StoredRecord, Write

Changes = Mapping[str, bytes | None]
"""New values by key; None deletes."""


class Ledger:
    """A mirror of the store. One task at a time may write; the coordinator sees to that."""

    def __init__(self, store: MetadataStore, records: dict[str, StoredRecord]) -> None:
        self._store = store
        self._records = records
        self._children: defaultdict[str, set[str]] = defaultdict(set)
        """For each path, the keys that are one level below."""
        for key in records:
            self._children[_parent(key)].add(key)

    @classmethod
    async def load(cls, store: MetadataStore) -> Ledger:
        """The ledger of what `store` has."""
        return cls(store, await store.list(""))

    async def check(self) -> None:
        """Whether it has all that was written (``census``). Raises `MetadataDamaged`, and what the store raises."""
        missing = census.missing_in(self.snapshot())
        if missing:
            await self._write(missing)

    def get(self, key: str) -> bytes | None:
        """The value under `key`."""
        record = self._records.get(key)
        return None if record is None else record.value

    def values(self, prefix: str) -> list[bytes]:
        """The values of all keys that start with `prefix`, in the order of the keys."""
        return [record.value for key, record in sorted(self._records.items()) if key.startswith(prefix)]

    def children(self, path: str) -> list[str]:
        """The keys that are one level below a path, in their order: at once, however many others there are."""
        return sorted(self._children.get(path, ()))

    def snapshot(self) -> dict[str, bytes]:
        """All values by key, as they are at this moment."""
        return {key: record.value for key, record in self._records.items()}

    def last_number(self, counter: str) -> int:
        """The last one that was written under `counter`; 0: none."""
        return int(self.get(counter) or b"0")

    def next_number(self, counter: str) -> int:
        """The number after the last one that was written under `counter`; from 1.

        It is taken by writing it, best together with what it is for; `number` makes the value.
        """
        return self.last_number(counter) + 1

    async def write(self, changes: Changes) -> None:
        """Make `changes` durable, all or none; only then are they seen here. Raises what the store raises."""
        await self._write(census.counted_with(changes, self.get))

    async def changed_by_others(self, keys: Sequence[str]) -> dict[str, int]:
        """Those of some records that the store does not have as they are here, with the version there; 0: none.

        What is just being written is among them. Raises what the store raises.
        """
        found = await asyncio.gather(*map(self._store.get, keys))
        return {
            key: 0 if there is None else there.version
            for key, there in zip(keys, found, strict=True)
            if there != self._records.get(key)
        }

    async def added_by_others(self) -> set[str]:
        """The keys of records that the store has and that are not here; what is just being written is among them."""
        return await self._store.keys() - self._records.keys()

    async def restore(self, versions: Mapping[str, int]) -> None:
        """Write records as they are here over these versions in the store, or delete those that are not here.

        Raises what the store raises.
        """
        await self._put([Write(key, self.get(key), version) for key, version in versions.items()])

    async def _write(self, changes: Changes) -> None:
        await self._put(
            [
                Write(key, value, self._records[key].version if key in self._records else 0)
                for key, value in changes.items()
            ]
        )

    async def _put(self, writes: Sequence[Write]) -> None:
        await self._store.write(*writes)
        for key, value, replaced_version in writes:
            if value is None:
                self._forget(key)
            else:
                self._records[key] = StoredRecord(value, replaced_version + 1)
                self._children[_parent(key)].add(key)

    def _forget(self, key: str) -> None:
        if self._records.pop(key, None) is not None:
            siblings = self._children[_parent(key)]
            siblings.discard(key)
            if not siblings:
                del self._children[_parent(key)]


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def number(value: int) -> bytes:
    """A counter's value as it is stored: decimal text."""
    return str(value).encode()
