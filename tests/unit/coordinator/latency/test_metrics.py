"""Metrics of latency constraints."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kera.coordinator import metrics as metrics_module
from kera.coordinator.metrics import CoordinatorMetrics
from kera.v1 import latency_pb2 as messages
from tests.metrics import values
from tests.unit.coordinator.latency.support import PATH, WINDOW_S, World


def measured(world: World, *, everything: bool = True) -> dict[str, float]:
    metrics = CoordinatorMetrics(CollectorRegistry())
    with metrics.leading(world.cluster.coordinator):
        found = values(metrics, everything=everything)
    return {name: value for name, value in found.items() if name.startswith("kera_latency")}


async def test_metrics_show_limits_hops_and_violations(world: World) -> None:
    assert measured(world, everything=False) == {
        "kera_latency_constraints": 0.0,
        "kera_latency_constraints_not_held": 0.0,
    }
    await world.create(statistic=messages.LATENCY_STATISTIC_P99)
    await world.window()
    await world.window(work=500_000)
    found = measured(world)
    assert found['kera_latency_limit_seconds{constraint="checkout",statistic="p99"}'] == 0.3
    assert found['kera_latency_hop_seconds{constraint="checkout",hop="work",stream="clicks"}'] == 0.5
    assert found['kera_latency_hop_seconds{constraint="checkout",hop="hand-over",stream="visits"}'] == 0.001
    assert found['kera_latency_violations_total{constraint="checkout"}'] == 1.0
    assert measured(world, everything=False)["kera_latency_constraints_not_held"] == 1.0
    assert found['kera_latency_not_held{constraint="checkout"}'] == 1.0
    await world.pass_by(WINDOW_S + 1)  # without records on the path
    await world.cluster.settle()
    assert measured(world)['kera_latency_not_held{constraint="checkout"}'] == 0.0
    assert measured(world, everything=False)["kera_latency_constraints_not_held"] == 0.0
    assert found['kera_latency_clock_error_seconds{constraint="checkout"}'] == 0.004
    await world.delete()
    assert all(value == 0 for value in measured(world).values())


async def test_the_number_of_series_of_hops_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "HOPS_MAX", 13)
    await world.create("a")
    await world.create("b", window_ms=5_000)
    await world.create("c", path=PATH[:1])
    await world.window()
    found = measured(world)
    assert sum(name.startswith("kera_latency_hop_seconds") for name in found) == 12
    assert found["kera_latency_hops_left_out"] == 15.0
    assert sum(name.startswith("kera_latency_limit_seconds") for name in found) == 3


async def test_a_coordinator_that_does_not_lead_shows_zero_constraints() -> None:
    found = values(CoordinatorMetrics(CollectorRegistry()))
    assert found["kera_latency_constraints"] == 0.0
