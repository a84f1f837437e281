"""Fuzzing targets with known defects."""

import os
import time
from random import Random

from kera.core.errors import CorruptChunk, InternalError
from tests.fuzz.target import Target

ENDS, STANDS_STILL = b"\x03", b"\x05"


def _make(random_: Random) -> bytes:
    return bytes([random_.randrange(8)])


def _ends(data: bytes) -> str:
    if data == ENDS:
        os._exit(7)
    if data == b"\0":
        raise CorruptChunk("it is none")
    if data == b"\1":
        raise InternalError("invariant broken")
    if data == b"\2":
        raise IndexError("list index out of range")
    return "read"


def _stands_still(data: bytes) -> str:
    if data == STANDS_STILL:
        time.sleep(3600)  # sleep: the run must find this input, which never returns
    return "read"


def _takes_memory(data: bytes) -> str:
    return f"{len(bytearray(16 << 30))} bytes" if data == b"\1" else "read"


TARGETS = {
    target.name: target
    for target in (
        Target("ends", _make, _ends),
        Target("stands-still", _make, _stands_still),
        Target("takes-memory", _make, _takes_memory),
    )
}
