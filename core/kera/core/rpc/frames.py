"""Frames: the layout, and the assembling of frames from a byte stream.

    0       2   3     4         8                 16           20           24           28
    ┌───────┬───┬─────┬─────────┬─────────────────┬────────────┬────────────┬────────────┬──────────────┐
    │ "KF"  │ v │kind │ method  │ request id      │ head_bytes │ bulk_bytes │ reserved   │ crc32c 0..27 │
    └───────┴───┴─────┴─────────┴─────────────────┴────────────┴────────────┴────────────┴──────────────┘
    then `head_bytes` of protobuf message, then `bulk_bytes` of chunks

Data are received into a small staging buffer; a frame that fits is handled there, in place. For a larger frame, the
part of the bulk that has not arrived yet is received straight into the buffer where it is used.

Memory for a frame is used only as its bytes arrive, whatever its header announces.

Limits: a head has at most `HEAD_BYTES_MAX`, a bulk at most the number of bytes for which the endpoint is configured. A
frame over a limit, or bytes that are not a frame, end the connection with a `ProtocolError`, as nothing that follows
can be trusted. A server sends the reason before it closes, in an error frame for request 0, an id that no request has.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from google.protobuf.message import Message

from kera.core.errors import ProtocolError, invariant
from kera.core.format.checksum import crc32c
from kera.core.native import accelerated
from kera.core.rpc.limits import BULK_BYTES_MAX, HEAD_BYTES_MAX, check_request, check_size
from kera.core.rpc.method import Method
from kera.v1 import common_pb2

VERSION = 1
HEADER_BYTES = 32
STAGING_BYTES = 64 << 10
"""Several small requests arrive with one system call; of a large one at most this much is copied once more."""
NO_REQUEST = 0
"""Request id of an error frame about the connection itself."""

_MAGIC = b"KF"
_COVERED = struct.Struct("<2sBBIQIII")
_CRC = struct.Struct("<I")
_METHOD = struct.Struct("<I")
_METHOD_AT = 4
_HEADER = struct.Struct(_COVERED.format + "I")
_COVERED_BYTES = _COVERED.size
invariant(_HEADER.size == HEADER_BYTES, "a frame header is 32 bytes")
invariant(_COVERED.size + _CRC.size == HEADER_BYTES, "the checksum is its last field, and covers all others")
invariant(HEADER_BYTES < STAGING_BYTES, "a header must fit into the staging buffer")


class FrameKind(enum.IntEnum):
    """The kind of a frame."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    """Head: a ``kera.v1.Error``."""


class FrameHeader(NamedTuple):
    """A frame's header, checked."""

    kind: int
    method: int
    request_id: int
    head_bytes: int
    bulk_bytes: int


_as_header = tuple.__new__
"""Does the same as `FrameHeader._make` in a third of the time; a frame has its fields in the same order."""


def encode_frame(
    kind: FrameKind,
    method: Method[Any, Any],
    request_id: int,
    message: Message,
    bulk: Sequence[Any],
    bulk_bytes_max: int,
) -> list[Any]:
    """Return a frame as pieces for a scatter/gather write: header and head joined, then the bulk as it was given.

    The pieces keep the objects in `bulk` themselves alive. A transport would not: it makes a new view of each
    `memoryview`, which keeps the memory but not the view to which a finalizer may be tied.

    Raises `RecordTooLarge` if the frame is over the limits.
    """
    head = message.SerializeToString()
    check = check_request if kind is FrameKind.REQUEST else check_size
    # From Python 3.12 on, asyncio's own transport keeps empty pieces, and later ones wait behind them.
    pieces = [piece if type(piece) is bytes else pa.py_buffer(piece) for piece in bulk if len(piece)]
    if not pieces:
        check(method, len(head), 0, bulk_bytes_max)
        return [with_header(head, kind, method.number, request_id, 0)]
    bulk_bytes = sum(map(len, pieces))
    check(method, len(head), bulk_bytes, bulk_bytes_max)
    return [with_header(head, kind, method.number, request_id, bulk_bytes), *pieces]


def encode_error(method: int, request_id: int, error: common_pb2.Error) -> bytes:
    """Return an error frame."""
    return with_header(error.SerializeToString(), FrameKind.ERROR, method, request_id, 0)


@accelerated()
def with_header(head: bytes, kind: FrameKind, method: int, request_id: int, bulk_bytes: int) -> bytes:
    """Return a frame's header followed by its head."""
    header = _COVERED.pack(_MAGIC, VERSION, kind, method, request_id, len(head), bulk_bytes, 0)
    return header + _CRC.pack(crc32c(header)) + head


def method_at(view: memoryview, at: int) -> int:
    """Return the method number in the header at `at`, without checking that it is a header."""
    number: int = _METHOD.unpack_from(view, at + _METHOD_AT)[0]
    return number


@accelerated(FrameHeader)
def decode_header(view: memoryview, at: int, bulk_bytes_max: int) -> FrameHeader:
    """Return the header at `at`. Raises `ProtocolError` if it is invalid, or announces more than the limits."""
    fields = _HEADER.unpack_from(view, at)
    magic, version, _, _, _, head_bytes, bulk_bytes, _, checksum = fields
    if magic != _MAGIC:
        raise ProtocolError("peer does not speak KerA frames (is this the gRPC port?)")
    if version != VERSION:
        raise ProtocolError(f"peer speaks frames of version {version}, this program {VERSION}", version=version)
    if crc32c(view[at : at + _COVERED_BYTES]) != checksum:
        raise ProtocolError("frame header does not match its checksum")
    if head_bytes > HEAD_BYTES_MAX or bulk_bytes > bulk_bytes_max:
        raise ProtocolError(
            f"frame of {head_bytes} + {bulk_bytes} bytes is over the limits of {HEAD_BYTES_MAX} + {bulk_bytes_max}",
            frame_bytes=head_bytes + bulk_bytes,
            limit=bulk_bytes_max,
        )
    return _as_header(FrameHeader, fields[2:7])


def lazy_memory(length_bytes: int) -> memoryview:
    """Return memory whose pages are allocated only as they are written to.

    So a frame that a peer announces costs nothing until it arrives. Huge pages would spend much of it on a single byte.
    """
    memory = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # it fails on a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory)


class FrameProtocol(asyncio.BufferedProtocol):
    """Assembles frames; a subclass decides where a bulk goes, and handles the frames."""

    def __init__(self, bulk_bytes_max: int = BULK_BYTES_MAX) -> None:
        self.bulk_bytes_max = bulk_bytes_max
        self.head_bytes_max = HEAD_BYTES_MAX
        """Maximum of a message that does not fit into the staging buffer."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._held = False
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._filled = 0  # bytes of the staging buffer that hold data
        self.arrivals = 0
        """How often data have arrived: if the number is unchanged, nothing has arrived meanwhile."""
        # While a large bulk is being received:
        self._header: FrameHeader | None = None
        self._head = b""
        self._bulk = memoryview(b"")
        self._bulk_filled = 0

    # -- methods that a subclass provides ----------------------------------------------------------------------

    def allocate_bulk(self, bulk_bytes: int) -> memoryview:
        """Return writable memory for a bulk that arrives in several pieces."""
        raise NotImplementedError  # abstract: each end has its own kind of memory

    def large_begins(self, length_bytes: int) -> None:
        """Called before a large message of `length_bytes` is read; nothing is read while frames are held."""

    def frame_received(self, header: FrameHeader, head: memoryview | bytes, bulk: memoryview, *, staged: bool) -> None:
        """Handle a whole frame. With `staged`, `head` and `bulk` are valid only during this call.

        If it raises `ProtocolError`, the connection ends.
        """
        raise NotImplementedError  # abstract

    def take_staged(self, staging: memoryview, at: int, filled: int) -> int:
        """Take staged frames between `at` and `filled`, which has at least a header; return the end of those taken."""
        del staging, filled
        return at

    def frames_taken(self) -> None:
        """Called when all frames that have arrived were handled, to send output that was gathered meanwhile."""

    def protocol_failed(self, error: ProtocolError) -> None:
        """Called when the peer has broken the protocol; the connection is closed after this call."""

    # -- methods for subclasses --------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun to arrive, and is not complete."""
        return self._header is not None or self._filled > 0

    @property
    def large_unfinished(self) -> bool:
        """Whether a message that does not fit into the staging buffer has begun to arrive."""
        return self._header is not None or (self._filled > 0 and len(self._staging) > STAGING_BYTES)

    @property
    def held(self) -> bool:
        """Whether no frames are taken for now, see `hold_frames`."""
        return self._held

    def shrink(self) -> None:
        """Replace a staging buffer that has grown for a large message, if it is empty."""
        if self._header is None and not self._filled and len(self._staging) > STAGING_BYTES:
            self._staging = memoryview(bytearray(STAGING_BYTES))

    def hold_frames(self) -> None:
        """Take no further frames, neither from the network nor from the staging buffer; may be called repeatedly."""
        self._held = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def release_frames(self) -> None:
        """Take frames again after `hold_frames`; may be called repeatedly."""
        if self._held:
            self._held = False
            self._loop.call_soon(self._take_held)  # later, as this may be called while a frame is handled

    def _take_held(self) -> None:
        self._take(self._consume_staging)
        if not self._held and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- asyncio -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = transport  # type: ignore[assignment]

    def get_buffer(self, _sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        if self._header is not None:
            return self._bulk[self._bulk_filled :]
        return self._staging[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.arrivals += 1
        if self._header is None:
            self._filled += nbytes
            self._take(self._consume_staging)
            return
        self._bulk_filled += nbytes
        if self._bulk_filled == len(self._bulk):
            self._take(self._finish_bulk)

    def _let_go_of_memory(self) -> None:
        """Free the buffers of a connection that is gone."""
        self._held = True
        self._staging = self._bulk = memoryview(b"")
        self._header, self._head = None, b""
        self._let_go_of_transport()

    def _let_go_of_transport(self) -> None:
        """Drop the closed transport: it refers to this object, and only the garbage collector would free the cycle."""
        self._transport = None

    def _take(self, consume: Callable[[], None]) -> None:
        """Handle data that have arrived, and end the connection if they are invalid."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            consume()
        except ProtocolError as error:
            self._held = True
            self.protocol_failed(error)
            transport.abort()
        except BaseException:
            self._held = True  # it is unknown how much of the data was handled
            transport.abort()
            raise
        else:
            self.frames_taken()

    def _finish_bulk(self) -> None:
        header, head, bulk = self._header, self._head, self._bulk
        self._header, self._bulk = None, memoryview(b"")
        if header is not None:
            self.frame_received(header, head, bulk, staged=False)

    def _consume_staging(self) -> None:
        staging, at, filled = self._staging, 0, self._filled
        needed = 0
        while filled - at >= HEADER_BYTES and not self._held:
            taken_to = self.take_staged(staging, at, filled)
            if taken_to > at:
                at = taken_to
                continue
            header = decode_header(staging, at, self.bulk_bytes_max)
            bulk_at = at + HEADER_BYTES + header.head_bytes
            end = bulk_at + header.bulk_bytes
            if filled >= end:
                head = staging[at + HEADER_BYTES : bulk_at]
                self.frame_received(header, head, staging[bulk_at:end], staged=True)
                at = end
                continue
            if filled < bulk_at:
                needed = bulk_at - at
            elif end - at > len(staging):
                self._begin_bulk(header, bytes(staging[at + HEADER_BYTES : bulk_at]), staging[bulk_at:filled])
                at = filled
            break  # a frame that fits will be complete with the next read, along with later ones
        rest = filled - at
        if needed > len(staging):
            if needed - HEADER_BYTES > self.head_bytes_max:
                raise ProtocolError(f"a message of {needed - HEADER_BYTES} bytes; {self.head_bytes_max} may come here")
            grown = lazy_memory(needed)
            grown[:rest] = staging[at:filled]
            self._staging = grown
            self.large_begins(needed)
        elif at and rest:
            staging[:rest] = staging[at:filled]
        self._filled = rest

    def _begin_bulk(self, header: FrameHeader, head: bytes, arrived: memoryview) -> None:
        self._bulk = self.allocate_bulk(header.bulk_bytes)
        self._bulk[: len(arrived)] = arrived
        self._bulk_filled = len(arrived)
        self._head = head
        self._header = header
        self.large_begins(header.bulk_bytes)
