"""The content of the schema registry, and the changes to it. Pure: records in, records out.

Invariants:

1. A text has one id, in whatever subjects it is, and at most one version per subject. It is gone with the last of them.
2. The numbers of a subject's versions only grow, as long as the subject exists.
3. The total size is bounded: the registry is in the coordinator's memory, and in each copy of the metadata.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kera.core.errors import InvalidArgument, UnknownSchema, UnknownSubject
from kera.core.schemas import VERSIONS_MAX, Compatibility
from kera.core.schemas.kinds import SchemaType
from kera.server.schemas.compatibility import Definition, Version
from kera.v1 import schema_pb2 as messages

SUBJECTS_MAX = 100_000
BYTES_MAX = 24 << 20
"""Maximum of all definitions and their records: a copy of the metadata has to fit into a message (30 MiB)."""
SUBJECT_BYTES_MAX = 4 << 20
"""Maximum of the definitions of one subject: a new one may have to be compared with all of them."""
SUBJECT_BYTES, VERSION_BYTES, SCHEMA_BYTES = 120, 60, 60
"""Approximate size of each, without its name or its definition."""
SUBJECTS_OF_PAGE_MAX = 5_000


class Basis(NamedTuple):
    """The state of a subject on which a decision about a new version is based."""

    compatibility: Compatibility
    versions: tuple[tuple[int, int], ...]
    """Number and id of each version."""


class Change(NamedTuple):
    """The records to write; None deletes a record."""

    subject: str
    record: messages.SubjectRecord | None
    schemas: Mapping[int, messages.SchemaRecord | None]
    """Records by id."""
    added_bytes: int = 0
    """The bytes that it adds to its author's share."""


class Registry:
    """The subjects, versions and ids of the schema registry. Each change is checked first and returned as records."""

    def __init__(
        self,
        subjects: Iterable[messages.SubjectRecord] = (),
        schemas: Iterable[messages.SchemaRecord] = (),
        default: Compatibility = Compatibility.BACKWARD,
    ) -> None:
        self.default = default
        """Compatibility of subjects without their own."""
        self._subjects: dict[str, messages.SubjectRecord] = {}
        self._names: list[str] = []
        """Names of subjects with versions, sorted."""
        self._schemas: dict[int, messages.SchemaRecord] = {}
        self._ids: dict[bytes, int] = {}
        """Ids by the digest of the definition."""
        self._users: dict[int, dict[str, None]] = {}
        """For each schema, the subjects that have it, in order of registration."""
        self._bytes = 0
        self.bytes_by: Counter[str] = Counter()
        """Approximate size of what each principal has registered; a schema that several have registered counts
        for each.
        """
        self._versions_by: Counter[tuple[str, int]] = Counter()
        """The number of versions with a schema that a principal has registered, by principal and schema."""
        for schema in schemas:
            self._put_schema(schema.schema_id, schema)
        for subject in subjects:
            self._put_subject(subject.subject, subject)

    @property
    def bytes(self) -> int:
        """Approximate size of the whole registry."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._subjects)

    # -- queries ---------------------------------------------------------------------------------------------------

    def subjects(self, prefix: str, after: str) -> tuple[list[str], bool]:
        """Return a page of subjects with versions and this prefix, sorted, behind `after`; and whether there
        are more.
        """
        at = bisect_left(self._names, max(prefix, f"{after}\0" if after else ""))
        page = self._names[at : at + SUBJECTS_OF_PAGE_MAX + 1]
        found = [name for name in page if name.startswith(prefix)]
        return found[:SUBJECTS_OF_PAGE_MAX], len(found) > SUBJECTS_OF_PAGE_MAX

    def subject(self, subject: str) -> messages.SubjectRecord:
        """Return a subject that has versions. Raises `UnknownSubject`."""
        record = self._subjects.get(subject)
        if record is None or not record.versions:
            raise UnknownSubject(f"no schema is registered under {subject!r}", subject=subject)
        return record

    def compatibility(self, subject: str) -> tuple[Compatibility, bool]:
        """Return the compatibility of a subject, even of one without versions; and whether it is the default."""
        record = self._subjects.get(subject)
        own = None if record is None else Compatibility.from_wire(record.compatibility)
        return own or self.default, own is None

    def version(self, subject: str, number: int) -> messages.RegisteredSchema:
        """Return a version with its schema; 0: the newest. Raises `UnknownSubject` and `UnknownSchema`."""
        record = self.subject(subject)
        found = next((each for each in record.versions if each.version == number), None)
        if not number:
            found = record.versions[-1]
        if found is None:
            raise UnknownSchema(
                f"{subject} has no version {number}: it has up to {record.versions[-1].version}",
                subject=subject,
                version=number,
            )
        return self.filled(subject, found)

    def filled(self, subject: str, version: messages.RegisteredSchema) -> messages.RegisteredSchema:
        """Return a version with its subject and schema, as in answers."""
        answer = messages.RegisteredSchema(subject=subject)
        answer.MergeFrom(version)
        answer.schema.CopyFrom(self._schemas[version.schema_id].schema)
        return answer

    def users(self, schema_id: int) -> list[str]:
        """Return the subjects that have a schema. Raises `UnknownSchema`."""
        users = self._users.get(schema_id)
        if not users:
            raise unknown_id(schema_id)
        return list(users)

    def of_id(self, subject: str, schema_id: int) -> messages.RegisteredSchema:
        """Return the version of a subject that has this schema. Raises `UnknownSchema`."""
        record = self._subjects.get(subject)
        found = next((each for each in record.versions if each.schema_id == schema_id), None) if record else None
        if found is None:
            raise unknown_id(schema_id)
        return self.filled(subject, found)

    def find(self, subject: str, schema: messages.SchemaDefinition) -> messages.RegisteredSchema | None:
        """Return the version of a subject that has exactly this schema, without the schema itself; None: there
        is none.
        """
        schema_id, record = self._ids.get(_digest(schema)), self._subjects.get(subject)
        if schema_id is None or record is None:
            return None
        return next((each for each in record.versions if each.schema_id == schema_id), None)

    def kinds(self, subject: str) -> set[SchemaType | None]:
        """Return the types of the schemas that a subject has."""
        record = self._subjects.get(subject)
        versions = () if record is None else record.versions
        return {SchemaType.from_wire(self._schemas[each.schema_id].schema.type) for each in versions}

    def basis(self, subject: str) -> Basis:
        """Return the basis of a decision about a new version; if it differs later, the decision has to be made
        again.
        """
        record = self._subjects.get(subject)
        versions = () if record is None else tuple((each.version, each.schema_id) for each in record.versions)
        return Basis(self.compatibility(subject)[0], versions)

    def versions(self, basis: Basis) -> list[Version]:
        """Return the versions of a basis, with their definitions."""
        found = []
        for number, schema_id in basis.versions:
            schema = self._schemas[schema_id].schema
            kind = SchemaType.from_wire(schema.type)
            if kind is not None:
                found.append(Version(number, Definition(kind, schema.definition, schema.message)))
        return found

    # -- changes ---------------------------------------------------------------------------------------------------

    def registered(
        self, subject: str, schema: messages.SchemaDefinition, *, new_id: int, by: str, now_us: int
    ) -> Change:
        """Return the change that adds a version to a subject. `new_id`: the id if the schema is new. Raises
        `InvalidArgument`.
        """
        known = self._subjects.get(subject)
        record = messages.SubjectRecord(subject=subject, created_by=by)
        if known is not None:
            record.CopyFrom(known)
        if len(record.versions) >= VERSIONS_MAX:
            raise InvalidArgument(
                f"{subject} has {len(record.versions)} versions already: delete unused ones",
                limit=VERSIONS_MAX,
            )
        schema_id = self._ids.get(_digest(schema))
        is_new = schema_id is None
        size = _size(schema)
        own = size + sum(_size(self._schemas[each.schema_id].schema) for each in record.versions)
        if own > SUBJECT_BYTES_MAX:
            raise InvalidArgument(
                f"the versions of {subject} would take {own} bytes: delete unused ones",
                limit=SUBJECT_BYTES_MAX,
            )
        new_bytes = self._check_room(subject, VERSION_BYTES + (size + SCHEMA_BYTES if is_new else 0))
        if schema_id is not None and not self._versions_by[by, schema_id]:
            new_bytes += size + SCHEMA_BYTES
        record.last_version += 1
        record.versions.add(
            version=record.last_version,
            schema_id=new_id if schema_id is None else schema_id,
            registered_us=now_us,
            registered_by=by,
        )
        schemas = {new_id: messages.SchemaRecord(schema_id=new_id, schema=schema)} if is_new else {}
        return Change(subject, record, schemas, new_bytes)

    def with_compatibility(self, subject: str, compatibility: Compatibility | None, *, by: str) -> Change:
        """Return the change that sets a subject's own compatibility, or removes it. Raises `InvalidArgument`."""
        record = messages.SubjectRecord(subject=subject, created_by=by)
        known, added_bytes = self._subjects.get(subject), 0
        if known is not None:
            record.CopyFrom(known)
        elif compatibility is not None:
            added_bytes = self._check_room(subject, 0)
        record.compatibility = messages.COMPATIBILITY_UNSPECIFIED if compatibility is None else compatibility.wire
        is_empty = not record.versions and not record.last_version and compatibility is None
        return Change(subject, None if is_empty else record, {}, added_bytes)

    def without(self, subject: str, number: int) -> Change:
        """Return the change that removes a version, or with 0 the subject. Raises `UnknownSubject` and
        `UnknownSchema`.
        """
        record = messages.SubjectRecord()
        if number:
            self.version(subject, number)
            record.CopyFrom(self.subject(subject))
            gone = [each.schema_id for each in record.versions if each.version == number]
            kept = [each for each in record.versions if each.version != number]
            del record.versions[:]
            record.versions.extend(kept)
        else:
            known = self._subjects.get(subject)
            if known is None:
                raise UnknownSubject(f"no schema is registered under {subject!r}", subject=subject)
            gone = [each.schema_id for each in known.versions]
        unused = [schema_id for schema_id in gone if len(self._users[schema_id]) == 1]
        return Change(subject, record if number else None, dict.fromkeys(unused))

    def apply(self, change: Change) -> None:
        """Apply a change that is in the store."""
        for schema_id, schema in change.schemas.items():
            if schema is not None:
                self._put_schema(schema_id, schema)
        self._put_subject(change.subject, change.record)
        for schema_id, schema in change.schemas.items():
            if schema is None:
                self._put_schema(schema_id, None)

    def _check_room(self, subject: str, size: int) -> int:
        """Return the added bytes of a change. Raises `InvalidArgument` if there is no room."""
        is_new = subject not in self._subjects
        if is_new and len(self._subjects) >= SUBJECTS_MAX:
            raise InvalidArgument(f"there are {len(self._subjects)} subjects already", limit=SUBJECTS_MAX)
        added = size + (SUBJECT_BYTES + len(subject) if is_new else 0)
        total = self._bytes + added
        if total > BYTES_MAX:
            raise InvalidArgument(f"all schemas would take {total} bytes: delete unused subjects", limit=BYTES_MAX)
        return added

    def _put_schema(self, schema_id: int, record: messages.SchemaRecord | None) -> None:
        known = self._schemas.pop(schema_id, None)
        if known is not None:
            del self._ids[_digest(known.schema)]
            self._users.pop(schema_id, None)
            self._bytes -= SCHEMA_BYTES + _size(known.schema)
        if record is not None:
            self._schemas[schema_id] = record
            self._ids[_digest(record.schema)] = schema_id
            self._bytes += SCHEMA_BYTES + _size(record.schema)

    def _put_subject(self, subject: str, record: messages.SubjectRecord | None) -> None:
        known = self._subjects.pop(subject, None)
        before = {} if known is None else {each.schema_id for each in known.versions}
        after = {} if record is None else {each.schema_id for each in record.versions}
        for schema_id in before:
            if schema_id not in after:
                self._users.get(schema_id, {}).pop(subject, None)
        for schema_id in after:
            self._users.setdefault(schema_id, {}).setdefault(subject)
        if bool(before) != bool(after):
            if after:
                insort(self._names, subject)
            else:
                del self._names[bisect_left(self._names, subject)]
        if known is not None:
            self._bytes -= SUBJECT_BYTES + len(subject) + VERSION_BYTES * len(before)
            self._count_for_principals(known, -1)
        if record is not None:
            self._subjects[subject] = record
            self._bytes += SUBJECT_BYTES + len(subject) + VERSION_BYTES * len(after)
            self._count_for_principals(record, 1)

    def _count_for_principals(self, record: messages.SubjectRecord, sign: int) -> None:
        self.bytes_by[record.created_by] += sign * (SUBJECT_BYTES + len(record.subject))
        for version in record.versions:
            key, schema = (version.registered_by, version.schema_id), self._schemas.get(version.schema_id)
            others = self._versions_by.pop(key, 0) - (sign < 0)
            if others + (sign > 0):
                self._versions_by[key] = others + (sign > 0)
            own = 0 if others or schema is None else SCHEMA_BYTES + _size(schema.schema)
            self.bytes_by[version.registered_by] += sign * (VERSION_BYTES + own)


def unknown_id(schema_id: int) -> UnknownSchema:
    """Return the error for an unknown id."""
    return UnknownSchema(f"no schema has the id {schema_id}", schema_id=schema_id)


def _size(schema: messages.SchemaDefinition) -> int:
    return len(schema.definition) + len(schema.message)


def _digest(schema: messages.SchemaDefinition) -> bytes:
    head = f"{schema.type} {schema.message}\n"
    return hashlib.sha256(head.encode() + schema.definition.encode()).digest()
