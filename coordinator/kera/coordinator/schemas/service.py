"""Requests about schemas. An answered change is in the store.

A comparison may take a while, so it is made before the change has its turn. If the subject has changed by then, the
comparison is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from kera.coordinator.cluster.audited import audited
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.keys import LAST_SCHEMA_ID
from kera.coordinator.cluster.shares import SCHEMAS as SCHEMAS_LIMIT
from kera.coordinator.cluster.shares import Shares
from kera.coordinator.cluster.state import State
from kera.coordinator.schemas.bookkeeping import BYTES_MAX, Basis, Change, Registry, unknown_id
from kera.coordinator.schemas.checking import Checking, incompatible
from kera.coordinator.schemas.columns import TypedStreams
from kera.coordinator.schemas.records import DEFAULT_COMPATIBILITY, SCHEMAS, SUBJECTS, changes_of
from kera.coordinator.store.ledger import number
from kera.coordinator.store.metadata_copy import RESTORED
from kera.core.access.rights import Operation
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, InvalidSchema, Unavailable
from kera.core.rpc import api
from kera.core.schemas import (
    DEFINITION_BYTES_MAX,
    SCHEMA_ID_MAX,
    SUBJECT_CHARS_MAX,
    VERSION_MAX,
    Compatibility,
    SchemaType,
    checked_subject,
    stream_of,
)
from kera.server.access.guard import CALLER, Guard
from kera.server.access.requirements import Need, stream
from kera.server.schemas.compatibility import Definition
from kera.v1 import schema_pb2 as messages

log = get_logger("kera.coordinator")

ATTEMPTS_MAX = 10
"""Maximum of comparisons while others change the subject."""


class SchemaService:
    """Serves requests about schemas. An answered change is stored, and was compared with the current versions."""

    def __init__(self, state: State, guard: Guard | None, shares: Shares) -> None:
        """`guard`: the coordinator's own; None: security is off."""
        self._state = state
        self._guard = guard
        self._registry = Registry()
        self._checking = Checking()
        self._shares = shares
        self.columns = TypedStreams(
            state, lambda: self._registry, self._checking, _caller_principal, check_share=self._check_share
        )
        """Schemas of typed streams."""

    def load(self) -> None:
        """Load the registry from the ledger."""
        ledger = self._state.ledger
        default = (ledger.get(DEFAULT_COMPATIBILITY) or Compatibility.BACKWARD.encode()).decode()
        self._registry = Registry(
            [messages.SubjectRecord.FromString(value) for value in self._below(SUBJECTS)],
            [messages.SchemaRecord.FromString(value) for value in self._below(SCHEMAS)],
            Compatibility(default),
        )

    @property
    def subject_count(self) -> int:
        """The number of subjects."""
        return len(self._registry)

    @property
    def size_bytes(self) -> int:
        """Approximate size of the registry."""
        return self._registry.bytes

    async def close(self) -> None:
        """Wait for the comparison under way."""
        await self._checking.close()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        handlers: Mapping[Any, Callable[[Any], Any]] = {
            api.REGISTER_SCHEMA: self.register,
            api.CHECK_SCHEMA: self.check,
            api.GET_SCHEMA: self.get,
            api.LIST_SUBJECTS: self.list_subjects,
            api.LIST_SCHEMA_VERSIONS: self.list_versions,
            api.GET_COMPATIBILITY: self.get_compatibility,
            api.SET_COMPATIBILITY: self.set_compatibility,
            api.DELETE_SCHEMA: self.delete,
        }
        return handlers

    # -- changes ---------------------------------------------------------------------------------------------------

    async def register(self, request: messages.RegisterSchemaRequest) -> messages.RegisterSchemaResponse:
        """Register a schema as the next version of a subject, or find it there.

        Raises `InvalidSchema`, `IncompatibleSchema`, `InvalidArgument`, `Unavailable` and `NotAllowed`.
        """
        subject = checked_subject(request.subject)
        definition = _definition(request.schema)
        self._check_may_register(subject)
        for _ in range(ATTEMPTS_MAX):
            known = self._registry.find(subject, request.schema)
            if known is not None:
                return _registered(subject, known)
            if self._state.ledger.get(RESTORED) is not None:  # these metadata may lack ids that were given
                raise Unavailable(self._state.catching_up or "the metadata are catching up with the cluster; ask again")
            basis = self._registry.basis(subject)
            found = await self._compared(basis, definition)
            if found:
                raise incompatible(subject, found)
            change = await self._state.change(self._add(subject, request.schema, basis), for_caller=True)
            if change is not None and change.record is not None:
                return _registered(subject, change.record.versions[-1])
        raise Unavailable(f"others change {subject} all the time; ask again", subject=subject)

    async def _add(self, subject: str, schema: messages.SchemaDefinition, basis: Basis) -> Change | None:
        """Write the next version; return None if the subject has changed since the comparison."""
        if self._registry.basis(subject) != basis:
            return None
        ledger, state = self._state.ledger, self._state
        new_id = ledger.next_number(LAST_SCHEMA_ID)
        if new_id > SCHEMA_ID_MAX:
            raise InvalidArgument("there are no more ids for schemas")
        change = self._registry.registered(
            subject, schema, new_id=new_id, by=_caller_principal(), now_us=state.clock.now_us()
        )
        self._check_share(change)
        last = messages.RegisteredSchema() if change.record is None else change.record.versions[-1]
        with self._audited("schema registered", subject=subject, version=last.version, schema_id=last.schema_id):
            await self._write(change, {LAST_SCHEMA_ID: number(new_id)} if change.schemas else {})
        return change

    async def set_compatibility(self, request: messages.SetCompatibilityRequest) -> messages.SetCompatibilityResponse:
        """Set which schemas may follow those of a subject, or of all without their own setting. Raises
        `InvalidArgument`.
        """
        wanted = Compatibility.from_wire(request.compatibility)
        if wanted is None and (request.compatibility or not request.subject):
            raise InvalidArgument(f"compatibility {request.compatibility} is not known to this version")
        subject = checked_subject(request.subject) if request.subject else ""

        async def put() -> None:
            said = {"subject": subject or "*", "compatibility": wanted or "default"}
            if subject:
                if self._registry.compatibility(subject) == (wanted or self._registry.default, wanted is None):
                    return
                change = self._registry.with_compatibility(subject, wanted, by=_caller_principal())
                self._check_share(change)
                with self._audited("compatibility of schemas", **said):
                    await self._write(change)
            elif wanted is not None:
                with self._audited("compatibility of schemas", **said):
                    await self._state.write({DEFAULT_COMPATIBILITY: wanted.encode()})
                self._registry.default = wanted

        await self._state.change(put(), for_caller=True)
        return messages.SetCompatibilityResponse()

    async def delete(self, request: messages.DeleteSchemaRequest) -> messages.DeleteSchemaResponse:
        """Delete a version, or a subject. Raises `UnknownSubject` and `UnknownSchema`."""
        subject = checked_subject(request.subject)
        answer = messages.DeleteSchemaResponse()

        async def take() -> None:
            before = self._registry.basis(subject).versions
            change = self._registry.without(subject, request.version)
            shown = {"version": request.version} if request.version else {"versions": len(before)}
            with self._audited("schema deleted", subject=subject, **shown):
                await self._write(change)
            after = self._registry.basis(subject).versions
            answer.versions.extend(version for version, schema_id in before if (version, schema_id) not in after)
            answer.schema_ids.extend(sorted(change.schemas))

        await self._state.change(take(), for_caller=True)
        return answer

    def _check_share(self, change: Change) -> None:
        principal = self._shares.caller()
        if change.added_bytes:
            self._shares.check(
                SCHEMAS_LIMIT, BYTES_MAX, principal, lambda: self._registry.bytes_by[principal] + change.added_bytes
            )

    async def _write(self, change: Change, more: Mapping[str, bytes | None] | None = None) -> None:
        await self._state.write({**changes_of(change), **(more or {})})
        self._registry.apply(change)

    # -- queries ---------------------------------------------------------------------------------------------------

    async def check(self, request: messages.CheckSchemaRequest) -> messages.CheckSchemaResponse:
        """Return the incompatibilities of a schema. Raises `InvalidSchema`."""
        basis = self._registry.basis(checked_subject(request.subject))
        definition = _definition(request.schema)
        known = self._registry.find(request.subject, request.schema)
        found = [] if known is not None else await self._compared(basis, definition)
        return messages.CheckSchemaResponse(incompatibilities=found, compatibility=basis.compatibility.wire)

    async def get(self, request: messages.GetSchemaRequest) -> messages.GetSchemaResponse:
        """Return a version of a subject, or a schema by its id. Raises `UnknownSubject` and `UnknownSchema`."""
        if request.WhichOneof("which") != "schema_id":
            subject = checked_subject(request.subject)
            if request.version > VERSION_MAX:
                raise InvalidArgument(f"no version has a number above {VERSION_MAX}")
            return messages.GetSchemaResponse(registered=self._registry.version(subject, request.version))
        schema_id, peer, pace = request.schema_id, CALLER.get(), self._state.pace()
        for subject in self._registry.users(schema_id):
            if self._guard is None or peer is None:
                return messages.GetSchemaResponse(registered=self._registry.of_id(subject, schema_id))
            if self._guard.allows(peer, Operation.DESCRIBE, stream(stream_of(subject))):
                return messages.GetSchemaResponse(registered=self._registry.of_id(subject, schema_id))
            await pace.step()
        raise unknown_id(schema_id)  # as if it did not exist

    def list_subjects(self, request: messages.ListSubjectsRequest) -> messages.ListSubjectsResponse:
        """List the subjects with a prefix, a page at a time."""
        if len(request.prefix) > SUBJECT_CHARS_MAX or len(request.after) > SUBJECT_CHARS_MAX:
            raise InvalidArgument(f"no subject has a name of more than {SUBJECT_CHARS_MAX} characters")
        subjects, more = self._registry.subjects(request.prefix, request.after)
        return messages.ListSubjectsResponse(subjects=subjects, next_after=subjects[-1] if more else "")

    def list_versions(self, request: messages.ListSchemaVersionsRequest) -> messages.ListSchemaVersionsResponse:
        """List all versions of a subject. Raises `UnknownSubject`."""
        record = self._registry.subject(checked_subject(request.subject))
        return messages.ListSchemaVersionsResponse(versions=record.versions)

    def get_compatibility(self, request: messages.GetCompatibilityRequest) -> messages.GetCompatibilityResponse:
        """Return the compatibility of a subject, or of subjects without their own."""
        subject = checked_subject(request.subject) if request.subject else ""
        compatibility, by_default = self._registry.compatibility(subject)
        return messages.GetCompatibilityResponse(compatibility=compatibility.wire, by_default=by_default)

    async def _compared(self, basis: Basis, definition: Definition) -> list[str]:
        versions = self._registry.versions(basis)
        return await self._checking.incompatibilities(definition, versions, basis.compatibility)

    def _below(self, path: str) -> list[bytes]:
        ledger = self._state.ledger
        return [ledger.get(key) or b"" for key in ledger.children(path.rstrip("/"))]

    # -- rights of the caller --------------------------------------------------------------------------------------

    def _check_may_register(self, subject: str) -> None:
        """Check that the caller may write to the stream or alter it. Raises `NotAllowed`, or `UnknownStream`."""
        peer, resource = CALLER.get(), stream(stream_of(subject))
        if self._guard is None or peer is None or self._guard.allows(peer, Operation.ALTER, resource):
            return
        if peer.identity is None or not peer.identity.is_daemon:
            self._guard.check(peer, Need(Operation.WRITE, resource))

    def _audited(self, what: str, **fields: object) -> AbstractContextManager[None]:
        return audited(self._guard, log, what, **fields)


def _definition(schema: messages.SchemaDefinition) -> Definition:
    kind = SchemaType.from_wire(schema.type)
    if kind is None:
        raise InvalidSchema(f"schemas of type {schema.type} are not known to this version")
    if len(schema.definition) > DEFINITION_BYTES_MAX:  # before anything looks at all of it
        raise InvalidSchema(
            f"the definition has {len(schema.definition)} characters, the limit is {DEFINITION_BYTES_MAX}",
            limit=DEFINITION_BYTES_MAX,
        )
    return Definition(kind, schema.definition, schema.message)


def _registered(subject: str, version: messages.RegisteredSchema) -> messages.RegisterSchemaResponse:
    answer = messages.RegisterSchemaResponse(registered=version)
    answer.registered.subject = subject
    return answer


def _caller_principal() -> str:
    peer = CALLER.get()
    return "" if peer is None or peer.identity is None else peer.identity.principal
