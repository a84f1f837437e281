"""Calls from Spark's synchronous code into the asynchronous client.

Spark's planner and its Python workers are synchronous processes that live across many queries, micro-batches and
tasks. A `Portal` is a connected client on an event loop of its own thread:

* the client connects when it is first needed, in the process that needs it: a portal is never pickled;
* `shared` keeps one portal per coordinator address and process, so that a task of the next micro-batch finds
  connections and metadata ready;
* `iterate` fetches ahead, so that the network works while Spark takes what has arrived.

Errors of the client come out of every call as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from kera.core.errors import InternalError, KeraError

if TYPE_CHECKING:
    from kera.client import Client

T = TypeVar("T")

_shared: dict[tuple[int, str], Portal] = {}
_shared_lock = threading.Lock()


class Portal:
    """A client of the coordinators at `bootstrap`, usable from synchronous code of any thread."""

    def __init__(self, bootstrap: str, *, retry_timeout_ms: int | None = None) -> None:
        """`retry_timeout_ms`: how long to go on trying; None: what the client's settings say."""
        self._bootstrap = bootstrap
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
        """What `work` gives when it is awaited on the portal's loop."""
        return self.begin(work)()

    def begin(self, work: Callable[[Client], Awaitable[T]]) -> Callable[[], T]:
        """Have `work` awaited on the portal's loop meanwhile. What comes back gives its outcome, and waits for it."""

        async def run() -> T:
            return await work(await self._connected())

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return functools.partial(_outcome, future)

    def iterate(self, work: Callable[[Client], AsyncGenerator[T, None]], ahead: int) -> Iterator[T]:
        """What `work` yields, up to `ahead` items of it fetched before they are asked for.

        Closing the iterator early stops the fetching and closes what `work` returned.
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
                del value  # it may hold memory of a broker, which is not to wait for the next one
        finally:
            future.cancel()

    def close(self) -> None:
        """Close the client and end the thread; calling it again does nothing."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        if self._client is not None:
            with contextlib.suppress(Exception):  # the process is on its way out: there is nobody to tell
                asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _connected(self) -> Client:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                from kera.client import Client, ClientSettings  # late: Spark imports this to look for data sources

                settings = ClientSettings.load(retry_timeout_ms=self._retry_timeout_ms)
                self._client = await Client.connect(self._bootstrap, settings)
        return self._client


def _outcome(future: Future[T]) -> T:
    try:
        return future.result()
    except InternalError:
        raise
    except KeraError as error:
        # Spark shows users the whole traceback, and this error says all there is to know in one line.
        raise error.with_traceback(None) from None


def shared(bootstrap: str) -> Portal:
    """The portal of this process for `bootstrap`. It lives as long as the process."""
    key = (os.getpid(), bootstrap)  # Spark forks its workers: a parent's portal has no thread here
    with _shared_lock:
        if key not in _shared:
            _shared[key] = Portal(bootstrap)
        return _shared[key]


def close_shared() -> None:
    """Close the portals that `shared` has made in this process: it is about to end."""
    with _shared_lock:
        mine = [key for key in _shared if key[0] == os.getpid()]
        portals = [_shared.pop(key) for key in mine]
    for portal in portals:
        portal.close()
