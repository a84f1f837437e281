"""Schemas of values: what kinds there are, which changes of one are compatible, and how large one may be.

Shared by the coordinator, which keeps the registry of schemas, by the client, and by serializers. Everything below here
is pure: no file, no network, and none of the libraries for a kind of schema. Streams with columns of their own have a
schema of Arrow's besides, and need none of this: see `kera.core.format.schema`.
"""

from kera.core.schemas.framing import SCHEMA_ID_MAX
from kera.core.schemas.kinds import Compatibility, SchemaType
from kera.core.schemas.limits import (
    DEFINITION_BYTES_MAX,
    MESSAGE_CHARS_MAX,
    SUBJECT_CHARS_MAX,
    VERSION_MAX,
    VERSIONS_MAX,
    checked_message,
    checked_subject,
    checked_text,
    stream_of,
)

__all__ = [
    "DEFINITION_BYTES_MAX",
    "MESSAGE_CHARS_MAX",
    "SCHEMA_ID_MAX",
    "SUBJECT_CHARS_MAX",
    "VERSIONS_MAX",
    "VERSION_MAX",
    "Compatibility",
    "SchemaType",
    "checked_message",
    "checked_subject",
    "checked_text",
    "stream_of",
]
