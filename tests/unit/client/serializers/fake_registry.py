"""A registry of schemas in memory. It takes every schema and notes every request."""

from dataclasses import dataclass, field

from kera.client.schemas.registry import RegisteredSchema
from kera.core.errors import UnknownSchema, UnknownSubject
from kera.core.schemas import SchemaType


@dataclass
class FakeRegistry:
    """The part of `SchemaRegistry` that serializers use."""

    schemas: list[RegisteredSchema] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    """Raised by the next calls of `by_id`."""

    async def register(
        self, subject: str, schema_type: SchemaType, definition: str, *, message: str = ""
    ) -> RegisteredSchema:
        self.asked.append(f"register {subject}")
        same = [each for each in self.schemas if (each.definition, each.message) == (definition, message)]
        for each in same:
            if each.subject == subject:
                return each
        schema_id = same[0].schema_id if same else 1 + max((each.schema_id for each in self.schemas), default=0)
        version = 1 + sum(each.subject == subject for each in self.schemas)
        self.schemas.append(RegisteredSchema(subject, version, schema_id, schema_type, definition, message))
        return self.schemas[-1]

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        self.asked.append(f"by_id {schema_id}")
        if self.failures:
            raise self.failures.pop(0)
        for each in self.schemas:
            if each.schema_id == schema_id:
                return each
        raise UnknownSchema(f"no schema has the id {schema_id}", schema_id=schema_id)

    async def versions(self, subject: str) -> list[int]:
        found = [each.version for each in self.schemas if each.subject == subject]
        if not found:
            raise UnknownSubject(f"no subject {subject!r}")
        return found

    async def version(self, subject: str, number: int) -> RegisteredSchema:
        return next(each for each in self.schemas if (each.subject, each.version) == (subject, number))
