"""Budgets that brokers get once per window, also when constraints, streams and coordinators change."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.coordinator.latency.figures import COUNT_MAX, TIME_US_MAX
from kera.core.base.turns import Turns
from kera.core.errors import InvalidArgument
from kera.v1 import latency_pb2 as messages
from tests.unit.coordinator.fake_cluster import Cluster
from tests.unit.coordinator.latency.support import FIRST, LIMIT_US, PATH, WINDOW_S, World, word


async def test_brokers_get_no_budgets_without_a_constraint(world: World) -> None:
    answer = await world.beat()
    assert not answer.HasField("budgets")
    await world.window()
    assert (world.version, world.budgets) == (0, {})


async def test_a_broker_gets_its_budgets_once_and_again_when_they_change(world: World) -> None:
    await world.create()
    assert (await world.beat()).HasField("budgets")
    assert set(world.budgets) == {"clicks", "visits"}
    first, budget = world.version, world.budgets["clicks"]
    assert first >> 32 == world.cluster.epoch
    assert (budget.constraint, budget.window_ms) == ("checkout", 15_000)
    assert [(each.consumer_group, each.stream_id) for each in budget.next] == [("enrich", world.stream_id("visits"))]
    assert not world.budgets["visits"].next
    ends = {name: list(each.ends.consumer_groups) for name, each in world.budgets.items()}
    assert ends == {"clicks": [], "visits": ["dashboard"]}
    assert all(each.HasField("ends") for each in world.budgets.values())
    assert 0 < budget.gather_us < LIMIT_US  # the needs of hops are not measured yet
    assert not (await world.beat()).HasField("budgets")
    await world.window()
    assert world.version > first
    assert world.budgets["clicks"].gather_us == (270_000 - 10_000) // 2


async def test_a_budget_that_hardly_changes_is_not_sent(world: World) -> None:
    await world.create()
    await world.window()
    version = world.version
    await world.window(send=1_200)
    assert world.version == version
    await world.window(send=30_000)
    assert world.version > version
    assert world.budgets["clicks"].gather_us == (270_000 - 8_000 - 60_000) // 2


async def test_granted_waiting_time_does_not_count_as_need_of_a_hop(world: World) -> None:
    """The granted time is measured, and the same time is granted again."""
    await world.create()
    await world.window()
    granted_us = world.budgets["clicks"].gather_us
    for _ in range(3):
        await world.window(gather=granted_us)
        assert abs(world.budgets["clicks"].gather_us - granted_us) < 0.05 * granted_us


async def test_deleted_constraints_leave_no_budget(world: World) -> None:
    await world.create()
    await world.beat()
    await world.delete()
    answer = await world.beat()
    assert answer.HasField("budgets")
    assert world.budgets == {}
    assert not (await world.beat()).HasField("budgets")


async def test_an_altered_limit_takes_effect_at_once(world: World) -> None:
    await world.create()
    await world.window()
    await world.alter(limit_us=100_000)
    await world.beat(world.took())
    assert world.budgets["clicks"].gather_us == (90_000 - 10_000) // 2


async def test_brokers_get_the_strictest_of_several_constraints(world: World) -> None:
    await world.create()
    await world.create("fast", path=PATH[:2], limit_us=50_000, window_ms=1_000)
    await world.window()
    budget = world.budgets["clicks"]
    assert (budget.constraint, budget.window_ms, budget.gather_us) == ("fast", 1_000, 45_000 - 5_000)
    assert world.budgets["visits"].gather_us == 270_000 - 10_000 - 40_000
    await world.delete("fast")
    await world.window()
    assert world.budgets["clicks"].constraint == "checkout"


async def test_windows_in_which_a_constraint_is_not_held_are_counted(world: World) -> None:
    await world.create()
    await world.window()
    assert world.describe().violations == 0
    await world.window(work=200_000)
    found = world.describe()
    assert (found.violations, found.state) == (1, messages.LATENCY_STATE_INFEASIBLE)
    assert [word(hop.hop) for hop in found.hops if hop.violates] == ["work", "work"]
    assert found.least_limit_us > LIMIT_US
    assert found.hops[0].advised_us > 0  # sending all chunks at once would only add load
    await world.window(work=135_000)
    assert all(hop.advised_us == 0 for hop in world.describe().hops)
    await world.window()
    assert world.describe().state == messages.LATENCY_STATE_HELD


async def test_figures_of_a_dead_broker_do_not_count(world: World) -> None:
    await world.create()
    await world.window()
    assert world.describe().state == messages.LATENCY_STATE_HELD
    await world.cluster.silence(FIRST)
    assert world.describe().state == messages.LATENCY_STATE_HELD  # the state of the last look
    world.cluster.clock.advance(WINDOW_S)
    await world.cluster.settle()
    assert world.describe().state == messages.LATENCY_STATE_UNKNOWN


async def test_a_new_coordinator_leaves_budgets_alone_until_it_has_reports_of_brokers(world: World) -> None:
    await world.create()
    await world.window()
    version, granted_us = world.version, world.budgets["clicks"].gather_us
    await world.fail_over()
    await world.cluster.settle()
    assert not (await world.beat(world.took())).HasField("budgets")
    await world.window(world.first_look_s, gather=granted_us)
    assert world.version >> 32 == world.cluster.epoch > version >> 32
    assert abs(world.budgets["clicks"].gather_us - granted_us) < 0.05 * granted_us
    await world.window(gather=granted_us)
    assert abs(world.budgets["clicks"].gather_us - granted_us) < 0.05 * granted_us
    assert world.describe().constraint.path == list(PATH)


async def test_a_new_coordinator_without_constraints_removes_earlier_budgets(world: World) -> None:
    await world.create()
    await world.beat()
    await world.delete()
    await world.cluster.restart()
    assert world.version
    assert (await world.beat()).HasField("budgets")
    assert (world.version, world.budgets) == (0, {})


async def test_a_constraint_created_after_a_failover_keeps_the_budgets_of_others(world: World) -> None:
    await world.create()
    await world.window()
    await world.fail_over()
    await world.create("fast", path=PATH[:2], limit_us=50_000)
    await world.beat(world.took())
    assert set(world.budgets) == {"clicks", "visits"}
    await world.window(world.first_look_s)
    assert {each.constraint for each in world.budgets.values()} == {"fast", "checkout"}


async def test_a_constraint_with_a_deleted_stream_is_broken_and_has_no_budgets(world: World) -> None:
    await world.create()
    await world.window()
    await world.cluster.coordinator.streams.delete("clicks")
    found = world.describe()
    assert found.state == messages.LATENCY_STATE_BROKEN
    assert "stream 'clicks' does not exist" in found.reason
    await world.window(streams=["visits"])
    assert world.budgets == {}
    await world.cluster.create("clicks")
    await world.window()
    assert world.budgets["clicks"].stream_id == world.stream_id("clicks")
    assert world.describe().state == messages.LATENCY_STATE_HELD


async def test_created_and_deleted_streams_change_budgets_at_once_despite_long_windows(world: World) -> None:
    await world.create(window_ms=3_600_000)
    await world.cluster.coordinator.streams.delete("visits")
    await world.cluster.settle()
    await world.beat()
    assert world.budgets == {}
    assert world.latency.planning.not_held == 1
    await world.cluster.create("visits")
    await world.cluster.settle()
    await world.beat()
    assert {name: each.stream_id for name, each in world.budgets.items()} == {
        name: world.stream_id(name) for name in ("clicks", "visits")
    }

    await world.cluster.coordinator.streams.delete("visits")  # replaced by another stream before the next look
    await world.cluster.create("visits")
    await world.cluster.settle()
    await world.beat()
    assert world.budgets["visits"].stream_id == world.stream_id("visits")


async def test_the_number_of_hops_in_a_heartbeat_is_limited(world: World) -> None:
    figures = [messages.HopFigures(stream_id=1, hop=messages.HOP_SEND, count=1)] * 4097
    with pytest.raises(InvalidArgument, match="at most 4096 latency, not 4097"):
        await world.beat(figures)


async def test_brokers_are_answered_while_many_constraints_are_planned(world: World) -> None:
    planning, count = world.latency.planning, 40
    for number in range(count):
        await world.cluster.create(f"s{number}")
        await world.create(f"c{number}", path=[f"s{number}"])
    world.cluster.coordinator.state.turns = Turns(0.0, now=lambda: 0.0)  # a slice is over after one step
    world.cluster.clock.advance(WINDOW_S)
    planning.advance()
    answered = 0
    while planning.work:
        await world.beat()
        await asyncio.sleep(0)
        answered += 1
    assert answered >= 5 * count, "each part of the plan gives way once for each constraint"
    assert len(world.budgets) == count


@pytest.mark.parametrize("version", [1, (1 << 64) - 1, (5 << 32) + 7])
async def test_a_broker_with_an_unknown_version_of_budgets_gets_them_again(world: World, version: int) -> None:
    """The version may be of an earlier coordinator, or of one that never existed."""
    await world.create()
    await world.window()
    told = world.version
    world.version = version
    assert (await world.beat()).budgets.version == told
    assert world.version == told
    assert not (await world.beat()).HasField("budgets")


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_figures_of_brokers_give_valid_descriptions_and_budgets(data: st.DataObject) -> None:
    """Figures are of existing and missing hops, groups and streams, with any values, in any order."""
    asyncio.run(hear(data))


async def hear(data: st.DataObject) -> None:
    cluster = Cluster()
    await cluster.restart()
    world = World(cluster)
    await world.begin()
    await world.create(statistic=data.draw(st.sampled_from(messages.LatencyStatistic.values())))
    await world.create("ends", path=PATH[:1], limit_us=1_000)
    numbers = st.sampled_from([0, 1, 1_000, 300_000, 1 << 32, (1 << 63), (1 << 64) - 1])
    figures = st.builds(
        messages.HopFigures,
        stream_id=st.sampled_from([world.stream_id("clicks"), world.stream_id("visits"), 0, 77, (1 << 64) - 1]),
        hop=st.sampled_from([*messages.Hop.values(), 7, -1, (1 << 31) - 1]),
        consumer_group=st.sampled_from(["", "enrich", "dashboard", "nobody", "g" * 300]),
        **dict.fromkeys(("count", "mean_us", "p99_us", "worst_mean_us", "clock_error_us", "own_linger_us"), numbers),
        worst_streamlet_id=st.sampled_from([0, (1 << 32) - 1]),
    )
    for _ in range(3):
        told = data.draw(st.lists(figures, max_size=30))
        world.version = data.draw(st.sampled_from([0, world.version, (1 << 64) - 1]))
        await world.pass_by(WINDOW_S, told)
        await cluster.settle()
        for name in ("checkout", "ends"):
            found = world.describe(name)
            limit_us = found.constraint.limit_us
            assert sum(hop.advised_us for hop in found.hops) <= limit_us * 0.9
            assert found.state != messages.LATENCY_STATE_UNSPECIFIED
            assert all(hop.count <= COUNT_MAX and hop.mean_us <= TIME_US_MAX for hop in found.hops)
            assert found.HasField("worst_hop") == any(hop.count for hop in found.hops)
        await world.beat()
        assert all(each.gather_us <= LIMIT_US for each in world.budgets.values())
        if data.draw(st.booleans()):
            await world.fail_over()
    await cluster.close()


async def test_after_a_long_look_the_next_one_waits_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    planning, clock, looks = world.latency.planning, world.cluster.clock, 0
    await world.create(window_ms=1_000)

    async def takes_long(_: object) -> None:
        nonlocal looks
        looks += 1
        clock.advance(2)

    monkeypatch.setattr(planning, "_look", takes_long)
    monkeypatch.setattr(planning, "_is_due", lambda _: True)
    for after_s, seen in ((0, 1), (7, 1), (1.1, 2), (7, 2)):
        clock.advance(after_s)
        planning.advance()
        await planning.work.idle()
        assert looks == seen
    await world.alter(limit_us=1_000_000)  # an alteration causes a look at once
    assert looks == 3
