"""Leases of a member of a consumer group: lost groups, and reports of lost records."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.core.errors import DataLost, LeaseLost
from tests.unit.client.conftest import MakeMember
from tests.unit.client.group_support import ROWS, GroupCluster, take, truncate
from tests.unit.client.support import WAIT_S, until


async def test_commits_of_lost_groups_are_refused(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(10)
    consumer = make_member(commit_interval_ms=0)
    await take(consumer, 10)
    lease: Any = consumer._leases.in_hand
    assert not lease.range.dropped
    await groups.expel(consumer.member_id)
    with pytest.raises(LeaseLost) as caught:
        await consumer.commit()
    assert lease.range.dropped
    assert caught.value.attributes["groups"] == [["s", 0, 0, 1]]
    assert await take(consumer, 10) == list(range(10)), "it takes part again"
    await consumer.commit()


async def test_a_gap_of_unknown_groups_is_reported_until_it_is_committed(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    first = make_member()
    await first.start()
    async with asyncio.timeout(WAIT_S):
        while not (await groups.described()).streamlets:
            await asyncio.sleep(0.001)
    await first.close()
    await fill_groups()
    gone = truncate(groups, 4)
    for commit in (False, True):
        consumer = make_member(commit_interval_ms=0)
        with pytest.raises(DataLost, match="before any consumer found them") as caught:
            await take(consumer, 1)
        assert caught.value.attributes["lost_records"] == [[0, gone]]
        if commit:
            await consumer.commit()
        await consumer.close()
    assert await take(make_member(), ROWS - gone) == list(range(gone, ROWS))


async def test_each_group_reports_its_own_part_of_a_gap(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    """Groups that a consumer has found, and one that none has: each record is reported as lost only once."""
    await fill_groups()
    consumer = make_member()
    taken = await take(consumer, 1)
    await consumer.close()
    (streamlet,) = (await groups.described()).streamlets
    last = max(group.next.group_id for group in streamlet.groups)
    await fill_groups()
    gone = truncate(groups, last + 3)
    consumer = make_member()
    told: list[int] = []
    while len(taken) < 2 * ROWS - gone + 1:
        try:
            taken += await take(consumer, 1)
        except DataLost as error:
            told.append(error.attributes["available_from"][0])
    assert sorted(taken[1:]) == list(range(gone, 2 * ROWS))
    assert sorted(told) == [*range(2, last + 1), last + 3], "the last one did not end where it was when it was found"


async def test_a_member_counts_as_busy_after_a_lease_lost_error(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(10)
    consumer = make_member()
    await take(consumer, 5)
    await groups.expel(consumer.member_id)
    with pytest.raises(LeaseLost):
        await take(consumer, 1000)
    await until(lambda: consumer.busy_ms > 0)


async def test_an_error_of_the_callback_is_raised_by_the_commit(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("the caller's")

    await fill_groups(10)
    consumer = make_member(commit_interval_ms=0, on_lost=broken)
    await take(consumer, 10)
    await groups.expel(consumer.member_id)
    with pytest.raises(RuntimeError, match="the caller's"):
        async with asyncio.timeout(WAIT_S):
            await consumer.commit()
