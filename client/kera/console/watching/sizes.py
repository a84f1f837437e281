"""The numbers of records and bytes of streams. Brokers are asked for a few at a time, and the answers are remembered.

A list of ten thousand streams that is sorted by size needs the size of each. A bounded number of tasks asks the brokers
in the background; a page waits a moment, and shows the sizes that are known by then. With many streams, sizes are asked
for less often than with few, so that asking takes a small part of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from kera.client import EntryBounds
from kera.console import limits
from kera.core.errors import KeraError, NotAllowed, UnknownStream

_REST = 20
"""Sizes are fresh for this multiple of the time that asking took."""
_SMOOTHING = 0.1
"""Weight of the last answer in the mean time of an answer."""


class Size(NamedTuple):
    """The present size of a stream."""

    records: int
    bytes: int


class _Seen(NamedTuple):
    at_s: float
    size: Size | None
    """None: the user may not see the size, or the stream was deleted."""


class _Waiting(NamedTuple):
    """A page that waits for sizes."""

    names: set[str]
    done: asyncio.Event


def size_of(bounds: Mapping[int, Sequence[EntryBounds]]) -> Size:
    """Return the total size of all entries. Pure."""
    entries = [entry for each in bounds.values() for entry in each]
    return Size(sum(e.next_record - e.first_record for e in entries), sum(e.length_bytes for e in entries))


class Sizes:
    """Sizes of streams by their names. `close` ends the tasks."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Mapping[int, Sequence[EntryBounds]]]],
        *,
        now_s: Callable[[], float] = time.monotonic,
        streams_max: int = limits.SIZES_MAX,
    ) -> None:
        """`ask` returns the bounds of the entries of a stream, and raises `KeraError`."""
        self._ask, self._now_s, self._streams_max = ask, now_s, streams_max
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        """The answers, least recent first; at most `streams_max`."""
        self._wanted: OrderedDict[str, None] = OrderedDict()
        """The names to ask for, the next one last; at most `streams_max`."""
        self._workers: set[asyncio.Task[None]] = set()
        self._answer_s = 0.0
        """Mean time of an answer."""
        self._waiting: list[_Waiting] = []

    async def of(self, names: Sequence[str], patience_s: float) -> dict[str, Size]:
        """Return the sizes of `names` that are known within `patience_s`; ask for the others in the background."""
        names = names[: self._streams_max]
        fresh_s = max(limits.SIZES_FRESH_S, _REST * len(names) * self._answer_s / limits.SIZES_ASKED_AT_ONCE)
        missing = [name for name in names if not self._is_fresh(name, fresh_s)]
        if missing:
            self._want(missing)
            await self._wait_for(set(missing), patience_s)
        known = ((name, self._seen.get(name)) for name in names)
        return {name: seen.size for name, seen in known if seen is not None and seen.size is not None}

    def forget(self) -> None:
        """Ask for all sizes again, because something was changed; until then the known sizes are shown."""
        self._seen = OrderedDict((name, seen._replace(at_s=float("-inf"))) for name, seen in self._seen.items())

    async def close(self) -> None:
        """Stop asking."""
        self._wanted.clear()
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def _is_fresh(self, name: str, fresh_s: float) -> bool:
        seen = self._seen.get(name)
        if seen is None:
            return False
        # The cluster's audit log records each refusal, so do not ask again soon.
        return self._now_s() - seen.at_s < (fresh_s if seen.size is not None else max(fresh_s, limits.REFUSAL_S))

    async def _wait_for(self, names: set[str], patience_s: float) -> None:
        waiting = _Waiting(names, asyncio.Event())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(patience_s):
                await waiting.done.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(waiting)

    def _want(self, names: Sequence[str]) -> None:
        for name in reversed(names):  # the first of the latest page comes first
            self._wanted[name] = None
            self._wanted.move_to_end(name)
        while len(self._wanted) > self._streams_max:
            self._wanted.popitem(last=False)
        for _ in range(min(len(self._wanted), limits.SIZES_ASKED_AT_ONCE - len(self._workers))):
            worker = asyncio.ensure_future(self._work())
            self._workers.add(worker)

    async def _work(self) -> None:
        try:
            while self._wanted:
                name, _ = self._wanted.popitem()
                await self._look_at(name)
                for waiting in self._waiting:
                    waiting.names.discard(name)
                    if not waiting.names:
                        waiting.done.set()
        finally:  # before any other task runs: names that are wanted from now on need another worker
            self._workers.remove(asyncio.current_task())  # type: ignore[arg-type]  # it runs as a task

    async def _look_at(self, name: str) -> None:
        begun_s = self._now_s()
        try:
            size: Size | None = size_of(await self._ask(name))
        except (NotAllowed, UnknownStream):
            size = None
        except KeraError:  # a broker cannot be reached: the last known size stays
            return
        now_s = self._now_s()
        self._answer_s += _SMOOTHING * (now_s - begun_s - self._answer_s)
        self._seen[name] = _Seen(now_s, size)
        self._seen.move_to_end(name)
        while len(self._seen) > self._streams_max:
            self._seen.popitem(last=False)
