"""The values of JSON, bytes and times in the msgpack format, which is shorter than JSON and not readable as text.

Names of mappings are text. Times need a time zone, and come back in UTC. Lists and tuples come back as lists.
"""

from __future__ import annotations

from typing import Any

from kera.client.serializers.protocols import Context
from kera.client.serializers.refusing import cannot_encode, library, undecodable

_CONTAINERS = (dict, list, tuple)


class MsgpackSerializer:
    """Values of the types that msgpack has."""

    def __init__(self) -> None:
        """Make the serializer. Raises `InvalidArgument` when `msgpack` is not installed."""
        self._pack = library("msgpack", "MsgpackSerializer").packb

    def __call__(self, value: Any, context: Context, /) -> bytes:
        """Return the bytes of `value`. Raises `CannotEncode`."""
        try:
            _look_at(value)
            return self._pack(value, datetime=True)  # type: ignore[no-any-return]
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise cannot_encode(context, error, self._where(value)) from error

    def _where(self, value: Any, path: str = "", depth: int = 0) -> str:
        """Return the path to the part that cannot be written; empty if no single part is to blame."""
        if depth > _DEPTH_MAX:
            return ""
        if isinstance(value, _CONTAINERS):
            of_mapping = isinstance(value, dict)
            for name, each in value.items() if isinstance(value, dict) else enumerate(value):
                if of_mapping and not isinstance(name, str):
                    return path
                step = f"[{name}]" if not of_mapping else f".{name}" if path else str(name)
                if not self._can_be_written(each):
                    return self._where(each, path + step, depth + 1)
        return path

    def _can_be_written(self, value: Any) -> bool:
        try:
            _look_at(value)
            self._pack(value, datetime=True)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return False
        return True


_DEPTH_MAX = 100


def _look_at(value: Any) -> None:
    """Raise `TypeError` for names that are not text, because readers refuse them."""
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{name!r} is not a name: names are text")
            if isinstance(each, _CONTAINERS):
                _look_at(each)
    elif isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, _CONTAINERS):
                _look_at(each)


class MsgpackDeserializer:
    """Reads the output of `MsgpackSerializer`."""

    def __init__(self) -> None:
        """Make the deserializer. Raises `InvalidArgument` when `msgpack` is not installed."""
        module = library("msgpack", "MsgpackDeserializer")
        self._unpack, self._errors = module.unpackb, (module.UnpackException, ValueError, TypeError, OverflowError)

    def __call__(self, data: bytes, _context: Context, /) -> Any:
        """Return the value in `data`. Raises `CannotDecode`. Declared lengths are limited by the length of `data`."""
        try:
            # Only text and bytes are accepted as names: numbers could be chosen so that they all have the same hash.
            return self._unpack(data, timestamp=3, strict_map_key=True, object_pairs_hook=_once)
        except (*self._errors, RecursionError) as error:
            raise undecodable(error) from error


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice in a mapping")
    return found
