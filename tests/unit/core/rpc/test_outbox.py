"""Sending over a transport that encrypts, and so makes copies."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from kera.core.rpc.outbox import ENCRYPTED_BYTES_MAX, Outbox
from tests.unit.core.rpc.fake_transport import FakeTransport
from tests.unit.core.rpc.transports import eventually

KIB, MIB = 1 << 10, 1 << 20


class Encrypting(FakeTransport):
    """Reports that it is full or has room, as asyncio's transport does; a test decides what the peer takes."""

    def __init__(self, *, encrypts: bool = True) -> None:
        super().__init__()
        self._encrypts = encrypts
        self.outbox: Outbox | None = None
        self.high = 0
        self.is_full = False
        self.most = 0
        """The largest number of bytes at one time."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "ssl_object" and self._encrypts else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del low
        self.high = high or 0

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        before = len(self.written)
        super().writelines(list_of_data)
        self.unsent_bytes += len(self.written) - before
        self.most = max(self.most, self.unsent_bytes)
        if self.unsent_bytes > self.high and not self.is_full and self.outbox is not None:
            self.is_full = True
            self.outbox.is_full()

    def take(self, size: int) -> None:
        """The peer takes this number of bytes."""
        while size and self.unsent_bytes:
            taken = min(size, self.unsent_bytes)
            self.unsent_bytes -= taken
            size -= taken
            if self.is_full and self.unsent_bytes <= self.high // 4 and self.outbox is not None:
                self.is_full = False
                self.outbox.has_room()


class Connection:
    """An outbox, and the actions that it asks of its connection."""

    def __init__(self, stalled_s: float = 60.0, *, loop: Any = None, encrypts: bool = True) -> None:
        self.did: list[str] = []
        self.outbox = Outbox(
            loop or asyncio.get_running_loop(),
            stalled_s,
            lambda _: self.did.append("stalled"),
            pause=lambda: self.did.append("pause"),
            resume=lambda: self.did.append("resume"),
        )
        self.transport = Encrypting(encrypts=encrypts)
        self.transport.outbox = self.outbox
        self.outbox.open(self.transport)


async def test_an_encrypting_transport_gets_few_bytes_at_a_time_in_order() -> None:
    one = Connection()
    rng = random.Random(1)
    sent = bytearray()
    for _ in range(200):
        frame = [rng.randbytes(rng.choice([0, 1, 100, 70 * KIB, 300 * KIB])) for _ in range(rng.randint(1, 3))]
        sent += b"".join(frame)
        one.outbox.write(frame)
        one.transport.take(rng.choice([0, 100 * KIB, MIB]))
    one.outbox.flush()
    assert one.outbox.unsent_bytes == one.transport.unsent_bytes + len(sent) - len(one.transport.written)
    one.transport.take(len(sent))
    assert one.transport.written == sent
    assert one.outbox.empty
    assert one.transport.most <= 2 * ENCRYPTED_BYTES_MAX


async def test_the_memory_of_a_frame_is_released_when_it_is_sent() -> None:
    one = Connection()
    view = memoryview(bytearray(MIB))
    piece = pa.py_buffer(view)
    held = weakref.ref(view)
    one.outbox.write([b"head", piece])
    del view, piece
    assert held() is not None
    one.transport.take(2 * MIB)
    assert held() is None


async def test_an_outbox_pauses_until_the_transport_has_all_waiting_bytes() -> None:
    one = Connection()
    one.outbox.write([b"head", bytes(ENCRYPTED_BYTES_MAX // 2)])
    assert one.did == []
    one.outbox.write([b"head", bytes(MIB)])
    assert one.did == ["pause"]
    one.transport.take(MIB // 2)
    assert one.outbox.paused
    one.transport.take(2 * MIB)
    assert one.did[-1] == "resume"
    assert "resume" not in one.did[:-1]
    assert not one.outbox.paused


async def test_untaken_bytes_of_tls_itself_pause_too() -> None:
    one = Connection()
    one.transport.writelines([bytes(2 * ENCRYPTED_BYTES_MAX)])
    assert one.did == ["pause"]
    one.outbox.write([b"head", b"bulk"])
    one.transport.take(2 * ENCRYPTED_BYTES_MAX)
    assert one.did == ["pause", "resume"]
    assert one.transport.written.endswith(b"headbulk")


async def test_a_peer_that_takes_nothing_has_stalled() -> None:
    one = Connection(stalled_s=0.01)
    one.outbox.write([b"head", bytes(MIB)])
    await eventually(lambda: one.did == ["pause", "stalled"])


class Clock:
    """A loop whose last timer a test runs."""

    def call_later(self, _: float, call: Callable[..., None], *args: Any) -> Clock:
        self.run = partial(call, *args)
        return self

    def cancel(self) -> None:
        """Like the timer's method."""


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_slow_peer_that_reads_is_not_stalled_despite_new_replies(*, encrypts: bool) -> None:
    clock = Clock()
    one = Connection(loop=clock, encrypts=encrypts)
    one.outbox.write([b"head", bytes(5 * MIB)])
    for _ in range(3):
        one.transport.take(1)
        one.outbox.write([b"head", bytes(MIB)])
        one.outbox.write([b"another"])
        one.outbox.flush()
        clock.run()
    assert one.did == ["pause"]
    one.outbox.write([b"head", bytes(MIB)])
    clock.run()
    assert one.did == ["pause", "stalled"]


@pytest.mark.parametrize("ends", ["end", "close"])
async def test_an_ended_outbox_keeps_no_bytes(ends: str) -> None:
    one = Connection()
    frame = [b"head", bytes(MIB)]
    one.outbox.write(frame)
    if ends == "close":
        one.outbox.close()
        assert one.transport.written == b"".join(frame), "replies that are under way leave before it is closed"
        assert one.transport.closed
    else:
        one.outbox.end()
    one.outbox.write(frame)
    assert one.outbox.unsent_bytes == (one.transport.unsent_bytes if ends == "close" else 0)
