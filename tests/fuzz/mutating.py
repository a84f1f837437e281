"""Corrupts bytes. Pure: the same `Random` makes the same change to the same bytes.

Decoders trust numbers most, so most changes are to numbers: of each width, in either byte order, to a value at an edge
or near the old value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

WILD = (
    *(0, 1, 2, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 4096, 1 << 14, (1 << 15) - 1, 1 << 15, (1 << 16) - 1),
    *(
        1 << 16,
        1 << 20,
        1 << 24,
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) - 1,
        1 << 32,
        (1 << 53) + 1,
        (1 << 62),
        (1 << 63) - 1,
    ),
    *(1 << 63, (1 << 64) - 2, (1 << 64) - 1),
)
"""Numbers at the edges of common ranges; taken modulo the width."""
NEAR = (-64, -8, -1, 1, 8, 64)
LONGER_MAX = 1 << 12
"""Bytes that one change inserts at most."""
BYTES_MAX = 1 << 18
"""Length limit of a changed input."""


def wild(random_: Random, bits: int = 64) -> int:
    """An unsigned number at an edge."""
    return random_.choice(WILD) % (1 << bits)


def near(random_: Random, was: int, bits: int = 64) -> int:
    """A number at an edge, or near `was`."""
    return random_.choice((wild(random_, bits), was + random_.choice(NEAR), 2 * was, -was)) % (1 << bits)


def mutated(data: bytes, random_: Random, others: Sequence[bytes] = ()) -> bytes:
    """`data` with some changes, which may insert pieces of `others`."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 1, 2, 3, 6))):
        random_.choice(_CHANGES)(changed, random_, others)
    return bytes(changed[:BYTES_MAX])


def pieces(data: bytes, random_: Random) -> list[bytes]:
    """`data` in a few pieces, as it may come over a network."""
    ends = sorted(random_.randrange(len(data) + 1) for _ in range(random_.choice((0, 0, 1, 3)))) if data else []
    bounds = [0, *ends, len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds) if begin < end]


def _bit(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    if data:
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)


def _byte(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    if data:
        data[random_.randrange(len(data))] = random_.choice((0, 1, 127, 128, 255, random_.randrange(256)))


def _number(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    width = random_.choice((1, 2, 3, 4, 4, 8, 8))
    if len(data) < width:
        return
    at = random_.randrange(len(data) - width + 1)
    if random_.random() < 0.7:
        at = at // width * width
    order = random_.choice(("little", "little", "big"))
    was = int.from_bytes(data[at : at + width], order)  # type: ignore[arg-type]  # one of two words
    data[at : at + width] = near(random_, was, 8 * width).to_bytes(width, order)  # type: ignore[arg-type]  # likewise


def _cut(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    del data[random_.randrange(len(data) + 1) :]


def _longer(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    count = random_.choice((1, 3, 64, random_.randrange(LONGER_MAX)))
    data += random_.choice((bytes(count), b"\xff" * count, random_.randbytes(count), bytes(data[:count])))


def _again(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    begin, end = _range(data, random_)
    data[end:end] = data[begin:end] * random_.choice((1, 1, 2, 5))


def _removed(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    begin, end = _range(data, random_)
    del data[begin:end]


def _swapped(data: bytearray, random_: Random, _: Sequence[bytes]) -> None:
    width = random_.choice((4, 8, 16, 32))
    places = len(data) // width
    if places:
        one, two = (random_.randrange(places) * width for _ in range(2))
        data[one : one + width], data[two : two + width] = data[two : two + width], data[one : one + width]


def _of_another(data: bytearray, random_: Random, others: Sequence[bytes]) -> None:
    if others:
        other = random_.choice(others)
        begin, end = _range(other, random_)
        at = random_.randrange(len(data) + 1)
        data[at : at + random_.choice((0, end - begin))] = other[begin:end]


def _range(data: bytes | bytearray, random_: Random) -> tuple[int, int]:
    begin = random_.randrange(len(data) + 1)
    return begin, min(len(data), begin + random_.choice((1, 4, 8, 64, random_.randrange(LONGER_MAX))))


_CHANGES: tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...] = (
    *(_bit, _bit, _byte, _byte, _number, _number, _number),
    *(_cut, _longer, _again, _removed, _swapped, _of_another),
)
