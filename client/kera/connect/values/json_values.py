"""Encodes values as JSON, and checks them against a JSON Schema."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from kera.client.serializers import Context, JsonSerializer
from kera.connect.values.encoding import UnknownField


class JsonEncoder:
    """Encodes values with one JSON Schema."""

    def __init__(self, definition: str, context: Context, *, exact: bool = False) -> None:
        """`exact`: values are not checked, because the schema was derived from their columns.

        Raises `InvalidArgument` for a definition that is not a JSON Schema.
        """
        self._serializer = JsonSerializer() if exact else JsonSerializer(schema=definition, framed=False)
        self._context = context
        self._known = _names(json.loads(definition))
        """Names of properties that an object may have; None: only the schema decides."""

    def __call__(self, value: Any) -> bytes:
        """See `Encoder`. Raises `UnknownField` for a property without a schema, unless the schema allows others."""
        if self._known is not None and isinstance(value, Mapping):
            for name in value:
                if name not in self._known:
                    raise UnknownField(name)
        return self._serializer.payload(value, self._context)


_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
"""Keywords that may allow an object other properties than those in `properties`."""


def _names(schema: Any) -> set[str] | None:
    if not isinstance(schema, Mapping) or any(schema.get(word, False) is not False for word in _OPEN):
        return None
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) and properties else None


def json_value(value: Any) -> Any:
    """Convert a column's value for JSON: times and dates to ISO 8601, decimals to digits, bytes to base64."""
    if isinstance(value, Mapping):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [json_value(each) for each in value]
    as_text = next((text for kind, text in _TEXTS.items() if isinstance(value, kind)), None)
    return value if as_text is None else as_text(value)


def _moment(value: datetime.datetime) -> str:
    text = value.isoformat()
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text


_TEXTS: dict[type, Callable[[Any], str]] = {
    datetime.datetime: _moment,
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    Decimal: lambda value: f"{value:f}",
    bytes: lambda value: base64.b64encode(value).decode(),
}
"""The conversions by type. The first that fits counts, because a `datetime` is also a `date`."""
