"""Decodes values in a format that the user chose, or by their appearance. Pure, except for `Decoder.look_up`.

Values may come from anybody: no value makes this code raise, and time and memory are bounded by the length of the
value. Values of more than `TAKEN_APART_BYTES_MAX` bytes are not decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from kera.client.serializers import Context, IntDeserializer, JsonDeserializer, MsgpackDeserializer
from kera.client.serializers.json import unframed
from kera.console.browsing.decoding import (
    TAKEN_APART_BYTES_MAX,
    Shown,
    is_taken_apart,
    shown,
    shown_document,
    shown_hex,
    shown_json,
    shown_text,
    text_of,
)
from kera.console.browsing.registered import Registered
from kera.core.errors import CannotDecode, InvalidArgument, KeraError

AUTO: Final = "auto"
FORMATS: Final = {
    AUTO: "Automatic",
    "schema": "By its schema",
    "json": "JSON",
    "msgpack": "msgpack",
    "text": "Text",
    "integer": "Integer",
    "hex": "Hexadecimal",
}
"""Formats of values, with their names for people."""
_CONTEXT = Context("", "value")
_REASON_MAX = 120
_FAILURES = (KeraError, ValueError, RecursionError, TypeError, KeyError, OverflowError)


class Decoder:
    """Decodes values in one of `FORMATS`.

    Automatic uses the first that fits: the schema that a value names, JSON (an object or a list), text, msgpack (an
    object), and otherwise the bytes.
    """

    def __init__(self, chosen: str = AUTO, registered: Registered | None = None) -> None:
        """`registered`: decodes values that name a schema; None: they are not decoded."""
        self.chosen = chosen
        self._registered = registered

    async def look_up(self, values: Iterable[bytes | None], asked_max: int) -> int:
        """Look up the schemas that values name; see `Registered.look_up`."""
        return 0 if self._registered is None else await self._registered.look_up(values, asked_max)

    def document(self, value: bytes | None) -> Any:
        """Return a value for filters; bytes if it does not fit the format, or is too long."""
        if not value or len(value) > TAKEN_APART_BYTES_MAX:
            return value if value is None or value else ""
        if self.chosen == AUTO:
            return self._guessed(value)
        try:
            return self._read(value)[1]
        except _FAILURES:
            return value

    def key(self, value: bytes | None) -> Any:
        """Return a key for filters. The chosen format applies only to values."""
        return Decoder(AUTO, self._registered).document(value)

    def shown(self, value: bytes | None, length_max: int) -> Shown:
        """Show a value in at most `length_max` characters. If it does not fit the format, `Shown.problem` says why."""
        if self.chosen == AUTO or not value:
            return self._shown_as_guessed(value, length_max)
        match self.chosen:
            case "text":
                return shown_text(value, length_max)
            case "hex":
                return shown_hex(value, length_max)
        if not is_taken_apart(value, length_max):
            return shown(value, length_max)._replace(problem=f"too long to be shown as {FORMATS[self.chosen]}")
        try:
            kind, document = self._read(value)
            # Show JSON as it is written, because decoding loses digits of numbers.
            written = shown_json(unframed(value), kind, len(value), length_max) if kind == "json" else None
            return written or shown_document(document, kind, len(value), length_max)
        except _FAILURES as error:
            return shown(value, length_max)._replace(problem=_reason(self.chosen, error))

    def _read(self, value: bytes) -> tuple[str, Any]:
        """Decode a value in the chosen format into kind and document. Raises one of `_FAILURES`."""
        match self.chosen:
            case "schema":
                found = None if self._registered is None else self._registered.document(value)
                if found is None:
                    raise CannotDecode("it names no registered schema, or does not fit the one that it names")
                return found
            case "json":
                return "json", JsonDeserializer()(value, _CONTEXT)
            case "msgpack":
                return "msgpack", MsgpackDeserializer()(value, _CONTEXT)
            case "integer":
                return "integer", IntDeserializer()(value, _CONTEXT)
            case "text":
                return "text", value.decode(errors="replace")
        return "hex", value

    def _guessed(self, value: bytes) -> Any:
        by_schema = None if self._registered is None else self._registered.document(value)
        if by_schema is not None:
            return by_schema[1]
        if value[:64].lstrip()[:1] in {b"{", b"["}:
            found = _of(json.loads, value)
            if found is not None:
                return found
        text = text_of(value)
        if text is not None:
            return text
        packed = _packed(value)
        return value if packed is None else packed

    def _shown_as_guessed(self, value: bytes | None, length_max: int) -> Shown:
        by_schema = None if self._registered is None else self._registered.shown(value, length_max)
        if by_schema is not None:
            return by_schema
        found = shown(value, length_max)
        if found.kind == "hex" and value and is_taken_apart(value, length_max):
            packed = _packed(value)
            if packed is not None:
                return _of(lambda _: shown_document(packed, "msgpack", len(value), length_max), value) or found
        return found


def _packed(value: bytes) -> dict[Any, Any] | None:
    """Decode an object of msgpack; None: it is not an object.

    Other bytes rarely decode as an object, but often as a number or a list.
    """
    first = value[0]
    if not (0x81 <= first <= 0x8F or first in {0xDE, 0xDF}):
        return None
    found = _of(lambda data: MsgpackDeserializer()(data, _CONTEXT), value)
    return found if isinstance(found, dict) and all(isinstance(name, str) for name in found) else None


def _of(read: Callable[[bytes], Any], value: bytes) -> Any:
    """Return the result of `read` for a value; None: it fails."""
    try:
        return read(value)
    except _FAILURES:
        return None


def _reason(chosen: str, error: Exception) -> str:
    if isinstance(error, InvalidArgument):
        return error.message  # a library is not installed
    reason = error.message if isinstance(error, KeraError) else str(error) or type(error).__name__
    if len(reason) > _REASON_MAX:
        reason = reason[:_REASON_MAX] + "…"
    return f"not {FORMATS[chosen]}: {reason}" if chosen != "schema" else reason
