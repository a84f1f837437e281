"""Machines and their processes, which can be started, paused, and killed as a whole."""

from __future__ import annotations

import asyncio
import contextvars
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.simulation.engine.clocks import MachineClock
from tests.simulation.engine.loop import ProcessLoop
from tests.simulation.engine.scheduler import Scheduler
from tests.simulation.engine.trace import Trace

if TYPE_CHECKING:
    from tests.simulation.engine.network import Listener, Network
    from tests.simulation.engine.transports import SimulatedTransport


class Machine:
    """A host: an address, and clocks that outlive its processes."""

    def __init__(self, network: Network, name: str, address: str, clock: MachineClock) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.clock = clock
        self.slowness = 1.0
        """The factor by which its disk is slower than others."""
        self.listeners: dict[tuple[str, int] | str, Listener] = {}
        self.transports: dict[SimulatedTransport, None] = {}
        """The ends of connections on this machine."""
        self._ports = 20_000

    def free_port(self) -> int:
        """A port that was never used."""
        self._ports += 1
        return self._ports


class Process:
    """One launch of a program. It ends or is killed; then none of its code runs any more."""

    def __init__(
        self,
        scheduler: Scheduler,
        machine: Machine,
        name: str,
        trace: Trace,
        on_defect: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_defect` gets exceptions that were not handled."""
        self.scheduler = scheduler
        self.machine = machine
        self.name = name
        self.trace = trace
        self.loop = ProcessLoop(self)  # type: ignore[abstract]  # the missing methods are not used here
        self.ended = False
        self.error: BaseException | None = None
        """The error that it ended with."""
        self._on_defect = on_defect
        self._main: asyncio.Task[Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs or is paused."""
        return not (self.ended or self.loop.stopped)

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run `main`; the process ends with it."""
        self.trace.note(self.name, "starts")

        def begin() -> None:
            self._main = self.loop.create_task(main(), name="main")
            self._main.add_done_callback(self._main_ended)

        self.loop.call_soon(begin, context=contextvars.Context())

    def _main_ended(self, main: asyncio.Task[Any]) -> None:
        self.error = None if main.cancelled() else main.exception()
        self.trace.note(self.name, "ended" if self.error is None else f"ended with {self.error!r}")
        self.ended = True
        for task in sorted(asyncio.all_tasks(self.loop), key=hash):
            task.cancel()
        self.scheduler.after(0.001, self._gone)

    def cancel(self) -> None:
        """Ask it to end: its main task is cancelled, as by a signal."""
        if self._main is not None:
            self.loop.call_soon(self._main.cancel)

    def kill(self) -> None:
        """End it at once. Its kernel resets its connections."""
        if not self.loop.stopped:
            self.trace.note(self.name, "is killed")
            self._gone()

    def _gone(self) -> None:
        self.loop.stopped = True
        machine = self.machine
        for address, listener in list(machine.listeners.items()):
            if listener.process is self:
                del machine.listeners[address]
        for transport in [each for each in machine.transports if each.process is self]:
            transport.vanish()

    def pause(self) -> None:
        """Stop it and its threads; its kernel goes on."""
        self.trace.note(self.name, "is paused")
        self.loop.paused = True

    def resume(self) -> None:
        """Let it go on."""
        self.trace.note(self.name, "goes on")
        self.loop.resume()

    def failed(self, message: str, error: BaseException | None) -> None:
        """An exception was not handled."""
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        self.trace.note(self.name, f"DEFECT {message}: {error!r}")
        self._on_defect(f"{self.name}: {message}\n{text}")
