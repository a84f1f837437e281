"""The registry of schemas: requests, access rights, typed streams, and what outlasts a coordinator."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from kera.coordinator.cluster.changing import REQUESTER
from kera.coordinator.cluster.keys import LAST_SCHEMA_ID
from kera.coordinator.cluster.shares import NO_SHARES
from kera.coordinator.schemas import bookkeeping, checking
from kera.coordinator.schemas import service as service_module
from kera.coordinator.schemas.service import SchemaService
from kera.coordinator.store.metadata import MetadataStoreFailed
from kera.coordinator.store.metadata_copy import RESTORED
from kera.core.access.accounts import Accounts
from kera.core.access.audit_events import AuditEvent
from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.errors import (
    IncompatibleSchema,
    InvalidArgument,
    InvalidSchema,
    KeraError,
    NotAllowed,
    Unavailable,
    UnknownSchema,
    UnknownStream,
    UnknownSubject,
)
from kera.core.rpc.method import Peer
from kera.core.schemas import DEFINITION_BYTES_MAX, Compatibility, SchemaType
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import CALLER, Guard
from kera.server.schemas.compatibility import Definition
from kera.v1 import common_pb2
from kera.v1 import schema_pb2 as messages
from tests.unit.coordinator.fake_cluster import WAIT_S, Cluster, config, until
from tests.unit.core.access.support import rule, table

SUBJECT = "orders-value"


def avro(*fields: str, default: str = "", kind: str = "string") -> messages.SchemaDefinition:
    """An Avro record with these fields, which all have the default if one is given."""
    described = [{"name": name, "type": kind, **({"default": default} if default else {})} for name in fields]
    return text(json.dumps({"type": "record", "name": "Order", "fields": described}))


def text(definition: str, kind: SchemaType = SchemaType.AVRO, message: str = "") -> messages.SchemaDefinition:
    return messages.SchemaDefinition(type=kind.wire, definition=definition, message=message)


@pytest.fixture
def registry(cluster: Cluster) -> SchemaService:
    return cluster.coordinator.schemas


async def register(
    registry: SchemaService, schema: messages.SchemaDefinition, subject: str = SUBJECT
) -> messages.RegisteredSchema:
    return (await registry.register(messages.RegisterSchemaRequest(subject=subject, schema=schema))).registered


async def version(registry: SchemaService, number: int = 0, subject: str = SUBJECT) -> messages.RegisteredSchema:
    return (await registry.get(messages.GetSchemaRequest(subject=subject, version=number))).registered


async def of_id(registry: SchemaService, schema_id: int) -> messages.RegisteredSchema:
    return (await registry.get(messages.GetSchemaRequest(schema_id=schema_id))).registered


async def delete(registry: SchemaService, number: int = 0, subject: str = SUBJECT) -> messages.DeleteSchemaResponse:
    return await registry.delete(messages.DeleteSchemaRequest(subject=subject, version=number))


async def put(registry: SchemaService, mode: Compatibility | None, subject: str = SUBJECT) -> None:
    wire = messages.COMPATIBILITY_UNSPECIFIED if mode is None else mode.wire
    await registry.set_compatibility(messages.SetCompatibilityRequest(subject=subject, compatibility=wire))


def mode_of(registry: SchemaService, subject: str = SUBJECT) -> tuple[Compatibility | None, bool]:
    answer = registry.get_compatibility(messages.GetCompatibilityRequest(subject=subject))
    return Compatibility.from_wire(answer.compatibility), answer.by_default


def subjects(registry: SchemaService, prefix: str = "", after: str = "") -> list[str]:
    return list(registry.list_subjects(messages.ListSubjectsRequest(prefix=prefix, after=after)).subjects)


def versions(registry: SchemaService, subject: str = SUBJECT) -> list[tuple[int, int]]:
    answer = registry.list_versions(messages.ListSchemaVersionsRequest(subject=subject))
    return [(each.version, each.schema_id) for each in answer.versions]


# --- requests ----------------------------------------------------------------------------------------------------


async def test_registering_a_schema_again_returns_its_version(registry: SchemaService) -> None:
    first = await register(registry, avro("a"))
    assert (first.subject, first.version, first.schema_id) == (SUBJECT, 1, 1)
    second = await register(registry, avro("a", "b", default="x"))
    assert (second.version, second.schema_id) == (2, 2)
    again = await register(registry, avro("a"))
    assert (again.subject, again.version, again.schema_id) == (SUBJECT, 1, 1)
    assert versions(registry) == [(1, 1), (2, 2)]


async def test_the_same_text_has_the_same_id_under_every_subject(registry: SchemaService) -> None:
    one = await register(registry, avro("a"))
    other = await register(registry, avro("a"), "orders-key")
    assert (one.schema_id, other.schema_id, other.version) == (1, 1, 1)
    assert (await register(registry, avro("b"), "returns-value")).schema_id == 2


async def test_the_same_text_has_another_id_as_a_schema_of_another_type(registry: SchemaService) -> None:
    both = '{"type": "string"}'
    assert (await register(registry, text(both), "a-value")).schema_id == 1
    assert (await register(registry, text(both, SchemaType.JSON), "b-value")).schema_id == 2


async def test_the_error_of_an_incompatible_schema_names_the_field(registry: SchemaService) -> None:
    await register(registry, avro("a"))
    with pytest.raises(IncompatibleSchema, match="field b: is new, and has no default") as caught:
        await register(registry, avro("a", "b"))
    assert caught.value.attributes["incompatibilities"] == [
        "field b: is new, and has no default: it cannot read version 1"
    ]
    assert versions(registry) == [(1, 1)]


async def test_a_check_lists_incompatibilities_and_registers_nothing(registry: SchemaService) -> None:
    request = messages.CheckSchemaRequest(subject=SUBJECT, schema=avro("a", "b"))
    assert list((await registry.check(request)).incompatibilities) == []
    await register(registry, avro("a"))
    answer = await registry.check(request)
    assert list(answer.incompatibilities) == ["field b: is new, and has no default: it cannot read version 1"]
    assert answer.compatibility == Compatibility.BACKWARD.wire
    assert (
        list((await registry.check(messages.CheckSchemaRequest(subject=SUBJECT, schema=avro("a")))).incompatibilities)
        == []
    )
    assert versions(registry) == [(1, 1)]


async def test_a_list_of_many_incompatibilities_is_cut_to_fit_into_an_error(registry: SchemaService) -> None:
    await register(registry, avro(*(f"field_{number}" for number in range(200))))
    with pytest.raises(IncompatibleSchema, match="; and 50 more") as caught:
        await register(registry, avro(*(f"field_{number}" for number in range(200)), kind="int"))
    told = caught.value.attributes["incompatibilities"]
    assert 5 < len(told) < 50
    assert len(json.dumps(told)) + len(caught.value.message) < 2048


async def test_the_compatibility_mode_decides_which_schemas_are_refused(registry: SchemaService) -> None:
    await register(registry, avro("a"))
    assert mode_of(registry) == (Compatibility.BACKWARD, True)
    await put(registry, Compatibility.FORWARD)
    assert mode_of(registry) == (Compatibility.FORWARD, False)
    await register(registry, avro("a", "b"))
    with pytest.raises(IncompatibleSchema, match="field a: is gone, and had no default"):
        await register(registry, avro("b"))
    await put(registry, Compatibility.NONE, "")
    assert (mode_of(registry, ""), mode_of(registry)) == ((Compatibility.NONE, True), (Compatibility.FORWARD, False))
    await put(registry, None)
    assert mode_of(registry) == (Compatibility.NONE, True)
    await register(registry, text('"int"'))


async def test_transitive_compatibility_compares_with_all_versions(registry: SchemaService) -> None:
    await put(registry, Compatibility.NONE)
    for schema in (avro("a"), avro("b")):
        await register(registry, schema)
    wanted = avro("b", "c", default="x")
    await put(registry, Compatibility.FORWARD)
    await register(registry, wanted)
    await put(registry, Compatibility.FORWARD_TRANSITIVE)
    with pytest.raises(IncompatibleSchema, match="field a: is gone, and had no default: readers of version 1"):
        await register(registry, avro("b", "d", default="x"))


async def test_a_compatibility_can_be_set_before_the_first_schema(registry: SchemaService) -> None:
    await put(registry, Compatibility.FULL)
    assert subjects(registry) == []
    with pytest.raises(UnknownSubject):
        versions(registry)
    await register(registry, avro("a"))
    with pytest.raises(IncompatibleSchema):
        await register(registry, avro("a", "b"))


async def test_removing_a_compatibility_that_is_not_set_changes_nothing(registry: SchemaService) -> None:
    await put(registry, None)
    assert mode_of(registry) == (Compatibility.BACKWARD, True)


async def test_schemas_are_found_by_version_and_by_id(registry: SchemaService) -> None:
    one, other = avro("a"), avro("a", "b", default="x")
    for schema in (one, other):
        await register(registry, schema)
    found = await version(registry)
    assert (found.subject, found.version, found.schema_id, found.schema) == (SUBJECT, 2, 2, other)
    assert (await version(registry, 1)).schema == one
    by_id = await of_id(registry, 1)
    assert (by_id.subject, by_id.version, by_id.schema) == (SUBJECT, 1, one)


@pytest.mark.parametrize("schema_id", [0, 3, (1 << 32) - 1])
async def test_an_id_without_a_schema_is_unknown(registry: SchemaService, schema_id: int) -> None:
    await register(registry, avro("a"))
    with pytest.raises(UnknownSchema, match=f"no schema has the id {schema_id}"):
        await of_id(registry, schema_id)


async def test_a_missing_version_is_an_error(registry: SchemaService) -> None:
    with pytest.raises(UnknownSubject, match="no schema is registered under 'orders-value'"):
        await version(registry)
    await register(registry, avro("a"))
    with pytest.raises(UnknownSchema, match="orders-value has no version 2: it has up to 1"):
        await version(registry, 2)
    with pytest.raises(InvalidArgument, match="no version has a number above"):
        await version(registry, (1 << 32) - 1)


async def test_subjects_are_listed_in_pages(registry: SchemaService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "SUBJECTS_OF_PAGE_MAX", 2)
    for name in ("b-value", "a-value", "b-key", "c-value", "b2-value"):
        await register(registry, avro("a"), name)
    answer = registry.list_subjects(messages.ListSubjectsRequest())
    assert (list(answer.subjects), answer.next_after) == (["a-value", "b-key"], "b-key")
    answer = registry.list_subjects(messages.ListSubjectsRequest(after="b-key"))
    assert (list(answer.subjects), answer.next_after) == (["b-value", "b2-value"], "b2-value")
    assert subjects(registry, after="b2-value") == ["c-value"]
    assert subjects(registry, "b-") == ["b-key", "b-value"]
    assert registry.list_subjects(messages.ListSubjectsRequest(prefix="b-")).next_after == ""
    assert subjects(registry, "b", "b-key") == ["b-value", "b2-value"]
    assert subjects(registry, "z") == []
    with pytest.raises(InvalidArgument, match="no subject has a name of more than"):
        subjects(registry, "x" * 256)


async def test_versions_and_ids_of_deleted_schemas_are_not_used_again(registry: SchemaService) -> None:
    for schema in (avro("a"), avro("a", "b", default="x"), avro("a", "c", default="x")):
        await register(registry, schema)
    answer = await delete(registry, 3)
    assert (list(answer.versions), list(answer.schema_ids)) == ([3], [3])
    with pytest.raises(UnknownSchema):
        await of_id(registry, 3)
    again = await register(registry, avro("a", "c", default="x"))
    assert (again.version, again.schema_id) == (4, 4)
    answer = await delete(registry)
    assert (list(answer.versions), list(answer.schema_ids)) == ([1, 2, 4], [1, 2, 4])
    assert subjects(registry) == []
    for number in (0, 1):
        with pytest.raises(UnknownSubject):
            await delete(registry, number)


async def test_a_schema_stays_while_another_subject_has_it(registry: SchemaService) -> None:
    for subject in (SUBJECT, "orders-key"):
        await register(registry, avro("a"), subject)
    assert list((await delete(registry, 1)).schema_ids) == []
    assert (await of_id(registry, 1)).subject == "orders-key"
    with pytest.raises(UnknownSubject):
        versions(registry)
    assert subjects(registry) == ["orders-key"]
    assert list((await delete(registry, subject="orders-key")).schema_ids) == [1]
    again = await register(registry, avro("a"))
    assert (again.version, again.schema_id) == (2, 2)


async def test_concurrent_registrations_are_compared_with_each_other(registry: SchemaService) -> None:
    await register(registry, avro("a"))
    wanted = [avro("a", "b", default="x"), text('{"type":"record","name":"Order","fields":[]}')]
    await put(registry, Compatibility.FORWARD)
    results = await asyncio.gather(*(register(registry, schema) for schema in wanted), return_exceptions=True)
    assert [isinstance(each, IncompatibleSchema) for each in results] == [False, True]
    await put(registry, Compatibility.BACKWARD)
    both = await asyncio.gather(*(register(registry, avro("a", f"n{n}", default="x")) for n in range(5)))
    assert sorted(each.version for each in both) == [3, 4, 5, 6, 7]
    same = await asyncio.gather(*(register(registry, avro("a", "same", default="x")) for _ in range(5)))
    assert len({(each.version, each.schema_id) for each in same}) == 1


async def test_a_registration_that_is_always_overtaken_is_unavailable(
    registry: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "ATTEMPTS_MAX", 0)
    with pytest.raises(Unavailable, match="others change orders-value all the time"):
        await register(registry, avro("a"))


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["", "a b", "a/b", "x" * 256, "é"])
async def test_every_request_refuses_an_invalid_subject(registry: SchemaService, subject: str) -> None:
    with pytest.raises(InvalidArgument, match="a subject cannot be called"):
        await register(registry, avro("a"), subject)
    with pytest.raises(InvalidArgument):
        await registry.check(messages.CheckSchemaRequest(subject=subject, schema=avro("a")))
    with pytest.raises(InvalidArgument):
        await version(registry, 1, subject)
    with pytest.raises(InvalidArgument):
        versions(registry, subject)
    with pytest.raises(InvalidArgument):
        await delete(registry, 0, subject)
    if subject:
        with pytest.raises(InvalidArgument):
            await put(registry, Compatibility.NONE, subject)
        with pytest.raises(InvalidArgument):
            mode_of(registry, subject)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (messages.SchemaDefinition(), "schemas of type 0 are not known"),
        (messages.SchemaDefinition(type=99, definition='"int"'), "schemas of type 99 are not known"),  # type: ignore[arg-type]
        (text(""), "the definition is empty"),
        (text("x" * (DEFINITION_BYTES_MAX + 1)), "the limit is 262144"),
        (text("é" * (DEFINITION_BYTES_MAX // 2 + 1)), "the limit is 262144"),
        (text('"nope"'), "there is no type 'nope'"),
        (text("[" * 100_000), "nested deeper than 64"),
    ],
)
async def test_an_invalid_definition_is_refused(
    registry: SchemaService, schema: messages.SchemaDefinition, said: str
) -> None:
    with pytest.raises(InvalidSchema, match=said):
        await register(registry, schema)
    with pytest.raises(InvalidSchema, match=said):
        await registry.check(messages.CheckSchemaRequest(subject=SUBJECT, schema=schema))
    assert subjects(registry) == []


async def test_a_message_is_refused_for_avro(registry: SchemaService) -> None:
    with pytest.raises(InvalidArgument, match="leave message out"):
        await register(registry, text('"int"', message="a.B"))


@pytest.mark.parametrize("number", [0, 99])
async def test_an_unknown_compatibility_is_refused(registry: SchemaService, number: int) -> None:
    with pytest.raises(InvalidArgument, match=f"compatibility {number} is not known"):
        await registry.set_compatibility(messages.SetCompatibilityRequest(compatibility=number))  # type: ignore[arg-type]


async def test_the_registry_limits_versions_subjects_and_bytes(
    registry: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(registry, avro("a"))
    monkeypatch.setattr(bookkeeping, "VERSIONS_MAX", 1)
    with pytest.raises(InvalidArgument, match="orders-value has 1 versions already"):
        await register(registry, avro("a", "b", default="x"))
    monkeypatch.setattr(bookkeeping, "SUBJECTS_MAX", 1)
    for change in (register(registry, avro("a"), "b-value"), put(registry, Compatibility.NONE, "b-value")):
        with pytest.raises(InvalidArgument, match="there are 1 subjects already"):
            await change
    monkeypatch.setattr(bookkeeping, "VERSIONS_MAX", 10)
    monkeypatch.setattr(bookkeeping, "SUBJECT_BYTES_MAX", 100)
    with pytest.raises(InvalidArgument, match="the versions of orders-value would take"):
        await register(registry, avro("a", "b", default="x"))
    monkeypatch.setattr(bookkeeping, "SUBJECT_BYTES_MAX", 10_000)
    monkeypatch.setattr(bookkeeping, "BYTES_MAX", 400)
    with pytest.raises(InvalidArgument, match="all schemas would take"):
        await register(registry, avro("a", "b", default="x"))


async def test_deleting_schemas_frees_their_bytes(cluster: Cluster, registry: SchemaService) -> None:
    for subject in ("a-value", "b-value"):
        for schema in (avro("a"), avro("a", "b", default="x")):
            await register(registry, schema, subject)
    held = registry.size_bytes
    assert (registry.subject_count, held > 400) == (2, True)
    await cluster.restart()
    registry = cluster.coordinator.schemas
    assert registry.size_bytes == held
    await delete(registry, 1, "a-value")
    for subject in ("a-value", "b-value"):
        await delete(registry, subject=subject)
    assert registry.size_bytes == 0


async def test_registration_fails_when_ids_are_used_up(cluster: Cluster, registry: SchemaService) -> None:
    await cluster.coordinator.state.write({LAST_SCHEMA_ID: str((1 << 31) - 1).encode()})
    with pytest.raises(InvalidArgument, match="no more ids"):
        await register(registry, avro("a"))


async def test_only_small_sets_of_columns_are_compared_in_the_event_loop(
    registry: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short definition of another type may take long, too."""
    loops, in_loop = threading.get_ident(), list[bool]()

    def compare(*_: Any) -> list[str]:
        in_loop.append(threading.get_ident() == loops)
        return []

    monkeypatch.setattr(checking, "incompatibilities", compare)
    many = columns(*map(str, range(100)))
    for schema in (as_text(columns("a")), as_text(many), avro("a"), text("{}", SchemaType.JSON)):
        await registry.check(messages.CheckSchemaRequest(subject=SUBJECT, schema=schema))
    assert in_loop == [True, False, False, False]


async def test_the_number_of_waiting_comparisons_is_limited(
    registry: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.gather(*(register(registry, avro("a", f"n{n}", default="x")) for n in range(5)))
    with pytest.raises(InvalidSchema, match="there is no type"):
        await register(registry, text('"nope"'))
    monkeypatch.setattr(checking, "WAITING_MAX", 0)
    with pytest.raises(Unavailable, match="schemas are being compared"):
        await register(registry, avro("z"))
    await register(registry, as_text(columns("a")), "few-value")


async def test_requesters_of_comparisons_take_turns(registry: SchemaService) -> None:
    done: list[str] = []

    async def ask(who: str, number: int) -> None:
        REQUESTER.set(who)
        await registry.check(messages.CheckSchemaRequest(subject=SUBJECT, schema=avro(f"f{number}")))
        done.append(who)

    await asyncio.gather(*(ask("many", number) for number in range(20)), ask("one", 20))
    assert done.index("one") <= 2


async def test_cancelled_comparisons_give_up_their_turns(registry: SchemaService) -> None:
    asked = [asyncio.create_task(register(registry, avro("a", f"n{n}", default="x"))) for n in range(5)]
    await asyncio.sleep(0)
    for each in asked[:4]:
        each.cancel()
    assert (await asked[4]).version == 1
    assert registry._checking._waiting == 0


async def test_an_abandoned_comparison_counts_until_it_ends(
    registry: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = list[str](), threading.Event()

    def compare(new: Definition, *_: Any) -> list[str]:
        begun.append(new.text)
        assert go_on.wait(WAIT_S)
        return []

    monkeypatch.setattr(checking, "incompatibilities", compare)
    monkeypatch.setattr(checking, "WAITING_MAX", 2)
    request = messages.CheckSchemaRequest(subject=SUBJECT, schema=avro("a"))
    gone = asyncio.create_task(registry.check(request))
    await until(lambda: begun, "the comparison has begun")
    gone.cancel()
    waiting = asyncio.create_task(registry.check(request))
    await asyncio.wait([gone])
    with pytest.raises(Unavailable, match="2 schemas are being compared"):
        await registry.check(request)
    go_on.set()
    await waiting
    assert (len(begun), registry._checking._waiting) == (2, 0)


# --- restarts of the coordinator ---------------------------------------------------------------------------------


async def test_schemas_and_compatibilities_outlast_a_coordinator(cluster: Cluster, registry: SchemaService) -> None:
    for schema in (avro("a"), avro("a", "b", default="x")):
        await register(registry, schema)
    await register(registry, avro("a"), "orders-key")
    await put(registry, Compatibility.FULL)
    await put(registry, Compatibility.NONE, "")
    await delete(registry, 2)
    await cluster.restart()
    registry = cluster.coordinator.schemas
    assert subjects(registry) == ["orders-key", SUBJECT]
    assert versions(registry) == [(1, 1)]
    assert (await of_id(registry, 1)).schema == avro("a")
    assert mode_of(registry) == (Compatibility.FULL, False)
    assert mode_of(registry, "") == (Compatibility.NONE, True)
    again = await register(registry, avro("a", "c", default="x"))
    assert (again.version, again.schema_id) == (3, 3)


async def test_ids_given_since_a_restored_copy_are_not_given_again(cluster: Cluster, registry: SchemaService) -> None:
    cluster.clock.advance(280_000_000.0)  # it is 2026
    registry = (await cluster.restart()).schemas
    await cluster.register("broker-a")
    await register(registry, avro("a"))
    copy = cluster.coordinator.state.ledger.snapshot()
    await register(registry, avro("b"), "b-value")
    changes: dict[str, bytes | None] = dict.fromkeys(cluster.coordinator.state.ledger.snapshot())
    await cluster.coordinator.state.write({**changes, **copy, RESTORED: b"{}"})
    registry = (await cluster.restart()).schemas
    assert cluster.coordinator.state.catching_up
    with pytest.raises(Unavailable):
        await register(registry, avro("c"), "c-value")
    assert (await of_id(registry, 1)).schema == avro("a")
    while cluster.coordinator.state.catching_up:
        cluster.clock.advance(1.0)
        await cluster.heartbeat(1)
        cluster.coordinator.tick()
    with pytest.raises(Unavailable, match="catching up"):  # the end of catching up is not stored yet
        await register(registry, avro("c"), "c-value")
    await cluster.coordinator.idle()
    assert (await register(registry, avro("c"), "c-value")).schema_id > 200_000_000
    assert (await register(registry, avro("a"), "d-value")).schema_id == 1


# --- access rights -----------------------------------------------------------------------------------------------


class Secured:
    """A registry behind a guard."""

    def __init__(self, cluster: Cluster) -> None:
        now_s = cluster.clock.boottime_s
        authenticator = Authenticator(CertificateNames.of(DAEMONS, USERS), now_s=now_s)
        self.events: list[AuditEvent] = []
        self.guard = Guard(authenticator, Audit(now_s, self.events.append))
        self.registry = SchemaService(cluster.coordinator.state, self.guard, NO_SHARES)
        self.registry.load()

    def grant(self, resource: str, *operations: Operation) -> None:
        """Grant Alice these operations and no others, and make her the caller."""
        told = table(rules=[rule("user:alice", resource, *operations)])
        self.guard.authenticator.accounts = Accounts(told, 1, 0.0)
        CALLER.set(Peer("grpc", "10.0.0.9:1", identity=Identity("alice")))


@pytest.fixture
async def secured(cluster: Cluster) -> AsyncIterator[Secured]:
    secured = Secured(cluster)
    yield secured
    await secured.registry.close()
    CALLER.set(None)


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.ALTER])
async def test_callers_who_may_write_or_alter_a_stream_can_register_its_schemas(
    secured: Secured, operation: Operation
) -> None:
    secured.grant("stream:orders", operation)
    registered = await register(secured.registry, avro("a"))
    assert registered.registered_by == "user:alice"
    with pytest.raises(UnknownStream):
        await register(secured.registry, avro("a"), "payments-value")


async def test_a_caller_who_may_only_read_a_stream_cannot_register(secured: Secured) -> None:
    secured.grant("stream:orders", Operation.READ)
    with pytest.raises(NotAllowed, match="user:alice may not write stream:orders"):
        await register(secured.registry, avro("a"))


async def test_a_schema_id_is_unknown_to_callers_without_a_right_to_its_streams(secured: Secured) -> None:
    await register(secured.registry, avro("a"), "payments-value")
    await register(secured.registry, avro("a"), SUBJECT)
    await register(secured.registry, avro("b"), "payments-key")
    secured.grant("stream:orders", Operation.READ)
    assert (await of_id(secured.registry, 1)).subject == SUBJECT
    hidden = await _refusal(secured.registry, 2)
    missing = await _refusal(secured.registry, 9)
    assert (hidden.code, hidden.message) == (missing.code, missing.message.replace("9", "2"))


async def _refusal(registry: SchemaService, schema_id: int) -> KeraError:
    with pytest.raises(UnknownSchema) as caught:
        await of_id(registry, schema_id)
    return caught.value


async def test_changes_of_the_registry_are_audited(cluster: Cluster, secured: Secured) -> None:
    secured.grant("stream:orders", Operation.WRITE)
    await register(secured.registry, avro("a"))
    await register(secured.registry, avro("a"))
    await put(secured.registry, Compatibility.NONE)
    await put(secured.registry, Compatibility.FULL, "")
    await delete(secured.registry, 1)
    assert [(each.principal, each.operation, json.loads(each.reason)) for each in secured.events] == [
        ("user:alice", "schema registered", {"subject": SUBJECT, "version": 1, "schema_id": 1}),
        ("user:alice", "compatibility of schemas", {"subject": SUBJECT, "compatibility": "none"}),
        ("user:alice", "compatibility of schemas", {"subject": "*", "compatibility": "full"}),
        ("user:alice", "schema deleted", {"subject": SUBJECT, "version": 1}),
    ]
    secured.events.clear()
    cluster.store.failure = MetadataStoreFailed("input/output error")  # the write may have happened or not
    with pytest.raises(MetadataStoreFailed):
        await put(secured.registry, Compatibility.NONE, "")
    assert [json.loads(each.reason).get("failed") for each in secured.events] == [None, "input/output error"]


# --- typed streams -----------------------------------------------------------------------------------------------


def columns(*names: str, kind: pa.DataType | None = None) -> bytes:
    return bytes(pa.schema([(name, kind or pa.int32()) for name in names]).serialize().to_pybytes())


def as_text(arrow_schema: bytes) -> messages.SchemaDefinition:
    return text(base64.b64encode(arrow_schema).decode(), SchemaType.ARROW)


async def create(cluster: Cluster, arrow_schema: bytes, name: str = "rides") -> None:
    schema = common_pb2.StreamSchema(arrow_schema=arrow_schema)
    await cluster.coordinator.streams.create(name, config(), schema)


@pytest.fixture
async def typed(cluster: Cluster) -> SchemaService:
    """The registry of a cluster that has a broker."""
    await cluster.register("broker-a")
    return cluster.coordinator.schemas


async def test_the_columns_of_a_stream_are_registered_and_deleted_with_it(
    cluster: Cluster, typed: SchemaService
) -> None:
    await create(cluster, columns("a"))
    found = await version(typed, subject="rides-value")
    assert (found.version, found.schema_id, found.schema) == (1, 1, as_text(columns("a")))
    await cluster.alter("rides", add_columns=columns("b"))
    assert versions(typed, "rides-value") == [(1, 1), (2, 2)]
    newest = cluster.coordinator.state.catalog.named("rides").schemas[-1].arrow_schema
    assert (await version(typed, subject="rides-value")).schema == as_text(newest)
    await cluster.alter("rides", add_columns=columns("b"))  # which exist already
    typed = (await cluster.restart()).schemas
    assert versions(typed, "rides-value") == [(1, 1), (2, 2)]
    await cluster.coordinator.streams.delete("rides")
    assert subjects(typed) == []
    await create(cluster, columns("a", kind=pa.string()))
    assert versions(typed, "rides-value") == [(1, 3)]


async def test_a_stream_without_columns_does_not_touch_the_registry(cluster: Cluster, typed: SchemaService) -> None:
    await cluster.create("plain")
    await register(typed, avro("a"), "plain-value")
    await cluster.coordinator.streams.delete("plain")
    assert subjects(typed) == ["plain-value"]


async def test_a_stream_with_incompatible_columns_is_not_created_or_altered(
    cluster: Cluster, typed: SchemaService
) -> None:
    await register(typed, as_text(columns("a")), "rides-value")
    with pytest.raises(IncompatibleSchema, match="rides-value: field a: string, was int32"):
        await create(cluster, columns("a", kind=pa.string()))
    assert "rides" not in [stream.name for stream in cluster.coordinator.state.catalog.streams()]
    await create(cluster, columns("a", "b"))
    await register(typed, as_text(columns("a", "b", "c")), "rides-value")
    with pytest.raises(IncompatibleSchema, match="field c: is gone: columns are only added"):
        await cluster.alter("rides", add_columns=columns("d"))
    assert len(cluster.coordinator.state.catalog.named("rides").schemas) == 1
    await cluster.alter("rides", add_columns=columns("c"))


async def test_deleting_a_typed_stream_keeps_a_subject_with_schemas_of_other_types(
    cluster: Cluster, typed: SchemaService
) -> None:
    await put(typed, Compatibility.NONE, "rides-value")
    await register(typed, avro("a"), "rides-value")
    await create(cluster, columns("a"))
    await cluster.coordinator.streams.delete("rides")
    assert [number for number, _ in versions(typed, "rides-value")] == [1, 2]


async def test_a_stream_is_created_even_if_the_registry_is_full(
    cluster: Cluster, typed: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeping, "SUBJECTS_MAX", 0)
    await create(cluster, columns("a"))
    large = columns(*(f"a column with a name that is rather long, indeed {number}" for number in range(2_100)))
    assert len(as_text(large).definition) > DEFINITION_BYTES_MAX
    await create(cluster, large, "large")
    await cluster.coordinator.streams.delete("large")
    assert subjects(typed) == []


async def test_a_creation_is_unavailable_when_its_subject_changes_meanwhile(
    cluster: Cluster, typed: SchemaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = typed.columns.compare

    async def overtaken(stream: str, arrow_schema: bytes) -> object:
        compared = await compare(stream, arrow_schema)
        await register(typed, as_text(columns("z")), f"{stream}-value")
        return compared

    monkeypatch.setattr(typed.columns, "compare", overtaken)
    with pytest.raises(Unavailable, match="others have changed rides-value meanwhile"):
        await create(cluster, columns("a"))
    assert "rides" not in [stream.name for stream in cluster.coordinator.state.catalog.streams()]
