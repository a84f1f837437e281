"""Calls from Spark's synchronous code into the asynchronous client.

Spark's planner and its Python workers are synchronous processes that live across many queries, micro-batches and
tasks. A `Portal` is a connected client on an event loop in its own thread:

* the client connects on first use, in the process that uses it: a portal is never pickled;
* `shared` lends one portal per `Connection` and process, so that the tasks of the next micro-batch reuse connections
  and metadata;
* `iterate` fetches ahead, so that the network is busy while Spark processes the items that have arrived.

Every call raises the client's errors unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from kera.core.base.home import expanded
from kera.core.errors import InternalError, KeraError
from kera.spark_connector.connection import Connection

if TYPE_CHECKING:
    from kera.client import Client, ClientSettings

T = TypeVar("T")

SHARED_IDLE_MAX = 16
"""Maximum number of portals to keep that nobody uses, of other clusters or with earlier tokens."""
_shared: dict[tuple[int, Connection], Portal] = {}
"""The shared portals by process and connection, the most recently used one last."""
_lent: Counter[Portal] = Counter()
"""How many users each shared portal has now."""
_shared_lock = threading.RLock()  # the garbage collector may end a use within another one


class Portal:
    """A client of a cluster, usable from synchronous code of any thread."""

    def __init__(self, connection: Connection, *, retry_timeout_ms: int | None = None) -> None:
        """`retry_timeout_ms`: how long to retry; None: as the client's settings say."""
        self._connection = connection
        self._retry_timeout_ms = retry_timeout_ms
        self._client: Client | None = None
        self._connecting: asyncio.Lock | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kera-portal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def call(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Await `work` on the portal's loop, and return its result."""
        return self.begin(work)()

    def begin(self, work: Callable[[Client], Awaitable[T]]) -> Callable[[], T]:
        """Start `work` on the portal's loop. Return a function that waits for its outcome, and returns or raises it."""

        async def run() -> T:
            return await work(await self._connected())

        return functools.partial(_outcome, asyncio.run_coroutine_threadsafe(run(), self._loop))

    def iterate(self, work: Callable[[Client], AsyncGenerator[T, None]], ahead: int) -> Iterator[T]:
        """Yield the items of `work`, and fetch up to `ahead` items in advance.

        Closing the iterator early stops the fetching and closes the generator that `work` returned.
        """
        items: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        room = asyncio.Semaphore(ahead)

        async def pump() -> None:
            try:
                async with contextlib.aclosing(work(await self._connected())) as source:
                    async for item in source:
                        items.put((True, item))
                        await room.acquire()
            except BaseException as error:
                items.put((False, error))
                raise
            items.put((False, None))

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                is_item, value = items.get()
                if not is_item:
                    if value is not None:
                        raise value
                    return
                self._loop.call_soon_threadsafe(room.release)
                yield value
                del value  # it may hold memory of a broker, which must be released before waiting for the next item
        finally:
            future.cancel()

    def close(self) -> None:
        """Close the client and end the thread; calling it again does nothing."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        if self._client is not None:
            with contextlib.suppress(Exception):  # the process is about to end, so an error would not help anyone
                asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _connected(self) -> Client:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                from kera.client import Client  # late: Spark imports this to look for data sources

                settings = settings_of(self._connection, retry_timeout_ms=self._retry_timeout_ms)
                self._client = await Client.connect(self._connection.bootstrap, settings)
        return self._client


def _outcome(future: Future[T]) -> T:
    try:
        return future.result()
    except InternalError:
        raise
    except KeraError as error:
        # Spark shows users the whole traceback, but this error's message is enough.
        raise error.with_traceback(None) from None


def settings_of(connection: Connection, *, retry_timeout_ms: int | None = None) -> ClientSettings:
    """Return the settings of a client with this connection. Raises `InvalidSettings`.

    If `connection` has credentials, those of the environment and the settings file are ignored.
    """
    from pydantic import SecretStr

    from kera.client import ClientSettings

    files: dict[str, Any] = connection.files
    settings = ClientSettings.load(retry_timeout_ms=retry_timeout_ms, **files)
    if connection.drivers_ca and settings.tls_ca is None:
        settings = settings.model_copy(update={"tls_ca": Path(connection.drivers_ca)})
    given: dict[str, Any] = {
        name: value if name == "user" else Path(value) for name, value in connection.credentials.items()
    }
    if connection.token is not None:
        given = {"token": SecretStr(connection.token.reveal())}
    if not given:
        return settings
    nobody = {"user": "", "password_file": None, "password": None, "token_file": None, "token": None}
    return settings.model_copy(update=nobody | given)


def ca_of(settings: ClientSettings) -> str:
    """Return the path of a driver's certificate authorities, for executors; empty: the settings have none."""
    return "" if settings.tls_ca is None else str(expanded(settings.tls_ca))


@contextlib.contextmanager
def shared(connection: Connection) -> Iterator[Portal]:
    """Lend this process's portal for `connection`.

    It lives until the process ends, or until nobody uses it and many others were used since.
    """
    key = (os.getpid(), connection)  # Spark forks its workers: a parent's portal has no thread here
    with _shared_lock:
        portal = _shared.pop(key, None)
        idle = [known for known, other in _shared.items() if known[0] == key[0] and not _lent[other]]
        left = [_shared.pop(known) for known in idle[: max(0, len(idle) - SHARED_IDLE_MAX + 1)]]
        _shared[key] = portal = portal or Portal(connection)
        _lent[portal] += 1
    try:
        for other in left:
            other.close()
        yield portal
    finally:
        with _shared_lock:
            _lent[portal] -= 1
            if not _lent[portal]:
                del _lent[portal]


def close_shared() -> None:
    """Close the portals that `shared` has made in this process, which is about to end."""
    with _shared_lock:
        mine = [key for key in _shared if key[0] == os.getpid()]
        portals = [_shared.pop(key) for key in mine]
    for portal in portals:
        portal.close()
