"""The records of the schema registry in the metadata.

schemas/compatibility      of subjects without their own, as its word
schemas/ids/<id>           SchemaRecord, 8 hexadecimal digits
schemas/subjects/<digest>  SubjectRecord; a name may be too long for a key
last/schema_id             the last id that was given, as decimal text
"""

from __future__ import annotations

import hashlib

from kera.coordinator.schemas.bookkeeping import Change

DEFAULT_COMPATIBILITY = "schemas/compatibility"
SCHEMAS = "schemas/ids/"
SUBJECTS = "schemas/subjects/"


def schema_key(schema_id: int) -> str:
    """Return the key of a schema's record."""
    return f"{SCHEMAS}{schema_id:08x}"


def subject_key(subject: str) -> str:
    """Return the key of a subject's record."""
    return SUBJECTS + hashlib.sha256(subject.encode()).hexdigest()[:40]


def changes_of(change: Change) -> dict[str, bytes | None]:
    """Return the records to write for a change."""
    record = change.record
    return {
        subject_key(change.subject): None if record is None else record.SerializeToString(),
        **{
            schema_key(schema_id): None if schema is None else schema.SerializeToString()
            for schema_id, schema in change.schemas.items()
        },
    }
