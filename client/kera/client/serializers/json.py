"""Strict JSON: a value is read back as it was written, and all readers agree on its meaning.

Names are text, and occur only once. There is no NaN and no infinity. Text is UTF-8. Both sides refuse the forms that
JSON itself leaves open and that `json` accepts.

With a JSON Schema, values are checked against it. A producer's schema is registered, and its values begin with the id
(`kera.core.schemas.framing`). A consumer reads values with and without an id, and checks them against its own schema.
It never uses the writer's schema, because hostile patterns in it could take unlimited processor time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

from kera.client.serializers.framed import WithFrame
from kera.client.serializers.protocols import Context, Schemas, Serializer
from kera.client.serializers.refusing import cannot_encode, library, undecodable
from kera.core.base.strict_json import unique_names
from kera.core.errors import InvalidArgument
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import unframe

JsonSchema: TypeAlias = "str | Mapping[str, Any] | bool"
"""The text of a JSON Schema, or its parsed form."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class JsonSerializer:
    """JSON values: None, booleans, numbers, text, lists, and mappings whose names are text."""

    def __init__(self, schema: JsonSchema | None = None, *, framed: bool | None = None) -> None:
        """Make the serializer; with a JSON Schema, values are checked against it.

        `framed`: values begin with the schema's id, which is the default with a schema. Raises `InvalidArgument` when
        the schema is invalid, and when `jsonschema` is not installed.
        """
        self._text = None if schema is None else _text_of(schema)
        self._check = None if schema is None else checker(schema)
        self.framed = schema is not None if framed is None else framed
        if self.framed and schema is None:
            raise InvalidArgument("values that begin with the id of a schema need one: JsonSerializer(schema=...)")

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[Any]:
        """See `NeedsSchema`."""
        if not self.framed or self._text is None:
            return self.payload
        return WithFrame(self.payload, await schemas.id_of(context, SchemaType.JSON, self._text))

    def payload(self, value: Any, context: Context, /) -> bytes:
        """Return the bytes of `value`, without a frame. Raises `CannotEncode`."""
        try:
            _look_at(value)
            text = _encode(value)
            if self._check is not None:
                for error in self._check(value):
                    raise cannot_encode(context, error.message, _path(error.absolute_path))
            return text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise cannot_encode(context, error, where_it_is(value)) from error

    def __call__(self, value: Any, context: Context, /) -> bytes:
        """Return the bytes of `value`. Raises `CannotEncode`, also if a framed serializer is not ready yet."""
        if self.framed:
            raise cannot_encode(context, f"the serializer is not ready: await producer.prepare({context.stream!r})")
        return self.payload(value, context)


class JsonDeserializer:
    """Reads the output of `JsonSerializer`, with a frame or without."""

    def __init__(self, schema: JsonSchema | None = None) -> None:
        """Make the deserializer; with a JSON Schema, values are checked against it. Raises `InvalidArgument`."""
        self._check = None if schema is None else checker(schema)

    def __call__(self, data: bytes, _context: Context, /) -> Any:
        """Return the value in `data`. Raises `CannotDecode`."""
        value = parsed(unframed(data))
        if self._check is not None:
            try:
                for error in self._check(value):
                    raise undecodable(f"{_path(error.absolute_path) or 'the value'}: {error.message}")
            except RecursionError as error:
                raise undecodable(error) from error
        return value


def unframed(data: bytes) -> bytes:
    """Return `data` without the id of a schema, if it begins with one: JSON never begins with a 0 byte.

    Raises `NotFramed`.
    """
    return unframe(data)[1] if data[:1] == b"\x00" else data


def parsed(data: bytes) -> Any:
    """Return the value of the JSON text `data`. Raises `CannotDecode`."""
    try:
        value = _decode(data.decode())
        if b"\\ud" in data or b"\\uD" in data:  # half a surrogate pair would fail at the next use of the text
            _encode(value).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise undecodable(error) from error


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is more than a float can be")
    if number == 0 and text.lower().partition("e")[0].strip("-0."):
        raise ValueError(f"{text[:40]} is closer to 0 than a float can be")
    return number


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


_decode = json.JSONDecoder(object_pairs_hook=unique_names, parse_float=_finite, parse_constant=_no_number).decode


def _look_at(value: Any) -> None:
    """Raise `TypeError` for a mapping whose names are not text, because 1 and "1" would become the same name."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name.__class__ is not str and not isinstance(name, str):
                raise TypeError(f"{name!r} is not a name: names are text")
            if each.__class__ in _CONTAINERS or isinstance(each, _CONTAINERS):
                _look_at(each)
    elif isinstance(value, list | tuple):
        for each in value:
            if each.__class__ in _CONTAINERS or isinstance(each, _CONTAINERS):
                _look_at(each)


_CONTAINERS = (dict, list, tuple)
_DEPTH_MAX = 100
"""Maximum depth of the search for a value that cannot be written."""


def where_it_is(value: Any, path: str = "", depth: int = 0) -> str:
    """Return the path to the part of a value that cannot be written; empty if no single part is to blame."""
    if depth > _DEPTH_MAX:
        return ""
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                return path
            if not _can_be_written(each):
                return where_it_is(each, f"{path}.{name}" if path else name, depth + 1)
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            if not _can_be_written(each):
                return where_it_is(each, f"{path}[{at}]", depth + 1)
    return path


def _can_be_written(value: Any) -> bool:
    try:
        _look_at(value)
        _encode(value).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def checker(schema: JsonSchema) -> Callable[[Any], Iterable[Any]]:
    """Return a function that yields the errors of a value. Raises `InvalidArgument` for an invalid schema.

    The function raises `ValueError` when the schema refers to another one, which it does not contain.
    """
    jsonschema = library("jsonschema", "a JSON Schema")
    referencing = library("referencing", "a JSON Schema")
    try:
        known = json.loads(schema) if isinstance(schema, str) else schema
        kind = jsonschema.validators.validator_for(known, default=jsonschema.Draft202012Validator)
        kind.check_schema(known)
        # With an empty registry, references outside the schema are never fetched.
        iter_errors: Callable[[Any], Iterable[Any]] = kind(known, registry=referencing.Registry()).iter_errors
    except (ValueError, TypeError, RecursionError, jsonschema.SchemaError) as error:
        raise InvalidArgument(f"this is not a valid JSON Schema: {getattr(error, 'message', error)}") from error

    def errors(value: Any) -> Iterable[Any]:
        try:
            yield from iter_errors(value)
        except referencing.exceptions.Unresolvable as error:
            raise ValueError(f"the schema refers to {error.ref!r}, which it does not have") from error

    return errors


def _text_of(schema: JsonSchema) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"this is not a valid JSON Schema: {error}") from error


def _path(parts: Iterable[str | int]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
