"""The requests to a fake daemon, which it records, and which a test can delay or refuse."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from kera.client.arguments import instance, wrong
from kera.core.errors import InvalidArgument, KeraError
from kera.core.rpc import Call, Handler, Method, Reply, Service

SECONDS = "seconds, from 0 on"

Answer = Callable[[Call[Any]], Reply[Any] | Awaitable[Reply[Any]]]


class Request(NamedTuple):
    """A received request."""

    method: str
    """Name of the method, such as ``MultiWriteChunks``."""
    message: Any


class Requests:
    """Passes the requests of a daemon on to their handlers: at once, later, or not at all."""

    def __init__(self, methods: Iterable[Method[Any, Any]]) -> None:
        """Begin without requests. `methods`: all methods of the daemon."""
        self._methods = {method.name for method in methods}
        self.log: list[Request] = []
        """All received requests, the oldest first."""
        self._refusals: deque[KeraError] = deque()
        self._refuse_all: KeraError | None = None
        self._delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._paused: frozenset[str] = frozenset()
        self._waiting = 0

    def named(self, method: str) -> list[Any]:
        """Return the messages of one method, the oldest first."""
        return [request.message for request in self.log if request.method == method]

    @property
    def waiting(self) -> int:
        """Number of requests that wait for `resume`."""
        return self._waiting

    def refuse(self, *errors: KeraError) -> None:
        """Answer the next requests with these errors, one each."""
        self._refusals.extend([_checked(error) for error in errors])

    @property
    def refusals_left(self) -> int:
        """Number of errors given to `refuse` that have not been used yet."""
        return len(self._refusals)

    def refuse_all(self, error: KeraError | None) -> None:
        """Answer every request with `error`; None: handle requests again."""
        self._refuse_all = None if error is None else _checked(error)

    def slow_down(self, delay_s: float) -> None:
        """Handle each request only after `delay_s`; 0: at once."""
        if not 0 <= instance("delay_s", delay_s, Real, SECONDS) < math.inf:
            raise wrong("delay_s", delay_s, SECONDS)
        self._delay_s = delay_s

    def pause(self, *methods: str) -> None:
        """Make requests wait for `resume`; with `methods`, only requests of these names."""
        for method in methods:
            if method not in self._methods:
                raise wrong("method", method, f"one of {', '.join(sorted(self._methods))}")
        self._open.clear()
        self._paused = frozenset(methods)

    def resume(self) -> None:
        """Handle the waiting requests, in order, and all new ones."""
        self._open.set()

    def service(self, methods: Iterable[Method[Any, Any]], answers: dict[Method[Any, Any], Answer]) -> Service:
        """Return handlers of all `methods`; a method without an answer is refused."""
        return {method: self._handler(method, answers.get(method) or _missing(method)) for method in methods}

    def _handler(self, method: Method[Any, Any], answer: Answer) -> Handler:
        def handle(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            self.log.append(Request(method.name, call.message))
            error = self._refusals.popleft() if self._refusals else self._refuse_all
            then = answer if error is None else partial(_refuse, error)
            paused = not self._open.is_set() and (not self._paused or method.name in self._paused)
            if not paused and not self._delay_s:
                return then(call)
            return self._later(then, Call(call.message, memoryview(bytes(call.bulk)), call.peer), paused=paused)

        return handle

    async def _later(self, answer: Answer, call: Call[Any], *, paused: bool) -> Reply[Any]:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if paused:
            self._waiting += 1
            try:
                await self._open.wait()
            finally:
                self._waiting -= 1
        reply = answer(call)
        return reply if isinstance(reply, Reply) else await reply


def _checked(error: KeraError) -> KeraError:
    return instance("error", error, KeraError, "an error of kera.core.errors, such as Unavailable('busy')")  # type: ignore[no-any-return]


def _missing(method: Method[Any, Any]) -> Answer:
    text = f"a fake cluster does not offer {method.name}; run the test against kera dev"
    return partial(_refuse, InvalidArgument(text, method=method.name))


def _refuse(error: KeraError, _: Call[Any]) -> Reply[Any]:
    raise error
