"""Schemas of values: their kinds, the modes of compatibility, and their limits.

The coordinator, which keeps the registry of schemas, the client and serializers share this package. It is pure: no
files, no network, and no libraries for kinds of schemas. Typed streams have a schema of Arrow's instead, and do not
need this package: see `kera.core.format.schema`.
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
