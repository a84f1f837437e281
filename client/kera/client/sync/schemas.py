"""`kera.client.SchemaRegistry` without asyncio: calls wait for their results. Made by `scripts.sync_sdk`."""

from __future__ import annotations

from kera.client.schemas.registry import RegisteredSchema, VersionDescription
from kera.client.schemas.registry import SchemaRegistry as AsyncSchemaRegistry
from kera.client.sync.loop_thread import LoopThread
from kera.core.schemas import Compatibility, SchemaType


class SchemaRegistry:
    """Schemas of values, and the rules for their changes. Get it as `Client.schemas`.

    Its methods do the same as those of `kera.client.SchemaRegistry`; the docstrings there name the errors.
    """

    def __init__(self, thread: LoopThread, schemas: AsyncSchemaRegistry) -> None:
        self._thread = thread
        self._schemas = schemas

    def register(
        self, subject: str, schema_type: SchemaType | str, definition: str, *, message: str = ""
    ) -> RegisteredSchema:
        """Register a schema as the next version of `subject`, or return the version that has it already."""
        return self._thread.run(self._schemas.register(subject, schema_type, definition, message=message))

    def check(self, subject: str, schema_type: SchemaType | str, definition: str, *, message: str = "") -> list[str]:
        """Return the incompatibilities that registering would have, a text for each field."""
        return self._thread.run(self._schemas.check(subject, schema_type, definition, message=message))

    def by_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with this id, under one of its subjects, from the cache if possible."""
        return self._thread.run(self._schemas.by_id(schema_id))

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the newest version of `subject`."""
        return self._thread.run(self._schemas.latest(subject))

    def version(self, subject: str, number: int) -> RegisteredSchema:
        """Return a version of `subject`."""
        return self._thread.run(self._schemas.version(subject, number))

    def subjects(self, prefix: str = "") -> list[str]:
        """Return all subjects that begin with `prefix` and that the caller may describe, in order."""
        return self._thread.run(self._schemas.subjects(prefix))

    def versions(self, subject: str) -> list[int]:
        """Return the numbers of the existing versions of `subject`, from the oldest."""
        return self._thread.run(self._schemas.versions(subject))

    def describe_versions(self, subject: str) -> list[VersionDescription]:
        """Describe the versions of `subject`: when and by whom each was registered, from the oldest."""
        return self._thread.run(self._schemas.describe_versions(subject))

    def compatibility(self, subject: str = "") -> Compatibility:
        """Return the compatibility mode of `subject`; for ``""``, the default of subjects without their own."""
        return self._thread.run(self._schemas.compatibility(subject))

    def set_compatibility(self, subject: str, mode: Compatibility | str) -> None:
        """Set the compatibility mode of `subject`, or with ``""`` the default."""
        self._thread.run(self._schemas.set_compatibility(subject, mode))

    def delete(self, subject: str, version: int | None = None) -> None:
        """Delete a version of `subject`, or the whole subject; ids are not used again."""
        self._thread.run(self._schemas.delete(subject, version))
