"""Limits of subjects, definitions and message names, checked on arrival. Pure."""

from __future__ import annotations

import re
from typing import Any

from kera.core.errors import InvalidArgument, InvalidSchema
from kera.core.schemas.kinds import SchemaType

SUBJECT_CHARS_MAX = 255
"""The maximum length of a stream's name, 249, and ``-value``, which its subject adds."""
DEFINITION_BYTES_MAX = 256 << 10
"""Maximum of a definition in UTF-8."""
MESSAGE_CHARS_MAX = 512
"""Maximum of the full name of a Protobuf message."""
VERSIONS_MAX = 1_000
"""Maximum of versions of a subject, as each is checked if a new one has to be compatible with all."""
VERSION_MAX = (1 << 31) - 1
"""The largest number of a version."""
_SUBJECT = re.compile(r"[a-zA-Z0-9._-]+")
_MESSAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_SUFFIXES = ("-value", "-key")


def checked_subject(subject: Any) -> str:
    """Return `subject`. Raises `InvalidArgument` if it is not a valid name of a subject."""
    if isinstance(subject, str) and _SUBJECT.fullmatch(subject) and len(subject) <= SUBJECT_CHARS_MAX:
        return subject
    shown = repr(subject[: SUBJECT_CHARS_MAX + 1] if isinstance(subject, str) else subject)
    raise InvalidArgument(
        f"a subject cannot be called {shown}: it is STREAM-value or STREAM-key, and has 1 to {SUBJECT_CHARS_MAX}"
        " letters, digits, dots, underscores and hyphens",
        subject=shown,
    )


def checked_text(definition: Any) -> str:
    """Return `definition`. Raises `InvalidSchema` if it is not text, is empty, or is too long to be examined."""
    try:
        if not isinstance(definition, str):
            raise InvalidSchema(f"a definition is text, not {type(definition).__name__}")
        size = len(definition) if len(definition) > DEFINITION_BYTES_MAX else len(definition.encode())
    except UnicodeEncodeError:
        raise InvalidSchema("the definition has characters that UTF-8 has not") from None
    if not size:
        raise InvalidSchema("the definition is empty")
    if size > DEFINITION_BYTES_MAX:
        raise InvalidSchema(
            f"the definition takes {size} bytes or more, and the limit is {DEFINITION_BYTES_MAX}: split it, or leave"
            " descriptions out",
            limit=DEFINITION_BYTES_MAX,
        )
    return definition


def checked_message(message: Any, schema_type: SchemaType) -> str:
    """Return `message`. Raises `InvalidArgument` unless it is empty or a valid name of a Protobuf message."""
    if message == "":
        return ""
    if schema_type is not SchemaType.PROTOBUF:
        raise InvalidArgument(f"a schema of type {schema_type} has no message to choose: leave message out")
    if (
        not isinstance(message, str)
        or len(message) > MESSAGE_CHARS_MAX
        or (message and not _MESSAGE.fullmatch(message))
    ):
        shown = repr(message)[:MESSAGE_CHARS_MAX]
        raise InvalidArgument(f"{shown} is not a full Protobuf message name, such as shop.v1.Order", message=shown)
    return str(message)


def stream_of(subject: str) -> str:
    """Return the stream of a subject: its name without ``-value`` or ``-key``, or the whole name."""
    for suffix in _SUFFIXES:
        if subject.endswith(suffix) and len(subject) > len(suffix):
            return subject.removesuffix(suffix)
    return subject
