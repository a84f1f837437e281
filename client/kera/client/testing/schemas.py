"""The schema registry of a `FakeCluster`: it accepts every schema, and does not check compatibility."""

from __future__ import annotations

from kera.client.testing.requests import Answer
from kera.core.errors import UnknownSchema, UnknownSubject
from kera.core.rpc import Call, Method, Reply, api
from kera.v1 import schema_pb2


class FakeSchemas:
    """A fake schema registry. The same text has the same id under every subject."""

    def __init__(self) -> None:
        self._subjects: dict[str, list[schema_pb2.RegisteredSchema]] = {}
        self._ids: dict[bytes, int] = {}

    def answers(self) -> dict[Method, Answer]:  # type: ignore[type-arg]  # of any messages
        """Return the answers by method; the fake does not offer other methods."""
        return {
            api.REGISTER_SCHEMA: self._register,
            api.GET_SCHEMA: self._get,
            api.LIST_SUBJECTS: self._list_subjects,
            api.LIST_SCHEMA_VERSIONS: self._list_versions,
        }

    def _register(self, call: Call[schema_pb2.RegisterSchemaRequest]) -> Reply[schema_pb2.RegisterSchemaResponse]:
        subject, schema = call.message.subject, call.message.schema
        schema_id = self._ids.setdefault(schema.SerializeToString(deterministic=True), len(self._ids) + 1)
        versions = self._subjects.setdefault(subject, [])
        known = next((each for each in versions if each.schema_id == schema_id), None)
        if known is None:
            known = schema_pb2.RegisteredSchema(
                subject=subject, version=len(versions) + 1, schema_id=schema_id, schema=schema
            )
            versions.append(known)
        return Reply(schema_pb2.RegisterSchemaResponse(registered=known))

    def _get(self, call: Call[schema_pb2.GetSchemaRequest]) -> Reply[schema_pb2.GetSchemaResponse]:
        wanted = call.message
        if wanted.WhichOneof("which") == "schema_id":
            every = [version for versions in self._subjects.values() for version in versions]
            found = [version for version in every if version.schema_id == wanted.schema_id]
        else:
            found = self._versions(wanted.subject)[-1:]
            if wanted.version:
                found = [each for each in self._versions(wanted.subject) if each.version == wanted.version]
        if not found:
            raise UnknownSchema(
                f"the fake cluster has no such schema: {wanted.schema_id or wanted.version}",
                schema_id=wanted.schema_id,
                subject=wanted.subject,
            )
        return Reply(schema_pb2.GetSchemaResponse(registered=found[0]))

    def _versions(self, subject: str) -> list[schema_pb2.RegisteredSchema]:
        if subject not in self._subjects:
            raise UnknownSubject(f"no schema is registered under {subject!r}", subject=subject)
        return self._subjects[subject]

    def _list_subjects(self, call: Call[schema_pb2.ListSubjectsRequest]) -> Reply[schema_pb2.ListSubjectsResponse]:
        found = sorted(name for name in self._subjects if name.startswith(call.message.prefix))
        return Reply(schema_pb2.ListSubjectsResponse(subjects=[name for name in found if name > call.message.after]))

    def _list_versions(
        self, call: Call[schema_pb2.ListSchemaVersionsRequest]
    ) -> Reply[schema_pb2.ListSchemaVersionsResponse]:
        return Reply(schema_pb2.ListSchemaVersionsResponse(versions=self._versions(call.message.subject)))
