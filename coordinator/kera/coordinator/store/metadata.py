"""The metadata store: small records by key, with versions, which make the coordinator's knowledge durable.

Guarantees of every `MetadataStore` (``tests/unit/coordinator/test_metadata_store.py`` checks them for each
implementation):

1. `MetadataStore.write` is all or nothing, and durable when it returns.
2. A write names for each record the version that it replaces, and fails with `VersionConflict` if the record has
   another one. So of two coordinators that believe to be the only one, at most one can write.
3. A write may also require versions of records that it does not change (`Check`). So each write of a leader depends on
   the record of its leadership (``kera.coordinator.store.leadership``).
4. Versions are counted per key: a record that does not exist has version 0, and each put adds 1. A record that is
   deleted and put again starts over at 1. (ZooKeeper counts the same way, from 0.)
5. Errors of the underlying store are translated into the errors below.

Keys are paths like ``streams/0000000000000007``. The writers of records define what they mean.
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
    """Version, from 1."""


class Write(NamedTuple):
    """The change of one record in a write."""

    key: str
    value: bytes | None
    """None deletes the record."""
    expected_version: int
    """The version that the record must have; 0: it must not exist. A put gives the record this version plus one."""


class Check(NamedTuple):
    """The required version of a record that a write does not change."""

    key: str
    expected_version: int
    """The version that the record must have; 0: it must not exist."""


class MetadataStore(Protocol):
    """A store of metadata. Asynchronous, since it may be on other machines."""

    async def get(self, key: str) -> StoredRecord | None:
        """Return the record under `key`, or None."""
        ...

    async def get_each(self, keys: Sequence[str]) -> Sequence[StoredRecord | None]:
        """Return what `get` does for each of `keys`, not necessarily as of one moment: cheaper than one after the
        other.
        """
        ...

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """Return all records whose key starts with `prefix`, in the order of their keys, as of one moment."""
        ...

    async def keys(self) -> set[str]:
        """Return the keys of all records, not necessarily as of one moment: cheaper than `list`, as no value is
        read.
        """
        ...

    async def write(self, *writes: Write | Check) -> None:
        """Put and delete records, all or none, and only if all versions are as expected.

        Raises `VersionConflict`, `MetadataStoreFull`, `DiskFull` or `MetadataStoreFailed`.

        A write that has begun is carried out even if the caller is cancelled.
        """
        ...

    async def close(self) -> None:
        """Release the store; no other call may follow."""
        ...


class UnknownFormat(StartError):
    """The metadata were written by another version of KerA."""

    code = "unknown_format"


class MetadataDamaged(StartError):
    """The metadata, or a record of them, are cut off or have other contents."""

    code = "metadata_damaged"


class VersionConflict(NotAccepted):
    """Another coordinator has written the record since it was read."""

    code = "version_conflict"


class MetadataStoreFull(NotAccepted):
    """The store has no room, and nothing was changed; the message says what to enlarge."""

    code = "metadata_store_full"


class MetadataStoreFailed(KeraError):
    """Reading failed, or it is unknown whether a write was carried out.

    The owner of a mirror of the store loads it anew: a leader does so by leading anew.
    """

    code = "metadata_store_failed"


def check_writes(writes: Sequence[Write | Check]) -> None:
    """Refuse writes that no store accepts; implementations call this first."""
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
    """Return the error for a write that expected another version."""
    return VersionConflict(
        f"{write.key} has version {found_version}, expected {write.expected_version}: another coordinator has written",
        key=write.key,
        expected_version=write.expected_version,
        found_version=found_version,
    )
