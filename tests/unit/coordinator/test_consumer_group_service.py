"""Consumer groups over a store: stored answers, rounds that wait, names, and groups that expire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from kera.coordinator.cluster.shares import Shares
from kera.coordinator.consumer_groups.discovery import LOOK_INTERVAL_S
from kera.coordinator.consumer_groups.registry import CONSUMER_GROUPS, NAME_CHARS_MAX
from kera.coordinator.consumer_groups.requests import MEMBER_ID_CHARS_MAX
from kera.coordinator.consumer_groups.service import LEFT_MAX, PAUSE_S_MIN, TICK_S, WAIT_MS_MAX, ConsumerGroups
from kera.coordinator.metrics import CoordinatorMetrics
from kera.coordinator.store.metadata import MetadataStoreFull
from kera.core.errors import InvalidArgument, LeaseLost, QuotaExceeded, UnknownStream
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1 import consumer_group_pb2 as messages
from tests.metrics import shown
from tests.unit.coordinator.creators_support import ALICE, BOB, ROOT, called_by, create, secure
from tests.unit.coordinator.fake_cluster import WAIT_S, Cluster, until

LONG_MS = WAIT_MS_MAX
"""Longer than `WAIT_S`: a test fails if a round waits for all of it."""
SHORT_MS = 200


class Service:
    """The consumer groups of a cluster with one stream ``s``, of one streamlet and entry."""

    def __init__(self, cluster: Cluster, **limits: Any) -> None:
        self.cluster = cluster
        self.limits = limits
        self.consumer_groups: ConsumerGroups
        self.lead()

    def lead(self) -> None:
        self.consumer_groups = ConsumerGroups(
            self.cluster.coordinator.state, self.cluster.settings.unnamed_group_retention_ms, **self.limits
        )
        self.consumer_groups.load()
        self.consumer_groups.start()

    async def restart(self, **limits: Any) -> None:
        self.limits = limits or self.limits
        await self.consumer_groups.close()
        await self.cluster.restart()
        self.lead()

    async def round(self, member_id: str = "a", consumer_group: str = "app", **fields: Any) -> Any:
        given = {"session_timeout_ms": 10_000, "progress_timeout_ms": 60_000, "groups_max": 10, "stream_ids": [1]}
        request = messages.ConsumeRoundRequest(
            consumer_group=consumer_group, member_id=member_id, **{**given, **fields}
        )
        return await self.consumer_groups.consume_round(request)

    async def begin(self, *group_ids: int) -> messages.ConsumeRoundResponse:
        """Let consumer ``a`` report that it found groups."""
        seen = messages.SeenGroups(
            stream_id=1,
            through_group_id=group_ids[-1],
            groups=[messages.SeenGroup(start=cursor(group_id)) for group_id in group_ids],
        )
        start = messages.StreamletStart(stream_id=1, cursors=[cursor(0, 0)])
        answer: messages.ConsumeRoundResponse = await self.round(starts=[start], seen=[seen])
        return answer

    async def advance(self, seconds: float) -> None:
        """Let time pass while the process runs."""
        for _ in range(round(seconds / TICK_S)):
            self.cluster.clock.advance(TICK_S)
            await self.consumer_groups.list_all(messages.ListConsumerGroupsRequest())

    async def until_waiting(self, member_id: str) -> None:
        await until(lambda: ("app", member_id) in self.consumer_groups.polls, f"a round of member {member_id} waits")

    def records(self) -> list[str]:
        return [key for key in self.cluster.store.records if key.startswith(CONSUMER_GROUPS)]


def cursor(group_id: int, segment_id: int = 1, offset: int = 0) -> common_pb2.Cursor:
    return common_pb2.Cursor(stream_id=1, group_id=group_id, segment_id=segment_id, position=offset)


def step(lease: messages.GroupLease, offset: int, **fields: Any) -> messages.GroupStep:
    return messages.GroupStep(next=cursor(lease.next.group_id, 1, offset), lease=lease.lease, **fields)


@pytest.fixture
async def service(cluster: Cluster) -> AsyncIterator[Service]:
    await cluster.register("one")
    await cluster.create("s")
    made = Service(cluster)
    yield made
    await made.consumer_groups.close()


async def test_an_answered_commit_is_stored(service: Service) -> None:
    (lease,) = (await service.begin(1)).held
    await service.round(steps=[step(lease, 50)])
    assert service.records() == ["applications/app/0000000000000001/00000000"]
    await service.restart()
    (again,) = (await service.round()).held
    assert (again.lease, again.next.position) == (lease.lease, 50)
    fetched = await service.consumer_groups.fetch(messages.FetchConsumerGroupRequest(consumer_group="app", stream_id=1))
    assert [each.position for each in fetched.cursors] == [50]
    assert [each.position for each in service.consumer_groups.registry.cursors_of(1)] == [50]


async def test_concurrent_rounds_are_stored_together(service: Service) -> None:
    (lease,) = (await service.begin(1)).held
    await service.round("b")
    writes = 0
    store = service.cluster.store
    write = store.write

    async def counted(*args: Any) -> None:
        nonlocal writes
        writes += 1
        await asyncio.sleep(0)
        await write(*args)

    store.write = counted  # type: ignore[method-assign]
    await asyncio.gather(*(service.round(steps=[step(lease, 10 * number)]) for number in range(1, 9)))
    assert 1 <= writes <= 2


async def test_a_commit_that_cannot_be_stored_has_no_effect(service: Service) -> None:
    (lease,) = (await service.begin(1)).held
    store = service.cluster.store
    write = store.write

    async def full(*_: Any) -> None:
        await asyncio.sleep(0)
        raise MetadataStoreFull("no room")

    store.write = full  # type: ignore[method-assign]
    results = await asyncio.gather(
        *(service.round(steps=[step(lease, 10 * number)]) for number in (1, 2)), return_exceptions=True
    )
    assert [type(result) for result in results] == [MetadataStoreFull, MetadataStoreFull]
    store.write = write  # type: ignore[method-assign]
    (again,) = (await service.round()).held
    assert (again.lease, again.next.position) == (lease.lease, 0)


async def test_a_member_forgotten_after_a_failed_write_joins_again(service: Service) -> None:
    """No record contains a member that holds nothing, so another member's failed write must not end it."""
    (lease,) = (await service.begin(1)).held
    await service.round("b")
    waiting = asyncio.create_task(service.round("b", wait_ms=SHORT_MS))
    await service.until_waiting("b")
    store = service.cluster.store
    write = store.write

    async def full(*_: Any) -> None:
        raise MetadataStoreFull("no room")

    store.write = full  # type: ignore[method-assign]
    with pytest.raises(MetadataStoreFull):
        await service.round(steps=[step(lease, 10)])
    store.write = write  # type: ignore[method-assign]
    async with asyncio.timeout(WAIT_S):
        assert not (await waiting).held
    assert "b" not in service.consumer_groups.registry.groups["app"].members
    await service.round("b")
    assert "b" in service.consumer_groups.registry.groups["app"].members


async def test_a_failed_write_of_one_consumer_group_leaves_the_others_alone(service: Service) -> None:
    """Loading thousands of groups anew for each commit that fails would hold up the coordinator."""
    (lease,) = (await service.begin(1)).held
    start = messages.StreamletStart(stream_id=1, cursors=[cursor(0, 0)])
    await service.round("b", consumer_group="other", starts=[start])
    known = service.consumer_groups.registry.groups
    before, other = known["app"], known["other"]
    store = service.cluster.store
    write = store.write

    async def full(*_: Any) -> None:
        raise MetadataStoreFull("no room")

    store.write = full  # type: ignore[method-assign]
    with pytest.raises(MetadataStoreFull):
        await service.round(steps=[step(lease, 10)])
    with pytest.raises(MetadataStoreFull):
        await service.round(consumer_group="new", starts=[start])
    store.write = write  # type: ignore[method-assign]
    assert known["other"] is other
    assert list(other.members) == ["b"]
    assert known["app"] is not before
    assert "new" not in known
    assert [each.group_id for each in service.consumer_groups.registry.cursors_of(1)] == [0]
    (again,) = (await service.round()).held
    assert (again.lease, again.next.position) == (lease.lease, 0)


async def test_a_round_waits_until_a_group_becomes_free(service: Service) -> None:
    await service.begin(1, 2)
    assert not (await service.round("b")).look
    waiting = asyncio.create_task(service.round("b", wait_ms=LONG_MS))
    held = (await service.round()).held
    await asyncio.sleep(0)
    assert len(held) == 2
    assert not waiting.done()
    await service.round(steps=[step(held[0], 0, released=True)])
    async with asyncio.timeout(WAIT_S):
        answer = await waiting
    assert [each.next.group_id for each in answer.held] == [held[0].next.group_id]


async def test_the_next_round_ends_the_wait_of_the_previous_one(service: Service) -> None:
    await service.begin(1)
    waiting = asyncio.create_task(service.round(wait_ms=LONG_MS))
    await service.until_waiting("a")
    async with asyncio.timeout(WAIT_S):
        await service.round()
        assert len((await waiting).held) == 1


async def test_a_round_of_a_stuck_consumer_waits_too(service: Service) -> None:
    """A stuck consumer gets no news until it goes on; without a wait it would ask again as fast as it can."""
    await service.begin(1)
    stuck: Any = {"busy_ms": 60_001, "wait_ms": LONG_MS}
    async with asyncio.timeout(WAIT_S):
        assert not (await service.round(**stuck)).held, "that it has lost what it held is said at once"
        waiting = asyncio.create_task(service.round(**stuck))
        await service.until_waiting("a")
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert len((await service.round()).held) == 1, "it goes on"
        await waiting


async def test_a_waiting_round_ends_when_it_is_time_to_look_for_groups(service: Service) -> None:
    await service.begin(1)
    waiting = asyncio.create_task(service.round(wait_ms=LONG_MS))
    await service.until_waiting("a")
    service.cluster.clock.advance(LOOK_INTERVAL_S)
    async with asyncio.timeout(WAIT_S):
        assert [each.after_group_id for each in (await waiting).look] == [1]


async def test_a_silent_member_is_removed_without_any_request(service: Service) -> None:
    await service.restart(tick_s=0.01)
    await service.begin(1)
    consumer_group = service.consumer_groups.registry.groups["app"]
    async with asyncio.timeout(WAIT_S):
        while consumer_group.members:
            service.cluster.clock.advance(0.2)
            await asyncio.sleep(0.01)
        while service.consumer_groups.is_ticking:
            await asyncio.sleep(0.01)


async def test_a_member_that_died_while_no_coordinator_led_is_removed_without_any_request(
    service: Service,
) -> None:
    await service.restart(tick_s=0.01)
    await service.begin(1)
    await service.restart()
    consumer_group = service.consumer_groups.registry.groups["app"]
    assert consumer_group.members
    async with asyncio.timeout(WAIT_S):
        while consumer_group.members:
            service.cluster.clock.advance(0.2)
            await asyncio.sleep(0.01)


async def test_checks_of_members_continue_after_an_exception_which_is_logged_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.restart(tick_s=0.001)
    await service.begin(1)
    checks = 0

    def defect(_: float) -> None:
        nonlocal checks
        checks += 1
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(service.consumer_groups.registry, "tidy", defect)
    with structlog.testing.capture_logs() as logs:
        await until(lambda: checks >= 3, "the members are checked three times")
    assert [each["event"] for each in logs] == ["unexpected exception in the check of consumer groups"]


async def test_only_consumer_groups_with_members_are_checked(service: Service) -> None:
    """There may be thousands of groups without members, and the coordinator checks twice a second."""
    start = messages.StreamletStart(stream_id=1, cursors=[cursor(0, 0)])
    for number in range(5):
        await service.consumer_groups.reset(
            messages.ResetConsumerGroupRequest(consumer_group=f"idle-{number}", starts=[start])
        )
    await service.begin(1)
    await service.advance(2)
    assert [each.name for each in service.consumer_groups.registry.active()] == ["app"]
    await service.cluster.coordinator.streams.delete("s")
    await service.consumer_groups.list_all(messages.ListConsumerGroupsRequest())
    assert service.records() == [], "a stream that is gone is forgotten by all"


async def test_a_pause_of_the_process_does_not_expire_members(service: Service) -> None:
    await service.begin(1)
    service.cluster.clock.advance(60)
    assert len((await service.round("b")).held) == 0
    assert len((await service.round("a")).held) == 1
    await service.advance(9)
    assert len((await service.round("b")).held) == 0
    await service.advance(2)
    assert len((await service.round("b")).held) == 1
    assert PAUSE_S_MIN > TICK_S


async def test_the_progress_in_a_deleted_stream_is_deleted(service: Service) -> None:
    await service.begin(1)
    await service.cluster.coordinator.streams.delete("s")
    with pytest.raises(UnknownStream):
        await service.round()
    await service.consumer_groups.list_all(messages.ListConsumerGroupsRequest())
    assert service.records() == []
    with pytest.raises(UnknownStream):
        await service.consumer_groups.fetch(messages.FetchConsumerGroupRequest(consumer_group="app", stream_id=1))


async def test_a_description_shows_members_and_progress(service: Service) -> None:
    await service.begin(1, 2)
    await service.round("b", client="host/7", busy_ms=500, bytes_consumed=9)
    await service.advance(2)
    (info,) = (await service.consumer_groups.list_all(messages.ListConsumerGroupsRequest())).consumer_groups
    assert (info.consumer_group, list(info.stream_ids), info.members) == ("app", [1], 2)
    described = await service.consumer_groups.describe(messages.DescribeConsumerGroupRequest(consumer_group="app"))
    assert [member.member_id for member in described.members] == ["a", "b"]
    b = described.members[1]
    assert (b.client, b.silent_ms, b.busy_ms, b.bytes_consumed) == ("host/7", 2000, 2500, 9)
    (progress,) = described.streamlets
    assert (progress.listed_group_id, [group.next.group_id for group in progress.groups]) == (2, [1, 2])


async def test_a_consumer_group_is_reset_and_deleted(service: Service) -> None:
    await service.begin(1)
    start = messages.StreamletStart(stream_id=1, cursors=[cursor(5, 1, 7)])
    request = messages.ResetConsumerGroupRequest(consumer_group="app", starts=[start])
    with pytest.raises(InvalidArgument, match="active"):
        await service.consumer_groups.reset(request)
    with pytest.raises(InvalidArgument, match="active"):
        await service.consumer_groups.delete(messages.DeleteConsumerGroupRequest(consumer_group="app"))
    await service.consumer_groups.leave(messages.LeaveRequest(consumer_group="app", member_id="a"))
    await service.consumer_groups.reset(request)
    fetched = await service.consumer_groups.fetch(messages.FetchConsumerGroupRequest(consumer_group="app", stream_id=1))
    assert list(fetched.cursors) == [cursor(5, 1, 7)]
    await service.consumer_groups.delete(messages.DeleteConsumerGroupRequest(consumer_group="app"))
    assert service.records() == []
    with pytest.raises(InvalidArgument, match="no consumer group"):
        await service.consumer_groups.describe(messages.DescribeConsumerGroupRequest(consumer_group="app"))


async def test_a_round_that_arrives_after_the_leave_of_its_member_is_refused(service: Service) -> None:
    """Calls of different methods may arrive in any order, and so may calls over different connections."""
    await service.begin(1)
    await service.consumer_groups.leave(messages.LeaveRequest(consumer_group="app", member_id="a"))
    with pytest.raises(LeaseLost, match="member a has left"):
        await service.round()
    described = await service.consumer_groups.describe(messages.DescribeConsumerGroupRequest(consumer_group="app"))
    assert not described.members
    await service.round(member_id="b")


async def test_a_limited_number_of_members_that_left_is_remembered(service: Service) -> None:
    await service.begin(1)
    for number in range(LEFT_MAX + 1):
        await service.consumer_groups.leave(messages.LeaveRequest(consumer_group="app", member_id=f"m{number}"))
    await service.round(member_id="m0")
    with pytest.raises(LeaseLost):
        await service.round(member_id="m1")


async def test_a_leave_with_overlong_names_is_refused_and_not_remembered(service: Service) -> None:
    for name, member_id in (("x" * (NAME_CHARS_MAX + 1), "a"), ("app", "x" * (MEMBER_ID_CHARS_MAX + 1))):
        with pytest.raises(InvalidArgument):
            await service.consumer_groups.leave(messages.LeaveRequest(consumer_group=name, member_id=member_id))
    assert not service.consumer_groups._left


@pytest.mark.parametrize("name", ["", "a/b", "x" * (NAME_CHARS_MAX + 1), "..", "ü"])
async def test_an_invalid_name_of_a_consumer_group_is_refused(service: Service, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be called"):
        await service.round(consumer_group=name)


async def test_the_number_of_consumer_groups_is_limited(service: Service) -> None:
    await service.restart(groups_max=1)
    with pytest.raises(InvalidArgument, match="between"):
        await service.round(consumer_group="wrong", session_timeout_ms=1)
    await service.begin(1)
    with pytest.raises(InvalidArgument, match="1 consumer groups, which is the limit; delete") as caught:
        await service.round(consumer_group="other")
    assert not caught.value.retriable, "a consumer is told, and does not try for ever"


async def test_a_keep_alive_says_whether_the_member_is_known_and_unknown_steps_are_refused(service: Service) -> None:
    keep_alive = messages.KeepAliveRequest(consumer_group="app", member_id="a")
    assert not (await service.consumer_groups.keep_alive(keep_alive)).member
    await service.begin(1)
    assert (await service.consumer_groups.keep_alive(keep_alive)).member
    late = messages.LeaveRequest(consumer_group="none", member_id="a", steps=[messages.GroupStep(lease=3)])
    assert list((await service.consumer_groups.leave(late)).refused) == list(late.steps)


async def test_metrics_count_consumer_groups_members_and_leases(service: Service) -> None:
    made = CoordinatorMetrics(CollectorRegistry())
    assert "kera_coordinator_consumer_groups 0.0" in shown(made), "a coordinator that does not lead"
    consumer_groups = service.cluster.coordinator.consumer_groups
    await service.consumer_groups.close()
    service.consumer_groups = consumer_groups
    await service.begin(1, 2)
    await service.round("b")
    await service.round("c", consumer_group="other")
    with made.leading(service.cluster.coordinator):
        text, totals = shown(made), shown(made, everything=False)
    assert "kera_coordinator_consumer_groups 2.0" in totals
    assert "consumer_group=" not in totals
    assert "kera_coordinator_consumer_groups 2.0" in text
    assert 'kera_coordinator_consumer_group_members{consumer_group="app"} 2.0' in text
    assert 'kera_coordinator_consumer_group_leases{consumer_group="app"} 2.0' in text
    assert 'kera_coordinator_consumer_group_leases{consumer_group="other"} 0.0' in text
    assert "kera_coordinator_consumer_groups_left_out 0.0" in text
    fewer = CoordinatorMetrics(CollectorRegistry(), consumer_groups_max=1)
    with fewer.leading(service.cluster.coordinator):
        text = shown(fewer)
    assert "kera_coordinator_consumer_groups_left_out 1.0" in text
    assert "kera_coordinator_consumer_groups 2.0" in text
    assert '{consumer_group="other"}' not in text


# --- unused consumer groups -------------------------------------------------------------------------------------


WEEK_MS = 7 * 86_400_000


@pytest.fixture
async def forgetful(cluster: Cluster) -> AsyncIterator[Service]:
    """A service that deletes unnamed consumer groups after a week without use."""
    await cluster.register("one")
    await cluster.create("s")
    cluster.settings = cluster.settings.model_copy(update={"unnamed_group_retention_ms": WEEK_MS})
    await cluster.restart()
    made = Service(cluster)
    yield made
    await made.consumer_groups.close()


async def commit(service: Service, name: str, offset: int = 5, **fields: Any) -> None:
    start = messages.StreamletStart(stream_id=1, cursors=[cursor(1, 1, offset)])
    request = messages.ResetConsumerGroupRequest(consumer_group=name, starts=[start], forward_only=True, **fields)
    await service.consumer_groups.reset(request)


async def listed(service: Service) -> dict[str, messages.ConsumerGroupInfo]:
    answer = await service.consumer_groups.list_all(messages.ListConsumerGroupsRequest())
    return {info.consumer_group: info for info in answer.consumer_groups}


async def pass_time(service: Service, milliseconds: int) -> None:
    service.cluster.clock.advance(milliseconds / 1000)
    await service.consumer_groups.forget_unused()


def all_records(service: Service) -> list[str]:
    return [key for key in service.cluster.store.records if key.startswith("application")]


async def test_an_unused_unnamed_consumer_group_is_deleted_completely(forgetful: Service) -> None:
    await commit(forgetful, "made-up", unnamed=True)
    await commit(forgetful, "chosen")
    await pass_time(forgetful, WEEK_MS - 1)
    found = await listed(forgetful)
    assert (found["made-up"].idle_ms, found["made-up"].expires_in_ms) == (WEEK_MS - 1, 1)
    assert not found["chosen"].HasField("expires_in_ms")
    await pass_time(forgetful, 1)
    assert set(await listed(forgetful)) == {"chosen"}
    assert [key for key in all_records(forgetful) if "made-up" in key] == []


async def test_a_commit_that_moves_nothing_counts_as_use(forgetful: Service) -> None:
    for _ in range(3):
        await commit(forgetful, "made-up", unnamed=True)
        await pass_time(forgetful, WEEK_MS - 1)
    assert (await listed(forgetful))["made-up"].expires_in_ms == 1


async def test_idle_time_continues_under_the_next_coordinator(forgetful: Service) -> None:
    await commit(forgetful, "made-up", unnamed=True)
    await pass_time(forgetful, WEEK_MS - 1000)
    await forgetful.restart()
    assert (await listed(forgetful))["made-up"].unnamed
    await pass_time(forgetful, 1000)
    assert await listed(forgetful) == {}


async def test_a_group_with_consumers_or_named_by_retention_is_kept(forgetful: Service) -> None:
    cluster = forgetful.cluster
    await cluster.create("pinned")
    await cluster.alter(
        "pinned", retention_consumer_groups=coordinator_pb2.ConsumerGroupNames(names=["pinned-by-name"])
    )
    await commit(forgetful, "pinned-by-name", unnamed=True)
    await commit(forgetful, "joined", unnamed=True)
    await forgetful.round("a", "joined", session_timeout_ms=24 * 3_600_000)
    await pass_time(forgetful, WEEK_MS)
    found = await listed(forgetful)
    assert set(found) == {"pinned-by-name", "joined"}
    assert not any(info.HasField("expires_in_ms") for info in found.values())
    request = messages.DeleteConsumerGroupRequest(consumer_group="pinned-by-name", idle_ms=WEEK_MS)
    with pytest.raises(InvalidArgument, match="retention of a stream waits"):
        await forgetful.consumer_groups.delete(request)


async def test_deleting_an_idle_group_fails_if_it_was_used_meanwhile(forgetful: Service) -> None:
    await commit(forgetful, "chosen")
    await pass_time(forgetful, 5000)
    await commit(forgetful, "chosen")
    request = messages.DeleteConsumerGroupRequest(consumer_group="chosen", idle_ms=5000)
    with pytest.raises(InvalidArgument, match="was used 0 s ago"):
        await forgetful.consumer_groups.delete(request)
    await pass_time(forgetful, 5000)
    await forgetful.consumer_groups.delete(request)
    assert await listed(forgetful) == {}


async def test_a_use_that_could_not_be_stored_is_stored_with_the_next_use(forgetful: Service) -> None:
    forgetful.cluster.store.failure = MetadataStoreFull("no room")
    with pytest.raises(MetadataStoreFull):
        await commit(forgetful, "made-up", unnamed=True)
    forgetful.cluster.store.failure = None
    await commit(forgetful, "made-up", unnamed=True)
    assert "application_uses/made-up" in all_records(forgetful)


START = messages.StreamletStart(stream_id=1, cursors=[cursor(0, 0)])


async def test_one_user_cannot_use_up_all_consumer_groups(cluster: Cluster) -> None:
    await secure(cluster)
    await cluster.register("a")
    await create(cluster, None, "s")
    guard = cluster.guard
    service = Service(cluster, groups_max=8, shares=Shares(guard, 25))
    called_by(ALICE)
    for number in range(2):
        await service.round(consumer_group=f"a-{number}", starts=[START])
    with pytest.raises(QuotaExceeded) as raised:
        await service.round(consumer_group="a-2")
    assert raised.value.attributes == {"quota": "consumer_groups", "value": 2, "principal": "user:alice"}
    await service.round(consumer_group="a-0")

    await service.restart()

    with pytest.raises(QuotaExceeded, match="user:alice would have 3 consumer groups"):
        await service.round(consumer_group="a-2")
    called_by(BOB)
    await service.round(consumer_group="b-0")
    called_by(ROOT)
    for number in range(3):
        await service.round(consumer_group=f"r-{number}", starts=[START])
    called_by(ALICE)
    await service.consumer_groups.leave(messages.LeaveRequest(consumer_group="a-1", member_id="a"))
    await service.consumer_groups.delete(messages.DeleteConsumerGroupRequest(consumer_group="a-1"))
    await service.round(consumer_group="a-2")
    await service.consumer_groups.close()
