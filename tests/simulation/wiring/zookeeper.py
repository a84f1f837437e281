"""A ZooKeeper for simulations: versioned nodes, sessions, ephemeral nodes and watches, over the simulated network.

One server stands in for an ensemble: its answered changes are durable, and it may be cut off, paused and killed. The
coordinators run all their own code except the session, which is their interface to kazoo.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kera.coordinator.store.metadata import MetadataStoreFailed
from kera.coordinator.store.zookeeper_session import (
    RETRY_INTERVAL_S,
    Lost,
    Node,
    NodeMissing,
    NodeThere,
    Operation,
    Refused,
    Watch,
)

PORT = 2181
TICK_S = 0.1
_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class _Stored:
    value: bytes
    version: int = 0
    owner: int = 0
    """The session that owns an ephemeral node; 0: none."""
    made: int = 0
    """The number of numbered nodes that were created in it."""


class _Impossible(Exception):
    """A request cannot be carried out; it has changed nothing."""


@dataclass(slots=True)
class Tree:
    """The data on a server's disk."""

    nodes: dict[str, _Stored] = field(default_factory=dict)
    sessions: dict[int, float] = field(default_factory=dict)
    """Time-outs of sessions."""
    last_session: int = 0

    def children(self, path: str) -> list[str]:
        """The names of a node's children."""
        self.at(path)
        depth = path.count("/") + 1
        return sorted(
            each.rpartition("/")[2] for each in self.nodes if each.startswith(f"{path}/") and each.count("/") == depth
        )

    def at(self, path: str) -> _Stored:
        """The node at a path."""
        if path not in self.nodes:
            raise _Impossible("no node")
        return self.nodes[path]

    def create(self, path: str, value: bytes, *, owner: int = 0, numbered: bool = False) -> str:
        """Create a node."""
        parent = path.rpartition("/")[0]
        if parent:
            self.at(parent)
        if numbered:
            path += f"{self.nodes[parent].made:010d}"
            self.nodes[parent].made += 1
        if path in self.nodes:
            raise _Impossible("there")
        self.nodes[path] = _Stored(value, owner=owner)
        return path

    def put(self, path: str, value: bytes, version: int) -> int:
        """Set the value of a node that must have this version."""
        self.check(path, version)
        node = self.nodes[path]
        node.value, node.version = value, node.version + 1
        return node.version

    def delete(self, path: str, version: int = -1) -> None:
        """Remove a node."""
        self.check(path, version)
        del self.nodes[path]

    def check(self, path: str, version: int) -> None:
        """Require that a node has this version."""
        if version not in {-1, self.at(path).version}:
            raise _Impossible("version")

    def transact(self, operations: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Carry out all operations or none."""
        before = {path: _Stored(each.value, each.version, each.owner, each.made) for path, each in self.nodes.items()}
        results: list[Any] = []
        for at, (kind, *arguments) in enumerate(operations):
            try:
                results.append(getattr(self, kind)(*arguments))
            except _Impossible:
                self.nodes = before
                raise _Impossible(f"refused {at}") from None
        return results


class _Recorder:
    """Stands in for kazoo's transaction, and collects operations."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []

    def check(self, path: str, version: int) -> None:
        self.operations.append(("check", path, version))

    def create(self, path: str, value: bytes) -> None:
        self.operations.append(("create", path, value))

    def set_data(self, path: str, value: bytes, version: int) -> None:
        self.operations.append(("put", path, value, version))

    def delete(self, path: str, version: int) -> None:
        self.operations.append(("delete", path, version))


async def _receive(reader: asyncio.StreamReader) -> Any:
    length = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
    return pickle.loads(await reader.readexactly(length))


def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(data)) + data)


class Server:
    """One launch of the server."""

    def __init__(self, tree: Tree, host: str) -> None:
        self._tree = tree
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._heard_s = dict.fromkeys(tree.sessions, self._loop.time())
        self._watches: dict[str, list[tuple[asyncio.StreamWriter, int]]] = {}

    async def serve(self) -> None:
        """Serve until the process is killed."""
        await asyncio.start_server(self._accept, self._host, PORT)
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            for session, timeout_s in list(self._tree.sessions.items()):
                if now_s - self._heard_s[session] > timeout_s:
                    self._end(session)

    def _end(self, session: int) -> None:
        self._tree.sessions.pop(session, None)
        for path in [path for path, node in self._tree.nodes.items() if node.owner == session]:
            self._tree.delete(path)
            self._changed(path)

    def _changed(self, path: str) -> None:
        for writer, number in self._watches.pop(path.rpartition("/")[0], []):
            _send(writer, (number, "watch", None))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tree = self._tree
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            session, timeout_s = await _receive(reader)
            if session not in tree.sessions:
                tree.last_session = session = tree.last_session + 1
                tree.sessions[session] = timeout_s
            self._heard_s[session] = self._loop.time()
            _send(writer, session)
            while True:
                number, kind, *arguments = await _receive(reader)
                if session not in tree.sessions:
                    break
                self._heard_s[session] = self._loop.time()
                _send(writer, (number, *self._answer(session, writer, number, kind, arguments)))
        writer.close()

    def _answer(
        self, session: int, writer: asyncio.StreamWriter, number: int, kind: str, arguments: Sequence[Any]
    ) -> tuple[str, Any]:
        tree, before = self._tree, set(self._tree.nodes)
        result: Any = None
        try:
            match kind:
                case "get":
                    node = tree.at(*arguments)
                    result = (node.value, node.version, node.owner)
                case "children":
                    result = tree.children(arguments[0])
                    if arguments[1]:
                        self._watches.setdefault(arguments[0], []).append((writer, number))
                case "create":
                    result = tree.create(*arguments)
                case "ephemeral":
                    result = tree.create(*arguments, owner=session, numbered=True)
                case "delete":
                    tree.delete(*arguments)
                case "transact":
                    result = tree.transact(*arguments)
                case "close":
                    self._end(session)
        except _Impossible as error:
            return "impossible", str(error)
        for path in sorted(before ^ set(tree.nodes)):
            self._changed(path)
        return "done", result


class Session:
    """See `kera.coordinator.store.zookeeper_session.ZooKeeperSession`. Made with `connect`."""

    root = "/kera"

    def __init__(self, host: str, *, session_timeout_ms: int, new_id: Callable[[], str]) -> None:
        self.hosts = f"{host}:{PORT}"
        self.new_id = new_id
        self.timeout_s = session_timeout_ms / 1000
        self.request_timeout_s = self.timeout_s
        self.attempt_timeout_s = self.timeout_s / 2
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._session = 0
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._number = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._watches: dict[int, Watch] = {}
        self._running = self._loop.create_task(self._run())
        self._pinging = self._loop.create_task(self._ping())

    @classmethod
    async def connect(cls, host: str, *, session_timeout_ms: int, new_id: Callable[[], str]) -> Session:
        """A session with the server at `host`."""
        self = cls(host, session_timeout_ms=session_timeout_ms, new_id=new_id)
        await self._connected.wait()
        return self

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(self.timeout_s / 2):
                    reader, writer = await asyncio.open_connection(self._host, PORT)
                    _send(writer, (self._session, self.timeout_s))
                    self._session = await _receive(reader)
                self._writer = writer
                self._connected.set()
                await self._take(reader)
            self._connected.clear()
            if self._writer is not None:
                self._writer.close()
            self._writer, self._watches = None, {}
            pending, self._pending = self._pending, {}
            for future in pending.values():
                if not future.done():
                    future.set_exception(self._error(Lost, "the connection was lost"))
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _take(self, reader: asyncio.StreamReader) -> None:
        while True:
            async with asyncio.timeout(self.timeout_s * 2 / 3):  # it answers pings
                number, kind, result = await _receive(reader)
            if kind == "watch":
                self._watches.pop(number)(None)
                continue
            future = self._pending.pop(number, None)
            if future is None or future.done():
                continue
            if kind == "done":
                future.set_result(result)
            elif result.startswith("refused"):
                refused = self._error(Refused, result)
                refused.at = int(result.split()[1])  # type: ignore[attr-defined]
                future.set_exception(refused)
            else:
                future.set_exception(self._error(NodeThere if result == "there" else NodeMissing, result))

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self.timeout_s / 4)
            with contextlib.suppress(Lost):
                await self._once(self.timeout_s, "ping")

    def _error(self, kind: type[MetadataStoreFailed], what: str) -> MetadataStoreFailed:
        return kind(f"ZooKeeper at {self.hosts}: {what}", address=self.hosts)

    async def _once(self, timeout_s: float, kind: str, *arguments: Any, watch: Watch | None = None) -> Any:
        """Send one request once."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
                self._number += 1
                number, future = self._number, self._loop.create_future()
                self._pending[number] = future
                if watch is not None:
                    self._watches[number] = watch
                if self._writer is not None:
                    _send(self._writer, (number, kind, *arguments))
                return await future
        except TimeoutError:
            raise self._error(Lost, "no answer in time") from None

    async def _ask(self, kind: str, *arguments: Any, watch: Watch | None = None) -> Any:
        """Send a request that may be repeated, until it is answered."""
        deadline_s = self._loop.time() + self.request_timeout_s
        while True:
            left_s = min(self.attempt_timeout_s, max(0.0, deadline_s - self._loop.time()))
            try:
                return await self._once(left_s, kind, *arguments, watch=watch)
            except Lost:
                if self._loop.time() + RETRY_INTERVAL_S >= deadline_s:
                    raise
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def get(self, path: str) -> Node:
        """See `ZooKeeperSession`; this holds for all following methods."""
        value, version, _ = await self._ask("get", path)
        return Node(value, version)

    async def version(self, path: str) -> int | None:
        try:
            return (await self.get(path)).version
        except NodeMissing:
            return None

    async def children(self, path: str, watch: Watch | None = None) -> Sequence[str]:
        return tuple(await self._ask("children", path, watch is not None, watch=watch))

    async def make(self, path: str, value: bytes = b"") -> None:
        with contextlib.suppress(NodeThere):
            await self._ask("create", path, value)

    async def delete(self, path: str) -> None:
        with contextlib.suppress(NodeMissing):
            await self._ask("delete", path)

    async def make_ephemeral(self, prefix: str, value: bytes) -> None:
        await self._once(self.request_timeout_s, "ephemeral", prefix, value)

    async def owns(self, path: str) -> bool:
        try:
            return bool((await self._ask("get", path))[2] == self._session)
        except NodeMissing:
            return False

    async def sync(self) -> None:
        await self._ask("sync")

    async def holds(self, *checks: Operation) -> bool:
        try:
            await self._ask("transact", _recorded(checks))
        except Refused:
            return False
        return True

    async def transact(self, operations: Sequence[Operation], timeout_s: float) -> int:
        results = await self._once(timeout_s, "transact", _recorded(operations))
        return int(results[0])

    async def close(self) -> None:
        with contextlib.suppress(MetadataStoreFailed):
            await self._once(1.0, "close")
        for task in (self._running, self._pinging):
            task.cancel()
        await asyncio.wait([self._running, self._pinging])
        if self._writer is not None:
            self._writer.close()


def _recorded(operations: Sequence[Operation]) -> list[tuple[Any, ...]]:
    recorder = _Recorder()
    for add in operations:
        add(recorder)
    return recorder.operations
