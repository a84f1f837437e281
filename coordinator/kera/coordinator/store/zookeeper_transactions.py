"""Transactions and reads of a metadata store in ZooKeeper: see ``zookeeper_store``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kera.coordinator.store.metadata import Check, MetadataStoreFailed, StoredRecord, Write, conflict
from kera.coordinator.store.zookeeper_layout import record_path, revision_path
from kera.coordinator.store.zookeeper_session import (
    RETRY_INTERVAL_S,
    Lost,
    Node,
    NodeMissing,
    Operation,
    Refused,
    ZooKeeperSession,
    check,
    make,
    put,
    remove,
)
from kera.core.base.telemetry import get_logger

log = get_logger("kera.zookeeper")

_OPERATION_BYTES = 64
"""Approximate size of a transaction's operation, without path and value."""

Writes = Sequence[Write | Check]


class Overtaken(Exception):
    """Another coordinator has already done what a transaction was to do."""


class ZooKeeperTransactions:
    """The transactions below one root; each depends on the revision that was seen last."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._revision_path = revision_path(session.root)
        self._revision = 0
        """Version of the node, as far as it is known."""

    async def commit(
        self,
        writes: Writes,
        also: Sequence[Operation] = (),
        *,
        look: Callable[[], Awaitable[None]] | None = None,
        between: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Carry out one transaction; `also`: operations besides those of `writes`. Takes bounded time.

        Raises `Overtaken` if one of `also` is impossible. `look` is called before the transaction is sent anew, and
        sees the same state as the transaction; `between` is called when another transaction has come first.
        """
        session, loop = self._session, asyncio.get_running_loop()
        deadline = loop.time() + session.request_timeout_s
        write_id = session.new_id().encode()
        uncertain = False
        while True:
            if look is not None and not uncertain:
                began = loop.time()
                await look()
                deadline += loop.time() - began
            operations, owners = self._transaction(writes, also, write_id)
            try:
                timeout_s = min(session.attempt_timeout_s, max(0.0, deadline - loop.time()))
                self._revision = await session.transact(operations, timeout_s)
            except Lost as error:
                if loop.time() + RETRY_INTERVAL_S >= deadline:
                    raise _unknown(error) from error
                uncertain = True
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            except Refused as error:
                if error.at:
                    await self._refuse(owners[error.at], error)
                refused = error
            else:
                return
            # Another write came first, or this very write has succeeded at an earlier attempt.
            seen, self._revision = await self._look()
            if seen == write_id:
                return
            if uncertain:
                raise _unknown(refused)
            if loop.time() >= deadline:
                raise refused
            if between is not None:
                await between()

    def _transaction(
        self, writes: Writes, also: Sequence[Operation], write_id: bytes
    ) -> tuple[list[Operation], list[Write | Check | None]]:
        """Return a transaction, and for each of its operations the write that it belongs to."""
        operations = [put(self._revision_path, write_id, self._revision), *also]
        owners: list[Write | Check | None] = [None] * len(operations)
        for write in writes:
            own = list(self._operations(write))
            operations += own
            owners += [write] * len(own)
        return operations, owners

    def _operations(self, write: Write | Check) -> Iterator[Operation]:
        path, version = self.path(write.key), write.expected_version - 1
        value = write.value if isinstance(write, Write) else None
        if write.expected_version == 0:
            yield make(path, value or b"")
            if value is None:  # no operation requires that a node does not exist; making and removing it does
                yield remove(path)
        elif isinstance(write, Check):
            yield check(path, version)
        elif value is None:
            yield remove(path, version)
        else:
            yield put(path, value, version)

    def size(self, write: Write | Check) -> int:
        """Return how many bytes a write takes of a transaction."""
        value = write.value if isinstance(write, Write) else None
        return len(self.path(write.key)) + _OPERATION_BYTES + len(value or b"")

    async def _refuse(self, write: Write | Check | None, error: Refused) -> None:
        """Raise the error that `error` of the operation for `write` means."""
        if write is None:
            raise Overtaken(error.message)
        found = await self.read(self.path(write.key))
        found_version = found.version if found else 0
        if found_version == write.expected_version:
            raise error  # the reason is not the record, but that its directory is gone
        raise conflict(write, found_version)

    async def revision(self) -> int:
        """Return the present revision."""
        return (await self._look()).version

    async def _look(self) -> Node:
        """Return the revision's node. Makes it again if another program has deleted it, as nothing could be
        written without it.
        """
        try:
            return await self._session.get(self._revision_path)
        except NodeMissing:
            await self._session.make(self._revision_path)
            log.error("made a node of the metadata anew that another program deleted", path=self._revision_path)
            return await self._session.get(self._revision_path)

    async def note_revision(self) -> None:
        """Note the present revision: transactions are refused from now on if another one has come since this call."""
        self._revision = await self.revision()

    async def read(self, path: str) -> StoredRecord | None:
        """Return the record in a node, or None."""
        try:
            node = await self._session.get(path)
        except NodeMissing:
            return None
        return StoredRecord(node.value, node.version + 1)

    async def children(self, path: str) -> Sequence[str]:
        """Return the names in a node; none if it does not exist."""
        try:
            return await self._session.children(path)
        except NodeMissing:
            return ()

    def path(self, key: str) -> str:
        """Return the path of a record."""
        return record_path(self._session.root, key)


def _unknown(error: MetadataStoreFailed) -> MetadataStoreFailed:
    return MetadataStoreFailed(f"{error.message}; it is not known whether a write was carried out", **error.attributes)
