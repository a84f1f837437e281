"""A client's view of the schema registry. The coordinator and serializers interpret definitions.

Definitions are transferred as text; this module needs no library for any kind of schema.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kera.client import arguments
from kera.client.cluster.cluster import Cluster
from kera.core.errors import InternalError, InvalidArgument, Uncertain, UnknownSchema, UnknownSubject
from kera.core.rpc import api
from kera.core.schemas import (
    SCHEMA_ID_MAX,
    VERSION_MAX,
    Compatibility,
    SchemaType,
    checked_message,
    checked_subject,
    checked_text,
)
from kera.v1 import schema_pb2

CACHED_MAX = 1_000
"""Maximum number of cached schemas; the oldest one is dropped first."""


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A version of a subject."""

    subject: str
    version: int
    """Version within the subject, from 1."""
    schema_id: int
    """Id within the cluster, from 1; the same text has the same id under every subject."""
    schema_type: SchemaType
    definition: str
    """The definition. Avro and JSON: text; Protobuf: a serialized FileDescriptorSet in base64; Arrow: an IPC message in
    base64."""
    message: str = ""
    """For Protobuf: the full name of the values' message; empty: the first one of the last file."""


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """The properties of a subject's version, except for the schema itself."""

    version: int
    schema_id: int
    registered_us: int
    """Time of its registration, on the coordinator's clock: microseconds since 1970."""
    registered_by: str
    """The principal that registered it, as ``user:alice``; empty without security."""


class SchemaRegistry:
    """Schemas of values, and the rules for their changes. Get it as `Client.schemas`.

    A subject is ``STREAM-value`` or ``STREAM-key``. With security on, users who may describe the stream may read its
    schemas, and users who may write to it or alter it may register; all methods raise `NotAllowed` for others. Invalid
    names of subjects raise `InvalidArgument`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_id: dict[int, RegisteredSchema] = {}
        self._asked: dict[int, asyncio.Task[RegisteredSchema]] = {}
        """Requests to the coordinator in progress, by id."""

    async def register(
        self, subject: str, schema_type: SchemaType | str, definition: str, *, message: str = ""
    ) -> RegisteredSchema:
        """Register a schema as the next version of `subject`, or return the version that has it already.

        Raises `InvalidSchema`, and `IncompatibleSchema`, whose attribute `incompatibilities` has a text for each field
        that would break readers.
        """
        schema = _definition(schema_type, definition, message)
        request = schema_pb2.RegisterSchemaRequest(subject=checked_subject(subject), schema=schema)
        answer = (await self._cluster.ask(api.REGISTER_SCHEMA, request)).registered
        answer.schema.CopyFrom(schema)
        return self._remembered(_registered(answer))

    async def check(
        self, subject: str, schema_type: SchemaType | str, definition: str, *, message: str = ""
    ) -> list[str]:
        """Return the incompatibilities that registering would have, a text for each field. Raises `InvalidSchema`."""
        request = schema_pb2.CheckSchemaRequest(
            subject=checked_subject(subject), schema=_definition(schema_type, definition, message)
        )
        return list((await self._cluster.ask(api.CHECK_SCHEMA, request)).incompatibilities)

    async def by_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with this id, under one of its subjects, from the cache if possible.

        Raises `UnknownSchema`.
        """
        arguments.whole("schema_id", schema_id, 0, arguments.UINT32_MAX)
        known = self._by_id.get(schema_id)
        if known is not None:
            return known
        if not 0 < schema_id <= SCHEMA_ID_MAX:
            raise UnknownSchema(f"no schema has the id {schema_id}: ids count from 1", schema_id=schema_id)
        asked = self._asked.get(schema_id)
        if asked is None:
            # A separate task: the first caller may be cancelled while others wait for the same answer.
            asked = self._asked[schema_id] = asyncio.create_task(self._ask_for(schema_id))
            asked.add_done_callback(lambda task: self._answered(schema_id, task))
        return await asyncio.shield(asked)

    async def latest(self, subject: str) -> RegisteredSchema:
        """Return the newest version of `subject`. Raises `UnknownSubject`."""
        return await self._get(schema_pb2.GetSchemaRequest(subject=checked_subject(subject)))

    async def version(self, subject: str, number: int) -> RegisteredSchema:
        """Return a version of `subject`. Raises `UnknownSubject` and `UnknownSchema`."""
        number = arguments.whole("number", number, 1, VERSION_MAX)
        return await self._get(schema_pb2.GetSchemaRequest(subject=checked_subject(subject), version=number))

    async def subjects(self, prefix: str = "") -> list[str]:
        """Return all subjects that begin with `prefix` and that the caller may describe, in order."""
        request = schema_pb2.ListSubjectsRequest(prefix=arguments.text("prefix", prefix, "the beginning of a name"))
        found: list[str] = []
        while True:
            answer = await self._cluster.ask(api.LIST_SUBJECTS, request)
            found += answer.subjects
            if not answer.next_after:
                return found
            request.after = answer.next_after

    async def versions(self, subject: str) -> list[int]:
        """Return the numbers of the existing versions of `subject`, from the oldest. Raises `UnknownSubject`."""
        request = schema_pb2.ListSchemaVersionsRequest(subject=checked_subject(subject))
        return [each.version for each in (await self._cluster.ask(api.LIST_SCHEMA_VERSIONS, request)).versions]

    async def describe_versions(self, subject: str) -> list[VersionDescription]:
        """Describe the versions of `subject`: when and by whom each was registered, from the oldest.

        Raises `UnknownSubject`.
        """
        request = schema_pb2.ListSchemaVersionsRequest(subject=checked_subject(subject))
        return [
            VersionDescription(each.version, each.schema_id, each.registered_us, each.registered_by)
            for each in (await self._cluster.ask(api.LIST_SCHEMA_VERSIONS, request)).versions
        ]

    async def compatibility(self, subject: str = "") -> Compatibility:
        """Return the compatibility mode of `subject`; for ``""``, the default of subjects without their own."""
        request = schema_pb2.GetCompatibilityRequest(subject=checked_subject(subject) if subject else "")
        answer = (await self._cluster.ask(api.GET_COMPATIBILITY, request)).compatibility
        known = Compatibility.from_wire(answer)
        if known is None:
            raise InternalError(f"the coordinator knows a compatibility {answer}, and is newer than this client")
        return known

    async def set_compatibility(self, subject: str, mode: Compatibility | str) -> None:
        """Set the compatibility mode of `subject`, or with ``""`` the default. Does not check existing versions."""
        try:
            wanted = Compatibility(mode)
        except ValueError:
            known = ", ".join(Compatibility)
            raise InvalidArgument(f"{mode!r} is not a compatibility mode: {known}", compatibility=str(mode)) from None
        request = schema_pb2.SetCompatibilityRequest(
            subject=checked_subject(subject) if subject else "", compatibility=wanted.wire
        )
        await self._cluster.ask(api.SET_COMPATIBILITY, request)

    async def delete(self, subject: str, version: int | None = None) -> None:
        """Delete a version of `subject`, or the whole subject; ids are not used again.

        Values whose schema no subject has any more can then no longer be read by their schema. Raises `UnknownSubject`
        and `UnknownSchema`.
        """
        number = 0 if version is None else arguments.whole("version", version, 1, VERSION_MAX)
        request = schema_pb2.DeleteSchemaRequest(subject=checked_subject(subject), version=number)
        try:
            answer = await self._cluster.ask(api.DELETE_SCHEMA, request)
        except (UnknownSubject, UnknownSchema) as error:
            if not isinstance(error.__cause__, Uncertain):
                raise
            self._by_id.clear()  # most likely an earlier attempt without an answer has deleted it
        else:
            for schema_id in answer.schema_ids:
                self._by_id.pop(schema_id, None)

    async def _get(self, request: schema_pb2.GetSchemaRequest) -> RegisteredSchema:
        return self._remembered(_registered((await self._cluster.ask(api.GET_SCHEMA, request)).registered))

    async def _ask_for(self, schema_id: int) -> RegisteredSchema:
        return await self._get(schema_pb2.GetSchemaRequest(schema_id=schema_id))

    def _answered(self, schema_id: int, task: asyncio.Task[RegisteredSchema]) -> None:
        del self._asked[schema_id]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the callers have got it

    def _remembered(self, schema: RegisteredSchema) -> RegisteredSchema:
        if schema.schema_id not in self._by_id:
            while len(self._by_id) >= CACHED_MAX:
                del self._by_id[next(iter(self._by_id))]
            self._by_id[schema.schema_id] = schema
        return schema


def _definition(schema_type: SchemaType | str, definition: str, message: str) -> schema_pb2.SchemaDefinition:
    try:
        kind = SchemaType(schema_type)
    except ValueError:
        known = ", ".join(SchemaType)
        raise InvalidArgument(f"{schema_type!r} is not a schema type: {known}", schema_type=str(schema_type)) from None
    return schema_pb2.SchemaDefinition(
        type=kind.wire, definition=checked_text(definition), message=checked_message(message, kind)
    )


def _registered(message: schema_pb2.RegisteredSchema) -> RegisteredSchema:
    kind = SchemaType.from_wire(message.schema.type)
    if kind is None:
        raise InternalError(f"schema {message.schema_id} is of type {message.schema.type}, newer than this client")
    return RegisteredSchema(
        message.subject,
        message.version,
        message.schema_id,
        kind,
        message.schema.definition,
        message.schema.message,
    )
