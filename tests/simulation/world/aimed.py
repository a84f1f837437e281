"""Faults that are aimed at critical moments.

A moment is a message between two machines, by its method: a broker sends records to a backup, an answer is in flight to
a producer, the coordinator asks a broker to open another one's streamlets. The fault hits the sender or the receiver,
and the message itself may be lost. The product does not know of it: the network recognizes messages by the headers of
their frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES, FrameKind
from kera.core.rpc.method import Method
from tests.simulation.engine.transports import SimulatedTransport

_FRAME = struct.Struct("<2sBBIQII")


class Moment(NamedTuple):
    """A message that goes from one machine to another."""

    kind: FrameKind
    methods: tuple[int, ...]


def _requests(*methods: Method[Any, Any]) -> Moment:
    return Moment(FrameKind.REQUEST, tuple(method.number for method in methods))


def _replies(*methods: Method[Any, Any]) -> Moment:
    return Moment(FrameKind.REPLY, tuple(method.number for method in methods))


MOMENTS = {
    "records are sent": _requests(api.MULTI_WRITE_CHUNKS),
    "records are replicated": _requests(api.REPLICATE),
    "a backup has records": _replies(api.REPLICATE),
    "records are acknowledged": _replies(api.MULTI_WRITE_CHUNKS),
    "records are read": _replies(api.MULTI_READ_CHUNKS),
    "streamlets are opened": _requests(api.OPEN_STREAMLETS),
    "streamlets are open": _replies(api.OPEN_STREAMLETS),
    "streamlets are sealed": _replies(api.SEAL_STREAMLETS),
    "streamlets are handed over": _requests(api.TAKE_OVER),
    "streamlets are taken over": _replies(api.TAKE_OVER),
    "a broker is fenced": _replies(api.FENCE_BROKER),
    "replicas are listed": _replies(api.LIST_REPLICAS),
    "replicas are read": _replies(api.READ_REPLICA),
    "replicas are freed": _requests(api.FREE_REPLICAS),
    "a broker registers": _replies(api.REGISTER_BROKER),
    "a backup registers": _replies(api.REGISTER_BACKUP),
    "a streamlet is to move": _requests(api.MOVE_STREAMLET),
    "cursors are committed": _requests(api.COMMIT_CURSORS),
    "cursors were committed": _replies(api.COMMIT_CURSORS),
    "members are told what is theirs": _replies(api.CONSUME_ROUND),
    "a member keeps its leases": _replies(api.KEEP_ALIVE),
}
SENDER, RECEIVER = "sender", "receiver"


class Aim(NamedTuple):
    """A fault that waits for its moment."""

    moment: Moment
    passed: int
    """The number of such messages to let pass."""
    is_lost: bool
    """Whether the message is lost, together with its connection."""
    strike: Callable[[SimulatedTransport], None]
    """Called as a separate event, with the sending end."""


class Aims:
    """All waiting aims; it watches the network's messages."""

    def __init__(self) -> None:
        self._waiting: list[Aim] = []

    def add(self, aim: Aim) -> None:
        """Wait for a moment."""
        self._waiting.append(aim)

    def clear(self) -> None:
        """Stop waiting for all moments."""
        self._waiting.clear()

    def meet(self, sender: SimulatedTransport, data: bytes) -> bool:
        """Check sent data, for `Network.watch`; return whether it is lost."""
        if not self._waiting or sender.machine is sender.peer.machine:
            return False
        is_lost = False
        for kind, method in frames_of(data):
            for number, aim in enumerate(self._waiting):
                if kind != aim.moment.kind or method not in aim.moment.methods:
                    continue
                if aim.passed:
                    self._waiting[number] = aim._replace(passed=aim.passed - 1)
                else:
                    del self._waiting[number]
                    sender.network.scheduler.after(0.0, aim.strike, sender)
                    is_lost |= aim.is_lost
                break
        return is_lost


def frames_of(data: bytes) -> Iterator[tuple[int, int]]:
    """The kind and method of each frame that begins in data sent at once."""
    at = 0
    while len(data) - at >= HEADER_BYTES and data[at : at + 2] == b"KF":
        _, _, kind, method, _, head_bytes, bulk_bytes = _FRAME.unpack_from(data, at)
        yield kind, method
        at += HEADER_BYTES + head_bytes + bulk_bytes
