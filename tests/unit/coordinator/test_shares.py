"""The share of one principal in the limits of the cluster, so that no principal can use them up.

Descriptions of streams are in ``test_creators``, and consumer groups in ``test_consumer_group_service``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from kera.coordinator.latency import service as latency
from kera.coordinator.operations import creators, producers
from kera.coordinator.schemas import bookkeeping
from kera.coordinator.schemas import service as schemas
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation, wire
from kera.core.errors import QuotaExceeded
from kera.core.schemas import Compatibility, SchemaType
from kera.v1 import access_pb2, common_pb2, latency_pb2, schema_pb2
from tests.unit.coordinator.creators_support import ALICE, BOB, ROOT, called_by
from tests.unit.coordinator.creators_support import secure as secure_cluster
from tests.unit.coordinator.fake_cluster import Cluster, config

OPERATIONS = [Operation.WRITE, Operation.ALTER]
Take = Callable[[Cluster, str], Awaitable[object]]
"""A function that uses up one more unit of a limit, under a new name."""


async def secure(cluster: Cluster) -> None:
    """Start a coordinator with security on; both users may write to all streams, and alter them."""
    await secure_cluster(cluster)
    called_by(ROOT)
    for who in ("alice", "bob"):
        await cluster.coordinator.access.put_user(access_pb2.PutUserRequest(name=who, create=True))
        granted = access_pb2.AccessRule(principal=f"user:{who}", operations=wire(OPERATIONS), resource="stream:*")
        await cluster.coordinator.access.grant(access_pb2.GrantRightRequest(rule=granted))


async def make_stream(cluster: Cluster, name: str) -> None:
    await cluster.coordinator.streams.create(name, config(1, 0, None), common_pb2.StreamSchema())


async def take_domain(cluster: Cluster, name: str) -> None:
    wanted = config(1, 0, None)
    wanted.memory_domain = name
    await cluster.coordinator.streams.create(name, wanted, common_pb2.StreamSchema())


async def take_domain_by_altering(cluster: Cluster, name: str) -> None:
    await make_stream(cluster, name)
    await cluster.alter(name, memory_domain=name)


async def take_name(cluster: Cluster, name: str) -> None:
    await cluster.coordinator.producers.init(name)


async def take_schema(cluster: Cluster, name: str) -> None:
    definition = f'{{"type": "string", "doc": "{name}"}}'
    schema = schema_pb2.SchemaDefinition(type=SchemaType.AVRO.wire, definition=definition)
    request = schema_pb2.RegisterSchemaRequest(subject=f"{name}-value", schema=schema)
    await cluster.coordinator.schemas.register(request)


async def take_subject(cluster: Cluster, name: str) -> None:
    request = schema_pb2.SetCompatibilityRequest(subject=f"{name}-value", compatibility=Compatibility.FULL.wire)
    await cluster.coordinator.schemas.set_compatibility(request)


async def constrain(cluster: Cluster, name: str, stream: str, window_ms: int) -> None:
    constraint = latency_pb2.LatencyConstraint(name=name, path=[stream], limit_us=50_000, window_ms=window_ms)
    await cluster.coordinator.latency.create(latency_pb2.CreateLatencyConstraintRequest(constraint=constraint))


async def take_constraint(cluster: Cluster, name: str) -> None:
    if "shared" not in [stream.name for stream in cluster.coordinator.state.catalog.streams()]:
        await make_stream(cluster, "shared")
    taken = len((await cluster.coordinator.latency.list_all(latency_pb2.ListLatencyConstraintsRequest())).constraints)
    await constrain(cluster, name, "shared", 1_000 * (taken + 1))


async def take_constrained_stream(cluster: Cluster, name: str) -> None:
    await make_stream(cluster, name)
    await constrain(cluster, name, name, 1_000)


class Case(NamedTuple):
    """One limit of the cluster. Within `total`, one principal has room for three units, and all have room for more."""

    quota: str
    take: Take
    places: tuple[tuple[object, str], ...]
    total: int


SCHEMA_BYTES = 12 * (120 + 60 + 60 + 60)
CASES = [
    Case("memory_domains", take_domain, ((creators, "MEMORY_DOMAINS_MAX"),), 12),
    Case("memory_domains", take_domain_by_altering, ((creators, "MEMORY_DOMAINS_MAX"),), 16),
    Case("producer_names", take_name, ((producers, "NAMES_MAX"),), 12),
    Case("schemas", take_schema, ((schemas, "BYTES_MAX"), (bookkeeping, "BYTES_MAX")), SCHEMA_BYTES),
    Case("schemas", take_subject, ((schemas, "BYTES_MAX"), (bookkeeping, "BYTES_MAX")), 12 * (120 + 10)),
    Case("latency_constraints", take_constraint, ((latency, "CONSTRAINTS_MAX"),), 12),
    Case("latency_streams", take_constrained_stream, ((latency, "STREAMS_MAX"),), 12),
]


@pytest.fixture(params=CASES, ids=lambda case: case.take.__name__.removeprefix("take_"))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    case: Case = request.param
    for module, name in case.places:
        monkeypatch.setattr(module, name, case.total)
    return case


async def take_by(cluster: Cluster, case: Case, who: Identity | None, *names: str) -> None:
    called_by(who)
    for name in names:
        await case.take(cluster, name)


async def test_a_principal_beyond_its_share_is_refused_and_others_are_not(cluster: Cluster, case: Case) -> None:
    await secure(cluster)
    await cluster.register("a")
    await take_by(cluster, case, ALICE, "a-0", "a-1", "a-2")
    with pytest.raises(QuotaExceeded) as raised:
        await take_by(cluster, case, ALICE, "a-3")
    assert raised.value.attributes["quota"] == case.quota
    assert raised.value.attributes["value"] == case.total // 4
    assert raised.value.attributes["principal"] == "user:alice"
    assert "user:alice would have " in raised.value.message
    assert f", and the share of one principal is {case.total // 4}; " in raised.value.message
    assert raised.value.message.endswith(", or have the coordinator run with a larger principal_share_percent")
    await take_by(cluster, case, BOB, "b-0", "b-1", "b-2")
    await take_by(cluster, case, ROOT, "r-0", "r-1", "r-2", "r-3")


async def test_a_share_outlasts_the_coordinator(cluster: Cluster, case: Case) -> None:
    await secure(cluster)
    await cluster.register("a")
    await take_by(cluster, case, ALICE, "a-0", "a-1", "a-2")
    await cluster.restart()
    await cluster.heartbeat(1)
    with pytest.raises(QuotaExceeded):
        await take_by(cluster, case, ALICE, "a-3")


async def test_shares_do_not_apply_without_security(cluster: Cluster, case: Case) -> None:
    await cluster.register("a")
    await take_by(cluster, case, ALICE, *(f"a-{number}" for number in range(6)))


async def test_deleted_schemas_free_the_share_of_their_principal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (schemas, bookkeeping):
        monkeypatch.setattr(module, "BYTES_MAX", SCHEMA_BYTES)
    await secure(cluster)
    called_by(ALICE)
    for number in range(20):
        await take_schema(cluster, f"s-{number}")
        await cluster.coordinator.schemas.delete(schema_pb2.DeleteSchemaRequest(subject=f"s-{number}-value"))
    for number in range(3):
        await take_schema(cluster, f"t-{number}")
    called_by(BOB)
    for number in range(3):  # they count for bob too, though alice has registered the same text
        request = schema_pb2.GetSchemaRequest(subject=f"t-{number}-value")
        known = (await cluster.coordinator.schemas.get(request)).registered.schema
        await cluster.coordinator.schemas.register(
            schema_pb2.RegisterSchemaRequest(subject=f"bob-{number}-value", schema=known)
        )
    with pytest.raises(QuotaExceeded):
        await take_schema(cluster, "bob-3")


async def test_a_returning_producer_does_not_use_up_more_of_the_share(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "NAMES_MAX", 4)
    await secure(cluster)
    called_by(ALICE)
    for _ in range(3):
        await take_name(cluster, "a")
    await cluster.restart()
    called_by(ALICE)
    await take_name(cluster, "a")
    with pytest.raises(QuotaExceeded, match="user:alice would have 2 producers with a name"):
        await take_name(cluster, "b")
