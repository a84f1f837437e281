"""`kera.client.SchemaRegistry` for those who write no asyncio. Written by ``python -m scripts.sync_sdk``."""

from __future__ import annotations

from kera.client.schemas.registry import RegisteredSchema, VersionDescription
from kera.client.schemas.registry import SchemaRegistry as AsyncSchemaRegistry
from kera.client.sync.loop_thread import LoopThread
from kera.core.schemas import Compatibility, SchemaType


class SchemaRegistry:
    """Schemas of values, and which changes of them are taken. Get it as `Client.schemas`.

    What each method promises and raises is in `kera.client.SchemaRegistry`.
    """

    def __init__(self, thread: LoopThread, schemas: AsyncSchemaRegistry) -> None:
        self._thread = thread
        self._schemas = schemas

    def register(
        self, subject: str, schema_type: SchemaType | str, definition: str, *, message: str = ""
    ) -> RegisteredSchema:
        """Make this the next version of `subject`, or find it among those that are there."""
        return self._thread.run(self._schemas.register(subject, schema_type, definition, message=message))

    def check(self, subject: str, schema_type: SchemaType | str, definition: str, *, message: str = "") -> list[str]:
        """The incompatibilities if this were registered, a text for each field; empty: none."""
        return self._thread.run(self._schemas.check(subject, schema_type, definition, message=message))

    def by_id(self, schema_id: int) -> RegisteredSchema:
        """The schema with this id, under one of its subjects."""
        return self._thread.run(self._schemas.by_id(schema_id))

    def latest(self, subject: str) -> RegisteredSchema:
        """The newest version of `subject`."""
        return self._thread.run(self._schemas.latest(subject))

    def version(self, subject: str, number: int) -> RegisteredSchema:
        """A version of `subject`."""
        return self._thread.run(self._schemas.version(subject, number))

    def subjects(self, prefix: str = "") -> list[str]:
        """All whose names begin with `prefix`, and that who asks may describe, in order."""
        return self._thread.run(self._schemas.subjects(prefix))

    def versions(self, subject: str) -> list[int]:
        """The numbers of the versions of `subject` that are there, from the oldest."""
        return self._thread.run(self._schemas.versions(subject))

    def describe_versions(self, subject: str) -> list[VersionDescription]:
        """When the versions of `subject` were registered, and by whom, from the oldest."""
        return self._thread.run(self._schemas.describe_versions(subject))

    def compatibility(self, subject: str = "") -> Compatibility:
        """Which schemas may follow those of `subject`; of ``""``: of subjects for which nothing else was set."""
        return self._thread.run(self._schemas.compatibility(subject))

    def set_compatibility(self, subject: str, mode: Compatibility | str) -> None:
        """Set it for `subject`; for ``""``: for all for which nothing else was set."""
        self._thread.run(self._schemas.set_compatibility(subject, mode))

    def delete(self, subject: str, version: int | None = None) -> None:
        """Forget a version of `subject`, or all of it; ids are not used again."""
        self._thread.run(self._schemas.delete(subject, version))
