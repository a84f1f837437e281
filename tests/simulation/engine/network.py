"""The network between machines: it delays messages, and cuts and loses connections.

Connections are like TCP: messages arrive once and in order, or the connection breaks. While a way is cut, messages
wait, as TCP sends them again; an end with a time-out gives up then. A cut way does not carry a reset either, so that
one end may believe in a connection that the other one has forgotten.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import log
from typing import Any

from tests.simulation.engine.process import Machine, Process
from tests.simulation.engine.scheduler import Scheduler
from tests.simulation.engine.transports import SimulatedSocket, SimulatedTransport

Address = tuple[str, int] | str
AGAIN_S = 1.0
"""The longest time between two attempts of TCP."""


@dataclass(slots=True)
class Weather:
    """The state of the network; drawn for each simulation, and changed by faults."""

    delay_s: float = 0.0002
    """The mean delay of a way."""
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    """The additional delay, by way from machine to machine."""
    pieces: float = 0.0
    """The probability that a read takes only a part of the received bytes."""


class Connecting:
    """An attempt to connect."""

    def __init__(self, process: Process) -> None:
        self.made: asyncio.Future[SimulatedTransport] = process.loop.create_future()
        self.given_up = False

    def give_up(self) -> None:
        """Stop waiting for it."""
        self.given_up = True
        if self.made.done() and not self.made.cancelled() and self.made.exception() is None:
            self.made.result().abort()


class Listener(asyncio.AbstractServer):
    """A listening socket of a process; see `asyncio.Server`."""

    def __init__(self, process: Process, factory: Callable[[], Any], address: Address, name: SimulatedSocket) -> None:
        self.process = process
        self.factory = factory
        self.sockets = (name,)
        self._address = address

    def close(self) -> None:
        """See `asyncio.Server`."""
        if self.process.machine.listeners.get(self._address) is self:
            del self.process.machine.listeners[self._address]

    def is_serving(self) -> bool:
        """See `asyncio.Server`."""
        return self.process.machine.listeners.get(self._address) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """See `asyncio.Server`."""
        return self.process.loop

    async def wait_closed(self) -> None:
        """See `asyncio.Server`."""


class Network:
    """See the head of this module."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._lot = scheduler.random.random
        self.weather = Weather()
        self.window_bytes = 1 << 20
        self.machines: dict[str, Machine] = {}
        """Machines, by address."""
        self._cut: set[tuple[str, str]] = set()
        """Cut ways, by names of machines."""
        self._client_ports = count(50_000)
        self.watch: Callable[[SimulatedTransport, bytes], bool] = lambda _sender, _data: False
        """Gets all sent data; if it returns true, the data and the connection are lost."""

    # -- messages ----------------------------------------------------------------------------------------------

    def carry(self, sender: SimulatedTransport, kind: str, data: bytes) -> None:
        """Carry a message to the other end, behind earlier ones."""
        if kind == "data" and self.watch(sender, data):
            self.scheduler.after(0.0, self.reset, sender)
            return
        arrives_s = max(self.scheduler.now_s + self._delay_s(sender.machine, sender.peer.machine), sender.arrives_s)
        sender.arrives_s = arrives_s
        sender.sent.append((kind, data))
        self.scheduler.at(arrives_s, self._arrive, sender)

    def _arrive(self, sender: SimulatedTransport) -> None:
        sender.held.append(sender.sent.popleft())  # in order, though several may be due at once
        self._pass_on(sender)

    def _pass_on(self, sender: SimulatedTransport) -> None:
        if not self.is_cut(sender.machine, sender.peer.machine):
            while sender.held:
                sender.peer.arrived(*sender.held.popleft())

    def taken(self, receiver: SimulatedTransport) -> None:
        """The process has read some bytes: the sender may send more."""
        sender = receiver.peer
        if sender.get_write_buffer_size():
            self.scheduler.after(self._delay_s(receiver.machine, sender.machine), self._acknowledged, sender)

    def _acknowledged(self, sender: SimulatedTransport) -> None:
        if not self.is_cut(sender.peer.machine, sender.machine):
            sender.room_again()

    def _delay_s(self, source: Machine, target: Machine) -> float:
        if source is target:
            return 5e-6
        slow = self.weather.slow
        extra_s = slow.get((source.name, target.name), 0.0) if slow else 0.0
        return extra_s - log(1.0 - self._lot()) * self.weather.delay_s + 20e-6

    def read_bytes(self, most: int) -> int:
        """The number of received bytes to read now."""
        random = self.scheduler.random
        if self.weather.pieces and random.random() < self.weather.pieces:
            return random.randint(1, 2000)
        return most

    # -- cut ways ----------------------------------------------------------------------------------------------

    def is_cut(self, source: Machine, target: Machine) -> bool:
        """Whether the way from one machine to another is cut."""
        return bool(self._cut) and (source.name, target.name) in self._cut

    def cut(self, ways: set[tuple[str, str]]) -> None:
        """Cut these ways."""
        self._cut |= ways
        self._look_at_silence()

    def heal(self, ways: set[tuple[str, str]] | None = None) -> None:
        """Open these ways, whose messages then arrive; None: all ways."""
        self._cut = set() if ways is None else self._cut - ways
        self._look_at_silence()

    def _look_at_silence(self) -> None:
        now_s = self.scheduler.now_s
        for machine in self.machines.values():
            for end in list(machine.transports):
                both = self.is_cut(machine, end.peer.machine) or self.is_cut(end.peer.machine, machine)
                if both and end.silent_since_s is None:
                    end.silent_since_s = now_s
                    if end.socket.silent_s is not None:
                        late_s = end.socket.silent_s * (1 + self.scheduler.random.random())
                        self.scheduler.after(late_s, self._still_silent, end, now_s)
                elif not both and end.silent_since_s is not None:
                    end.silent_since_s = None
        for machine in self.machines.values():
            for end in list(machine.transports):
                for each in (end, end.peer):
                    if each.held and not self.is_cut(each.machine, each.peer.machine):
                        self.scheduler.after(self.scheduler.random.random() * AGAIN_S, self._pass_on, each)
                if end.silent_since_s is None and end.get_write_buffer_size():
                    self.scheduler.after(self.scheduler.random.random() * AGAIN_S, end.room_again)

    def _still_silent(self, end: SimulatedTransport, since_s: float) -> None:
        if end.silent_since_s == since_s and not end.gone:
            end.timed_out()

    def reset(self, end: SimulatedTransport) -> None:
        """One end loses the connection; the other one gets the reset behind all messages in flight."""
        end.arrived("reset", b"")
        self.carry(end, "reset", b"")

    # -- connections -------------------------------------------------------------------------------------------

    def listen(self, process: Process, factory: Callable[[], Any], address: Address) -> Listener:
        """See `asyncio.AbstractEventLoop.create_server`."""
        machine = process.machine
        if not isinstance(address, str):
            if address[0] != machine.address:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            address = address[0], address[1] or machine.free_port()
        if address in machine.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        name = SimulatedSocket(_family(address), address)
        listener = machine.listeners[address] = Listener(  # type: ignore[abstract]  # the missing methods are unused
            process, factory, address, name
        )
        return listener

    def connect(self, process: Process, address: Address) -> Connecting:
        """See `asyncio.AbstractEventLoop.create_connection`."""
        connecting = Connecting(process)
        target = process.machine if isinstance(address, str) else self.machines.get(address[0])
        if target is None:
            connecting.made.set_exception(OSError(errno.EHOSTUNREACH, "No route to host"))
            return connecting
        self._knock(process, target, address, connecting)
        return connecting

    def _knock(self, process: Process, target: Machine, address: Address, connecting: Connecting) -> None:
        if connecting.given_up or not process.alive:
            return
        source = process.machine
        if self.is_cut(source, target) or self.is_cut(target, source):
            self.scheduler.after(AGAIN_S, self._knock, process, target, address, connecting)
            return
        there_s = self._delay_s(source, target)
        self.scheduler.after(there_s, self._knocked, process, target, address, connecting)

    def _knocked(self, process: Process, target: Machine, address: Address, connecting: Connecting) -> None:
        if connecting.given_up or not process.alive:
            return
        back_s = self._delay_s(target, process.machine)
        listener = target.listeners.get(address)
        if listener is None:
            refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            self.scheduler.after(back_s, process.loop.call_soon, _refuse, connecting, refused)
            return
        own = "" if isinstance(address, str) else (process.machine.address, next(self._client_ports))
        near = SimulatedTransport(self, process, own, address)
        far = SimulatedTransport(self, listener.process, address, own)
        near.peer, far.peer = far, near
        listener.process.loop.call_soon(_accept, listener, far)
        self.scheduler.after(back_s, process.loop.call_soon, _made, connecting, near)


def _family(address: Address) -> Any:
    import socket

    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _accept(listener: Listener, far: SimulatedTransport) -> None:
    if not far.gone:
        far.begin(listener.factory())


def _made(connecting: Connecting, near: SimulatedTransport) -> None:
    if connecting.given_up or connecting.made.done():
        near.abort()
    else:
        connecting.made.set_result(near)


def _refuse(connecting: Connecting, error: OSError) -> None:
    if not connecting.made.done():
        connecting.made.set_exception(error)
