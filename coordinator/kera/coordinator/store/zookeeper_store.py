"""The metadata store that several coordinators share: ZooKeeper.

``zookeeper_layout`` defines its layout; ``zookeeper_election`` determines the leader.

**Writes** are ZooKeeper's transactions. Each one puts its id into ``revision``, on the condition that its version is
the one that was seen last. This makes three things simple:

* `ZooKeeperStore.list` reads many nodes; they belong to one moment if ``revision`` is the same before and after;
* a write whose connection breaks before the answer is sent again, and carried out at most once;
* if the version has changed, the id tells whether this very write has changed it.

**Large writes**, which do not fit into a transaction, are decided by one transaction, and carried out by several
(``zookeeper_staging``).

**Versions** of records are ZooKeeper's plus one: ZooKeeper counts from 0, even when a node is made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from kera.coordinator.store.metadata import (
    Check,
    MetadataDamaged,
    MetadataStoreFailed,
    StoredRecord,
    UnknownFormat,
    Write,
    check_writes,
)
from kera.coordinator.store.zookeeper_layout import (
    candidates_path,
    format_path,
    key_of,
    may_have,
    records_path,
    revision_path,
    staged_path,
)
from kera.coordinator.store.zookeeper_session import RETRY_INTERVAL_S, ZooKeeperSession
from kera.coordinator.store.zookeeper_staging import READS_IN_FLIGHT, StagedWrites
from kera.coordinator.store.zookeeper_transactions import Writes, ZooKeeperTransactions

FORMAT = 1
TRANSACTION_BYTES_MAX = 1_040_000
"""Maximum of a transaction: a server closes connections that send more than ``jute.maxbuffer``, 1 MiB less a byte."""
LIST_ATTEMPTS = 20


class ZooKeeperStore:
    """See `kera.coordinator.store.metadata.MetadataStore`. Made with `open`; the session is closed by its owner."""

    def __init__(self, session: ZooKeeperSession, transaction_bytes_max: int) -> None:
        self._session = session
        self._bytes_max = transaction_bytes_max
        self._transactions = ZooKeeperTransactions(session)
        self._staging = StagedWrites(session, self._transactions, transaction_bytes_max)
        self._records = records_path(session.root)
        self._directories: set[str] = set()
        """Directories that are known to exist, as KerA never removes one."""
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, session: ZooKeeperSession, *, transaction_bytes_max: int = TRANSACTION_BYTES_MAX
    ) -> ZooKeeperStore:
        """Return the store below the session's root, which is made if it does not exist.

        Raises `UnknownFormat`, `MetadataDamaged` if all records are gone, or `MetadataStoreFailed`.
        """
        self = cls(session, transaction_bytes_max)
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
        if await session.version(revision_path(root)) and not await self._transactions.children(self._records):
            raise MetadataDamaged(
                f"ZooKeeper at {session.hosts}: the metadata are damaged: {self._records} is empty, and records were"
                f" written; delete {root} to begin a new cluster, or to put a copy back with kera cluster restore FILE",
                path=self._records,
            )
        for path in (self._records, revision_path(root), staged_path(root), candidates_path(root)):
            await session.make(path)
        await session.sync()
        await self._transactions.note_revision()
        await self._carry_out_pending()  # after it: a later decision has another revision
        return self

    async def get(self, key: str) -> StoredRecord | None:
        """See `MetadataStore.get`."""
        (found,) = await self.get_each([key])
        return found

    async def get_each(self, keys: Sequence[str]) -> Sequence[StoredRecord | None]:
        """See `MetadataStore.get_each`."""
        await self._carry_out_pending()
        found: list[StoredRecord | None] = []
        for start in range(0, len(keys), READS_IN_FLIGHT):
            paths = [self._transactions.path(key) for key in keys[start : start + READS_IN_FLIGHT]]
            read = await asyncio.gather(*map(self._transactions.read, paths))
            for path, record in zip(paths, read, strict=True):
                if record is None:  # another program may have deleted its directory as well
                    self._directories.discard(path.rpartition("/")[0])
            found += read
        return found

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        """See `MetadataStore.list`."""
        for attempt in range(LIST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_INTERVAL_S)  # another coordinator is writing
            await self._carry_out_pending()
            before = await self._transactions.revision()
            found = await self._read_all(prefix)
            if found is not None and await self._transactions.revision() == before:
                return found
        raise MetadataStoreFailed(
            f"ZooKeeper at {self._session.hosts}: others have written all the time, so that records could not be read"
            " as they were at one moment",
            address=self._session.hosts,
        )

    async def keys(self) -> set[str]:
        """See `MetadataStore.keys`. Nodes that are not records of KerA are left out."""
        await self._carry_out_pending()
        return {key for key, path in (await self._paths("")).items() if path == self._transactions.path(key)}

    async def write(self, *writes: Write | Check) -> None:
        """See `MetadataStore.write`."""
        check_writes(writes)
        await self._to_the_end(self._write(writes))

    async def close(self) -> None:
        """See `MetadataStore.close`. Waits for writes that have begun, which takes bounded time."""
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
            task.exception()  # the caller may have given up

    # --- writing -----------------------------------------------------------------------------------------------

    async def _write(self, writes: Writes) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._session.request_timeout_s
        async with self._writing:
            if loop.time() >= deadline:  # earlier writes have waited this long for their answers
                raise MetadataStoreFailed(
                    f"ZooKeeper at {self._session.hosts}: no answer in time", address=self._session.hosts
                )
            for write in writes:
                await self._make_directory(self._transactions.path(write.key).rpartition("/")[0])
            if sum(map(self._transactions.size, writes)) <= self._bytes_max:
                await self._transactions.commit(writes, between=self._staging.carry_out)
            else:
                await self._staging.write(writes)

    async def _carry_out_pending(self) -> None:
        """Make later reads no older than this call, and carry out a pending write."""
        await self._session.sync()
        if await self._staging.is_pending():
            async with self._writing:
                await self._staging.carry_out()

    async def _make_directory(self, path: str) -> None:
        if path not in self._directories:
            await self._session.make(path)
            self._directories.add(path)

    # --- reading -----------------------------------------------------------------------------------------------

    async def _paths(self, prefix: str) -> dict[str, str]:
        """Return the paths of the nodes for the keys that start with `prefix`."""
        paths: dict[str, str] = {}
        for directory in await self._session.children(self._records):
            if may_have(directory, prefix):
                names = await self._transactions.children(f"{self._records}/{directory}")
                for name in names:
                    key = key_of(directory, name)
                    if key.startswith(prefix):
                        paths[key] = f"{self._records}/{directory}/{name}"
        return paths

    async def _read_all(self, prefix: str) -> dict[str, StoredRecord] | None:
        """Return all records whose key starts with `prefix`; None if one was removed meanwhile."""
        paths = await self._paths(prefix)
        keys = sorted(paths, key=str.encode)
        found: dict[str, StoredRecord] = {}
        for start in range(0, len(keys), READS_IN_FLIGHT):
            some = keys[start : start + READS_IN_FLIGHT]
            read = (self._transactions.read(self._transactions.path(key)) for key in some)
            for key, record in zip(some, await asyncio.gather(*read), strict=True):
                if record is None:
                    self._check_written_here(key, paths[key])
                    return None
                found[key] = record
        return found

    def _check_written_here(self, key: str, found: str) -> None:
        """Raise `MetadataDamaged` unless the node that was found for `key` is where KerA puts its record."""
        if found != self._transactions.path(key):
            raise MetadataDamaged(
                f"ZooKeeper at {self._session.hosts}: {found} is not a KerA record; delete it", path=found
            )
