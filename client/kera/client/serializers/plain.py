"""Values that are bytes, text, whole numbers, or nothing."""

from __future__ import annotations

from kera.client.serializers.protocols import Context
from kera.client.serializers.refusing import cannot_encode, undecodable

INT_BYTES = 8
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1


class BytesSerializer:
    """Bytes, unchanged."""

    def __call__(self, value: bytes | bytearray | memoryview, context: Context, /) -> bytes:
        """Return `value` as bytes. Raises `CannotEncode` for other types."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise cannot_encode(context, f"it is {type(value).__name__}, not bytes")


class BytesDeserializer:
    """Bytes, unchanged."""

    def __call__(self, data: bytes, _context: Context, /) -> bytes:
        """Return `data` unchanged."""
        return data


class StrSerializer:
    """Text, as UTF-8."""

    def __call__(self, value: str, context: Context, /) -> bytes:
        """Return `value` in UTF-8. Raises `CannotEncode`, also for text outside UTF-8 (half a surrogate pair)."""
        if not isinstance(value, str):
            raise cannot_encode(context, f"it is {type(value).__name__}, not text")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise cannot_encode(context, error) from error


class StrDeserializer:
    """Text, as UTF-8."""

    def __call__(self, data: bytes, _context: Context, /) -> str:
        """Return the text in `data`. Raises `CannotDecode`."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise undecodable(error) from error


class IntSerializer:
    """Signed whole numbers of 64 bits, as 8 bytes, the most significant first, like Kafka's LongSerializer."""

    def __call__(self, value: int, context: Context, /) -> bytes:
        """Return the 8 bytes of `value`. Raises `CannotEncode`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise cannot_encode(context, f"it is {type(value).__name__}, not a whole number")
        if not INT_MIN <= value <= INT_MAX:
            raise cannot_encode(context, f"a whole number of more than {8 * INT_BYTES} bits")
        return value.to_bytes(INT_BYTES, "big", signed=True)


class IntDeserializer:
    """Whole numbers of 8 bytes, or of 4 bytes like those of Kafka's IntegerSerializer."""

    def __call__(self, data: bytes, _context: Context, /) -> int:
        """Return the number in `data`. Raises `CannotDecode`."""
        if len(data) not in {4, INT_BYTES}:
            raise undecodable(f"{len(data)} bytes are not a whole number, which has {INT_BYTES} bytes or 4")
        return int.from_bytes(data, "big", signed=True)


class NoneSerializer:
    """Nothing: for streams that only use the keys of records."""

    def __call__(self, value: None, context: Context, /) -> bytes:
        """Raise `CannotEncode`: serializers are not called for None."""
        raise cannot_encode(context, f"it is {type(value).__name__}, and only None is sent")


class NoneDeserializer:
    """Nothing, whatever the bytes are."""

    def __call__(self, _data: bytes, _context: Context, /) -> None:
        """Return None, and ignore the bytes."""
        return
