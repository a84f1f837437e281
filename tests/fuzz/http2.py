"""Calls of gRPC as bytes of HTTP/2, valid and not. Pure.

It has as much of HTTP/2 as calls need: a preface, settings, uncompressed headers, data, and a few other frames.
"""

from __future__ import annotations

from random import Random

from tests.fuzz.mutating import mutated, near, wild
from tests.fuzz.protobuf import BYTES, varint

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
HEADER_BYTES = 9


def bulk_field(bulk: bytes) -> bytes:
    """The bulk as the last field of a message."""
    return varint(15 << 3 | BYTES) + varint(len(bulk)) + bulk


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind % 256, flags % 256)) + stream.to_bytes(4, "big") + payload


def _string(text: bytes) -> bytes:
    return bytes((len(text),)) + text if len(text) < 127 else b"\x7f" + varint(len(text) - 127) + text


def headers(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Headers as literals with their names, without compression."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in pairs)


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """A message with the prefix of gRPC."""
    return bytes((compressed,)) + len(data).to_bytes(4, "big") + data


def _frames(path: str, data: bytes, random_: Random) -> list[bytes]:
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"grpc-timeout", random_.choice((b"1S", b"1S", b"99999999H", b"-1S", b"x"))),
    ]
    if random_.random() < 0.3:
        at = random_.randrange(len(pairs))
        name, value = pairs[at]
        pairs[at] = random_.choice(
            ((name, mutated(value, random_)), (mutated(name, random_), value), (b"x", b"v" * 5_000))
        )
    if random_.random() < 0.1:
        random_.shuffle(pairs)
    body = message(data, compressed=random_.random() < 0.05)
    parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    return [
        frame(
            SETTINGS,
            0,
            0,
            bytes((0, random_.randrange(1, 7))) + random_.choice((65_535, wild(random_, 32))).to_bytes(4, "big"),
        ),
        frame(HEADERS, END_HEADERS, 1, headers(pairs)),
        *(frame(DATA, END_STREAM * (part is parts[-1]), 1, part) for part in parts),
    ]


def _other(random_: Random) -> bytes:
    kind = random_.choice((PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION, 77))
    size = random_.choice((0, 4, 5, 6, 8, 600))
    return frame(
        kind, random_.choice((0, 1, 4, 255)), random_.choice((0, 1, 2, 3, (1 << 31) - 1)), random_.randbytes(size)
    )


def _with_spoilt_header(one: bytes, random_: Random) -> bytes:
    data = bytearray(one)
    at, width = random_.choice(((0, 3), (3, 1), (4, 1), (5, 4)))
    was = int.from_bytes(data[at : at + width], "big")
    data[at : at + width] = near(random_, was, 8 * width).to_bytes(width, "big")
    return bytes(data)


def spoilt_call(path: str, data: bytes, random_: Random) -> bytes:
    """The bytes of a connection with one call, most of the time with something wrong."""
    sent = _frames(path, data, random_)
    for _ in range(random_.choice((0, 1, 1, 2, 4))):
        at = random_.randrange(len(sent))
        match random_.randrange(6):
            case 0:
                sent.insert(at, _other(random_))
            case 1:
                sent[at] = _with_spoilt_header(sent[at], random_)
            case 2:
                sent.insert(at, sent[at])
            case 3:
                random_.shuffle(sent)
            case 4:
                sent[at] = mutated(sent[at], random_, sent)
            case _:
                sent.insert(at, _other(random_) * random_.choice((1, 50)))
    preface = PREFACE if random_.random() < 0.95 else mutated(PREFACE, random_)
    return preface + b"".join(sent)
