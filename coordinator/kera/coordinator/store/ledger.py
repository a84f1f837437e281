"""All metadata, in memory and in the store: the coordinator reads them without waiting, and writes before it acts.

The coordinator is the store's only writer, so its memory equals the store, and reading is cheap. If another coordinator
writes as well, the versions no longer agree, and `Ledger.write` fails instead of undoing that work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kera.coordinator.store import census
from kera.coordinator.store.metadata import MetadataStore, StoredRecord, Write

Changes = Mapping[str, bytes | None]
"""New values by key; None deletes a record."""


class Ledger:
    """A mirror of the store. Only one task at a time may write; the coordinator ensures that."""

    def __init__(self, store: MetadataStore, records: dict[str, StoredRecord]) -> None:
        self._store = store
        self._records = records
        self._children: defaultdict[str, set[str]] = defaultdict(set)
        """For each path, the keys that are one level below."""
        for key in records:
            self._children[_parent(key)].add(key)

    @classmethod
    async def load(cls, store: MetadataStore) -> Ledger:
        """Return a ledger of the records in `store`."""
        return cls(store, await store.list(""))

    async def check(self) -> None:
        """Check that all written records are there (``census``). Raises `MetadataDamaged`, and the store's errors."""
        missing = census.missing_in(self.snapshot())
        if missing:
            await self._write(missing)

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None."""
        record = self._records.get(key)
        return None if record is None else record.value

    def values(self, prefix: str) -> list[bytes]:
        """Return the values of all keys that start with `prefix`, in the order of the keys."""
        return [record.value for key, record in sorted(self._records.items()) if key.startswith(prefix)]

    def children(self, path: str) -> list[str]:
        """Return the keys one level below a path, sorted; the time does not depend on the number of other records."""
        return sorted(self._children.get(path, ()))

    def snapshot(self) -> dict[str, bytes]:
        """Return a copy of all present values, by key."""
        return {key: record.value for key, record in self._records.items()}

    def last_number(self, counter: str) -> int:
        """Return the last number that was written under `counter`; 0: none."""
        return int(self.get(counter) or b"0")

    def next_number(self, counter: str) -> int:
        """Return the number after the last one that was written under `counter`, from 1.

        Writing it takes it, preferably together with its object; `number` makes the value.
        """
        return self.last_number(counter) + 1

    async def write(self, changes: Changes) -> None:
        """Make `changes` durable, all or none, and only then visible here. Raises the store's errors."""
        await self._write(census.counted_with(changes, self.get))

    async def changed_by_others(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the records among `keys` that differ in the store, each with its version there; 0: not there.

        A record that is just being written may be among them. Raises the store's errors.
        """
        found = await self._store.get_each(keys)
        return {
            key: 0 if there is None else there.version
            for key, there in zip(keys, found, strict=True)
            if there != self._records.get(key)
        }

    async def added_by_others(self) -> set[str]:
        """Return the keys that only the store has; keys that are just being written may be among them."""
        return await self._store.keys() - self._records.keys()

    async def restore(self, versions: Mapping[str, int]) -> None:
        """Overwrite these versions in the store with the records here, or delete records that are not here.

        Raises the store's errors.
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
    """Return a counter's stored value: decimal text."""
    return str(value).encode()
