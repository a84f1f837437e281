"""Consumer groups: which member gets which groups, and how far the members get."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kera.coordinator.consumer_groups import progress as consumer_group_progress
from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.discovery import LOOK_INTERVAL_S, Discovery
from kera.coordinator.consumer_groups.leases import Leases
from kera.coordinator.consumer_groups.members import AHEAD, Member, leases_of
from kera.coordinator.consumer_groups.progress import GroupId, StreamletProgress, key_of, lowest, position_of
from kera.coordinator.consumer_groups.requests import StreamShape
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.turns import at_once
from kera.core.errors import InvalidArgument, Unavailable
from kera.v1 import consumer_group_pb2 as messages
from tests.property.consumer_group_world import (
    PROGRESS_MS,
    SESSION_MS,
    SHAPES,
    STREAM_ID,
    FakeMember,
    World,
    cursor,
)


def world_with(groups: int, *names: str, closed: bool = False) -> World:
    """A consumer group with these members that reads `groups` groups, spread over all entries."""
    world = World()
    for number in range(groups):
        world.append(number % 2, number // 2 % 3, 10)
        if closed:
            world.close(number % 2, number // 2 % 3)
    for name in names:
        world.join(name)
    rounds(world, 4)
    return world


def rounds(world: World, times: int = 1, share: float = 0.0) -> None:
    for _ in range(times):
        world.advance(0.6)
        for member in world.members.values():
            world.round(member, share)
            world.check()


def held(world: World) -> list[int]:
    return [len(member.held) for member in world.members.values()]


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "expected"), [(1, [6]), (2, [3, 3]), (4, [1, 1, 2, 2]), (6, [1] * 6)])
def test_open_groups_are_shared_evenly(members: int, expected: list[int]) -> None:
    world = world_with(6, *"abcdef"[:members])
    assert sorted(held(world)) == expected


def test_some_members_get_no_group_when_members_outnumber_groups() -> None:
    assert sorted(held(world_with(2, *"abcd"))) == [0, 0, 1, 1]


def test_members_share_a_backlog_and_read_the_oldest_groups_first() -> None:
    world = World()
    for _ in range(20):
        world.append(0, 0, 10)
        world.close(0, 0)
    for name in "abc":
        world.join(name)
    rounds(world, 4)
    assert held(world) == [AHEAD] * 3
    given = sorted(key[2] for member in world.members.values() for key in member.held)
    assert given == [1, 2, 3, 4, 5, 6]


def test_a_joining_member_gets_one_group_from_each_member_and_they_keep_the_rest() -> None:
    world = world_with(6, "a", "b")
    before = {name: set(member.held) for name, member in world.members.items()}
    world.join("c")
    world.round(world.members["c"])
    asked = [lease for lease in world_answers(world) if lease.give_back]
    assert len(asked) == 2
    rounds(world, 4)
    assert held(world) == [2, 2, 2]
    for name in "ab":
        assert set(world.members[name].held) < before[name], "one given back, the others kept"


def world_answers(world: World) -> list[messages.GroupLease]:
    return [lease for member in world.consumer_group.members.values() for lease in leases_of(member)]


def test_extra_groups_go_to_the_members_that_have_consumed_least() -> None:
    """Four members read six lanes whose groups end now and then; over time their shares are even."""
    world = World()
    lanes = [(streamlet, entry) for streamlet in range(2) for entry in range(3)]
    for name in "abcd":
        world.join(name)
    for number in range(400):
        for lane in lanes:
            world.append(*lane, 10)
        world.close(*lanes[number % 6])
        rounds(world, 1, share=1.0)
    consumed = [member.consumed for member in world.members.values()]
    assert max(consumed) - min(consumed) < 0.05 * sum(consumed) / 4, consumed


def test_members_get_only_groups_of_their_streams_and_at_most_groups_max() -> None:
    world = world_with(6)
    requests = [
        messages.ConsumeRoundRequest(
            consumer_group="app",
            member_id=name,
            session_timeout_ms=SESSION_MS,
            progress_timeout_ms=PROGRESS_MS,
            groups_max=groups_max,
            stream_ids=[stream_id],
        )
        for name, stream_id, groups_max in (("elsewhere", STREAM_ID + 1, 100), ("small", STREAM_ID, 1))
    ]
    shapes = {**SHAPES, STREAM_ID + 1: SHAPES[STREAM_ID]}
    for request in requests:
        at_once(world.consumer_group.consuming(request, shapes, world.now_s))
    world.join("a")
    rounds(world, 4)
    members = world.consumer_group.members
    assert [len(members[name].held) for name in ("elsewhere", "small", "a")] == [0, 1, 5]


def test_the_assignment_is_short_when_members_do_not_take_the_next_groups() -> None:
    """Otherwise no member would read these groups, and nothing would show that."""
    world = world_with(6)
    request = world.request(FakeMember("small"), [])
    request.groups_max = 4
    for _ in range(3):
        response = at_once(world.consumer_group.consuming(request, SHAPES, world.now_s))
        at_once(world.consumer_group.answering(response, "small", SHAPES, world.now_s))
        request = world.request(FakeMember("small", looks=list(response.look)), [])
        request.groups_max = 4
        world.advance(0.6)
    assert len(world.consumer_group.members["small"].held) == 4
    assert world.consumer_group.assignment.is_short
    world.join("a")
    rounds(world, 2)
    assert not world.consumer_group.assignment.is_short


def test_groups_that_only_wait_for_a_commit_do_not_count_as_held() -> None:
    """Otherwise a consumer that seldom commits would get no more groups."""
    world = World()
    for _ in range(6):
        world.append(0, 0, 10)
        world.close(0, 0)
    world.join("a")
    rounds(world, 4)
    member = world.members["a"]
    for expected in (4, 6):
        request = world.request(member, [])
        request.ended.extend(messages.GroupStep(next=lease.next, lease=lease.lease) for lease in member.held.values())
        response = at_once(world.consumer_group.consuming(request, SHAPES, world.now_s))
        at_once(world.consumer_group.answering(response, "a", SHAPES, world.now_s))
        member.held = {key_of(lease): lease for lease in response.held}  # type: ignore[arg-type]
        assert len(member.held) == expected


# -- parts of groups ---------------------------------------------------------------------------------------------------


def splitting(*names: str, in_order: bool = False) -> World:
    """Members that support parts, and one open group that all of them want."""
    world = World()
    world.splitting, world.in_order = set(names), in_order
    world.append(0, 0, 1000)
    for name in names:
        world.join(name)
    return world


def parts_of(world: World) -> dict[int, tuple[int, int | None]]:
    """The unread range of each part of group 1 that is not done."""
    streamlet = world.consumer_group.streamlets[STREAM_ID, 0]
    return {
        part: (group.next.offset, group.end.offset if group.end is not None else None)
        for (_, part), group in streamlet.groups.items()
        if not group.done
    }


def test_members_share_one_open_group() -> None:
    world = splitting(*"abcd")
    rounds(world, 2)
    assert sorted(held(world)) == [0, 0, 0, 1], "nobody has split it yet"
    rounds(world, 12, share=0.05)
    assert min(member.consumed for member in world.members.values()) > 0
    assert min(held(world)) >= 1
    world.finish()
    assert world.exact


def test_a_group_is_not_split_while_there_is_a_group_for_each_member() -> None:
    world = splitting(*"ab")
    world.append(1, 0, 1000)
    rounds(world, 8, share=0.1)
    assert held(world) == [1, 1]
    assert not any(streamlet.parts for streamlet in world.consumer_group.streamlets.values())


def test_a_single_member_does_not_split_its_group() -> None:
    world = splitting("a")
    rounds(world, 8, share=0.1)
    assert parts_of(world) == {0: (parts_of(world)[0][0], None)}


def test_a_member_without_support_for_parts_gets_no_parts() -> None:
    world = splitting(*"ab")
    world.splitting = {"b"}
    world.members["a"].splits = False
    world.round(world.members["a"])
    rounds(world, 8, share=0.1)
    assert [len(world.members[name].held) for name in "ab"] == [1, 0]
    world.consumer_group.leave("a", [], world.now_s)
    del world.members["a"]
    world.splitting = {"b", "c"}
    world.join("c")
    rounds(world, 8, share=0.1)
    assert len(parts_of(world)) > 1, "those who know parts share it"


def test_a_single_member_without_support_for_parts_reads_the_group_from_the_first_open_offset() -> None:
    world = splitting(*"ab")
    rounds(world, 8, share=0.1)
    start = parts_of(world)[min(parts_of(world))][0]
    for name in "ab":
        world.consumer_group.leave(name, [], world.now_s)
    world.members.clear()
    world.splitting = set()
    world.join("old")
    rounds(world, 2)
    ((key, lease),) = world.members["old"].held.items()
    assert (key.group_id, key.part, lease.next.position, lease.HasField("end")) == (1, 0, start, False)
    assert parts_of(world) == {0: (start, None)}
    world.finish()


def test_the_number_of_parts_of_a_group_is_limited_when_one_part_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_max = 12
    monkeypatch.setattr(consumer_group_progress, "PARTS_MAX", parts_max)
    world = splitting(*"abc")
    world.append(0, 0, 10_000)
    rounds(world, 6)
    stuck = next(member for member in world.members.values() if any(not key.part for key in member.held))
    for _ in range(2 * parts_max):
        world.append(0, 0, 100)
        world.advance(0.6)
        for member in world.members.values():
            world.round(member, 0.0 if member is stuck else 0.5)
    assert world.consumer_group.streamlets[STREAM_ID, 0].parts <= parts_max
    assert stuck.consumed < 1000
    assert sum(member.consumed for member in world.members.values()) > parts_max * 50, "the others go on"
    world.finish()
    assert world.exact


def test_a_repeated_split_changes_nothing() -> None:
    streamlet = StreamletProgress(STREAM_ID, 0, [EARLIEST])
    streamlet.see(listed(0, (1, 0, None)))
    key = GroupId(STREAM_ID, 0, 1)
    assert streamlet.split(key, Position(1, 1, 640), 10)
    assert streamlet.split(key, Position(1, 1, 640), 10)
    assert not streamlet.split(key, Position(1, 1, 1280), 20)
    assert list(streamlet.groups) == [(1, 0), (1, 1)]


def test_an_older_coordinator_reads_a_split_group_from_its_first_open_offset() -> None:
    """A coordinator without parts sees one group, at its first unread place, without a holder."""
    world = splitting(*"abc")
    rounds(world, 12, share=0.1)
    streamlet = world.consumer_group.streamlets[STREAM_ID, 0]
    (stored,) = streamlet.to_message("app").groups
    first = next(group for group in streamlet.groups.values() if not group.done)
    assert (stored.next.position, stored.member_id, stored.lease, stored.done) == (first.next.offset, "", 0, False)
    assert stored.first_record == next(iter(streamlet.groups.values())).first_record
    assert not stored.HasField("end")
    assert StreamletProgress.from_message(streamlet.to_message("app")).groups.keys() == streamlet.groups.keys()


def test_reading_in_order_leases_only_the_oldest_group_of_an_entry() -> None:
    world = splitting(*"abc", in_order=True)
    for _ in range(4):
        world.close(0, 0)
        world.append(0, 0, 1000)
    rounds(world, 8, share=0.1)
    assert sorted(held(world)) == [0, 0, 1]
    world.finish()
    assert world.exact


# -- leases ------------------------------------------------------------------------------------------------------------


def test_groups_of_a_dead_member_go_to_others_and_its_commits_are_refused() -> None:
    world = world_with(2, "a", "b")
    dead = world.members.pop("a")
    stale = world.steps(dead, 1.0)
    world.advance(SESSION_MS / 2000)
    world.round(world.members["b"])
    world.advance(SESSION_MS / 2000 + 0.1)
    world.round(world.members["b"])
    assert len(world.members["b"].held) == 2
    response = at_once(world.consumer_group.consuming(world.request(dead, stale), SHAPES, world.now_s))
    assert list(response.refused) == stale
    assert not response.moved
    world.check()


def test_a_stuck_member_is_removed_until_it_goes_on() -> None:
    world = world_with(1, "a")
    member = world.members["a"]
    member.busy_ms = PROGRESS_MS - 1000
    assert world.consumer_group.keep_alive("a", member.busy_ms, world.now_s)
    world.advance(1.5)
    assert not world.consumer_group.keep_alive("a", PROGRESS_MS + 500, world.now_s)
    assert not world.consumer_group.members
    member.busy_ms = PROGRESS_MS + 600
    world.round(member)
    assert (held(world), len(world.consumer_group.members)) == ([0], 0)
    member.busy_ms = 0
    world.round(member)
    assert held(world) == [1]


def test_a_pause_of_the_coordinator_expires_no_member() -> None:
    world = world_with(2, "a", "b")
    world.advance(SESSION_MS / 1000 + 5)
    world.consumer_group.extend_timeouts(SESSION_MS / 1000 + 5)
    assert world.consumer_group.expire(world.now_s) == []


def test_a_repeated_commit_is_not_late() -> None:
    world = world_with(2, "a", closed=True)
    world.round(world.members["a"], 1.0, answer_lost=True)
    assert world.all_done()


def test_a_consumer_group_without_members_remembers_no_commits() -> None:
    """There may be thousands of such groups, each with thousands of commits."""
    world = world_with(2, "a", "b", closed=True)
    rounds(world, 1, share=1.0)
    assert len(world.consumer_group.commits)
    world.consumer_group.leave("a", [], world.now_s)
    world.advance(SESSION_MS / 1000 + 1)
    world.consumer_group.expire(world.now_s)
    assert not world.consumer_group.members
    assert not len(world.consumer_group.commits)


@pytest.mark.parametrize("group_id", [1, 2])
def test_a_commit_repeated_to_a_new_coordinator_is_not_late(group_id: int) -> None:
    """The previous coordinator wrote the commit and died before its answer. No other member had the group."""
    world = World()
    for _ in range(3):
        world.append(0, 0, 10)
        world.close(0, 0)
    member = world.join("a")
    rounds(world, 4)
    (step,) = [step for step in world.steps(member, 1.0) if step.next.group_id == group_id]
    assert not at_once(world.consumer_group.consuming(world.request(member, [step]), SHAPES, world.now_s)).refused
    world.store()
    known = world.consumer_group.streamlets[STREAM_ID, 0].groups
    assert ((group_id, 0) in known) == (group_id == 2), "the first is left behind, the other one waits for it"
    world.restart()
    assert not at_once(world.consumer_group.consuming(world.request(member, [step]), SHAPES, world.now_s)).refused
    step.lease += 100
    assert at_once(world.consumer_group.consuming(world.request(member, [step]), SHAPES, world.now_s)).refused


def test_a_group_that_is_assigned_again_has_a_later_lease() -> None:
    world = world_with(1, "a")
    ((_, before),) = world.members["a"].held.items()
    world.consumer_group.leave("a", [], world.now_s)
    world.round(world.members["a"])
    ((_, after),) = world.members["a"].held.items()
    assert after.lease > before.lease


def test_a_commit_with_a_leave_counts() -> None:
    world = world_with(1, "a")
    (step,) = world.steps(world.members["a"], 0.5)
    answer = world.consumer_group.leave("a", [step], world.now_s)
    assert [each.position for each in answer.moved] == [5]
    assert not answer.refused


def test_a_new_coordinator_knows_which_member_holds_which_group() -> None:
    world = world_with(6, "a", "b", "c")
    before = [dict(member.held) for member in world.members.values()]
    world.restart()
    rounds(world, 2)
    assert [dict(member.held) for member in world.members.values()] == before
    world.members.popitem()
    world.restart()
    world.advance(SESSION_MS / 1000 - 1)
    rounds(world)
    assert sum(held(world)) == 4, "who is silent has a full time-out"
    world.advance(2)
    rounds(world)
    assert sum(held(world)) == 6


def test_a_new_coordinator_knows_the_session_timeouts_of_members_with_groups() -> None:
    """If the coordinator's time-out were shorter, the consumer would read groups that others already have."""
    world = world_with(2, "a", "b")
    request = world.request(world.members["a"], [])
    request.session_timeout_ms = 6 * SESSION_MS
    world.join("c")
    for name in "ab":
        world.consumer_group.leave(name, [], world.now_s)
    for _ in range(3):
        world.advance(0.6)
        at_once(world.consumer_group.consuming(request, SHAPES, world.now_s))
    world.store()
    world.restart()
    world.advance(5 * SESSION_MS / 1000)
    world.round(world.members["c"])
    assert set(world.consumer_group.members) == {"a", "c"}
    world.advance(SESSION_MS / 1000 + 1)
    world.round(world.members["c"])
    assert set(world.consumer_group.members) == {"c"}


def test_a_new_coordinator_removes_a_stuck_member_that_only_sends_keep_alives() -> None:
    """A consumer whose code holds up its event loop sends only keep-alives, for ever."""
    world = world_with(1, "a")
    world.restart()
    assert world.consumer_group.keep_alive("a", PROGRESS_MS - 1000, world.now_s)
    assert not world.consumer_group.keep_alive("a", PROGRESS_MS + 1000, world.now_s)
    assert not world.consumer_group.members


def test_only_changed_streamlets_are_stored() -> None:
    world = world_with(2, "a")
    rounds(world, 3)
    assert world.consumer_group.leases.take_dirty() == []
    world.consumer_group.keep_alive("a", 5, world.now_s)
    assert not world.consumer_group.leases.dirty
    world.append(0, 0, 5)
    (step,) = [step for step in world.steps(world.members["a"], 1.0) if step.next.streamlet_id == 0]
    at_once(world.consumer_group.consuming(world.request(world.members["a"], [step]), SHAPES, world.now_s))
    assert world.consumer_group.leases.take_dirty() == [(STREAM_ID, 0)]


# -- known groups ------------------------------------------------------------------------------------------------------


def seen(after: int, *groups: tuple[int, int], through: int | None = None) -> messages.SeenGroups:
    """Groups as (entry, id)."""
    last = groups[-1][1] if groups else after
    return messages.SeenGroups(
        stream_id=STREAM_ID,
        after_group_id=after,
        through_group_id=through or last,
        groups=[messages.SeenGroup(start=cursor(0, entry, group_id, 1, 64)) for entry, group_id in groups],
    )


def test_each_list_of_groups_must_continue_the_previous_one() -> None:
    streamlet = StreamletProgress(STREAM_ID, 0, [EARLIEST] * 2)
    assert streamlet.see(seen(0, (0, 1), (1, 2)))
    assert not streamlet.see(seen(3, (0, 4)))
    assert streamlet.see(seen(1, (1, 2), (0, 3)))
    assert streamlet.see(seen(3, through=9))
    assert not streamlet.see(seen(0, (0, 1), (1, 2), (0, 3)))
    assert (list(streamlet.groups), streamlet.listed) == ([(1, 0), (2, 0), (3, 0)], 9)


def test_reading_begins_at_the_cursor_and_later_groups_are_read_from_their_start() -> None:
    """The first group may lack its start; later groups must be whole; groups behind a cursor are done."""
    streamlet = StreamletProgress(STREAM_ID, 0, [EARLIEST, Position(4, 2, 100)])
    streamlet.see(seen(0, (0, 1), (1, 2), (0, 3), (1, 4), (1, 5)))
    assert {number: group.next for (number, _), group in streamlet.groups.items()} == {
        1: Position(1, 1, 64),
        3: Position(3, 1, 0),
        4: Position(4, 2, 100),
        5: Position(5, 1, 0),
    }
    assert StreamletProgress(STREAM_ID, 0, [Position(7, 1, 0), Position(4, 2, 100)]).listed == 3


@pytest.mark.parametrize(
    "wrong", [seen(0, (0, 2), (0, 1)), seen(0, (0, 1), (0, 5), through=4), seen(0, (7, 1))], ids=str
)
def test_an_invalid_list_of_groups_is_refused(wrong: messages.SeenGroups) -> None:
    with pytest.raises(InvalidArgument, match="listed"):
        StreamletProgress(STREAM_ID, 0, [EARLIEST]).see(wrong)


def test_the_number_of_known_groups_of_a_streamlet_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_group_progress, "STREAMLET_GROUPS_MAX", 3)
    world = World()
    for _ in range(8):
        world.append(0, 0, 1)
        world.close(0, 0)
    world.join("a")
    rounds(world, 4)
    assert len(world.consumer_group.streamlets[STREAM_ID, 0].groups) == 3
    world.finish()


def backlog(groups: int) -> World:
    """A backlog of closed groups in one entry of each streamlet."""
    world = World()
    for streamlet in range(2):
        for _ in range(groups):
            world.append(streamlet, 0, 1)
            world.close(streamlet, 0)
    return world


def test_only_the_next_groups_of_a_long_backlog_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work, the record and the answer of each commit must not grow with the backlog."""
    monkeypatch.setattr(consumer_group_progress, "WAITING_MAX", 48)
    world = backlog(5 * consumer_group_progress.WAITING_MAX)
    for name in "abc":
        world.join(name)
    rounds(world, 4)
    for _ in range(20):
        rounds(world, 1, share=1.0)
        for streamlet in world.consumer_group.streamlets.values():
            assert len(streamlet.groups) <= consumer_group_progress.WAITING_MAX + 3 * AHEAD
            assert streamlet.to_message("app").ByteSize() < 120 * len(streamlet.groups) + 200
        assert all(member.held for member in world.members.values()), "there is always work for all"
    world.finish()


def test_a_round_looks_only_at_the_groups_of_changed_streamlets() -> None:
    world = backlog(50)
    member = world.join("a")
    rounds(world, 4)
    before = {key: streamlet.waiting for key, streamlet in world.consumer_group.streamlets.items()}

    def looked() -> set[int]:
        streamlets = world.consumer_group.streamlets.items()
        return {key[1] for key, streamlet in streamlets if streamlet.waiting is not before[key]}

    world.round(member)
    assert not looked()
    step = next(step for step in world.steps(member, 1.0) if step.next.streamlet_id == 1)
    at_once(world.consumer_group.consuming(world.request(member, [step]), SHAPES, world.now_s))
    assert looked() == {1}


# -- gaps --------------------------------------------------------------------------------------------------------------


def listed(after: int, *groups: tuple[int, int, int | None], begin: int = 0) -> messages.SeenGroups:
    """Groups of entry 0 as (id, first record, end if closed); the last group lacks its first `begin` bytes."""
    found = [
        messages.SeenGroup(start=cursor(0, 0, group_id, 1, 0), first_record=first, end_record=end)
        for group_id, first, end in groups
    ]
    found[-1].start.position = begin
    return messages.SeenGroups(stream_id=STREAM_ID, after_group_id=after, through_group_id=groups[-1][0], groups=found)


def lost_of(streamlet: StreamletProgress) -> dict[int, list[tuple[int, int]]]:
    return {
        group_id: [(each.first, each.end) for each in group.lost]
        for (group_id, _), group in streamlet.groups.items()
        if group.lost
    }


def test_groups_that_expired_before_they_were_found_are_reported_lost_once() -> None:
    streamlet = StreamletProgress(STREAM_ID, 0, [EARLIEST], [0])
    streamlet.see(listed(0, (1, 0, 100), (2, 100, 200)))
    streamlet.advance()
    assert not lost_of(streamlet)
    streamlet.see(listed(2, (9, 250, None), begin=64))
    assert streamlet.advance()[1] == [streamlet.groups[9, 0]]
    assert lost_of(streamlet) == {9: [(200, 250)]}
    assert streamlet.groups[9, 0].next == Position(9, 1, 64), "what is gone of its start is in the gap"
    assert streamlet.advance()[1] == [], "it is told once"


def test_a_gap_before_the_first_group_counts_only_if_the_start_record_is_known() -> None:
    cases: list[tuple[Position, int | None, dict[int, list[tuple[int, int]]]]] = [
        (EARLIEST, None, {}),
        (EARLIEST, 70, {}),
        (EARLIEST, 0, {5: [(0, 70)]}),
        (Position(3, 1, 9), 30, {5: [(30, 70)]}),
        (Position(3, 1, 9), None, {}),
    ]
    for position, record, expected in cases:
        streamlet = StreamletProgress(STREAM_ID, 0, [position], [record])
        streamlet.see(listed(streamlet.listed, (5, 70, None)))
        streamlet.advance()
        assert lost_of(streamlet) == expected


def test_record_numbers_that_go_back_are_a_gap_of_unknown_size() -> None:
    """A host was lost with the records in its memory."""
    streamlet = StreamletProgress(STREAM_ID, 0, [EARLIEST], [0])
    streamlet.see(listed(0, (1, 0, 100), (1000, 0, None)))
    streamlet.advance()
    assert lost_of(streamlet) == {1000: [(100, 0)]}


def test_a_gap_waits_for_the_end_of_the_group_before_it() -> None:
    """If the group after the gap is done by then, the next group gets the gap."""
    streamlet = StreamletProgress(STREAM_ID, 0, [EARLIEST], [0])
    streamlet.see(listed(0, (1, 0, None)))
    streamlet.advance()
    streamlet.see(listed(1, (5, 150, None)))
    streamlet.advance()
    assert not lost_of(streamlet)
    streamlet.groups[5, 0].done, streamlet.groups[5, 0].end_record = True, 160
    streamlet.groups[1, 0].done, streamlet.groups[1, 0].end_record = True, 100
    streamlet.advance()
    assert (streamlet.groups, streamlet.lost) == ({}, [[(100, 150)]])
    streamlet.see(listed(5, (7, 160, None)))
    streamlet.advance()
    assert lost_of(streamlet) == {7: [(100, 150)]}


def test_a_gap_is_reported_until_a_member_acknowledges_it() -> None:
    world = world_with(0, "a")
    world.append(0, 0, 10)
    world.close(0, 0)
    rounds(world, 3, share=1.0)
    for _ in range(3):
        world.append(0, 0, 10)
        world.close(0, 0)
    world.expire(0, 0, 3)
    rounds(world, 3)
    (lease,) = world.members["a"].held.values()
    expected = [messages.RecordRange(first_record=10, end_record=30)]
    assert list(lease.lost) == expected
    world.restart()
    world.consumer_group.leave("a", [], world.now_s)
    del world.members["a"]
    world.join("b")
    rounds(world, 2)
    (lease,) = world.members["b"].held.values()
    assert list(lease.lost) == expected, "the one before has not said that it told"
    rounds(world, 1, share=0.3)
    (lease,) = world.members["b"].held.values()
    assert not lease.lost
    world.finish()


def test_a_forward_only_reset_keeps_the_start_records_of_unmoved_cursors() -> None:
    consumer_group = ConsumerGroup("app")
    known = [messages.StartRecord(record=record) for record in (5, 6, 7)]
    first = start(cursor(0, 0, 3, 1, 50), cursor(0, 1, 3, 1, 0), cursor(0, 2, 2, 1, 0))
    first.records.extend(known)
    at_once(consumer_group.resetting([first], SHAPES, 1.0, force=False, forward_only=True))
    ahead = start(cursor(0, 0, 4, 1, 50), cursor(0, 1, 0, 0, 0), cursor(0, 2, 0, 0, 0))
    at_once(consumer_group.resetting([ahead], SHAPES, 1.0, force=False, forward_only=True))
    assert consumer_group.streamlets[STREAM_ID, 0].records == [None, 6, 7]
    first.records.pop()
    with pytest.raises(InvalidArgument, match="2 streamlets with 3 entries"):
        at_once(consumer_group.resetting([first], SHAPES, 1.0, force=True, forward_only=False))


def test_a_cursor_waits_for_the_oldest_group() -> None:
    world = world_with(0, "a", "b")
    for _ in range(2):
        world.append(0, 0, 10)
        world.close(0, 0)
    rounds(world, 3)
    first, second = (world.members[name] for name in "ab")
    if GroupId(STREAM_ID, 0, 1) not in first.held:
        first, second = second, first
    world.round(second, 1.0)
    assert world.cursors()[0, 0] == (1, 1, 0)
    world.round(first, 1.0)
    assert world.cursors()[0, 0] == (2, 1, 10)


# -- requests to a consumer group --------------------------------------------------------------------------------------


def start(*cursors: Any, streamlet: int = 0) -> messages.StreamletStart:
    return messages.StreamletStart(stream_id=STREAM_ID, streamlet_id=streamlet, cursors=cursors)


def test_a_forced_reset_moves_back_and_revokes_leases() -> None:
    world = world_with(2, "a", closed=True)
    before = dict(world.members["a"].held)
    rounds(world, 1, share=1.0)
    back = start(*(cursor(0, entry, 0, 0, 0) for entry in range(3)))
    reset: dict[str, Any] = {"shapes": SHAPES, "now_s": world.now_s, "forward_only": False}
    with pytest.raises(InvalidArgument, match="1 active consumer"):
        at_once(world.consumer_group.resetting([back], force=False, **reset))
    at_once(world.consumer_group.resetting([back], force=True, **reset))
    world.processed.pop((0, 1))
    rounds(world, 3)
    ((key, lease),) = world.members["a"].held.items()
    assert lease.next.position == 0
    assert lease.lease > before[key].lease


def test_a_reset_is_carried_out_as_a_whole_or_not_at_all() -> None:
    consumer_group = ConsumerGroup("app")
    good, wrong = start(*[cursor(0, 0, 5, 1, 0)] * 3), start(cursor(1, 0, 5, 1, 0), streamlet=1)
    with pytest.raises(InvalidArgument, match="2 streamlets with 3 entries"):
        at_once(consumer_group.resetting([good, wrong], SHAPES, 1.0, force=True, forward_only=False))
    assert not consumer_group.streamlets


def test_a_start_in_a_stream_that_the_member_does_not_read_is_refused() -> None:
    world = World()
    request = world.request(FakeMember("a"), [])
    request.starts.add(stream_id=STREAM_ID + 1)
    with pytest.raises(InvalidArgument, match=f"stream {STREAM_ID + 1} is not one of"):
        at_once(world.consumer_group.consuming(request, SHAPES, 1.0))


def test_a_forward_only_reset_never_moves_a_cursor_back() -> None:
    consumer_group = ConsumerGroup("app")
    ahead = start(cursor(0, 0, 3, 1, 50), cursor(0, 1, 0, 0, 0), cursor(0, 2, 2, 1, 0))
    behind = start(cursor(0, 0, 2, 1, 0), cursor(0, 1, 4, 1, 10), cursor(0, 2, 2, 1, 0))
    for each in (ahead, behind):
        at_once(consumer_group.resetting([each], SHAPES, 1.0, force=False, forward_only=True))
    assert [position_of(each) for each in consumer_group.cursors(STREAM_ID)] == [(3, 1, 50), (4, 1, 10), (2, 1, 0)]
    with pytest.raises(InvalidArgument, match="2 streamlets with 3 entries"):
        at_once(consumer_group.resetting([start(cursor(0, 0, 1, 1, 0))], SHAPES, 1.0, force=False, forward_only=True))


def test_leases_and_records_of_a_deleted_stream_are_removed() -> None:
    world = world_with(2, "a")
    world.consumer_group.forget([STREAM_ID])
    assert {world.consumer_group.stored(key) for key in world.consumer_group.leases.take_dirty()} == {None}
    assert not world.consumer_group.members["a"].held


def test_the_lowest_cursor_of_each_entry_counts() -> None:
    cursors = [cursor(0, 0, 3, 1, 0), cursor(0, 1, 5, 1, 0), cursor(0, 0, 2, 9, 9), cursor(0, 1, 0, 0, 0)]
    assert lowest(cursors) == [cursors[2], cursors[3]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"member_id": ""}, "id of 1 to"),
        ({"member_id": "x" * 65}, "id of 1 to"),
        ({"session_timeout_ms": 1}, "session_timeout_ms"),
        ({"progress_timeout_ms": 0}, "progress_timeout_ms"),
        ({"groups_max": 0}, "at least one"),
        ({"stream_ids": []}, "at least one"),
    ],
)
def test_an_invalid_round_is_refused(wrong: dict[str, Any], message: str) -> None:
    world = World()
    request = world.request(FakeMember("a"), [])
    for name, value in wrong.items():
        request.ClearField(name)  # type: ignore[arg-type]
        if not isinstance(value, list):
            setattr(request, name, value)
    with pytest.raises(InvalidArgument, match=message):
        at_once(world.consumer_group.consuming(request, SHAPES, 1.0))


def test_the_number_of_members_is_limited() -> None:
    world = World()
    world.consumer_group = ConsumerGroup("app", members_max=2)
    for name in "ab":
        world.round(world.join(name))
    with pytest.raises(Unavailable, match="2 consumers, which is the limit"):
        world.round(world.join("c"))


def calls_in(work: Callable[[], object]) -> int:
    """How many functions are called: a measure of work that does not depend on the speed of the machine."""
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_round_is_linear_in_groups_and_members() -> None:
    """One member holds a thousand groups when many others join, and then gives back what these are to have."""
    lanes, members = 250, 200
    shapes = {STREAM_ID: StreamShape(lanes, 4)}
    consumer_group = ConsumerGroup("app")

    def say(name: str, **fields: Any) -> None:
        request = World().request(FakeMember(name), [])
        request.groups_max = 2048
        request.MergeFrom(messages.ConsumeRoundRequest(**fields))
        at_once(consumer_group.consuming(request, shapes, 1.0))

    say("first", starts=[start(*[cursor(0, 0, 0, 0, 0)] * 4, streamlet=number) for number in range(lanes)])
    groups = [[messages.SeenGroup(start=cursor(0, entry, entry + 1, 1, 0)) for entry in range(4)]] * lanes
    say(
        "first",
        seen=[
            messages.SeenGroups(stream_id=STREAM_ID, streamlet_id=number, through_group_id=4, groups=each)
            for number, each in enumerate(groups)
        ],
    )
    for number in range(2, members):
        say(f"m{number:03}")
    joining = calls_in(lambda: say("last"))
    leases = list(leases_of(consumer_group.members["first"]))
    given = [messages.GroupStep(next=each.next, lease=each.lease, released=True) for each in leases if each.give_back]
    giving = calls_in(lambda: say("first", steps=given))
    assert [len(member.held) for member in consumer_group.members.values()] == [4 * lanes // members] * members
    assert max(joining, giving) < 100 * (4 * lanes + members)


def test_one_member_at_a_time_looks_for_groups() -> None:
    world = world_with(0, "a", "b")
    looks = Counter[str]()
    for _ in range(10):
        world.advance(LOOK_INTERVAL_S / 2 + 0.01)
        for name, member in world.members.items():
            world.round(member)
            looks[name] += len(member.looks)
    assert 8 <= looks.total() <= 12


def test_a_round_looks_only_at_the_streams_that_it_names() -> None:
    member = Member("a", 0.0, stream_ids=frozenset({1, 2}))
    response = messages.ConsumeRoundResponse()
    Discovery(Leases()).look(response, member, {1: StreamShape(2, 1)}, set(), 0.0)
    assert [(each.stream_id, each.streamlet_id) for each in response.look] == [(1, 0), (1, 1)]
