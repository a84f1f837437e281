"""Random changes of constraints, streams and coordinators, compared with a plain model."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kera.core.errors import KeraError
from kera.v1 import latency_pb2 as messages
from tests.unit.coordinator.fake_cluster import Cluster
from tests.unit.coordinator.latency.support import PATH, READERS, WINDOW_S, World

NAMES = ("a", "b", "c")
PATHS = (PATH, PATH[:1], PATH[:2], PATH[2:], ("visits",), ("nothing",))
STEPS = (
    *("create", "alter", "delete", "delete stream", "create stream", "window", "late window", "quiet"),
    *("fail over", "odd version", "settle"),
)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_constraints_behave_like_a_plain_model(data: st.DataObject) -> None:
    asyncio.run(run(data))


async def run(data: st.DataObject) -> None:
    cluster = Cluster()
    await cluster.restart()
    world = World(cluster)
    await world.begin()
    model: dict[str, messages.LatencyConstraint] = {}
    violations: dict[str, int] = {}
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=25)):
        await take(step, world, model, violations, data)
        listed = (await world.latency.list_all(messages.ListLatencyConstraintsRequest())).constraints
        assert {each.constraint.name: each.constraint for each in listed} == model
        there = {each.name for each in cluster.coordinator.state.catalog.streams()}
        for each in listed:
            name, path = each.constraint.name, list(each.constraint.path)
            is_broken = not {element for element in path if not element.startswith("group:")} <= there
            assert (each.state == messages.LATENCY_STATE_BROKEN) is is_broken
            assert each.violations >= violations.get(name, 0)
            violations[name] = each.violations
            described = world.describe(name)
            assert described.state == each.state
            assert sum(hop.advised_us for hop in described.hops) <= each.constraint.limit_us
        planning = world.latency.planning
        assert planning.count == len(model) >= planning.not_held
        assert set(planning.shown) <= set(model)
    for name in list(model):
        await world.delete(name)
    await world.pass_by(WINDOW_S)
    await cluster.settle()
    await world.beat()
    assert world.budgets == {}
    assert world.latency.planning.not_held == 0
    await cluster.close()


async def take(
    step: str,
    world: World,
    model: dict[str, messages.LatencyConstraint],
    violations: dict[str, int],
    data: st.DataObject,
) -> None:
    name, streams = data.draw(st.sampled_from(NAMES)), world.cluster.coordinator.streams
    there = {each.name for each in world.cluster.coordinator.state.catalog.streams()}
    fields: dict[str, Any] = {
        "path": data.draw(st.sampled_from(PATHS)),
        "limit_us": data.draw(st.sampled_from([0, 1_000, 300_000, 3_600_000_000])),
        "window_ms": data.draw(st.sampled_from([1_000, 15_000])),
        "statistic": data.draw(st.sampled_from(messages.LatencyStatistic.values())),
    }
    match step:
        case "create":
            with contextlib.suppress(KeraError):
                model[name] = await world.create(name, **fields)
        case "alter":
            with contextlib.suppress(KeraError):
                model[name] = await world.alter(name, **fields)
        case "delete":
            try:
                await world.delete(name)
                del model[name]
                violations.pop(name, None)
            except KeraError:
                assert name not in model
        case "delete stream" if "visits" in there:
            await streams.delete("visits")
        case "create stream" if "visits" not in there:
            await world.cluster.create("visits")
            await world.read(READERS["visits"], "visits")
        case "window" | "late window":
            work = 900_000 if step == "late window" else 1_000
            await world.window(streams=there & set(READERS), work=work)
        case "quiet":
            await world.pass_by(2 * WINDOW_S)
        case "fail over":
            await world.fail_over()
            violations.clear()
        case "odd version":
            world.version = data.draw(st.sampled_from([0, 1, (1 << 64) - 1]))
        case "settle":
            await world.cluster.settle()
