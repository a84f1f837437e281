"""Writes to a metadata store in ZooKeeper that are too large for one transaction: see ``zookeeper_store``.

Their parts are put into ``staged`` first. Then one transaction makes ``pending``: that decides the write. It is carried
out part by part, each in a transaction that removes the part, and the last one also removes ``pending``. Every reader
or writer that finds ``pending`` carries it out first. The versions of all records are checked before the decision. As
the deciding transaction depends on ``revision``, they are still the same then.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Iterator

from kera.coordinator.store.metadata import (
    MetadataDamaged,
    MetadataStoreFailed,
    MetadataStoreFull,
    VersionConflict,
    Write,
    conflict,
)
from kera.coordinator.store.zookeeper_layout import packed, pending_path, staged_path, unpacked
from kera.coordinator.store.zookeeper_session import NodeMissing, ZooKeeperSession, check, make, remove
from kera.coordinator.store.zookeeper_transactions import Overtaken, Writes, ZooKeeperTransactions

READS_IN_FLIGHT = 256
_ID = re.compile(rb"[A-Za-z0-9_-]+")


class StagedWrites:
    """Carries out writes to ZooKeeper that are too large for one transaction, all or nothing."""

    def __init__(self, session: ZooKeeperSession, transactions: ZooKeeperTransactions, bytes_max: int) -> None:
        """`bytes_max`: maximum of a transaction."""
        self._session = session
        self._transactions = transactions
        self._bytes_max = bytes_max
        self._staged = staged_path(session.root)
        self._pending = pending_path(session.root)

    async def write(self, writes: Writes) -> None:
        """Carry out a write, however large. Only one at a time."""
        await self.carry_out()
        for left in await self._transactions.children(self._staged):  # of coordinators that ended before the decision
            await self._remove(f"{self._staged}/{left}")
        name = self._session.new_id()
        directory = f"{self._staged}/{name}"
        parts = [f"{directory}/{number:08x}" for number, _ in enumerate(self._parts(writes))]

        async def look() -> None:
            await self._transactions.note_revision()
            await self.carry_out()  # after it: a later decision has another revision
            await self._check(writes)

        decide = [*map(check, parts), make(self._pending, name.encode())]
        try:
            await self._session.make(self._staged)  # it exists, unless another program has deleted it
            await self._session.make(directory)
            for path, part in zip(parts, self._parts(writes), strict=True):
                await self._session.make(path, packed(part))
            await self._transactions.commit((), decide, look=look, between=self.carry_out)
        except (VersionConflict, MetadataStoreFull):
            await self._remove(directory)
            raise
        except Overtaken as error:
            raise MetadataStoreFailed(
                f"ZooKeeper at {self._session.hosts}: another coordinator has removed a write that was not decided",
                address=self._session.hosts,
            ) from error
        await self.carry_out()

    async def _check(self, writes: Writes) -> None:
        """Check that the versions of all records are as expected. Raises `VersionConflict`."""
        for start in range(0, len(writes), READS_IN_FLIGHT):
            some = writes[start : start + READS_IN_FLIGHT]
            found = await asyncio.gather(*(self._session.version(self._transactions.path(write.key)) for write in some))
            for write, version in zip(some, found, strict=True):
                found_version = 0 if version is None else version + 1
                if found_version != write.expected_version:
                    raise conflict(write, found_version)

    def _parts(self, writes: Writes) -> Iterator[list[Write]]:
        """Yield the changes among `writes`, in parts that fit into transactions."""
        part: list[Write] = []
        size = 0
        for write in writes:
            if isinstance(write, Write):
                if part and size + self._transactions.size(write) > self._bytes_max:
                    yield part
                    part, size = [], 0
                part.append(write)
                size += self._transactions.size(write)
        yield part

    async def carry_out(self) -> None:
        """Carry out the pending write, if there is one; others may do so at the same time.

        Raises `MetadataDamaged` if it cannot be read: it was decided, so it must not be skipped.
        """
        name = await self._pending_id()
        if not name:
            return
        directory = f"{self._staged}/{name}"
        parts = sorted(await self._transactions.children(directory))
        if not parts and await self._pending_id() == name:  # the last part would have removed `pending`, too
            raise self._damaged(f"{directory}, which has it, is gone")
        for part in parts:
            path = f"{directory}/{part}"
            removed = [path, self._pending] if part == parts[-1] else [path]
            try:
                writes = self._unpacked(path, (await self._session.get(path)).value)
                await self._transactions.commit(writes, list(map(remove, removed)))
            except (NodeMissing, Overtaken):
                continue  # another coordinator has carried it out
        await self._remove(directory)

    async def is_pending(self) -> bool:
        """Whether a write is decided, and not carried out to its end."""
        return bool(await self._pending_id())

    async def _pending_id(self) -> str:
        try:
            name = (await self._session.get(self._pending)).value
        except NodeMissing:
            return ""
        if not _ID.fullmatch(name):
            raise self._damaged(f"{self._pending} has no id")
        return name.decode()

    def _unpacked(self, path: str, data: bytes) -> list[Write]:
        try:
            return unpacked(data)
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"{path} cannot be read ({error})") from error

    def _damaged(self, problem: str) -> MetadataDamaged:
        return MetadataDamaged(
            f"ZooKeeper at {self._session.hosts}: a write that was decided cannot be carried out: {problem}; delete"
            f" {self._pending} to give it up, then put a copy of the metadata back with kera cluster restore"
            " FILE --force",
            path=self._pending,
        )

    async def _remove(self, directory: str) -> None:
        """Remove the rest of a staged write, which others may remove at the same time."""
        for path in (*(f"{directory}/{name}" for name in await self._transactions.children(directory)), directory):
            await self._session.delete(path)
