"""The metadata store: small records by key, with versions; what the coordinator knows, made durable.

Promises of every `MetadataStore` (``tests/unit/coordinator/test_metadata_store.py`` holds each implementation to them):

1. `MetadataStore.write` is all or nothing, and durable when it returns.
2. A write says for each record which version it replaces, and fails with `VersionConflict` when that is not what is
   there. So of two coordinators that believe to be the only one, at most one gets its change through.
3. A write may also ask for the version of records that it does not change (`Check`). So a coordinator that leads makes
   each of its writes depend on the record that says so (``kera.coordinator.store.leadership``).
4. Versions are counted per key: a record that is not there has version 0, and each put adds 1. A record that is
   deleted and put again starts over at 1. (ZooKeeper counts the same way, from 0.)
5. The errors of what is underneath end here, see below.

Keys are paths like ``streams/0000000000000007``. What records mean is left to those who write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kera.core.errors import InvalidArgument, KeraError, NotAccepted, StartError, invariant

KEY_BYTES_MAX = 255
"""Maximum of a key in UTF-8; LMDB takes 511."""
VALUE_BYTES_MAX = 1_000_000
"""Maximum of one record; ZooKeeper takes 1 MiB for the record and its frame."""


class StoredRecord(NamedTuple):
    """A record as it was read."""

    value: bytes
    version: int
    """From 1."""


class Write(NamedTuple):
    """One record's part of a write."""

    key: str
    value: bytes | None
    """None deletes the record."""
    expected_version: int
    """The version that must be there; 0: none. A put leaves the record at this plus one."""


class Check(NamedTuple):
    """A record that a write depends on, and leaves as it is."""

    key: str
    expected_version: int
    """The version that must be there; 0: none."""


class MetadataStore(Protocol):
    """Where metadata is kept. Asynchronous, since a store may be on other machines."""

    async def get(self, key: str) -> StoredRecord | None:
        """The record under `key`."""
        ...

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """All records whose key starts with `prefix`, in the order of their keys. They belong to one moment."""
        ...

    async def keys(self) -> set[str]:
        """The keys of all records, not necessarily of one moment: cheaper than `list`, as no value is read."""
        ...

    async def write(self, *writes: Write | Check) -> None:
        """Put and delete records, all or none, and only if all versions are as expected.

        Raises `VersionConflict`, `MetadataStoreFull`, `DiskFull` or `MetadataStoreFailed`.

        A write that has begun is carried out even if the caller is cancelled.
        """
        ...

    async def close(self) -> None:
        """Release the store; nothing is called after this."""
        ...


class UnknownFormat(StartError):
    """The metadata was written by another version of KerA."""

    code = "unknown_format"


class MetadataDamaged(StartError):
    """The metadata, or a record of them, are cut off or have other contents."""

    code = "metadata_damaged"


class VersionConflict(NotAccepted):
    """Someone else has written the record since it was read: there is another coordinator."""

    code = "version_conflict"


class MetadataStoreFull(NotAccepted):
    """The store has no room, and nothing was changed; the message says what to enlarge."""

    code = "metadata_store_full"


class MetadataStoreFailed(KeraError):
    """Reading failed, or it is not known whether a write was carried out.

    Whoever has a copy of what is there loads it anew: a coordinator that leads does so by leading anew.
    """

    code = "metadata_store_failed"


def check_writes(writes: Sequence[Write | Check]) -> None:
    """Refuse what no store takes; implementations call this before they begin."""
    invariant(len({write.key for write in writes}) == len(writes), "each record at most once in a write")
    for write in writes:
        invariant(0 < len(write.key.encode()) <= KEY_BYTES_MAX, "keys are short", key=write.key)
        if isinstance(write, Write) and write.value is not None and len(write.value) > VALUE_BYTES_MAX:
            raise InvalidArgument(
                f"{write.key} would take {len(write.value)} bytes of metadata, the limit is {VALUE_BYTES_MAX}",
                key=write.key,
                limit_bytes=VALUE_BYTES_MAX,
            )


def conflict(write: Write | Check, found_version: int) -> VersionConflict:
    """The error for a write that expected another version."""
    return VersionConflict(
        f"{write.key} has version {found_version}, expected {write.expected_version}: another coordinator has written",
        key=write.key,
        expected_version=write.expected_version,
        found_version=found_version,
    )
