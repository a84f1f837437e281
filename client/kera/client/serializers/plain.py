"""Values that are bytes already, text, whole numbers, or nothing."""

from __future__ import annotations

from kera.client.serializers.protocols import Context
from kera.client.serializers.refusing import cannot_encode, undecodable

INT_BYTES = 8
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1


class BytesSerializer:
    """Bytes as they are."""

    def __call__(self, value: bytes | bytearray | memoryview, context: Context, /) -> bytes:
        """Raises `CannotEncode`."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise cannot_encode(context, f"it is {type(value).__name__}, not bytes")


class BytesDeserializer:
    """Bytes as they are."""

    def __call__(self, data: bytes, _context: Context, /) -> bytes:
        """Any bytes, unchanged."""
        return data


class StrSerializer:
    """Text, as UTF-8."""

    def __call__(self, value: str, context: Context, /) -> bytes:
        """Raises `CannotEncode`, also for text that UTF-8 does not have (half a pair of surrogates)."""
        if not isinstance(value, str):
            raise cannot_encode(context, f"it is {type(value).__name__}, not text")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise cannot_encode(context, error) from error


class StrDeserializer:
    """Text, as UTF-8."""

    def __call__(self, data: bytes, _context: Context, /) -> str:
        """Raises `CannotDecode`."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise undecodable(error) from error


class IntSerializer:
    """Whole numbers of 64 bits with a sign, as 8 bytes, the most significant first: as Kafka's LongSerializer."""

    def __call__(self, value: int, context: Context, /) -> bytes:
        """Raises `CannotEncode`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise cannot_encode(context, f"it is {type(value).__name__}, not a whole number")
        if not INT_MIN <= value <= INT_MAX:
            raise cannot_encode(context, f"a whole number of more than {8 * INT_BYTES} bits")
        return value.to_bytes(INT_BYTES, "big", signed=True)


class IntDeserializer:
    """Whole numbers of 8 bytes, or of 4 as Kafka's IntegerSerializer has them."""

    def __call__(self, data: bytes, _context: Context, /) -> int:
        """Raises `CannotDecode`."""
        if len(data) not in {4, INT_BYTES}:
            raise undecodable(f"{len(data)} bytes are not a whole number, which has {INT_BYTES} bytes or 4")
        return int.from_bytes(data, "big", signed=True)


class NoneSerializer:
    """Nothing: for streams of which only the keys count."""

    def __call__(self, value: None, context: Context, /) -> bytes:
        """Raises `CannotEncode`: None does not get here."""
        raise cannot_encode(context, f"it is {type(value).__name__}, and only None is sent")


class NoneDeserializer:
    """Nothing, whatever is there."""

    def __call__(self, _data: bytes, _context: Context, /) -> None:
        """Looks at nothing."""
        return
