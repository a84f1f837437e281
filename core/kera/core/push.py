"""The messages of the push channel as bytes, as ``proto/kera/v1/push.proto`` defines them. Pure.

A message is a length, a kind and a body. `Decoder` extracts messages from a byte stream; `encode_runs` and `runs_of`
convert messages of kind `RUNS`, the only ones that are sent while chunks flow: 64 bytes for many chunks.

Limits: a body has at most `BODY_BYTES_MAX`. A longer one, or bytes that are not a message, raise `ProtocolError`:
nothing that follows on the connection can be trusted.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from kera.core.errors import ProtocolError

VERSION = 2
DEFAULT_DOMAIN = "default"
"""The memory domain of streams for which no other is set."""
ALIVE_INTERVAL_MS = 1_000
"""How often a broker sends `ALIVE`, whatever else it sends."""
SILENT_INTERVALS_MAX = 5
"""Number of these intervals without a message after which a reader leaves the broker."""
BODY_BYTES_MAX = 1 << 20
STRANGER_BYTES_MAX = 64 << 10
"""Maximum of a message's body from a peer that has not received any memory yet."""
WINDOW_BYTES_MAX = 64 << 20
WINDOW_SHARE_MAX = 8
"""A window is at most one such share of a broker's memory: it closes before its reader holds too much."""
HEAD = struct.Struct("<IB3x")
RUN = struct.Struct("<IIQQIIQI4xQ8x")
"""A run: subscription, slot, generation, arena offset, length, segment, group, offset, lag; 64 bytes."""
_TAKEN = struct.Struct("<Q")


class PushKind(enum.IntEnum):
    """The kind of a message."""

    HELLO = 0
    RUNS = 1
    END = 2
    ALIVE = 3
    AUTHENTICATED = 4
    REFUSED = 5
    SUBSCRIBE = 16
    CANCEL = 17
    TAKEN = 18
    RELEASE = 19
    AUTHENTICATE = 20
    OPEN = 21


class Run(NamedTuple):
    """Consecutive whole chunks of one segment, in a slot of the arena."""

    lane: int
    """Number of the subscription."""
    slot: int
    generation: int
    """Generation of the slot. If the slot has another generation, its bytes have changed, too."""
    arena_offset: int
    """Offset of the first byte from the start of the arena file."""
    length_bytes: int
    segment_id: int
    group_id: int
    offset: int
    """Position of the first chunk within its segment."""
    lag_records: int
    """Records between the end of the run and the durable head of its entry."""


_KINDS = {kind.value: kind for kind in PushKind}
_as_run: Callable[[Iterable[Any]], Run] = partial(tuple.__new__, Run)
"""Does the same as `Run._make` in half the time; the structure has as many fields as the tuple."""


def window_bytes_max(slots: int, slot_bytes: int) -> int:
    """Return the largest window that a broker with this memory allows, in bytes."""
    return max(1, min(WINDOW_BYTES_MAX, slots * slot_bytes // WINDOW_SHARE_MAX))


def encode(kind: PushKind, body: bytes) -> bytes:
    """Return a message."""
    return HEAD.pack(len(body), kind) + body


ALIVE = encode(PushKind.ALIVE, b"")
"""The message of kind `ALIVE`, which has no body."""


def encode_runs(runs: Iterable[Run]) -> bytes:
    """Return a message of kind `RUNS`."""
    return encode(PushKind.RUNS, b"".join([RUN.pack(*run) for run in runs]))


def encode_taken(taken_bytes: int) -> bytes:
    """Return a message of kind `TAKEN`."""
    return encode(PushKind.TAKEN, _TAKEN.pack(taken_bytes))


def encode_numbers(kind: PushKind, numbers: Sequence[int]) -> bytes:
    """Return a message of kind `CANCEL` or `RELEASE`, whose numbers are subscriptions or slots."""
    return encode(kind, struct.pack(f"<{len(numbers)}I", *numbers))


def runs_of(body: bytes) -> Iterator[Run]:
    """Return the content of a message of kind `RUNS`. Raises `ProtocolError`."""
    if len(body) % RUN.size:
        raise ProtocolError("a push message of runs has an invalid length")
    return map(_as_run, RUN.iter_unpack(body))


def taken_of(body: bytes) -> int:
    """Return the content of a message of kind `TAKEN`. Raises `ProtocolError`."""
    if len(body) != _TAKEN.size:
        raise ProtocolError("a push message TAKEN has an invalid length")
    return int(_TAKEN.unpack(body)[0])


def numbers_of(body: bytes) -> tuple[int, ...]:
    """Return the content of a message of kind `CANCEL` or `RELEASE`. Raises `ProtocolError`."""
    if len(body) % 4:
        raise ProtocolError("a push message of numbers has an invalid length")
    return struct.unpack(f"<{len(body) // 4}I", body)


class Decoder:
    """Extracts messages from a byte stream that arrives in pieces."""

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.body_bytes_max = body_bytes_max
        self._data = bytearray()
        self._at = 0
        """The start of the next message in `_data`. The bytes before it are removed after all messages, in one go."""

    @property
    def unfinished(self) -> bool:
        """Whether a message has begun to arrive, and is not complete."""
        return self._at < len(self._data)

    def feed(self, piece: bytes) -> Iterator[tuple[PushKind, bytes]]:
        """Yield the messages that `piece` completes. Raises `ProtocolError`."""
        data = self._data
        data += piece
        while len(data) - self._at >= HEAD.size:
            length, number = HEAD.unpack_from(data, self._at)
            if length > self.body_bytes_max:
                raise ProtocolError(
                    f"a push message of {length} bytes is over the limit of {self.body_bytes_max}",
                    limit=self.body_bytes_max,
                )
            kind = _KINDS.get(number)
            if kind is None:
                raise ProtocolError(f"a push message of unknown kind {number}; is the peer newer?")
            begin = self._at + HEAD.size
            end = begin + length
            if len(data) < end:
                break
            self._at = end  # before the message is handled, as that may raise an error
            yield kind, bytes(data[begin:end])
        del data[: self._at]
        self._at = 0
