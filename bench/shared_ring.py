"""Chunks from a producer on the broker's host, over a unix socket and through memory that both share: ``python -m
bench.shared_ring``.

KerA has the first and not the second, see bench/notes/requests.md. Two processes do only the work of a producer and a
broker on the bytes of a chunk:

* ``socket``: the producer encodes into memory of its own (a copy) and writes frame header and payload; the broker
  receives them by `FrameProtocol`, as it does every request, checks the checksum and copies the chunk into a slot.
* ``socket, one pass``: the same, but copied block by block, and each block of the copy is checked while it is
  in the cache.
* ``ring``: the producer encodes into the ring (the same copy); a descriptor of 32 bytes goes through the socket; the
  broker copies into a slot and checks the copy in one pass, as the producer can write to the ring meanwhile.
* ``ring, trusted``: checked in the ring, then copied. Not safe: what is kept may not be what was checked.

Processor time of both processes together counts; ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from bench.common import Figures, alternating, directory, parser, say, size
from bench.small_requests import ROOT, NoCompiler, compiler
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB
from kera.core.errors import invariant
from kera.core.format.checksum import crc32c
from kera.core.rpc.frames import FrameHeader, FrameKind, FrameProtocol, with_header
from kera.core.rpc.sockets import CALLER, tune

WAYS = ("socket", "socket, one pass", "ring", "ring, trusted")
METHOD = 1
IN_FLIGHT = 5
"""Chunks in flight, like a producer's requests."""
SLOTS_BYTES = 256 * MIB
"""More than the caches hold, like a broker's memory."""
_CHECKSUM = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("<QQQQ")
"""Number, offset, length and checksum of a chunk in the ring."""
_TAKEN = struct.Struct("<I")
"""The answer: this many more chunks are taken."""

Take = Callable[[int, int, int], int]
"""A function in C: to, from, size; returns the checksum."""


def compile_taking(folder: Path) -> Path:
    """Compile `shared_ring.c` in `folder`. Raises `NoCompiler`."""
    made = folder / "shared_ring.so"
    native = ROOT / "core/native"
    sources = map(str, (ROOT / "bench/shared_ring.c", native / "crc32c.c"))
    subprocess.run(
        [*compiler(), "-std=c11", "-O2", "-shared", "-fPIC", f"-I{native}", *sources, "-o", str(made)], check=True
    )
    return made


def taking(library: Path, way: str) -> Take:
    """The broker's work on the bytes of a chunk."""
    loaded = ctypes.CDLL(str(library))
    loaded.crc32c_init()
    function = loaded.check_then_copy if way in {"socket", "ring, trusted"} else loaded.copy_and_check
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    taken: Take = function
    return taken


def address_of(memory: memoryview | mmap.mmap) -> int:
    """The address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# -- the broker's end ------------------------------------------------------------------------------------------


class Slots:
    """Keeps chunks, and measures the processor time since the warm-up."""

    def __init__(self, take: Take, warm_up: int) -> None:
        self._take = take
        self._memory = mmap.mmap(-1, SLOTS_BYTES)  # shared, so that its pages are of the same kind as an arena's
        self._memory.write(bytes(SLOTS_BYTES))
        self._address = address_of(self._memory)
        self._at = 0
        self._warm_up = warm_up
        self.chunks = 0
        self.begun_ns = 0

    def keep(self, address: int, length: int, checksum: int) -> None:
        """Check a chunk, and copy it. Raises `ValueError` if it is damaged."""
        if self._at + length > SLOTS_BYTES:
            self._at = 0
        if self._take(self._address + self._at, address, length) != checksum:
            raise ValueError("a chunk does not match its checksum")
        self._at += length
        self.chunks += 1
        if self.chunks == self._warm_up:
            self.begun_ns = time.process_time_ns()


class Frames(FrameProtocol):
    """Receives chunks as a broker does."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots
        self._receive = memoryview(b"")
        self._taken = 0
        self.lost = self._loop.create_future()

    def allocate_bulk(self, bulk_bytes: int) -> memoryview:
        """See `FrameProtocol`; the memory is used again, like a server's."""
        if len(self._receive) < bulk_bytes:
            self._receive = memoryview(mmap.mmap(-1, bulk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return self._receive[:bulk_bytes]

    def frame_received(self, header: FrameHeader, head: memoryview | bytes, bulk: memoryview, *, staged: bool) -> None:
        """See `FrameProtocol`."""
        del header, staged
        self._slots.keep(address_of(bulk), len(bulk), _CHECKSUM.unpack(head)[0])
        self._taken += 1

    def frames_taken(self) -> None:
        """See `FrameProtocol`."""
        if self._taken and self._transport is not None:
            self._transport.write(_TAKEN.pack(self._taken))
            self._taken = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.lost.set_result(exc)


class Descriptors(asyncio.Protocol):
    """Takes chunks from the ring."""

    def __init__(self, slots: Slots, ring: mmap.mmap) -> None:
        self._slots = slots
        self._ring_bytes = len(ring)
        self._address = address_of(ring)
        self._rest = b""
        self._transport: Any = None
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        data = self._rest + data
        whole = len(data) // _DESCRIPTOR.size
        end = whole * _DESCRIPTOR.size
        for _, offset, length, checksum in _DESCRIPTOR.iter_unpack(data[:end]):
            if offset + length > self._ring_bytes:
                raise ValueError("a descriptor points beyond the ring")
            self._slots.keep(self._address + offset, length, checksum)
        self._rest = data[end:]
        if whole:
            self._transport.write(_TAKEN.pack(whole))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.lost.set_result(exc)


async def serve(arguments: argparse.Namespace) -> None:
    """Take chunks until the producer closes; print how many, and the processor seconds."""
    way, ring_bytes = arguments.serve, arguments.ring_bytes
    slots = Slots(taking(arguments.library, way), arguments.warm_up)
    end = socket.socket(fileno=arguments.descriptors[0])
    tune(end, CALLER)
    ring = mmap.mmap(arguments.descriptors[1], ring_bytes)
    loop = asyncio.get_running_loop()
    _, protocol = await loop.connect_accepted_socket(
        lambda: Frames(slots) if way.startswith("socket") else Descriptors(slots, ring), end
    )
    print(flush=True)
    await protocol.lost
    spent_ns = time.process_time_ns() - slots.begun_ns
    print(json.dumps({"chunks": slots.chunks, "cpu_s": spent_ns / 1e9}), flush=True)


# -- the producer's end ----------------------------------------------------------------------------------------


class Sender(asyncio.Protocol):
    """Encodes chunks, up to the number in flight, and sends them or their descriptors."""

    def __init__(self, ring: mmap.mmap, chunk_bytes: int, chunks: int, warm_up: int, *, through_ring: bool) -> None:
        self._source = os.urandom(chunk_bytes)
        self._memory = memoryview(ring if through_ring else bytearray(len(ring)))
        self._places = len(ring) // chunk_bytes
        self._chunk_bytes, self._chunks, self._warm_up = chunk_bytes, chunks, warm_up
        self._through_ring = through_ring
        self._sent = self._taken = 0
        self._rest = b""
        self._transport: Any = None
        self.begun_ns = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`: taken chunks make room for others."""
        data = self._rest + data
        end = len(data) // _TAKEN.size * _TAKEN.size
        before = self._taken
        self._taken += sum(count for (count,) in _TAKEN.iter_unpack(data[:end]))
        self._rest = data[end:]
        if before < self._warm_up <= self._taken:
            self.begun_ns = time.process_time_ns()
        if self._taken == self._chunks:
            self.done.set_result(None)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the broker's end has closed"))

    def _send(self) -> None:
        while self._sent < self._chunks and self._sent - self._taken < IN_FLIGHT:
            at = self._sent % self._places * self._chunk_bytes
            place = self._memory[at : at + self._chunk_bytes]
            place[:] = self._source
            checksum = crc32c(place)
            if self._through_ring:
                self._transport.write(_DESCRIPTOR.pack(self._sent, at, self._chunk_bytes, checksum))
            else:
                head = with_header(_CHECKSUM.pack(checksum), FrameKind.REQUEST, METHOD, self._sent, self._chunk_bytes)
                self._transport.writelines([head, place])
            self._sent += 1


async def play(way: str, chunk_bytes: int, arguments: argparse.Namespace, library: Path) -> tuple[float, float]:
    """Processor seconds per GB of the producer's process and of the broker's."""
    chunks = arguments.bytes // chunk_bytes
    warm_up = max(1, chunks // 10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    tune(ours, CALLER)
    ours.settimeout(0)
    theirs.settimeout(0)
    ring_bytes = max(IN_FLIGHT, arguments.memory_bytes // chunk_bytes) * chunk_bytes
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, ring_bytes)
    ring = mmap.mmap(descriptor, ring_bytes)
    words = [sys.executable, "-m", "bench.shared_ring", "--serve", way, "--library", library]
    words += ["--warm-up", warm_up, "--ring-bytes", ring_bytes, "--descriptors", theirs.fileno(), descriptor]
    process = await asyncio.create_subprocess_exec(
        *map(str, words), stdout=asyncio.subprocess.PIPE, pass_fds=(theirs.fileno(), descriptor)
    )
    theirs.close()
    os.close(descriptor)
    invariant(process.stdout is not None, "it was asked for")
    await process.stdout.readline()  # type: ignore[union-attr]
    loop = asyncio.get_running_loop()
    transport, sender = await loop.connect_accepted_socket(
        lambda: Sender(ring, chunk_bytes, chunks, warm_up, through_ring=way.startswith("ring")), ours
    )
    try:
        await sender.done
        spent_ns = time.process_time_ns() - sender.begun_ns
    finally:
        transport.close()
    output, _ = await process.communicate()
    found = json.loads(output)
    if process.returncode or found["chunks"] != chunks:
        raise SystemExit(f"{chunks} chunks were sent, and the other end says {found}")
    gigabytes = (chunks - warm_up) * chunk_bytes / 1e9
    return spent_ns / 1e9 / gigabytes, found["cpu_s"] / gigabytes


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Run all rounds."""
    library, figures = compile_taking(folder), Figures("shared_ring", arguments, folder)
    for number in range(arguments.rounds):
        say(f"round {number + 1} of {arguments.rounds}")
        for chunk_bytes in arguments.chunk_bytes:
            both_s = {}
            for way in alternating(WAYS, 1):
                producer_s, broker_s = await play(way, chunk_bytes, arguments, library)
                both_s[way] = producer_s + broker_s
                name = f"{chunk_bytes // KIB} KiB, {way}"
                figures.add(f"{name}: producer", producer_s, "CPU-s/GB")
                figures.add(f"{name}: broker", broker_s, "CPU-s/GB")
                figures.add(f"{name}: both", both_s[way], "CPU-s/GB")
            for way in WAYS[1:]:
                figures.add(f"{chunk_bytes // KIB} KiB, {way}: less by", both_s["socket"] / both_s[way], "times")
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--chunk-bytes", type=size, nargs="+", default=[16 * KIB, 64 * KIB, 256 * KIB, MIB])
    made.add_argument("--bytes", type=size, default=2 * 10**9, help="of each way and size in a round")
    made.add_argument(
        "--memory-bytes", type=size, default=0, help="that the producer encodes into in turns; at least 5 chunks"
    )
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    made.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--warm-up", type=int, help=argparse.SUPPRESS)
    made.add_argument("--ring-bytes", type=int, help=argparse.SUPPRESS)
    made.add_argument("--descriptors", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.serve:
        die_with_parent()
        uvloop.run(serve(arguments))
        return 0
    os.environ.setdefault(DIE_WITH_PARENT_VARIABLE, "1")
    with directory(arguments) as folder:
        try:
            uvloop.run(run(arguments, folder))
        except NoCompiler as error:
            say(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
