"""Frames: their bytes, and finding them in a stream of bytes that arrives in arbitrary pieces."""

import asyncio
import struct
import weakref
from typing import Any, NamedTuple

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import InternalError, ProtocolError, RecordTooLarge
from kera.core.rpc.frames import (
    HEADER_BYTES,
    STAGING_BYTES,
    FrameHeader,
    FrameKind,
    FrameProtocol,
    decode_header,
    encode_error,
    encode_frame,
)
from kera.core.rpc.limits import HEAD_BYTES_MAX
from kera.v1 import common_pb2
from tests.unit.core.rpc.fake_transport import FakeTransport, feed
from tests.unit.core.rpc.transports import ECHO, UNARY, EchoRequest, UnaryRequest, eventually, numbered

BULK_BYTES_MAX = 1 << 20


class Frame(NamedTuple):
    kind: int
    method: int
    request_id: int
    head: bytes
    bulk: bytes


class Recorder(FrameProtocol):
    """Keeps the frames, and checks that the memory of each is the announced one."""

    def __init__(self, hold_every: int = 0) -> None:
        super().__init__(BULK_BYTES_MAX)
        self.frames: list[Frame] = []
        self.failures: list[ProtocolError] = []
        self.allocated: list[memoryview] = []
        self._hold_every = hold_every
        self.transport = FakeTransport()
        self.connection_made(self.transport)

    def allocate_bulk(self, bulk_bytes: int) -> memoryview:
        self.allocated.append(memoryview(bytearray(bulk_bytes)))
        return self.allocated[-1]

    def frame_received(self, header: FrameHeader, head: memoryview | bytes, bulk: memoryview, *, staged: bool) -> None:
        assert staged is not any(bulk.obj is memory.obj for memory in self.allocated)
        assert (len(head), len(bulk)) == (header.head_bytes, header.bulk_bytes)
        self.frames.append(Frame(header.kind, header.method, header.request_id, bytes(head), bytes(bulk)))
        if self._hold_every and len(self.frames) % self._hold_every == 0:
            self.hold_frames()

    def protocol_failed(self, error: ProtocolError) -> None:
        self.failures.append(error)


def encode(frame: Frame) -> bytes:
    header = struct.pack(
        "<2sBBIQIII", b"KF", 1, frame.kind, frame.method, frame.request_id, len(frame.head), len(frame.bulk), 0
    )
    return header + struct.pack("<I", crc32c(header)) + frame.head + frame.bulk


def run(scenario: Any) -> Any:
    """Run a coroutine on a fresh loop: hypothesis drives functions, and a protocol belongs to a loop."""
    return asyncio.run(scenario)


# --- the bytes ---------------------------------------------------------------------------------------------


def test_a_frame_has_its_documented_layout() -> None:
    message = EchoRequest(chunk_count=7)
    head = message.SerializeToString()

    frame = b"".join(
        encode_frame(FrameKind.REQUEST, ECHO, 0x0102030405060708, message, [b"ab", b"", b"c"], BULK_BYTES_MAX)
    )

    assert frame[:4] == b"KF\x01\x01"
    assert struct.unpack_from("<IQIII", frame, 4) == (ECHO.number, 0x0102030405060708, len(head), 3, 0)
    assert struct.unpack_from("<I", frame, 28) == (crc32c(frame[:28]),)
    assert frame[32:] == head + b"abc"
    assert frame == encode(Frame(1, ECHO.number, 0x0102030405060708, head, b"abc"))


def test_the_bytes_of_frame_version_1_do_not_change() -> None:
    # A difference here means that programs of different versions no longer understand each other.
    assert encode_error(258, 3, common_pb2.Error(code="x")) == bytes.fromhex(
        "4b46 01 03 02010000 0300000000000000 03000000 00000000 00000000 e55ded59  0a0178"
    )


def test_a_header_is_decoded_as_it_was_written() -> None:
    (frame,) = encode_frame(FrameKind.REPLY, UNARY, 9, UnaryRequest(name="a"), [], BULK_BYTES_MAX)

    assert decode_header(memoryview(b"before" + frame), 6, BULK_BYTES_MAX) == FrameHeader(2, UNARY.number, 9, 3, 0)


def test_any_flipped_bit_of_a_header_is_detected() -> None:
    frame = encode(Frame(FrameKind.REQUEST, 1, 2, b"head", b"bulk"))

    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_header(memoryview(damaged), 0, BULK_BYTES_MAX)


@pytest.mark.parametrize(("bulk_bytes", "fits"), [(BULK_BYTES_MAX, True), (BULK_BYTES_MAX + 1, False)])
def test_bulk_over_the_limit_is_refused_at_both_ends(bulk_bytes: int, *, fits: bool) -> None:
    frame = memoryview(encode(Frame(FrameKind.REQUEST, ECHO.number, 1, b"", bytes(bulk_bytes))))
    pieces = [bytes(bulk_bytes - 1), b"1"]

    if fits:
        encode_frame(FrameKind.REQUEST, ECHO, 1, numbered(1), pieces, BULK_BYTES_MAX)
        assert decode_header(frame, 0, BULK_BYTES_MAX).bulk_bytes == bulk_bytes
    else:
        with pytest.raises(RecordTooLarge, match="Echo: message of"):
            encode_frame(FrameKind.REQUEST, ECHO, 1, numbered(1), pieces, BULK_BYTES_MAX)
        with pytest.raises(ProtocolError, match="over the limits") as caught:
            decode_header(frame, 0, BULK_BYTES_MAX)
        assert caught.value.attributes == {"frame_bytes": bulk_bytes, "limit": BULK_BYTES_MAX}


def test_a_message_over_the_limit_is_refused_at_both_ends() -> None:
    frame = encode(Frame(FrameKind.REQUEST, UNARY.number, 1, bytes(HEAD_BYTES_MAX + 1), b""))

    with pytest.raises(ProtocolError, match="over the limits"):
        decode_header(memoryview(frame), 0, BULK_BYTES_MAX)
    with pytest.raises(RecordTooLarge):
        encode_frame(FrameKind.REQUEST, UNARY, 1, UnaryRequest(name="x" * HEAD_BYTES_MAX), [], BULK_BYTES_MAX)


def test_bulk_for_a_method_without_bulk_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="Unary has no bulk field"):
        encode_frame(FrameKind.REQUEST, UNARY, 1, UnaryRequest(), [b"a"], BULK_BYTES_MAX)


def test_the_pieces_of_a_frame_keep_the_given_views() -> None:
    # A transport makes its own view of each piece and forgets the piece: the finalizer must wait all the same.
    let_go: list[int] = []
    view = memoryview(bytearray(100))
    weakref.finalize(view, let_go.append, 1)

    _, piece = encode_frame(FrameKind.REQUEST, ECHO, 1, numbered(1), [view], BULK_BYTES_MAX)
    of_the_transport = memoryview(piece).cast("b")[50:]
    del view, piece

    assert let_go == []
    del of_the_transport
    assert let_go == [1]


def test_memory_is_not_copied_on_its_way_to_the_transport() -> None:
    memory = bytearray(b"before")

    _, piece = encode_frame(FrameKind.REQUEST, ECHO, 1, numbered(1), [memoryview(memory)], BULK_BYTES_MAX)
    memory[:] = b"after!"

    assert bytes(piece) == b"after!"


# --- a stream of bytes -------------------------------------------------------------------------------------

U32 = st.integers(0, 2**32 - 1)
SIZES = st.integers(0, 300) | st.sampled_from(
    [STAGING_BYTES - 33, STAGING_BYTES - 32, STAGING_BYTES - 31, STAGING_BYTES, STAGING_BYTES + 1, 200_000]
)
CONTENTS = st.builds(lambda seed, size: (seed * (size // 7 + 1))[:size], st.binary(min_size=7, max_size=7), SIZES)
FRAMES = st.lists(
    st.builds(
        Frame,
        kind=st.sampled_from(FrameKind),
        method=U32,
        request_id=st.integers(0, 2**64 - 1),
        head=CONTENTS,
        bulk=CONTENTS,
    ),
    min_size=1,
    max_size=6,
)


@given(sent=FRAMES, data=st.data())
def test_any_split_of_the_stream_gives_the_same_frames(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    splits = data.draw(st.lists(st.integers(0, len(stream)), max_size=30), label="splits")

    async def scenario() -> None:
        recorder = Recorder()
        assert feed(recorder, stream, splits) == len(stream)
        assert recorder.frames == sent
        assert recorder.failures == []

    run(scenario())


def test_a_stream_in_single_bytes_gives_the_same_frames() -> None:
    sent = [Frame(1, 2, 3, b"head", b"bulk" * 10), Frame(2, 3, 4, b"", b""), Frame(3, 4, 5, b"h" * 40, b"")]
    stream = b"".join(map(encode, sent))

    async def scenario() -> None:
        recorder = Recorder()
        feed(recorder, stream, range(len(stream)))
        assert recorder.frames == sent

    run(scenario())


@given(sent=FRAMES, data=st.data())
def test_held_frames_arrive_later_in_order_and_once(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    splits = data.draw(st.lists(st.integers(0, len(stream)), max_size=10), label="splits")
    every = data.draw(st.integers(1, 3), label="hold_every")

    async def scenario() -> None:
        recorder = Recorder(hold_every=every)
        taken = 0
        while taken < len(stream) or len(recorder.frames) < len(sent):
            before = len(recorder.frames)
            taken += feed(recorder, stream[taken:], [split - taken for split in splits if split > taken])
            assert len(recorder.frames) - before <= every
            assert recorder.transport.reading is (len(recorder.frames) % every > 0)
            recorder.release_frames()
            recorder.release_frames()
            await asyncio.sleep(0)
        assert recorder.frames == sent

    run(scenario())


async def test_holding_and_releasing_while_a_frame_is_handled_gives_each_frame_once() -> None:
    # As if a reply fills the transport's buffer and the peer takes it at once.
    class Fickle(Recorder):
        def frame_received(self, *arguments: Any, **options: Any) -> None:
            super().frame_received(*arguments, **options)
            self.hold_frames()
            self.release_frames()

    fickle = Fickle()
    sent = [Frame(1, 2, number, b"head", b"bulk") for number in range(5)]
    feed(fickle, b"".join(map(encode, sent)))
    await eventually(lambda: len(fickle.frames) == 5 and fickle.transport.reading)

    assert fickle.frames == sent


async def test_a_frame_that_arrives_whole_is_handled_in_place() -> None:
    recorder = Recorder()

    feed(recorder, encode(Frame(1, 2, 3, b"head", bytes(STAGING_BYTES - HEADER_BYTES - 4))))

    assert len(recorder.frames) == 1
    assert recorder.allocated == []


async def test_frames_that_fit_are_received_together() -> None:
    recorder = Recorder()
    small = encode(Frame(1, 2, 3, b"head", bytes(STAGING_BYTES // 4)))

    feed(recorder, small + small[:-1])

    assert len(recorder.frames) == 1
    assert len(recorder.get_buffer(-1)) == STAGING_BYTES - len(small) + 1  # not only for the missing byte
    feed(recorder, small[-1:] + small)
    assert len(recorder.frames) == 3
    assert recorder.allocated == []


async def test_only_the_start_of_a_large_bulk_is_copied() -> None:
    recorder = Recorder()
    frame = encode(Frame(1, 2, 3, b"head", bytes(BULK_BYTES_MAX)))

    feed(recorder, frame[:STAGING_BYTES])

    (memory,) = recorder.allocated
    rest = recorder.get_buffer(-1)
    assert rest.obj is memory.obj  # the network writes where the bytes are used
    assert len(rest) == len(frame) - STAGING_BYTES


async def test_nothing_is_allocated_for_a_bulk_over_the_limit() -> None:
    recorder = Recorder()
    header = bytearray(encode(Frame(1, 2, 3, b"", b"")))
    header[20:24] = struct.pack("<I", 2**32 - 1)
    header[28:32] = struct.pack("<I", crc32c(header[:28]))

    feed(recorder, bytes(header))

    assert recorder.allocated == []
    assert recorder.failures[0].attributes["limit"] == BULK_BYTES_MAX
    assert recorder.transport.closed


# --- bytes that are not frames ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("garbage", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "does not speak KerA frames"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", "is this the gRPC port"),
        (bytes(HEADER_BYTES), "does not speak KerA frames"),
        (b"KF\x02" + bytes(HEADER_BYTES), "frames of version 2, this program 1"),
        (b"KF\x01\x01" + bytes(HEADER_BYTES), "does not match its checksum"),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
async def test_garbage_ends_the_connection_with_the_reason(garbage: bytes, text: str, before: int) -> None:
    recorder = Recorder()
    good = Frame(1, 2, 3, b"head", b"bulk")

    feed(recorder, encode(good) * before + garbage)

    assert recorder.frames == [good] * before
    assert len(recorder.failures) == 1
    assert text in recorder.failures[0].message
    assert recorder.transport.closed
    assert feed(recorder, encode(good)) == 0


@given(noise=st.binary(min_size=HEADER_BYTES, max_size=200), data=st.data())
def test_noise_ends_the_connection_with_no_other_error(noise: bytes, data: st.DataObject) -> None:
    splits = data.draw(st.lists(st.integers(0, len(noise)), max_size=5), label="splits")

    async def scenario() -> None:
        recorder = Recorder()
        feed(recorder, noise, splits)
        assert (recorder.frames, len(recorder.failures), recorder.transport.closed) == ([], 1, True)

    run(scenario())


async def test_a_protocol_error_of_the_receiver_ends_the_connection() -> None:
    class Refusing(Recorder):
        def frame_received(self, *arguments: Any, **options: Any) -> None:
            super().frame_received(*arguments, **options)
            raise ProtocolError("not understood")

    for bulk_bytes in (10, 2 * STAGING_BYTES):  # in place, and in separate memory
        recorder = Refusing()
        feed(recorder, encode(Frame(1, 2, 3, b"head", bytes(bulk_bytes))) * 2)

        assert len(recorder.frames) == 1
        assert [error.message for error in recorder.failures] == ["not understood"]
        assert recorder.transport.closed


async def test_staged_frames_of_an_ended_connection_are_not_handled() -> None:
    recorder = Recorder(hold_every=1)
    feed(recorder, encode(Frame(1, 2, 3, b"", b"")) * 3)

    recorder.transport.abort()
    recorder.release_frames()
    await asyncio.sleep(0)

    assert len(recorder.frames) == 1
    assert not recorder.transport.reading


async def test_a_frame_needs_a_staging_buffer_no_larger_than_its_head() -> None:
    recorder = Recorder()
    large = Frame(1, 2, 3, b"h" * (2 * STAGING_BYTES), b"b" * 100)

    feed(recorder, encode(large) * 3, [STAGING_BYTES, 5 * STAGING_BYTES])

    assert recorder.frames == [large] * 3
    assert len(recorder._staging) == HEADER_BYTES + len(large.head)
