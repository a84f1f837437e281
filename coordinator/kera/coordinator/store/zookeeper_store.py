"""The metadata store that several coordinators share: ZooKeeper.

Where things are in it says ``zookeeper_layout``; who leads is decided by ``zookeeper_election``.

**Writes** are ZooKeeper's transactions. Each one puts its id into ``revision``, and only if that has the version that
was seen last. This makes three things simple:

* `ZooKeeperStore.list` reads many nodes, which belong to one moment if ``revision`` is the same before and after;
* a write whose connection breaks before the answer is sent again, and carried out at most once;
* if the version is another one, the id tells whether that was this very write.

**Large writes**, of more than fits into a transaction, are put into ``staged`` first. One transaction then makes
``pending``: so the write is decided. It is carried out part by part, each in a transaction that removes the part, and
the last one ``pending`` as well. Whoever finds ``pending``, to read or to write, does that first. The versions of all
records are looked at before it is decided, and as that, too, depends on ``revision``, they are still the same then.

**Versions** of records are ZooKeeper's plus one, as that counts from 0, also when a node is made anew.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from kera.coordinator.store.metadata import (
    Check,
    MetadataStoreFailed,
    MetadataStoreFull,
    StoredRecord,
    UnknownFormat,
    VersionConflict,
    Write,
    check_writes,
    conflict,
)
from kera.coordinator.store.zookeeper_layout import (
    candidates_path,
    format_path,
    key_of,
    may_have,
    packed,
    pending_path,
    record_path,
    records_path,
    revision_path,
    staged_path,
    unpacked,
)
from kera.coordinator.store.zookeeper_session import (
    RETRY_INTERVAL_S,
    Lost,
    NodeMissing,
    Operation,
    Refused,
    ZooKeeperSession,
    check,
    make,
    put,
    remove,
)

FORMAT = 1
TRANSACTION_BYTES_MAX = 1_040_000
"""A server closes the connection to who sends more than ``jute.maxbuffer``: 1 MiB less a byte."""
_OPERATION_BYTES = 64
"""Of a transaction's operation, besides path and value."""
LIST_ATTEMPTS = 20
READS_IN_FLIGHT = 256

list_ = list  # a method of the store has this name
_Writes = Sequence[Write | Check]


class _Overtaken(Exception):
    """Another one has done what a transaction was to do."""


class ZooKeeperStore:
    """See `kera.coordinator.store.metadata.MetadataStore`. Made with `open`; the session is closed by its owner."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._records = records_path(session.root)
        self._revision_path = revision_path(session.root)
        self._staged = staged_path(session.root)
        self._pending = pending_path(session.root)
        self._revision = 0
        """Version of the node, as far as is known."""
        self._directories: set[str] = set()
        """Those that are there for sure: they are never removed."""
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, session: ZooKeeperSession) -> ZooKeeperStore:
        """The store below the session's root, which is made if it is not there.

        Raises `UnknownFormat` or `MetadataStoreFailed`.
        """
        self = cls(session)
        root = session.root
        parts = root.split("/")
        for length in range(2, len(parts) + 1):
            await session.make("/".join(parts[:length]))
        await session.make(format_path(root), str(FORMAT).encode())
        found = (await session.get(format_path(root))).value
        if found != str(FORMAT).encode():
            text = found.decode(errors="replace")
            raise UnknownFormat(
                f"metadata in ZooKeeper at {session.hosts}{root} has format {text}, this version knows {FORMAT};"
                " start the version that wrote it, or name another root with --zookeeper",
                path=root,
                format=text,
            )
        for path in (self._records, self._revision_path, self._staged, candidates_path(root)):
            await session.make(path)
        await session.sync()
        self._revision = await self._seen_revision()
        await self._settle()  # after it: what is decided later has another revision
        return self

    async def get(self, key: str) -> StoredRecord | None:
        """See `MetadataStore.get`."""
        await self._settle()
        return await self._read(self._path(key))

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """See `MetadataStore.list`."""
        for attempt in range(LIST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_INTERVAL_S)  # someone is writing
            await self._settle()
            before = await self._seen_revision()
            found = await self._read_all(prefix)
            if found is not None and await self._seen_revision() == before:
                return found
        raise MetadataStoreFailed(
            f"ZooKeeper at {self._session.hosts}: others have written all the time, so that records could not be read"
            " as they were at one moment",
            address=self._session.hosts,
        )

    async def write(self, *writes: Write | Check) -> None:
        """See `MetadataStore.write`."""
        check_writes(writes)
        await self._to_the_end(self._write(writes))

    async def close(self) -> None:
        """See `MetadataStore.close`. What has been begun ends, which takes bounded time."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _to_the_end(self, operation: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waited for it may have given up

    # --- writing -----------------------------------------------------------------------------------------------

    async def _write(self, writes: _Writes) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._session.request_timeout_s
        async with self._writing:
            if loop.time() >= deadline:  # those before this one have waited for their answers for so long
                raise MetadataStoreFailed(
                    f"ZooKeeper at {self._session.hosts}: no answer in time", address=self._session.hosts
                )
            for write in writes:
                await self._make_directory(self._path(write.key).rpartition("/")[0])
            if sum(map(self._size, writes)) <= TRANSACTION_BYTES_MAX:
                await self._commit(writes)
            else:
                await self._write_large(writes)

    async def _commit(
        self,
        writes: _Writes,
        also: Sequence[Operation] = (),
        *,
        look: Callable[[], Awaitable[None]] | None = None,
        settles: bool = False,
    ) -> None:
        """Carry out one transaction; `also` are operations besides those of `writes`. Takes bounded time.

        Raises `_Overtaken` if one of those is impossible. `look` is called before it is sent anew, and sees the same
        as the transaction. With `settles`, it is part of what is pending.
        """
        session, loop = self._session, asyncio.get_running_loop()
        deadline = loop.time() + session.request_timeout_s
        write_id = uuid.uuid4().hex.encode()
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
            # Another write came between, or this one itself, the first time.
            seen, self._revision = await session.get(self._revision_path)
            if seen == write_id:
                return
            if uncertain:
                raise _unknown(refused)
            if loop.time() >= deadline:
                raise refused
            if not settles:
                await self._carry_out()

    def _transaction(
        self, writes: _Writes, also: Sequence[Operation], write_id: bytes
    ) -> tuple[list_[Operation], list_[Write | Check | None]]:
        """A transaction, and for each of its operations which of `writes` it is for."""
        operations = [put(self._revision_path, write_id, self._revision), *also]
        owners: list_[Write | Check | None] = [None] * len(operations)
        for write in writes:
            own = list(self._operations(write))
            operations += own
            owners += [write] * len(own)
        return operations, owners

    def _operations(self, write: Write | Check) -> Iterator[Operation]:
        path, version = self._path(write.key), write.expected_version - 1
        value = write.value if isinstance(write, Write) else None
        if write.expected_version == 0:
            yield make(path, value or b"")
            if value is None:  # there is no operation for "is not there"; to make it and to remove it is one
                yield remove(path)
        elif isinstance(write, Check):
            yield check(path, version)
        elif value is None:
            yield remove(path, version)
        else:
            yield put(path, value, version)

    def _size(self, write: Write | Check) -> int:
        value = write.value if isinstance(write, Write) else None
        return len(self._path(write.key)) + _OPERATION_BYTES + len(value or b"")

    async def _write_large(self, writes: _Writes) -> None:
        await self._carry_out()
        for left in await self._children(self._staged):  # by those who ended before they had decided
            await self._remove(f"{self._staged}/{left}")
        name = uuid.uuid4().hex
        directory = f"{self._staged}/{name}"
        parts = [f"{directory}/{number:08x}" for number, _ in enumerate(self._parts(writes))]

        async def look() -> None:
            self._revision = await self._seen_revision()
            await self._carry_out()  # after it: what is decided later has another revision
            await self._check(writes)

        decide = [*map(check, parts), make(self._pending, name.encode())]
        try:
            await self._session.make(directory)
            for path, part in zip(parts, self._parts(writes), strict=True):
                await self._session.make(path, packed(part))
            await self._commit((), decide, look=look)
        except (VersionConflict, MetadataStoreFull):
            await self._remove(directory)
            raise
        except _Overtaken as error:
            raise MetadataStoreFailed(
                f"ZooKeeper at {self._session.hosts}: another coordinator has removed a write that was not decided",
                address=self._session.hosts,
            ) from error
        await self._carry_out()

    async def _check(self, writes: _Writes) -> None:
        """Whether the versions of all records are as expected. Raises `VersionConflict`."""
        for start in range(0, len(writes), READS_IN_FLIGHT):
            some = writes[start : start + READS_IN_FLIGHT]
            found = await asyncio.gather(*(self._session.version(self._path(write.key)) for write in some))
            for write, version in zip(some, found, strict=True):
                found_version = 0 if version is None else version + 1
                if found_version != write.expected_version:
                    raise conflict(write, found_version)

    def _parts(self, writes: _Writes) -> Iterator[list_[Write]]:
        """The changes among `writes`, in parts that fit into transactions."""
        part: list_[Write] = []
        size = 0
        for write in writes:
            if isinstance(write, Write):
                if part and size + self._size(write) > TRANSACTION_BYTES_MAX:
                    yield part
                    part, size = [], 0
                part.append(write)
                size += self._size(write)
        yield part

    async def _carry_out(self) -> None:
        """Carry out what is pending, if anything; others may do so at the same time."""
        name = await self._pending_id()
        if not name:
            return
        directory = f"{self._staged}/{name}"
        parts = sorted(await self._children(directory))
        for part in parts:
            path = f"{directory}/{part}"
            removed = [path, self._pending] if part == parts[-1] else [path]
            try:
                data = (await self._session.get(path)).value
                await self._commit(unpacked(data), list(map(remove, removed)), settles=True)
            except (NodeMissing, _Overtaken):
                continue  # another one has done it
        await self._remove(directory)

    async def _settle(self) -> None:
        """See to it that what is read after this is not older than this call, and nothing is pending."""
        await self._session.sync()
        if await self._pending_id():
            async with self._writing:
                await self._carry_out()

    async def _pending_id(self) -> str:
        try:
            return (await self._session.get(self._pending)).value.decode()
        except NodeMissing:
            return ""

    async def _remove(self, directory: str) -> None:
        """Remove a staged write, as far as others have not."""
        for path in (*(f"{directory}/{name}" for name in await self._children(directory)), directory):
            await self._session.delete(path)

    async def _refuse(self, write: Write | Check | None, error: Refused) -> None:
        """Raise what `error` of the operation for `write` means."""
        if write is None:
            raise _Overtaken(error.message)
        found = await self._read(self._path(write.key))
        found_version = found.version if found else 0
        if found_version == write.expected_version:
            raise error  # it was not for the record, then: what it is in has gone
        raise conflict(write, found_version)

    async def _make_directory(self, path: str) -> None:
        if path not in self._directories:
            await self._session.make(path)
            self._directories.add(path)

    # --- reading -----------------------------------------------------------------------------------------------

    async def _seen_revision(self) -> int:
        return (await self._session.get(self._revision_path)).version

    async def _read(self, path: str) -> StoredRecord | None:
        try:
            node = await self._session.get(path)
        except NodeMissing:
            return None
        return StoredRecord(node.value, node.version + 1)

    async def _read_all(self, prefix: str) -> dict[str, StoredRecord] | None:
        """All records whose key starts with `prefix`; None when one went away meanwhile."""
        keys = []
        for directory in await self._session.children(self._records):
            if may_have(directory, prefix):
                names = await self._children(f"{self._records}/{directory}")
                keys += [key for name in names if (key := key_of(directory, name)).startswith(prefix)]
        keys.sort(key=str.encode)
        found: dict[str, StoredRecord] = {}
        for start in range(0, len(keys), READS_IN_FLIGHT):
            some = keys[start : start + READS_IN_FLIGHT]
            for key, record in zip(
                some, await asyncio.gather(*(self._read(self._path(key)) for key in some)), strict=True
            ):
                if record is None:
                    return None
                found[key] = record
        return found

    async def _children(self, path: str) -> Sequence[str]:
        try:
            return await self._session.children(path)
        except NodeMissing:
            return ()

    def _path(self, key: str) -> str:
        return record_path(self._session.root, key)


def _unknown(error: MetadataStoreFailed) -> MetadataStoreFailed:
    return MetadataStoreFailed(f"{error.message}; it is not known whether a write was carried out", **error.attributes)
