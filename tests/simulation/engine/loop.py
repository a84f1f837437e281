"""The event loop of one process: asyncio's interface over virtual time and the simulated network.

Each process has its own loop, as in reality. A loop works in turns: a turn runs all handles that were ready at its
beginning, in order, and takes a little virtual time. A job for a thread runs later as one uninterrupted event; so a
thread may not wait for another one.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import events
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVarTuple

from tests.simulation.engine.disk import PowerLost

if TYPE_CHECKING:
    from tests.simulation.engine.process import Process

Ts = TypeVarTuple("Ts")

TURN_S = 20e-6
HANDLE_S = 5e-6
"""The time of a turn, and of each handle in it."""
JOB_S_MEAN = 0.0008
"""The mean time of a thread for a job."""


class _Numbered:
    """Its hash depends on the time of its first use in a set, and not on its address in memory."""

    _serial = 0

    if TYPE_CHECKING:
        get_loop: Callable[[], ProcessLoop]

    def __hash__(self) -> int:
        if not self._serial:
            self._serial = self.get_loop().serial()
        return self._serial


class SimulatedTask(_Numbered, asyncio.Task[Any]):
    """See `_Numbered`."""


class SimulatedFuture(_Numbered, asyncio.Future[Any]):
    """See `_Numbered`."""


class SimulatedHandle(asyncio.TimerHandle):
    """Asyncio's handle, without its calls of the loop when it is made or cancelled."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: ProcessLoop,
        context: Context | None,
    ) -> None:
        self._when = when
        self._callback: Any = callback
        self._args: Any = args
        self._loop: Any = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr: Any = None
        self._source_traceback: Any = None

    def cancel(self) -> None:
        """See `asyncio.Handle`. The loop notices a cancelled timer only when it is due."""
        self._cancelled = True
        self._callback = self._args = None


class ProcessLoop(asyncio.AbstractEventLoop):
    """See the head of this module."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.scheduler
        self._network = process.machine.network
        self._clock = process.machine.clock
        self.serial = process.scheduler.serial
        self._ready: deque[SimulatedHandle] = deque()
        self._turn_due = False
        self._free_s = 0.0
        """The time until which the process is busy."""
        self.stopped = False
        """The process is gone for good."""
        self.paused = False

    # -- time and turns ----------------------------------------------------------------------------------------

    def time(self) -> float:
        """See `asyncio.AbstractEventLoop`; this holds for all following methods."""
        return self._clock.monotonic_s()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = SimulatedHandle(0.0, callback, args, self, context)
        self._ready.append(handle)
        if not self._turn_due:
            self._wake()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = SimulatedHandle(when, callback, args, self, context)
        self._scheduler.at(self._clock.when_s(when), self._timer_due, handle)
        return handle

    def _timer_due(self, handle: SimulatedHandle) -> None:
        if not (handle._cancelled or self.stopped):
            self._ready.append(handle)
            if not self._turn_due:
                self._wake()

    def _wake(self) -> None:
        if not (self.stopped or self.paused):
            self._turn_due = True
            if self._free_s > self._scheduler.now_s:
                self._scheduler.at(self._free_s, self._turn)
            else:
                self._scheduler.next(self._turn)

    def _turn(self) -> None:
        if self.stopped or self.paused:
            self._turn_due = False
            return
        ready, scheduler = self._ready, self._scheduler
        events._set_running_loop(self)  # made for event loops
        try:
            while True:
                count = len(ready)
                for _ in range(count):
                    handle = ready.popleft()
                    if not handle._cancelled:
                        try:
                            handle._context.run(handle._callback, *handle._args)
                        except PowerLost:
                            ready.clear()
                            return
                        except Exception as error:  # noqa: BLE001 - as asyncio does
                            self._process.failed(f"in {handle!r}", error)
                self._free_s = scheduler.now_s + (TURN_S + count * HANDLE_S) * (0.5 + scheduler.random.random())
                if not (ready and scheduler.pass_until(self._free_s)):
                    break
        finally:
            events._set_running_loop(None)
            self._turn_due = False
        if ready:
            self._wake()

    def resume(self) -> None:
        """The process goes on after a pause."""
        self.paused = False
        if self._ready and not self._turn_due:
            self._wake()

    # -- futures, tasks, threads -------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return SimulatedFuture(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        return SimulatedTask(coro, loop=self, name=name or "task", context=context)

    def run_in_executor(  # type: ignore[override]  # a future, as of all loops that there are
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        del executor
        future = self.create_future()
        took_s = self._process.machine.slowness * self._scheduler.random.expovariate(1 / JOB_S_MEAN)
        self._scheduler.after(took_s, self._job, future, func, args)
        return future

    def _job(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.stopped:
            return
        if self.paused:
            self._scheduler.after(0.01, self._job, future, func, args)
            return
        try:
            result = func(*args)
        except BaseException as error:  # noqa: BLE001 - the waiting task gets it
            self.call_soon(self._failed, future, error)
        else:
            self.call_soon(self._succeeded, future, result)

    @staticmethod
    def _succeeded(future: asyncio.Future[Any], result: Any) -> None:
        if not future.done():
            future.set_result(result)

    @staticmethod
    def _failed(future: asyncio.Future[Any], error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    # -- the network -------------------------------------------------------------------------------------------

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self._connected(protocol_factory, (str(host), int(port)))

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return await self._connected(protocol_factory, str(path))

    async def _connected(self, protocol_factory: Any, address: tuple[str, int] | str) -> Any:
        connecting = self._network.connect(self._process, address)
        try:
            transport = await connecting.made
        except BaseException:
            connecting.give_up()
            raise
        protocol = protocol_factory()
        transport.begin(protocol)
        return transport, protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self._network.listen(self._process, protocol_factory, (str(host), int(port)))

    async def create_unix_server(
        self, protocol_factory: Any, path: Any = None, *, sock: socket.socket | None = None, **_: Any
    ) -> Any:
        address = str(path) if sock is None else str(sock.getsockname())
        return self._network.listen(self._process, protocol_factory, address)

    # -- other methods that asyncio uses -----------------------------------------------------------------------

    @property
    def process_name(self) -> str:
        """The name of the loop's process."""
        return self._process.name

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.stopped

    def is_closed(self) -> bool:
        return self.stopped

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._process.failed(str(context.get("message")), context.get("exception"))
