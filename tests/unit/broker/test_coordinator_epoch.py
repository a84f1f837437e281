"""The coordinator's epoch: which coordinator's orders a broker carries out."""

from __future__ import annotations

import asyncio

import pytest

from kera.broker.ownership import coordinator_epoch
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.core.errors import StaleEpoch, Unavailable

LARGEST = (1 << 64) - 1


async def test_an_order_of_the_leading_coordinator_is_confirmed_at_once() -> None:
    leader = CoordinatorEpoch()
    leader.observe(3)
    await leader.confirm(3)
    assert not leader.wanted.is_set()


@pytest.mark.parametrize("epoch", [0, 2])
async def test_an_order_of_a_replaced_coordinator_or_without_an_epoch_is_refused(epoch: int) -> None:
    leader = CoordinatorEpoch()
    leader.observe(3)
    with pytest.raises(StaleEpoch) as refused:
        await leader.confirm(epoch)
    assert refused.value.attributes == {"coordinator_epoch": 3}


async def test_an_order_of_a_later_epoch_waits_until_the_coordinator_confirms_it() -> None:
    leader = CoordinatorEpoch()
    leader.observe(3)
    order = asyncio.create_task(leader.confirm(4))
    await asyncio.wait_for(leader.wanted.wait(), 5)
    assert not order.done()
    leader.observe(4)
    await order


async def test_the_answer_to_an_earlier_heartbeat_does_not_refuse_a_waiting_order() -> None:
    leader = CoordinatorEpoch()
    leader.observe(3)
    order = asyncio.create_task(leader.confirm(4))
    await asyncio.wait_for(leader.wanted.wait(), 5)
    leader.observe(3)
    await asyncio.sleep(0)
    leader.observe(4)
    await order


async def test_an_order_whose_epoch_the_coordinator_does_not_confirm_is_refused() -> None:
    leader = CoordinatorEpoch()
    leader.observe(3)
    order = asyncio.create_task(leader.confirm(LARGEST))
    await asyncio.wait_for(leader.wanted.wait(), 5)
    for _ in range(coordinator_epoch.ANSWERS_MIN):
        leader.observe(3)
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await order
    await leader.confirm(3)  # the leading coordinator's epoch is still valid


async def test_an_order_is_refused_when_no_coordinator_answers_in_time() -> None:
    leader = CoordinatorEpoch(confirm_timeout_s=0.01)
    leader.observe(3)
    with pytest.raises(Unavailable):
        await leader.confirm(4)


async def test_a_late_answer_does_not_bring_an_old_epoch_back() -> None:
    leader = CoordinatorEpoch()
    leader.observe(4)
    leader.observe(3)
    assert leader.value == 4


async def test_the_latest_order_counts_when_epochs_are_not_confirmed() -> None:
    leader = CoordinatorEpoch(confirmed=False)
    await leader.confirm(4)
    await leader.confirm(0)
    with pytest.raises(StaleEpoch):
        await leader.confirm(3)
