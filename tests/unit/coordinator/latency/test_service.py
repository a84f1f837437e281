"""Requests about latency constraints: changes, access rights, records and the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kera.coordinator.latency.records import constraint_key
from kera.coordinator.store.metadata import MetadataStoreFull
from kera.core.access.accounts import Accounts
from kera.core.access.audit_events import AuditEvent
from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.errors import (
    InvalidArgument,
    LatencyConstraintExists,
    NotAllowed,
    UnknownLatencyConstraint,
    UnknownStream,
)
from kera.core.rpc.method import Peer
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import CALLER, Guard
from kera.v1 import consumer_group_pb2
from kera.v1 import latency_pb2 as messages
from tests.unit.coordinator.latency.support import LIMIT_US, OUT, PATH, World
from tests.unit.core.access.support import rule, table


async def test_a_repeated_creation_finds_its_constraint(world: World) -> None:
    made = await world.create()
    assert (made.window_ms, made.statistic) == (15_000, messages.LATENCY_STATISTIC_MEAN)
    assert await world.create() == made  # like a client that got no answer
    with pytest.raises(LatencyConstraintExists):
        await world.create(limit_us=1_000)


async def test_a_constraint_needs_all_streams_and_groups_of_its_path(world: World) -> None:
    with pytest.raises(UnknownStream, match="no stream 'orders'"):
        await world.create(path=["orders"])
    with pytest.raises(InvalidArgument, match="no consumer group 'nobody'"):
        await world.create(path=["clicks", "group:nobody"])
    with pytest.raises(InvalidArgument, match="'dashboard' does not read 'clicks'"):
        await world.create(path=["clicks", "group:dashboard"])
    await world.read("dashboard", "clicks")
    await world.create(path=["clicks", "group:dashboard"])


async def test_an_alteration_keeps_the_fields_that_it_does_not_set(world: World) -> None:
    await world.create(statistic=messages.LATENCY_STATISTIC_P99)
    found = await world.alter(limit_us=50_000)
    assert (found.limit_us, found.statistic, list(found.path)) == (50_000, messages.LATENCY_STATISTIC_P99, list(PATH))
    found = await world.alter(window_ms=1_000, path=PATH[:3])
    assert (found.limit_us, found.window_ms, list(found.path)) == (50_000, 1_000, list(PATH[:3]))
    with pytest.raises(InvalidArgument, match="the limit"):
        await world.alter(limit_us=0)
    with pytest.raises(UnknownStream):
        await world.alter(path=["orders"])
    assert world.describe().constraint == found


async def test_requests_for_a_missing_constraint_are_an_error(world: World) -> None:
    for ask in (world.alter, world.delete):
        with pytest.raises(UnknownLatencyConstraint, match="no latency constraint 'nope': kera latency list"):
            await ask("nope")
    with pytest.raises(UnknownLatencyConstraint):
        world.describe("nope")
    with pytest.raises(InvalidArgument, match="cannot be called"):
        world.describe("")


async def test_constraints_outlast_a_coordinator(world: World) -> None:
    await world.create()
    await world.create("ends", path=PATH[:1])
    await world.alter("ends", limit_us=77_000)
    before = world.describe("ends")
    await world.delete("checkout")
    await world.fail_over()
    answer = await world.latency.list_all(messages.ListLatencyConstraintsRequest())
    assert [each.constraint.name for each in answer.constraints] == ["ends"]
    assert answer.constraints[0].constraint.limit_us == 77_000
    assert answer.constraints[0].created_us == before.created_us > 0


async def test_an_unreadable_constraint_does_not_hold_up_the_others(world: World) -> None:
    await world.create()
    state = world.cluster.coordinator.state
    usual: dict[str, Any] = {"path": PATH, "limit_us": LIMIT_US, "window_ms": 1_000}
    for number, (field, value) in enumerate({"path": [], "statistic": 9, "window_ms": 1, "limit_us": 0}.items()):
        odd = messages.LatencyConstraint(**usual | {field: value})
        odd.name = f"odd-{number}"
        record = messages.LatencyConstraintRecord(constraint=odd)
        await state.write({constraint_key(odd.name): record.SerializeToString()})
    await world.fail_over()
    await world.window(world.first_look_s)
    await world.window()
    answer = await world.latency.list_all(messages.ListLatencyConstraintsRequest())
    assert [each.constraint.name for each in answer.constraints] == ["checkout"]
    assert world.describe().state == messages.LATENCY_STATE_HELD


async def test_a_change_that_cannot_be_stored_leaves_constraints_as_they_were(world: World) -> None:
    await world.create()
    before, told = world.describe(), (await world.beat()).budgets
    world.cluster.store.failure = MetadataStoreFull("no room")
    for ask in (world.create("other", window_ms=1_000), world.alter(limit_us=1_000_000), world.delete()):
        with pytest.raises(MetadataStoreFull):
            await ask
    assert world.describe() == before
    with pytest.raises(UnknownLatencyConstraint):
        world.describe("other")
    assert not (await world.beat()).HasField("budgets")
    assert told.version == world.version

    world.cluster.store.failure = None
    await world.fail_over()
    assert world.describe().constraint == before.constraint
    await world.create("other", window_ms=1_000)
    await world.delete()


async def test_a_description_has_the_hops_of_the_path_with_their_times(world: World) -> None:
    await world.create()
    assert world.describe().state == messages.LATENCY_STATE_UNKNOWN
    await world.window(gather=20_000)
    found = world.describe()
    assert (found.state, found.mean_us, found.p99_us) == (messages.LATENCY_STATE_HELD, 50_000, 50_000)
    assert [(hop.stream, hop.consumer_group) for hop in found.hops] == [
        *[("clicks", "")] * 3,
        *[("clicks", "enrich")] * 3,
        *[("visits", "")] * 3,
        *[("visits", "dashboard")] * 3,
    ]
    gather = found.hops[0]
    assert (gather.hop, gather.count, gather.mean_us) == (messages.HOP_GATHER, 100, 20_000)
    assert gather.advised_us == world.budgets["clicks"].gather_us > 0
    assert sum(hop.allowed_us for hop in found.hops) <= LIMIT_US * 9 // 10
    answer = await world.latency.list_all(messages.ListLatencyConstraintsRequest())
    assert [(each.mean_us, len(each.hops)) for each in answer.constraints] == [(50_000, 0)]


async def test_the_reason_names_a_producer_whose_own_linger_breaks_a_constraint(world: World) -> None:
    """No advice of the coordinator can help then: the producer's own setting makes the hop slow."""
    await world.create()
    world.own_linger_us = 20_000
    await world.window(gather=20_000)
    assert (world.describe().state, world.describe().reason) == (messages.LATENCY_STATE_HELD, "")
    assert world.describe().hops[0].own_linger_us == 20_000
    world.own_linger_us = 500_000
    for _ in range(3):
        await world.window(gather=500_000)
        found = world.describe()
        assert (found.state, found.least_limit_us) == (messages.LATENCY_STATE_VIOLATED, 0)
        assert "gather of clicks exceeds its share" in found.reason or "gather of visits exceeds" in found.reason
        assert "; a producer of clicks sets linger_ms 500 itself, which overrides the constraint" in found.reason


async def test_the_reason_names_a_deleted_consumer_group(world: World) -> None:
    await world.create()
    await world.window()
    assert world.describe().reason == ""
    await world.cluster.coordinator.consumer_groups.delete(
        consumer_group_pb2.DeleteConsumerGroupRequest(consumer_group="enrich")
    )
    assert world.describe().reason == "consumer group 'enrich' does not read 'clicks' any more"


async def test_a_description_has_the_clock_error_of_each_hop(world: World) -> None:
    await world.create()
    await world.window()
    told = {(hop.stream, hop.hop): hop.clock_error_us for hop in world.describe().hops if hop.clock_error_us}
    assert told == {("clicks", messages.HOP_HAND_OVER): 2_000, ("visits", messages.HOP_HAND_OVER): 2_000}


async def test_a_list_names_the_worst_hop_of_each_constraint(world: World) -> None:
    """In a held constraint it is the slowest hop, otherwise the hop that is furthest beyond its share."""
    await world.create()
    assert not world.describe().HasField("worst_hop")
    for prefetch, work, hop, violates in ((30_000, 1_000, 5, False), (1_000, 400_000, 6, True)):
        await world.window(gather=1_000, prefetch=prefetch, work=work)
        (found,) = (await world.latency.list_all(messages.ListLatencyConstraintsRequest())).constraints
        worst = found.worst_hop
        assert (worst.hop, worst.violates, worst.mean_us) == (hop, violates, max(prefetch, work))
        assert worst in world.describe().hops


# --- access rights -----------------------------------------------------------------------------------------------


class Secured:
    """A coordinator with security on, whose caller is Alice."""

    def __init__(self, world: World) -> None:
        now_s = world.cluster.clock.boottime_s
        self.events: list[AuditEvent] = []
        door = Authenticator(CertificateNames.of(DAEMONS, USERS), now_s=now_s)
        self.guard = Guard(door, Audit(now_s, self.events.append))
        world.latency._guard = self.guard

    def grant(self, **rights: tuple[Operation, ...]) -> None:
        """Grant Alice only these operations, by the names of streams and consumer groups."""
        rules = [
            rule("user:alice", f"{'stream' if name in PATH else 'group'}:{name}", *operations)
            for name, operations in rights.items()
        ]
        self.guard.authenticator.accounts = Accounts(table(rules=rules), 1, 0.0)
        CALLER.set(Peer("grpc", "10.0.0.9:1", identity=Identity("alice")))


@pytest.fixture
def secured(world: World) -> Iterator[Secured]:
    yield Secured(world)
    CALLER.set(None)


ALTER, DESCRIBE, USE = (Operation.ALTER,), (Operation.DESCRIBE,), (Operation.USE,)


async def test_callers_who_may_alter_all_streams_of_a_path_can_alter_and_delete(world: World, secured: Secured) -> None:
    await world.create()
    secured.grant(clicks=ALTER, visits=ALTER, enrich=DESCRIBE, dashboard=USE)
    await world.alter(limit_us=1_000_000)
    assert world.describe().changed_by == "user:alice"
    await world.delete()
    changed = [event for event in secured.events if event.principal == "user:alice"]
    assert len(changed) == 2


async def test_callers_who_may_only_describe_a_stream_cannot_alter_its_constraint(
    world: World, secured: Secured
) -> None:
    await world.create()
    secured.grant(clicks=ALTER, visits=DESCRIBE, enrich=DESCRIBE, dashboard=USE)
    assert world.describe().constraint.name == "checkout"
    for ask in (world.alter, world.delete):
        with pytest.raises(NotAllowed, match="may not alter stream:visits"):
            await ask()


async def test_a_constraint_is_unknown_to_callers_who_may_not_describe_all_of_its_path(
    world: World, secured: Secured
) -> None:
    await world.create()
    secured.grant(clicks=ALTER, visits=ALTER, enrich=DESCRIBE)
    with pytest.raises(UnknownLatencyConstraint, match="no latency constraint 'checkout'"):
        world.describe()
    for ask in (world.alter, world.delete):
        with pytest.raises(UnknownLatencyConstraint):
            await ask()


async def test_the_reason_names_a_consumer_group_without_measurements(world: World) -> None:
    """Without measurements a group looks quick, so the reason tells the two cases apart."""
    await world.create()
    figures = [each for each in world.took() if not (each.consumer_group == "enrich" and each.hop in OUT[1:])]
    await world.beat(figures)
    found = world.describe()
    assert found.state == messages.LATENCY_STATE_HELD
    assert found.reason == "nothing was measured of group:enrich, which reads clicks"
    await world.beat([each for each in world.took(streams=["clicks"]) if each.hop != messages.HOP_PREFETCH])
    assert world.describe().reason == ""  # like a Spark query; the other stream had no writes
