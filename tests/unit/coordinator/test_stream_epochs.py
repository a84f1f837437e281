"""Epochs of streams: the feature level that they need, their settings, and the end of clock punctuation."""

from __future__ import annotations

from typing import Any

import pytest

from kera.core.errors import InvalidArgument
from kera.server.feature_level import EPOCHS
from kera.v1 import common_pb2
from tests.unit.coordinator.fake_cluster import Cluster, config, registration

CLOCK, PRODUCERS = common_pb2.PUNCTUATION_CLOCK, common_pb2.PUNCTUATION_PRODUCERS


async def register(cluster: Cluster, launch: str, level: int) -> None:
    request = registration(launch)
    request.broker.feature_level = level
    await cluster.coordinator.members.register_broker(request)


async def create(cluster: Cluster, name: str, **epochs: Any) -> common_pb2.StreamInfo:
    wanted = config(1)
    for field, value in epochs.items():
        setattr(wanted, field, value)
    return await cluster.coordinator.streams.create(name, wanted, common_pb2.StreamSchema())


async def test_a_stream_cannot_have_epochs_before_the_cluster_has_the_feature_level(cluster: Cluster) -> None:
    await register(cluster, "a", EPOCHS)
    await register(cluster, "b", EPOCHS - 1)
    await create(cluster, "without")
    with pytest.raises(InvalidArgument, match=f"from feature level {EPOCHS} of the cluster on, and it has"):
        await create(cluster, "with", epoch_ms=10)
    with pytest.raises(InvalidArgument, match="kera cluster health"):
        await cluster.alter("without", epoch_ms=10)
    assert cluster.coordinator.state.catalog.named("without").config.epoch_ms == 0
    await cluster.alter("without", epoch_grace_ms=10)


@pytest.mark.parametrize(
    "wrong", [{"epoch_grace_ms": 0}, {"epoch_grace_ms": 3_600_001}, {"timestamp_ahead_max_ms": 367 * 86_400_000}]
)
async def test_invalid_settings_of_epochs_are_refused_even_without_epochs(
    cluster: Cluster, wrong: dict[str, Any]
) -> None:
    await register(cluster, "a", EPOCHS)
    await create(cluster, "without")
    (field,) = wrong
    with pytest.raises(InvalidArgument, match=field):
        await cluster.alter("without", **wrong)
    with pytest.raises(InvalidArgument, match=field):
        await create(cluster, "wrong", **wrong)


async def test_a_stream_can_have_epochs_as_soon_as_all_daemons_support_them(cluster: Cluster) -> None:
    await register(cluster, "a", EPOCHS)
    assert cluster.coordinator.state.feature_level < EPOCHS
    await create(cluster, "with", epoch_ms=10)
    assert cluster.coordinator.state.feature_level == EPOCHS
    assert cluster.brokers.created == ["with"]
    await create(cluster, "later")
    assert (await cluster.alter("later", epoch_ms=10)).config.epoch_ms == 10
    assert cluster.brokers.created == ["with", "later"], "nobody had them before"


@pytest.mark.parametrize("change", [{"punctuation": PRODUCERS}, {"epoch_ms": 0}])
async def test_the_end_of_clock_punctuation_is_kept_until_the_clock_counts_again(
    cluster: Cluster, change: dict[str, Any]
) -> None:
    await register(cluster, "a", EPOCHS)
    stream = await create(cluster, "s", epoch_ms=10, clock_until_us=5)
    assert stream.config.clock_until_us == 0, "nobody else says that"
    now_us = cluster.clock.now_us()
    lease_us = cluster.settings.lease_ms * 1000
    altered = await cluster.alter("s", **change)
    assert altered.config.clock_until_us == now_us + lease_us, "a broker may hear of it later"
    cluster.clock.advance(100)
    again = await cluster.alter("s", **change)
    assert again == altered
    assert (await cluster.alter("s", retention_ms=5)).config.clock_until_us == now_us + lease_us
    assert (await cluster.restart()).state.catalog.named("s").config.clock_until_us == now_us + lease_us
    back = await cluster.alter("s", epoch_ms=10, punctuation=CLOCK)
    assert back.config.clock_until_us == 0, "from then on a new owner goes by the clock"


async def test_a_stream_with_producer_punctuation_has_no_end_of_clock_punctuation(cluster: Cluster) -> None:
    await register(cluster, "a", EPOCHS)
    await create(cluster, "s", epoch_ms=10, punctuation=PRODUCERS)
    assert (await cluster.alter("s", epoch_ms=0)).config.clock_until_us == 0
    await create(cluster, "plain")
    assert (await cluster.alter("plain", epoch_ms=5, punctuation=PRODUCERS)).config.clock_until_us == 0
