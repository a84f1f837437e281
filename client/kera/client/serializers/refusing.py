"""The errors of serializers and deserializers, and the error for a missing library."""

from __future__ import annotations

import importlib
from typing import Any

from kera.client.serializers.protocols import Context
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument

REASON_CHARS_MAX = 500
"""Maximum length of a reason, which may be as long as the value."""


def cannot_encode(context: Context, reason: object, field: str = "") -> CannotEncode:
    """Return the error for a value that cannot be written, or a field of it (a path, as ``lines[2].price``)."""
    where = f", field {field}" if field else ""
    why = words(reason)
    return CannotEncode(
        f"the {context.part} for stream {context.stream!r} cannot be serialized{where}: {why}",
        stream=context.stream,
        part=context.part,
        field=field,
        reason=why,
    )


def undecodable(reason: object) -> CannotDecode:
    """Return the error for bytes that cannot be read. Callers that know their place add it."""
    why = words(reason)
    return CannotDecode(why, reason=why)


def words(reason: object) -> str:
    """Return the reason of an error as one line of limited length."""
    if isinstance(reason, RecursionError):
        return "it is nested too deeply, or contains itself"
    text = str(reason) or type(reason).__name__
    if isinstance(reason, BaseException) and not isinstance(reason, ValueError):
        text = f"{type(reason).__name__}: {text}" if str(reason) else text
    text = " ".join(text.split())
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"


def library(name: str, needed_by: str) -> Any:
    """Return a module of an optional package. Raises `InvalidArgument` when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InvalidArgument(f"{needed_by} needs {package}: pip install 'kera[serializers]' ({error})") from error
