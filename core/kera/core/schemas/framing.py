"""The framing of values: the id of the schema precedes the payload, as in values from Kafka.

::

    0        1                        5
    +--------+------------------------+----------------------------------------------------+
    | 0x00   | schema id, big-endian  | payload                                            |
    +--------+------------------------+----------------------------------------------------+

The payload of Avro is its binary form without a schema, that of JSON is UTF-8 text. That of Protobuf begins with the
path to its message within the schema's last file: the count of numbers, then the numbers, each as a zigzag varint.
Message 3 nested in message 1 has the path ``[1, 3]``. The commonest path, ``[0]``, is written as the single byte 0.

This is the framing of Confluent's serializers: their values can be read here, and the other way round. Values may come
from any program, so the functions that read them check the lengths first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kera.core.errors import InvalidArgument, NotFramed

__all__ = [
    "FRAME_BYTES",
    "SCHEMA_ID_MAX",
    "frame",
    "frame_of",
    "message_path_to_bytes",
    "split_message_path",
    "unframe",
]

FRAME_BYTES = 5
"""Number of bytes before the payload."""

SCHEMA_ID_MAX = (1 << 31) - 1
"""The largest id; the smallest is 1. Other implementations read ids as signed numbers."""

_MAGIC = 0
_PATH_NUMBERS_MAX = 64
"""Maximum depth of nested messages, far above any in use."""
_VARINT_BYTES_MAX = 5
"""Maximum length of a varint of 32 bits."""


def frame_of(schema_id: int) -> bytes:
    """Return the prefix of payloads that are written with this schema. Raises `InvalidArgument`."""
    if not 0 < schema_id <= SCHEMA_ID_MAX:
        raise InvalidArgument(f"{schema_id} is not a schema id: ids are 1 to {SCHEMA_ID_MAX}", schema_id=schema_id)
    return b"\x00" + schema_id.to_bytes(4, "big")


def frame(schema_id: int, payload: bytes) -> bytes:
    """Return the value for a `payload` that is written with this schema. Raises `InvalidArgument`."""
    return frame_of(schema_id) + payload


def unframe(value: bytes) -> tuple[int, bytes]:
    """Return the id of the schema of `value`, and its payload. Raises `NotFramed`."""
    if len(value) < FRAME_BYTES:
        raise NotFramed(
            f"a value of {len(value)} bytes does not begin with the id of a schema, which takes {FRAME_BYTES};"
            " was it written without a registry?",
            bytes=len(value),
        )
    if value[0] != _MAGIC:
        raise NotFramed(
            f"a value that begins with byte 0x{value[0]:02x} and not with 0x00 does not name its schema;"
            " was it written without a registry?",
            first_byte=value[0],
        )
    schema_id = int.from_bytes(value[1:FRAME_BYTES], "big")
    if not 0 < schema_id <= SCHEMA_ID_MAX:
        raise NotFramed(
            f"a value names schema {schema_id}, and ids are 1 to {SCHEMA_ID_MAX}; was it written without a registry?",
            schema_id=schema_id,
        )
    return schema_id, value[FRAME_BYTES:]


def message_path_to_bytes(path: Sequence[int]) -> bytes:
    """Return the bytes of the path to a Protobuf message within its file. Raises `InvalidArgument`."""
    if not 0 < len(path) <= _PATH_NUMBERS_MAX or not all(0 <= number <= SCHEMA_ID_MAX for number in path):
        raise InvalidArgument(f"{list(path)} is not a path to a message", path=list(path))
    if list(path) == [0]:
        return b"\x00"
    return b"".join(_zigzag(number) for number in (len(path), *path))


def split_message_path(payload: bytes) -> tuple[tuple[int, ...], bytes]:
    """Split `payload` into the path to the message within its file, and the message. Raises `NotFramed`."""
    count, at = _read_zigzag(payload, 0)
    if count == 0:
        return (0,), payload[at:]
    if not 0 < count <= _PATH_NUMBERS_MAX:
        raise NotFramed(f"the path to the message has {count} numbers, and at most {_PATH_NUMBERS_MAX} are taken")
    path = []
    for _ in range(count):
        number, at = _read_zigzag(payload, at)
        if number < 0:
            raise NotFramed(f"the path to the message has the number {number}")
        path.append(number)
    return tuple(path), payload[at:]


def _zigzag(number: int) -> bytes:
    """Return a number that is not negative as a zigzag varint."""
    left, parts = number << 1, bytearray()
    while left > 0x7F:
        parts.append(left & 0x7F | 0x80)
        left >>= 7
    parts.append(left)
    return bytes(parts)


def _read_zigzag(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at offset `at`, and the offset behind it. Raises `NotFramed`."""
    value = 0
    for index, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at + index + 1
    raise NotFramed("the path to the message ends within a number", at=at)
