"""A session with ZooKeeper: requests from the event loop, with bounded waits and errors of ours.

This is the only module that uses ZooKeeper's client, kazoo. Its threads and errors end here: results come back to the
event loop, every wait is bounded, and every failure is a `MetadataStoreFailed` (`MetadataStoreFull` where ZooKeeper
refuses for want of room). Where the kind matters, it is one of these:

    NodeMissing, NodeThere   a node that a request needs is missing, or a node that it makes exists already
    Refused                  one of a transaction's operations is impossible: nothing was changed
    Lost                     it is unknown whether the request was carried out

A new session follows one that expires, unnoticed by the callers. If kazoo itself ends, which only a defect causes, all
requests fail with `InternalError`: they would never be answered.

``zookeeper_store`` and ``zookeeper_election`` define the content, and who may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kazoo.client import KazooClient, KazooState, TransactionRequest
from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    QuotaExceededError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import KeeperState

from kera.coordinator.store.metadata import MetadataStoreFailed, MetadataStoreFull
from kera.core.base.address import reason_of, split_address
from kera.core.base.telemetry import get_logger
from kera.core.errors import InternalError, InvalidArgument, StartError
from kera.core.runtime import random_id
from kera.core.security import Tls

log = get_logger("kera.zookeeper")

ROOT_DEFAULT = "/kera"
CONNECT_TIMEOUT_S = 15.0
"""Time limit of the first connection, at the start."""
CLOSE_TIMEOUT_S = 1.0
"""Time limit of closing; after it the session ends by its time-out: a coordinator ends, whatever ails ZooKeeper."""
ADDRESSES_MIN = 2
"""Each address gets half of the time-out to connect: a quarter is too short where packets are late and lost."""
RETRY_INTERVAL_S = 0.1

# The request may or may not have been carried out. (A closed connection belongs to an expired session.)
_LOST = (ConnectionLoss, SessionExpiredError, SessionMovedError, OperationTimeoutError, TimeoutError)
_IMPOSSIBLE = (BadVersionError, NoNodeError, NodeExistsError)

Watch = Callable[[Any], None]
"""Called on kazoo's thread."""
_Submit = Callable[[KazooClient], Any]
"""Begins a request; returns kazoo's asynchronous result."""
Operation = Callable[[TransactionRequest], None]
"""Adds itself to a transaction."""


def check(path: str, version: int = 0) -> Operation:
    """Return the operation that requires a node in this version; a node that was never set has 0."""
    return lambda transaction: transaction.check(path, version)


def make(path: str, value: bytes = b"") -> Operation:
    """Return the operation that makes a node."""
    return lambda transaction: transaction.create(path, value)


def put(path: str, value: bytes, version: int) -> Operation:
    """Return the operation that sets the value of a node of this version."""
    return lambda transaction: transaction.set_data(path, value, version)


def remove(path: str, version: int = -1) -> Operation:
    """Return the operation that removes a node of this version; -1: of any version."""
    return lambda transaction: transaction.delete(path, version)


class NodeMissing(MetadataStoreFailed):
    """A node does not exist. Callers that expect that catch this."""


class NodeThere(MetadataStoreFailed):
    """A node that was to be made exists already."""


class Lost(MetadataStoreFailed):
    """The request may or may not have been carried out."""


class Refused(MetadataStoreFailed):
    """The operation number `at` of a transaction is impossible, and so the whole transaction."""

    at: int = 0


class ZooKeeperUnreachable(StartError):
    """No server of the ensemble answered within the time limit of the start."""

    code = "zookeeper_unreachable"


class Node(NamedTuple):
    """A node that was read."""

    value: bytes
    version: int
    """Version, from 0."""


class ZooKeeperAddress(NamedTuple):
    """The parts of ``host:port,host:port/root``."""

    hosts: str
    root: str

    @classmethod
    def parse(cls, text: str) -> ZooKeeperAddress:
        """Parse an address. Raises `InvalidArgument`."""
        hosts, slash, path = text.strip().partition("/")
        for host in hosts.split(","):
            split_address(host.strip())
        parts = path.rstrip("/").split("/") if slash and path.rstrip("/") else []
        if any(part in {"", ".", ".."} for part in parts):
            raise InvalidArgument(f"{text!r} has no path that ZooKeeper could have", address=text)
        return cls(hosts, "/" + "/".join(parts) if parts else ROOT_DEFAULT)


class _TlsHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Kazoo's own handler with encrypted connections.

    Kazoo's TLS would also trust every authority of the operating system, and never read files that have changed.
    """

    def __init__(self, tls: Tls) -> None:
        super().__init__()
        self._tls = tls
        self.problem = ""
        """The TLS error of the last connection; empty: none."""

    def create_connection(self, address: tuple[str, int], *, timeout: float, hostname: str, **_: Any) -> ssl.SSLSocket:
        sock = socket.create_connection(address, timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = self._tls.client_context().wrap_socket(sock, server_hostname=hostname)
        except ssl.SSLError as error:
            self.problem = reason_of(error)
            sock.close()
            raise
        except BaseException:
            sock.close()
            raise
        self.problem = ""
        return secured


class ZooKeeperSession:
    """A session, and the next one when it expires. Belongs to one event loop; made with `connect`."""

    def __init__(
        self,
        address: ZooKeeperAddress,
        *,
        session_timeout_ms: int,
        new_id: Callable[[], str] = random_id,
        tls: Tls | None = None,
    ) -> None:
        """`new_id` returns unique names for nodes. `tls`: encrypts connections."""
        self.root = address.root
        self.hosts = address.hosts
        self.new_id = new_id
        self.timeout_s = session_timeout_ms / 1000
        """Time without a sign of us after which ZooKeeper ends the session, or later."""
        self.request_timeout_s = self.timeout_s
        """Time limit of a request: by then a leader has stepped down."""
        self.attempt_timeout_s = self.timeout_s / 2
        """Time after which a request is sent again: kazoo may forget one that comes just when it begins a new
        session.
        """
        self._closing = False
        logger = logging.getLogger("kera.zookeeper.kazoo")
        logger.setLevel(logging.CRITICAL)  # what matters is logged below, or raised
        retry = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5, "ignore_expire": True}
        # kazoo gives each address its share of the time-out to answer when it connects. A server that is just starting
        # may accept a connection and never answer; with one address that would cost the whole time-out.
        self._handler = SequentialThreadingHandler() if tls is None else _TlsHandler(tls)
        count = address.hosts.count(",") + 1
        hosts = ",".join([address.hosts] * math.ceil(ADDRESSES_MIN / count))
        self._client = KazooClient(
            hosts,
            timeout=self.timeout_s,
            connection_retry=retry,
            command_retry=retry,
            logger=logger,
            handler=self._handler,
        )
        self._client.add_listener(self._changed)
        self._note_granted_timeouts()

    def _note_granted_timeouts(self) -> None:
        # Servers may grant a session less time than it asked for, and kazoo does not report how much. But this method
        # returns how long a session may be silent: two thirds of the granted time.
        connection = self._client._connection  # noqa: SLF001
        connect = connection._connect  # noqa: SLF001

        def connect_and_note(*arguments: Any) -> Any:  # on kazoo's thread
            silence_ms, connect_timeout_ms = connect(*arguments)
            self._granted(round(silence_ms * 3 / 2) / 1000)
            return silence_ms, connect_timeout_ms

        connection._connect = connect_and_note  # noqa: SLF001

    def _granted(self, timeout_s: float) -> None:
        if timeout_s < self.timeout_s:
            log.warning(
                "ZooKeeper ends sessions sooner than it was asked to", asked_s=self.timeout_s, given_s=timeout_s
            )
            self.timeout_s = timeout_s

    @classmethod
    async def connect(
        cls,
        address: ZooKeeperAddress,
        *,
        session_timeout_ms: int,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        new_id: Callable[[], str] = random_id,
        tls: Tls | None = None,
    ) -> ZooKeeperSession:
        """Return a session with the ensemble at `address`. Raises `ZooKeeperUnreachable`."""
        self = cls(address, session_timeout_ms=session_timeout_ms, new_id=new_id, tls=tls)
        connected = self._client.start_async()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + connect_timeout_s
        try:
            while not connected.is_set():
                if loop.time() >= deadline:
                    problem = self._handler.problem if isinstance(self._handler, _TlsHandler) else ""
                    raise ZooKeeperUnreachable(
                        f"no ZooKeeper answers at {self.hosts} within {connect_timeout_s:g} s"
                        f"{f' ({problem})' if problem else ''};"
                        " start it, or name another with --zookeeper",
                        address=self.hosts,
                    )
                await asyncio.sleep(0.01)
        except BaseException:
            await self.close()
            raise
        return self

    # --- requests ----------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Node:
        """Return a node. Raises `NodeMissing`."""
        value, status = await self._ask(lambda client: client.get_async(path))
        return Node(value, int(status.version))

    async def version(self, path: str) -> int | None:
        """Return the version of a node; None: it does not exist."""
        status = await self._ask(lambda client: client.exists_async(path))
        return None if status is None else int(status.version)

    async def children(self, path: str, watch: Watch | None = None) -> Sequence[str]:
        """Return the names of the nodes in a node; `watch` is called when they change. Raises `NodeMissing`."""
        return tuple(await self._ask(lambda client: client.get_children_async(path, watch)))

    async def make(self, path: str, value: bytes = b"") -> None:
        """Make a node, unless it exists."""
        with contextlib.suppress(NodeThere):
            await self._ask(lambda client: client.create_async(path, value))

    async def delete(self, path: str) -> None:
        """Remove a node, if it exists."""
        with contextlib.suppress(NodeMissing):
            await self._ask(lambda client: client.delete_async(path))

    async def make_ephemeral(self, prefix: str, value: bytes) -> None:
        """Make a node that ends with this session, under the next number behind `prefix`. May also raise `Lost`."""
        await self._send(
            lambda client: client.create_async(prefix, value, ephemeral=True, sequence=True), self.request_timeout_s
        )

    async def owns(self, path: str) -> bool:
        """Whether an ephemeral node exists and belongs to this session, not to an earlier one."""
        status = await self._ask(lambda client: client.exists_async(path))
        known = self._client.client_id
        return status is not None and known is not None and int(status.ephemeralOwner) == int(known[0])

    async def sync(self) -> None:
        """Make later reads no older than this call, as far as the ensemble's leader knows."""
        await self._ask(lambda client: client.sync_async(self.root))

    async def holds(self, *checks: Operation) -> bool:
        """Whether all of `checks` hold for a majority of the ensemble at a time between this call and its end.

        A plain read does not prove that: a server that does not know that it leads the ensemble no more would answer
        it.
        """
        try:
            await self._ask(_committing(checks))
        except Refused:
            return False
        return True

    async def transact(self, operations: Sequence[Operation], timeout_s: float) -> int:
        """Carry out all operations or none, sent once; return the version of the node that the first one has set.

        May also raise `Refused` or `Lost`.
        """
        results = await self._send(_committing(operations), timeout_s)
        return int(results[0].version)

    async def _ask(self, submit: _Submit) -> Any:
        """Send a request that may be repeated, until it is answered."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.request_timeout_s
        while True:
            try:
                return await self._send(submit, min(self.attempt_timeout_s, max(0.0, deadline - loop.time())))
            except Lost:
                if loop.time() + RETRY_INTERVAL_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _send(self, submit: _Submit, timeout_s: float) -> Any:
        """Send one request once."""
        if self._client.client_state in {KeeperState.CLOSED, KeeperState.AUTH_FAILED} and not self._closing:
            raise InternalError(
                f"the client of ZooKeeper at {self.hosts} has ended by itself; restart this coordinator",
                address=self.hosts,
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any) -> None:
            if future.done():
                return
            if result.exception is not None:
                future.set_exception(result.exception)
            else:
                future.set_result(result.value)

        def answered(result: Any) -> None:  # on kazoo's thread
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result)

        try:
            submit(self._client).rawlink(answered)
            async with asyncio.timeout(timeout_s):
                value = await future
        except Exception as error:
            raise self._translated(error) from error
        if isinstance(value, list):
            self._raise_for(value)
        return value

    def _raise_for(self, results: list[Any]) -> None:
        """Raise the cause if a transaction failed. (A list of names contains no errors.)"""
        for at, result in enumerate(results):
            if _is_cause(result):
                error = self._translated(result)
                if not isinstance(result, _IMPOSSIBLE):
                    raise error
                refused = Refused(error.message, **error.attributes)
                refused.at = at
                raise refused

    def _translated(self, error: BaseException) -> MetadataStoreFailed | MetadataStoreFull:
        kind: type[MetadataStoreFailed | MetadataStoreFull] = MetadataStoreFailed
        what = str(error) or type(error).__name__
        if isinstance(error, NoNodeError):
            kind = NodeMissing
            what = f"something below {self.root} is missing; if it was removed, restart the coordinators to begin again"
        elif isinstance(error, NodeExistsError):
            kind = NodeThere
        elif isinstance(error, QuotaExceededError):
            kind, what = MetadataStoreFull, f"no room for metadata; raise the quota of {self.root}"
        elif isinstance(error, TimeoutError):
            kind, what = Lost, "no answer in time"
        elif isinstance(error, _LOST) or not isinstance(error, KazooException):  # not: kazoo cannot read the answer
            kind = Lost
        return kind(f"ZooKeeper at {self.hosts}: {what}", address=self.hosts)

    # --- closing -----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session, which takes bounded time."""
        # On a separate thread that may be left behind: kazoo waits for its threads, and they wait for the server.
        self._closing = True
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def stopped() -> None:
            if not done.done():
                done.set_result(None)

        def stop() -> None:
            with contextlib.suppress(Exception):  # nothing can be done about it
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


def _committing(operations: Sequence[Operation]) -> _Submit:
    def submit(client: KazooClient) -> Any:
        transaction = client.transaction()  # a new one each time: it can be sent once
        for add in operations:
            add(transaction)
        return transaction.commit_async()

    return submit


def _is_cause(result: object) -> bool:
    """Whether an operation's result is the cause of its transaction's failure; the other results only report
    the failure.
    """
    return isinstance(result, BaseException) and not isinstance(result, RolledBackError | RuntimeInconsistency)
