"""The metadata store that several coordinators share, and their election: ZooKeeper.

This is the only module that knows ZooKeeper's client, kazoo. Its threads and errors end here: results come back to the
event loop, every wait is bounded, and what fails is a `MetadataStoreFailed`.

Below the root (the path behind the addresses, ``/kera`` by default):

    format                     version of this layout, as decimal text
    revision                   set by each write, to an id of the write; see below
    records/<first>/<rest>     a record; its key's first component, then the rest, both percent-encoded
    staged/<id>/<number>       parts of a write that is too large for one transaction; see below
    pending                    id of the staged write that is decided, and not carried out to its end
    candidates/<id>-<number>   ephemeral: a coordinator that runs, its address; the one with the lowest number leads

**Writes** are ZooKeeper's transactions. Each one puts its id into ``revision``, and only if that has the version that
was seen last. This makes three things simple:

* `ZooKeeperStore.list` reads many nodes, which belong to one moment if ``revision`` is the same before and after;
* a write whose connection breaks before the answer is sent again, and carried out at most once;
* if the version is another one, the id tells whether that was this very write.

**Large writes**, of more than fits into a transaction, are put into ``staged`` first. One transaction then checks all
versions, and makes ``pending``: so the write is decided. It is carried out part by part, each in a transaction that
removes the part, and the last one ``pending`` as well. Whoever finds ``pending``, to read or to write, does that first.

**Versions** of records are ZooKeeper's plus one, as that counts from 0, also when a node is made anew.

**Proofs.** While its candidate's node exists nobody else leads. ZooKeeper removes the node when it has not heard of its
session for the session time-out. So who asks for the node, through the ensemble's leader, and finds it, leads for
`LEASE_PART` of the time-out from when it asked. The rest is a margin for servers that tell the ensemble's leader of
their sessions only once per half tick: a time-out is at least two ticks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import string
import struct
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)

from kera.coordinator.metadata import (
    Check,
    MetadataStoreFailed,
    Record,
    UnknownFormat,
    VersionConflict,
    Write,
    check_writes,
    conflict,
)
from kera.core.errors import InvalidArgument, StartError
from kera.core.rpc.address import split_address
from kera.core.telemetry import get_logger

log = get_logger("kera.zookeeper")

FORMAT = 1
ROOT_DEFAULT = "/kera"
CONNECT_TIMEOUT_S = 15.0
"""Bound on the first connection, at the start."""
CLOSE_TIMEOUT_S = 1.0
"""Then the session is left to its time-out: a coordinator ends, whatever ails ZooKeeper."""
ADDRESSES_MIN = 4
RETRY_INTERVAL_S = 0.1
POLL_INTERVAL_S = 1.0
"""How often candidates look, besides being told: what is told is lost with a connection."""
TRANSACTION_BYTES_MAX = 1_040_000
"""A server closes the connection to who sends more than ``jute.maxbuffer``: 1 MiB less a byte."""
_OPERATION_BYTES = 64
"""Of a transaction's operation, besides path and value."""
LIST_ATTEMPTS = 20
READS_IN_FLIGHT = 256
LEASE_PART = 2 / 3

_PLAIN = frozenset(string.ascii_letters + string.digits + "-_")
_EMPTY = "+"
"""Stands where nothing is left to encode; percent-encoding never gives it."""

# The request may or may not have been carried out. (A connection that is closed is one of a session that has expired.)
_LOST = (ConnectionLoss, SessionExpiredError, SessionMovedError, OperationTimeoutError, TimeoutError)

T = TypeVar("T")
list_ = list  # a method of the store has this name
_Writes = Sequence[Write | Check]
_Operation = Callable[[Any], None]
"""Adds itself to a transaction."""
Submit = Callable[[KazooClient], Any]
"""Begins a request; gives kazoo's asynchronous result."""


def _getting(path: str) -> Submit:
    return lambda client: client.get_async(path)


def _deleting(path: str) -> Submit:
    return lambda client: client.delete_async(path)


def _check_there(path: str) -> _Operation:
    return lambda transaction: transaction.check(path, 0)


def _make(path: str, value: bytes) -> _Operation:
    return lambda transaction: transaction.create(path, value)


def _remove(path: str) -> _Operation:
    return lambda transaction: transaction.delete(path)


def _committing(transaction: Any) -> Submit:
    return lambda _: transaction.commit_async()


class _Overtaken(Exception):
    """Another one has done what a transaction was to do."""


class ZooKeeperUnreachable(StartError):
    """No server of the ensemble answered within the time that was given for the start."""

    code = "zookeeper_unreachable"


class ZooKeeperAddress(NamedTuple):
    """``host:port,host:port/root``, taken apart."""

    hosts: str
    root: str

    @classmethod
    def parse(cls, text: str) -> ZooKeeperAddress:
        """Raises `InvalidArgument`."""
        hosts, slash, path = text.strip().partition("/")
        for host in hosts.split(","):
            split_address(host.strip())
        parts = path.rstrip("/").split("/") if slash and path.rstrip("/") else []
        if any(part in {"", ".", ".."} for part in parts):
            raise InvalidArgument(f"{text!r} has no path that ZooKeeper could have", address=text)
        return cls(hosts, "/" + "/".join(parts) if parts else ROOT_DEFAULT)


class ZooKeeperSession:
    """A session, and the next one when it expires. Belongs to one event loop; made with `connect`."""

    def __init__(self, address: ZooKeeperAddress, *, session_timeout_ms: int) -> None:
        self.root = address.root
        self.hosts = address.hosts
        self.timeout_s = session_timeout_ms / 1000
        self.request_timeout_s = self.timeout_s
        """By then a leader has stepped down."""
        self.attempt_timeout_s = self.timeout_s / 2
        """Then it is sent again: one that comes just when kazoo begins a new session may be forgotten by it."""
        logger = logging.getLogger("kera.zookeeper.kazoo")
        logger.setLevel(logging.CRITICAL)  # what matters of it is told below, or raised
        retry = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5, "ignore_expire": True}
        # kazoo gives each address its share of the time-out to answer when it connects. A server that is just starting
        # may take a connection and never answer; with one address all of the time-out would be lost to it.
        count = address.hosts.count(",") + 1
        hosts = ",".join([address.hosts] * math.ceil(ADDRESSES_MIN / count))
        self._client = KazooClient(
            hosts, timeout=self.timeout_s, connection_retry=retry, command_retry=retry, logger=logger
        )
        self._client.add_listener(self._changed)

    @classmethod
    async def connect(cls, address: ZooKeeperAddress, *, session_timeout_ms: int) -> ZooKeeperSession:
        """A session with the ensemble at `address`. Raises `ZooKeeperUnreachable`."""
        self = cls(address, session_timeout_ms=session_timeout_ms)
        connected = self._client.start_async()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_TIMEOUT_S
        try:
            while not connected.is_set():
                if loop.time() >= deadline:
                    raise ZooKeeperUnreachable(
                        f"no ZooKeeper answers at {self.hosts} within {CONNECT_TIMEOUT_S:g} s;"
                        " start it, or name another with --zookeeper",
                        address=self.hosts,
                    )
                await asyncio.sleep(0.01)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def session_id(self) -> int | None:
        """Of the present session; the server's name for it as owner of ephemeral nodes."""
        known = self._client.client_id
        return None if known is None else int(known[0])

    def transaction(self) -> Any:
        """An empty one, to be filled and sent."""
        return self._client.transaction()

    async def send(self, submit: Submit, timeout_s: float) -> Any:
        """Send one request once. Raises kazoo's errors, those of `_LOST` when its outcome is not known."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any) -> None:
            if future.done():
                return
            if result.exception is not None:
                future.set_exception(result.exception)
            else:
                future.set_result(result.value)

        def answered(result: Any) -> None:  # on kazoo's thread
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result)

        submit(self._client).rawlink(answered)
        async with asyncio.timeout(timeout_s):
            return await future

    async def ask(self, submit: Submit) -> Any:
        """Send a request that may be repeated, until it is answered.

        Raises `NoNodeError` and `NodeExistsError` as they are, and `MetadataStoreFailed`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.request_timeout_s
        while True:
            try:
                return await self.send(submit, min(self.attempt_timeout_s, max(0.0, deadline - loop.time())))
            except _LOST as error:
                if loop.time() + RETRY_INTERVAL_S >= deadline:
                    raise self.failed(error) from error
                await asyncio.sleep(RETRY_INTERVAL_S)
            except (NoNodeError, NodeExistsError):
                raise
            except KazooException as error:
                raise self.failed(error) from error

    def failed(self, error: BaseException) -> MetadataStoreFailed:
        """What others hear of `error`."""
        what = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
        return MetadataStoreFailed(f"ZooKeeper at {self.hosts}: {what}", address=self.hosts)

    async def make(self, path: str, value: bytes = b"") -> None:
        """Make a node, if it is not there."""
        with contextlib.suppress(NodeExistsError):
            await self.ask(lambda client: client.create_async(path, value))

    async def sync(self) -> None:
        """What is read after this is not older than this call."""
        await self.ask(lambda client: client.sync_async(self.root))

    async def close(self) -> None:
        """End the session, which takes bounded time."""
        # On a thread of its own, which may be left behind: kazoo waits for its threads, and they for the server.
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def stopped() -> None:
            if not done.done():
                done.set_result(None)

        def stop() -> None:
            with contextlib.suppress(Exception):  # nobody can do anything about it
                self._client.stop()
                self._client.close()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopped)

        threading.Thread(target=stop, name="kera-zookeeper-close", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, CLOSE_TIMEOUT_S)

    def _changed(self, state: str) -> None:  # on kazoo's thread
        if state == KazooState.CONNECTED:
            log.info("connected to ZooKeeper", address=self.hosts)
        elif state == KazooState.SUSPENDED:
            log.warning("connection to ZooKeeper lost", address=self.hosts)
        else:
            log.warning("session with ZooKeeper ended", address=self.hosts)


class ZooKeeperStore:
    """See `kera.coordinator.metadata.MetadataStore`. Made with `open`; the session is closed by its owner."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._records = f"{session.root}/records"
        self._revision_path = f"{session.root}/revision"
        self._staged = f"{session.root}/staged"
        self._pending = f"{session.root}/pending"
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
        await session.make(f"{root}/format", str(FORMAT).encode())
        found, _ = await session.ask(_getting(f"{root}/format"))
        if found != str(FORMAT).encode():
            text = found.decode(errors="replace")
            raise UnknownFormat(
                f"metadata in ZooKeeper at {session.hosts}{root} has format {text}, this version knows {FORMAT};"
                " start the version that wrote it, or name another root with --zookeeper",
                path=root,
                format=text,
            )
        for path in (self._records, self._revision_path, self._staged, f"{root}/candidates"):
            await session.make(path)
        await session.sync()
        self._revision = await self._seen_revision()
        await self._settle()  # after it: what is decided later has another revision
        return self

    async def get(self, key: str) -> Record | None:
        """See `MetadataStore.get`."""
        await self._settle()
        return await self._read(self._path(key))

    async def list(self, prefix: str) -> dict[str, Record]:
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
        """See `MetadataStore.write`. Raises `InvalidArgument`, too, when not even the checks fit into a transaction."""
        check_writes(writes)
        size = sum(2 * self._size(Check(*write[:1], 0)) for write in writes)
        if size > TRANSACTION_BYTES_MAX:
            raise InvalidArgument(
                f"a change of {len(writes)} records is too large for ZooKeeper: their keys take {size} bytes"
                f" of {TRANSACTION_BYTES_MAX}",
                limit_bytes=TRANSACTION_BYTES_MAX,
            )
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
                raise self._session.failed(TimeoutError())
            for write in writes:
                await self._make_directory(self._path(write.key).rpartition("/")[0])
            if sum(map(self._size, writes)) <= TRANSACTION_BYTES_MAX:
                await self._commit(writes, deadline)
            else:
                await self._write_large(writes, deadline)

    async def _commit(
        self, writes: _Writes, deadline: float, also: Sequence[_Operation] = (), *, settles: bool = False
    ) -> None:
        """Carry out one transaction; `also` are operations besides those of `writes`.

        Raises `_Overtaken` if one of those is impossible. With `settles`, it is part of what is pending.
        """
        loop = asyncio.get_running_loop()
        write_id = uuid.uuid4().hex.encode()
        uncertain = False
        while True:
            transaction, owners = self._transaction(writes, also, write_id)
            try:
                timeout_s = min(self._session.attempt_timeout_s, max(0.0, deadline - loop.time()))
                results = await self._session.send(_committing(transaction), timeout_s)
            except _LOST as error:
                if loop.time() + RETRY_INTERVAL_S >= deadline:
                    raise self._unknown(error) from error
                uncertain = True
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            except KazooException as error:
                raise self._session.failed(error) from error
            failed = next((at for at, result in enumerate(results) if _is_cause(result)), None)
            if failed is None:
                self._revision = results[0].version
                return
            if failed:
                await self._refuse(owners[failed], results[failed])
            # Another write came between, or this one itself, the first time.
            seen, status = await self._session.ask(_getting(self._revision_path))
            self._revision = status.version
            if seen == write_id:
                return
            if uncertain:
                raise self._unknown(results[0])
            if loop.time() >= deadline:
                raise self._session.failed(results[0])
            if not settles:
                await self._carry_out(deadline)

    def _transaction(
        self, writes: _Writes, also: Sequence[_Operation], write_id: bytes
    ) -> tuple[Any, list_[Write | Check | None]]:
        """A transaction, and for each of its operations which of `writes` it is for."""
        transaction = self._session.transaction()
        transaction.set_data(self._revision_path, write_id, version=self._revision)
        for add in also:
            add(transaction)
        owners: list_[Write | Check | None] = [None] * (1 + len(also))
        for write in writes:
            path, version = self._path(write.key), write.expected_version - 1
            value = write.value if isinstance(write, Write) else None
            if write.expected_version == 0:
                transaction.create(path, value or b"")
                if value is None:  # there is no operation for "is not there"; to make it and to remove it is one
                    owners.append(write)
                    transaction.delete(path)
            elif isinstance(write, Check):
                transaction.check(path, version)
            elif value is None:
                transaction.delete(path, version)
            else:
                transaction.set_data(path, value, version)
            owners.append(write)
        return transaction, owners

    def _size(self, write: Write | Check) -> int:
        value = write.value if isinstance(write, Write) else None
        return len(self._path(write.key)) + _OPERATION_BYTES + len(value or b"")

    async def _write_large(self, writes: _Writes, deadline: float) -> None:
        await self._carry_out(deadline)
        for left in await self._children(self._staged):  # by those who ended before they had decided
            await self._remove(f"{self._staged}/{left}")
        name = uuid.uuid4().hex
        directory = f"{self._staged}/{name}"
        await self._session.make(directory)
        parts = []
        for number, part in enumerate(self._parts(writes)):
            parts.append(f"{directory}/{number:08x}")
            await self._session.make(parts[-1], _packed(part))
        checks = tuple(Check(write.key, write.expected_version) for write in writes)
        decide = [*map(_check_there, parts), _make(self._pending, name.encode())]
        try:
            await self._commit(checks, deadline, decide)
        except VersionConflict:
            await self._remove(directory)
            raise
        except _Overtaken as error:
            raise self._session.failed(error) from error
        await self._carry_out(deadline)

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

    async def _carry_out(self, deadline: float) -> None:
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
                data, _ = await self._session.ask(_getting(path))
                await self._commit(_unpacked(data), deadline, list(map(_remove, removed)), settles=True)
            except (NoNodeError, _Overtaken):
                continue  # another one has done it
        await self._remove(directory)

    async def _settle(self) -> None:
        """See to it that what is read after this is not older than this call, and nothing is pending."""
        await self._session.sync()
        if await self._pending_id():
            async with self._writing:
                await self._carry_out(asyncio.get_running_loop().time() + self._session.request_timeout_s)

    async def _pending_id(self) -> str:
        try:
            value, _ = await self._session.ask(_getting(self._pending))
        except NoNodeError:
            return ""
        return str(value.decode())

    async def _remove(self, directory: str) -> None:
        """Remove a staged write, as far as others have not."""
        for path in (*(f"{directory}/{name}" for name in await self._children(directory)), directory):
            with contextlib.suppress(NoNodeError):
                await self._session.ask(_deleting(path))

    async def _refuse(self, write: Write | Check | None, error: BaseException) -> None:
        """Raise what `error` of the operation for `write` means."""
        if not isinstance(error, BadVersionError | NoNodeError | NodeExistsError):
            raise self._session.failed(error)
        if write is None:
            raise _Overtaken(str(error) or type(error).__name__)
        found = await self._read(self._path(write.key))
        raise conflict(write, found.version if found else 0)

    def _unknown(self, error: BaseException) -> MetadataStoreFailed:
        failed = self._session.failed(error)
        return MetadataStoreFailed(
            f"{failed.message}; it is not known whether a write was carried out", **failed.attributes
        )

    async def _make_directory(self, path: str) -> None:
        if path not in self._directories:
            await self._session.make(path)
            self._directories.add(path)

    # --- reading -----------------------------------------------------------------------------------------------

    async def _seen_revision(self) -> int:
        _, status = await self._session.ask(_getting(self._revision_path))
        return int(status.version)

    async def _read(self, path: str) -> Record | None:
        try:
            value, status = await self._session.ask(_getting(path))
        except NoNodeError:
            return None
        return Record(value, status.version + 1)

    async def _read_all(self, prefix: str) -> dict[str, Record] | None:
        """All records whose key starts with `prefix`; None when one went away meanwhile."""
        keys = []
        for directory in await self._children(self._records):
            if may_have(directory, prefix):
                names = await self._children(f"{self._records}/{directory}")
                keys += [key for name in names if (key := key_of(directory, name)).startswith(prefix)]
        keys.sort(key=str.encode)
        found: dict[str, Record] = {}
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
            return tuple(await self._session.ask(lambda client: client.get_children_async(path)))
        except NoNodeError:
            return ()

    def _path(self, key: str) -> str:
        directory, name = path_of(key)
        return f"{self._records}/{directory}/{name}"


class ZooKeeperElection:
    """See `kera.coordinator.leadership.Election`."""

    alone = False

    def __init__(self, session: ZooKeeperSession, store: ZooKeeperStore, address: str) -> None:
        """`address` is where clients and daemons reach this coordinator."""
        self._session = session
        self._store = store
        self._address = address
        self._path = f"{session.root}/candidates"
        self._id = uuid.uuid4().hex
        """Finds our node, also when the connection broke before we heard its whole name."""
        self._candidates: dict[str, str] = {}
        """Address by node, the one that leads first."""
        self._changed = asyncio.Event()
        self.lease_s = session.timeout_s * LEASE_PART

    @property
    def leader(self) -> str:
        """See `Election.leader`."""
        return next(iter(self._candidates.values()), "")

    @property
    def coordinators(self) -> list[str]:
        """See `Election.coordinators`."""
        return list(dict.fromkeys(self._candidates.values()))

    async def win(self) -> None:
        """See `Election.win`."""
        while True:
            try:
                self._changed.clear()
                await self._look(self._wake())
                if not await self._is_candidate():
                    await self._stand()
                elif self._mine() == next(iter(self._candidates), None):
                    return
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), POLL_INTERVAL_S)
            except MetadataStoreFailed as error:
                log.warning("cannot run for leader", error=str(error))
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def prove(self, guard: Check) -> bool:
        """See `Election.prove`."""
        async with asyncio.timeout(self.lease_s):
            await self._session.sync()
            if not await self._is_candidate():
                return False
            record = await self._store.get(guard.key)
            await self._look()
        leads = self._mine() is not None and self._mine() == next(iter(self._candidates), None)
        return leads and record is not None and record.version == guard.expected_version

    async def resign(self) -> None:
        """See `Election.resign`."""
        with contextlib.suppress(MetadataStoreFailed, NoNodeError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._look()
                while (node := self._mine()) is not None:
                    await self._session.ask(_deleting(f"{self._path}/{node}"))
                    del self._candidates[node]

    async def _stand(self) -> None:
        """Become a candidate, the last one in the row."""
        path, value = f"{self._path}/{self._id}-", self._address.encode()
        with contextlib.suppress(*_LOST):
            await self._session.send(
                lambda client: client.create_async(path, value, ephemeral=True, sequence=True),
                self._session.request_timeout_s,
            )

    async def _is_candidate(self) -> bool:
        """Whether our node is there, and of the session that we have: an earlier one's goes away any moment."""
        node = self._mine()
        if node is None:
            return False
        status = await self._session.ask(lambda client: client.exists_async(f"{self._path}/{node}"))
        return status is not None and status.ephemeralOwner == self._session.session_id

    def _mine(self) -> str | None:
        return next((node for node in self._candidates if node.startswith(self._id)), None)

    async def _look(self, watch: Callable[[Any], None] | None = None) -> None:
        """See which candidates there are; `watch` is called on kazoo's thread when that changes."""
        await self._session.sync()
        nodes = await self._session.ask(lambda client: client.get_children_async(self._path, watch))
        known, found = self._candidates, {}
        for node in sorted(nodes, key=lambda node: node.rpartition("-")[2]):
            if node in known:
                found[node] = known[node]
                continue
            with contextlib.suppress(NoNodeError):
                value, _ = await self._session.ask(_getting(f"{self._path}/{node}"))
                found[node] = value.decode()
        self._candidates = found

    def _wake(self) -> Callable[[Any], None]:
        loop = asyncio.get_running_loop()

        def changed(_: Any) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._changed.set)

        return changed


def _is_cause(result: object) -> bool:
    """Whether an operation's result is why its transaction failed; of the others, the result says just that."""
    return isinstance(result, BaseException) and not isinstance(result, RolledBackError | RuntimeInconsistency)


# --- staged writes -------------------------------------------------------------------------------------------------

_HEAD = struct.Struct(">HQq")
"""Of a change: length of the key, expected version, length of the value; -1: it is deleted. Key and value follow."""


def _packed(writes: Iterable[Write]) -> bytes:
    pieces = []
    for write in writes:
        key = write.key.encode()
        pieces += [
            _HEAD.pack(len(key), write.expected_version, -1 if write.value is None else len(write.value)),
            key,
            write.value or b"",
        ]
    return b"".join(pieces)


def _unpacked(data: bytes) -> list[Write]:
    writes, at = [], 0
    while at < len(data):
        key_bytes, version, value_bytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        key = data[at : at + key_bytes].decode()
        at += key_bytes
        value = None if value_bytes < 0 else data[at : at + value_bytes]
        at += max(0, value_bytes)
        writes.append(Write(key, value, version))
    return writes


# --- keys ----------------------------------------------------------------------------------------------------------

_TOP = _EMPTY * 2
"""Directory of the records whose key has one component."""


def _quoted(text: str) -> str:
    if not text:
        return _EMPTY
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02X}" for byte in text.encode())


def _unquoted(name: str) -> str:
    return "" if name == _EMPTY else urllib.parse.unquote(name)


def path_of(key: str) -> tuple[str, str]:
    """Directory and name of a record."""
    head, slash, rest = key.partition("/")
    return (_quoted(head), _quoted(rest)) if slash else (_TOP, _quoted(key))


def key_of(directory: str, name: str) -> str:
    """The opposite of `path_of`."""
    return _unquoted(name) if directory == _TOP else f"{_unquoted(directory)}/{_unquoted(name)}"


def may_have(directory: str, prefix: str) -> bool:
    """Whether keys of `directory` may start with `prefix`."""
    if directory == _TOP:
        return "/" not in prefix
    head, slash, _ = prefix.partition("/")
    return _unquoted(directory) == head if slash else _unquoted(directory).startswith(head)
