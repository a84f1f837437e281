"""The first message of a TLS 1.3 client (ClientHello), and corrupted versions of it. Pure."""

from __future__ import annotations

from functools import cache
from random import Random

from tests.fuzz.mutating import mutated, near

HANDSHAKE, CLIENT_HELLO = 22, 1
RECORD_BYTES_MAX = 1 << 14
SERVER_NAME, GROUPS, SIGNATURES, PROTOCOLS, VERSIONS, SHARES = 0, 10, 13, 16, 43, 51
X25519 = 29


def _sized(data: bytes, width: int) -> bytes:
    return len(data).to_bytes(width, "big") + data


def _numbers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(2, "big") for number in numbers)


@cache
def hello() -> bytes:
    """A message that a server answers."""
    extensions = {
        SERVER_NAME: _sized(b"\x00" + _sized(b"localhost", 2), 2),
        GROUPS: _sized(_numbers(X25519, 23), 2),
        SIGNATURES: _sized(_numbers(0x0403, 0x0804, 0x0807), 2),
        PROTOCOLS: _sized(_sized(b"h2", 1), 2),
        VERSIONS: _sized(_numbers(0x0304, 0x0303), 1),
        SHARES: _sized(_numbers(X25519) + _sized(bytes(range(1, 33)), 2), 2),
    }
    said = b"\x03\x03" + bytes(32) + _sized(bytes(32), 1) + _sized(_numbers(0x1301, 0x1302, 0x1303, 0xC02F), 2)
    said += b"\x01\x00" + _sized(b"".join(_numbers(kind) + _sized(data, 2) for kind, data in extensions.items()), 2)
    return record(bytes((CLIENT_HELLO,)) + _sized(said, 3))


def record(data: bytes, kind: int = HANDSHAKE) -> bytes:
    """A record of TLS around `data`."""
    return bytes((kind, 3, 1)) + _sized(data, 2)


def spoilt_hello(random_: Random) -> bytes:
    """The hello with one change: in its bytes, its lengths, how it is cut into records, or in data that follows it."""
    data = hello()
    match random_.randrange(6):
        case 0:
            length = near(random_, int.from_bytes(data[6:9], "big"), 24)
            return data[:6] + length.to_bytes(3, "big") + data[9:] + random_.randbytes(random_.choice((0, 9, 70_000)))
        case 1:
            inner = data[5:]
            size = random_.choice((1, 7, 100))
            return b"".join(record(inner[at : at + size]) for at in range(0, len(inner), size))
        case 2:
            return data * random_.choice((2, 50))
        case 3:
            kind = random_.choice((20, 21, 23, 24, 255))
            return data + record(random_.randbytes(random_.choice((0, 2, RECORD_BYTES_MAX, 40_000))), kind)
        case 4:
            return record(bytes((CLIENT_HELLO,)) + (1 << 24 - 1).to_bytes(3, "big")) + bytes(
                random_.choice((9, 99_999))
            )
        case _:
            return mutated(data, random_, (data,))
