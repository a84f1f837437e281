"""Encodes values as JSON, checked against a JSON Schema."""

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
        """`exact`: values fit the schema, since it was derived from their columns, and are not checked.

        Raises `InvalidArgument` for a definition that is not a JSON Schema.
        """
        self._serializer = JsonSerializer() if exact else JsonSerializer(schema=definition, framed=False)
        self._context = context
        self._known = _names(json.loads(definition))
        """Names that an object may have; None: the schema alone decides."""

    def __call__(self, value: Any) -> bytes:
        """See `Encoder`. A property that the schema does not name is refused, unless it allows others."""
        if self._known is not None and isinstance(value, Mapping):
            for name in value:
                if name not in self._known:
                    raise UnknownField(name)
        return self._serializer.payload(value, self._context)


_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
"""Keywords by which an object may have other properties than `properties` names."""


def _names(schema: Any) -> set[str] | None:
    if not isinstance(schema, Mapping) or any(schema.get(word, False) is not False for word in _OPEN):
        return None
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) and properties else None


def json_value(value: Any) -> Any:
    """A value of a column as JSON has it: times and dates as ISO 8601, decimals as digits, bytes as base64."""
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
"""By type; the first that fits counts, and a `datetime` is a `date`, too."""
