"""The event loop of one process: asyncio's interface over virtual time and the simulated network.

Each process has a loop of its own, as it has outside. A loop works in turns: one runs all that was ready when it began,
in order, and takes a little virtual time. What is handed to threads is carried out as one event later on, which no
other event interrupts; so a thread may not wait for another one.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Self, TypeVarTuple

if TYPE_CHECKING:
    from tests.simulation.engine.process import Process

Ts = TypeVarTuple("Ts")

TURN_S = 20e-6
HANDLE_S = 5e-6
"""What a turn takes, and what each thing that is done in it adds."""
JOB_S_MEAN = 0.0008
"""What a thread takes for a job, on average."""


class _Numbered:
    """Has a place in a set that depends on when it was made, and not on where it is in memory."""

    serial: int

    def __new__(cls, *_arguments: Any, **named: Any) -> Self:
        self = super().__new__(cls)
        self.serial = named["loop"].serial()
        return self

    def __hash__(self) -> int:
        return self.serial


class SimulatedTask(_Numbered, asyncio.Task[Any]):
    """See `_Numbered`."""


class SimulatedFuture(_Numbered, asyncio.Future[Any]):
    """See `_Numbered`."""


class ProcessLoop(asyncio.AbstractEventLoop):
    """See the head of this module."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.scheduler
        self._network = process.machine.network
        self._clock = process.machine.clock
        self.serial = process.scheduler.serial
        self._ready: deque[asyncio.Handle] = deque()
        self._turn_due = False
        self._free_s = 0.0
        """Until when the process is busy."""
        self.stopped = False
        """Nothing runs any more, for ever: the process is gone."""
        self.paused = False
        self.tasks: set[asyncio.Task[Any]] = set()
        """That have not ended."""

    # -- time and turns ----------------------------------------------------------------------------------------

    def time(self) -> float:
        """See `asyncio.AbstractEventLoop`; so all that follow."""
        return self._clock.monotonic_s()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
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
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._scheduler.at(self._clock.when_s(when), self._timer_due, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio's handles call this. It is found out when the time has come."""

    def _timer_due(self, handle: asyncio.TimerHandle) -> None:
        if not (self.stopped or handle.cancelled()):
            self._ready.append(handle)
            if not self._turn_due:
                self._wake()

    def _wake(self) -> None:
        if not (self.stopped or self.paused):
            self._turn_due = True
            self._scheduler.at(self._free_s, self._turn)

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
                    if not handle._cancelled:  # likewise, as the next line
                        handle._run()
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
        task = SimulatedTask(coro, loop=self, name=name or f"task-{self.serial()}", context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

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
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
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

    # -- the rest of what asyncio asks of a loop ---------------------------------------------------------------

    @property
    def process_name(self) -> str:
        """Whose loop it is."""
        return self._process.name

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.stopped

    def is_closed(self) -> bool:
        return self.stopped

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._process.failed(str(context.get("message")), context.get("exception"))
