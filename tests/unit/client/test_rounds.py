"""Rounds between a member of a consumer group and the coordinator: retries, limits, and invalid answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.core.base.clock import FakeClock
from kera.core.errors import LeaseLost, ProtocolError, Unavailable, Uncertain
from kera.v1 import common_pb2
from tests.unit.client.conftest import MakeMember
from tests.unit.client.group_support import ROWS, GroupCluster, take, take_batches
from tests.unit.client.support import Fault, until


async def test_a_member_reads_every_record_despite_temporary_errors(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups()
    groups.failures.extend([Unavailable("away"), Uncertain("no answer"), Unavailable("away")])
    groups.connects.append(Unavailable("nobody there"))
    groups.loopback.read_faults.extend([Fault.LOST, Fault.NONE, Fault.NOT_SENT])
    groups.lose_answers = 20
    consumer = make_member()
    assert sorted(await take(consumer, ROWS)) == list(range(ROWS))
    await consumer.commit()


@pytest.mark.parametrize(
    "strange", [{"stream_id": 1 << 40}, {"stream_id": 7, "streamlet_id": 99}], ids=["stream", "streamlet"]
)
async def test_an_assigned_group_of_an_unknown_streamlet_is_a_protocol_error(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any, strange: dict[str, int]
) -> None:
    await fill_groups(5)
    groups.spoil = lambda answer: answer.held.add(next=common_pb2.Cursor(group_id=1, segment_id=1, **strange))
    with pytest.raises(ProtocolError, match="invalid answer: KeyError"):
        await take(make_member(), 5)


async def test_a_requested_look_at_an_unknown_streamlet_is_a_protocol_error(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(5)
    groups.spoil = lambda answer: answer.look.add(stream_id=7, streamlet_id=99)
    with pytest.raises(ProtocolError, match="invalid answer: KeyError"):
        await take(make_member(), 50)


async def test_a_member_goes_on_after_a_restart_of_the_coordinator(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups()
    consumer = make_member()
    taken = await take(consumer, ROWS // 2)
    await groups.restart_coordinator()
    taken += await take(consumer, ROWS - ROWS // 2)
    await consumer.commit()
    assert sorted(taken) == list(range(ROWS))


async def test_a_large_commit_takes_several_rounds(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups()
    consumer = make_member(commit_interval_ms=0, steps_max=2)
    assert sorted(await take_batches(consumer, ROWS)) == list(range(ROWS))
    before = len(groups.steps)
    await consumer.commit()
    told = groups.steps[before:]
    assert max(told) == 2
    assert sum(told) > 4, "one of each group"
    await consumer.close()
    await fill_groups(5)
    assert await take(make_member(), 5) == list(range(ROWS, ROWS + 5)), "all was committed when the commit returned"


@pytest.mark.parametrize("groups", [5], indirect=True)
async def test_leaving_with_many_steps_takes_several_requests(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    for _ in range(10):
        await fill_groups(5)
    consumer = make_member(commit_interval_ms=60_000, steps_max=1)
    taken = await take_batches(consumer, 50)
    before = len(groups.steps)
    await consumer.close()
    told = [steps for steps in groups.steps[before:] if steps]  # a round may have no steps
    assert told in ([1] * 4, [1] * 5), "of each streamlet, but for one whose only chunk came last"
    again = await take_batches(make_member(), 1)
    assert again == taken[-len(again) :], "nothing else is left than the chunk that was taken last"


async def test_a_commit_while_the_coordinator_is_away_fails(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(10)
    consumer = make_member()
    await take(consumer, 10)
    groups.failures.extend([Unavailable("away")] * 1000)
    with pytest.raises(Unavailable, match="away"):
        await consumer.commit()
    groups.failures.clear()
    await consumer.commit()


async def test_a_member_delivers_no_records_while_its_session_may_have_expired(
    groups: GroupCluster, members_clock: FakeClock, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(40)
    consumer = make_member(session_timeout_ms=10_000)
    assert len(await take(consumer, 5)) == 5
    groups.failures.extend([Unavailable("away")] * 1000)
    members_clock.advance(11)
    waiting = asyncio.ensure_future(take(consumer, 35))
    rounds = groups.rounds
    await until(lambda: groups.rounds > rounds + 3)
    assert not waiting.done()
    await groups.expel(consumer.member_id)
    groups.failures.clear()
    with pytest.raises(LeaseLost):
        await waiting
    assert len(set(await take(consumer, 36))) == 36


async def test_a_caller_back_too_late_gets_no_records_before_the_coordinator_answers(
    groups: GroupCluster, members_clock: FakeClock, make_member: MakeMember, fill_groups: Any
) -> None:
    """Other members may have its groups by then, and read the prefetched records."""
    await fill_groups(40)
    for taking in (take, take_batches):
        consumer = make_member(progress_timeout_ms=5_000)
        await taking(consumer, 1)
        groups.failures.extend([Unavailable("away")] * 1000)
        members_clock.advance(6)  # less than the session timeout
        waiting = asyncio.ensure_future(taking(consumer, 1))
        rounds = groups.rounds
        await until(lambda rounds=rounds: groups.rounds > rounds + 3)  # type: ignore[misc]
        assert not waiting.done()
        groups.failures.clear()
        assert await waiting
        await consumer.close()
