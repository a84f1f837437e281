"""A consumer group, the streamlets that it reads, and members that follow the protocol: for tests without a daemon."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.members import leases_of
from kera.coordinator.consumer_groups.progress import GroupId, StreamletProgress, key_of, position_of
from kera.coordinator.consumer_groups.requests import StreamShape
from kera.core.base.turns import at_once
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

STREAM_ID = 7
SHAPES = {STREAM_ID: StreamShape(2, 3)}
SESSION_MS = 10_000
PROGRESS_MS = 60_000


def cursor(streamlet: int, entry: int, group_id: int, segment_id: int, offset: int) -> common_pb2.Cursor:
    return common_pb2.Cursor(
        stream_id=STREAM_ID,
        streamlet_id=streamlet,
        entry=entry,
        group_id=group_id,
        segment_id=segment_id,
        position=offset,
    )


@dataclass
class TrueGroup:
    """A group as its broker has it; positions in it are offsets in its only segment."""

    group_id: int
    entry: int
    length: int = 1
    closed: bool = False
    first_record: int = 0
    gone: bool = False
    """The broker no longer has any of its records."""

    @property
    def end_record(self) -> int:
        return self.first_record + self.length


@dataclass
class FakeMember:
    """A consumer that follows the protocol, and remembers the answers."""

    member_id: str
    held: dict[GroupId, messages.GroupLease] = field(default_factory=dict)
    looks: list[messages.Look] = field(default_factory=list)
    consumed: int = 0
    busy_ms: int = 0
    splits: bool = False
    in_order: bool = False


class World:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.consumer_group = ConsumerGroup("app")
        self.stored: dict[tuple[int, int], bytes] = {}
        self.groups: dict[int, list[TrueGroup]] = {0: [], 1: []}
        self.next_id = {0: 1, 1: 1}
        self.members: dict[str, FakeMember] = {}
        self.processed: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        """(Streamlet, group) → how often each of its records was committed."""
        self.written: Counter[tuple[int, int]] = Counter()
        """Records of each (streamlet, entry)."""
        self.began: dict[tuple[int, int], int] = {}
        """(Streamlet, entry) → the first record of the consumer group."""
        self.splitting: set[str] = set()
        """The members that understand parts of groups."""
        self.in_order = False
        """All members want entries in order."""
        self.exact = True
        """Members that do not understand parts never read a group again after others had done parts of it."""
        self.told: Counter[tuple[int, int]] = Counter()
        """(Streamlet, entry) → the number of records reported as lost to the consumer group."""

    # -- streams -----------------------------------------------------------------------------------------------

    def append(self, streamlet: int, entry: int, count: int, skipped_ids: int = 0) -> None:
        """Append records to an entry, in its open group or a new one."""
        group = next((each for each in self.groups[streamlet] if each.entry == entry and not each.closed), None)
        if group is None:
            self.next_id[streamlet] += skipped_ids
            group = TrueGroup(self.next_id[streamlet], entry, 0, first_record=self.written[streamlet, entry])
            self.next_id[streamlet] += 1
            self.groups[streamlet].append(group)
        group.length += count
        self.written[streamlet, entry] += count

    def expire(self, streamlet: int, entry: int, count: int) -> None:
        """Retention removes some of the oldest groups of an entry; not the open group, nor the last one."""
        left = [each for each in self.groups[streamlet] if each.entry == entry and not each.gone]
        for group in left[:-1][:count]:
            group.gone = True

    def oldest(self, streamlet: int, entry: int, after: int = 0) -> int:
        """The ordinal of the first remaining record in groups after `after`."""
        there = (each for each in self.groups[streamlet] if each.entry == entry and each.group_id > after)
        return next((each.first_record for each in there if not each.gone), self.written[streamlet, entry])

    def close(self, streamlet: int, entry: int) -> None:
        for group in self.groups[streamlet]:
            if group.entry == entry:
                group.closed = True

    def true_group(self, streamlet: int, group_id: int) -> TrueGroup:
        return next(each for each in self.groups[streamlet] if each.group_id == group_id)

    # -- members -----------------------------------------------------------------------------------------------

    def join(self, member_id: str) -> FakeMember:
        splits = member_id in self.splitting
        return self.members.setdefault(member_id, FakeMember(member_id, splits=splits, in_order=self.in_order))

    def request(self, member: FakeMember, steps: list[messages.GroupStep]) -> messages.ConsumeRoundRequest:
        request = messages.ConsumeRoundRequest(
            consumer_group="app",
            member_id=member.member_id,
            session_timeout_ms=SESSION_MS,
            progress_timeout_ms=PROGRESS_MS,
            busy_ms=member.busy_ms,
            bytes_consumed=member.consumed,
            groups_max=100,
            stream_ids=[STREAM_ID],
            steps=steps,
            splits=member.splits,
            in_order=member.in_order,
        )
        for look in member.looks:
            after = look.after_group_id
            if look.start:
                cursors = [cursor(look.streamlet_id, entry, 0, 0, 0) for entry in range(3)]
                first = [self.oldest(look.streamlet_id, entry) for entry in range(3)]
                records = [messages.StartRecord(record=record) for record in first]
                request.starts.add(
                    stream_id=STREAM_ID, streamlet_id=look.streamlet_id, cursors=cursors, records=records
                )
                if (STREAM_ID, look.streamlet_id) not in self.consumer_group.streamlets:
                    self.began.update(((look.streamlet_id, entry), record) for entry, record in enumerate(first))
            listed = [group for group in self.groups[look.streamlet_id] if group.group_id > after and not group.gone]
            if listed:
                request.seen.add(
                    stream_id=STREAM_ID,
                    streamlet_id=look.streamlet_id,
                    after_group_id=after,
                    through_group_id=listed[-1].group_id,
                    groups=[
                        messages.SeenGroup(
                            start=cursor(look.streamlet_id, each.entry, each.group_id, 1, 0),
                            first_record=each.first_record,
                            end_record=each.end_record if each.closed else None,
                        )
                        for each in listed
                    ],
                )
        member.looks = []
        return request

    def steps(self, member: FakeMember, share: float) -> list[messages.GroupStep]:
        """The progress of a member since: a share of the rest of each group."""
        found = []
        for (_, streamlet, group_id, part), lease in member.held.items():
            group = self.true_group(streamlet, group_id)
            offset = lease.next.position
            end = lease.end.position if lease.HasField("end") else group.length
            taken = offset + int((end - offset) * share + 0.999) if not group.gone else offset
            member.consumed += taken - offset
            step = messages.GroupStep(lease=lease.lease, part=part)
            step.next.CopyFrom(cursor(streamlet, group.entry, group_id, 1, taken))
            step.next_record = group.first_record + taken
            if share and not lease.give_back:
                step.told.extend(lease.lost)
            if group.gone and share:
                known = lease.HasField("end_record")
                step.next_record = lease.end_record if known else self.oldest(streamlet, group.entry, group.group_id)
                step.finished = True
            else:
                step.finished = taken == end and (group.closed or lease.HasField("end"))
            if lease.split_bytes and not step.finished and taken < group.length and (not group.gone):
                at = taken + 1 + (group.length - taken - 1) // 2  # reads up to there, and has not reported it yet
                if at < group.length or not group.closed:
                    step.split.CopyFrom(cursor(streamlet, group.entry, group_id, 1, at))
                    step.split_record = group.first_record + at
            step.released = lease.give_back and not step.finished
            found.append(step)
        return found

    def round(self, member: FakeMember, share: float = 0.0, *, answer_lost: bool = False) -> None:
        """A round; after a lost answer the member sends the request once more."""
        steps = self.steps(member, share)
        self.consumer_group.expire(self.now_s)
        request = self.request(member, steps)
        leases = {key_of(step): step.lease for step in steps}
        ended = {step.next.group_id for step in steps if self.true_group(*key_of(step)[1:3]).gone and step.finished}
        valid = {
            key
            for key, lease in leases.items()
            if (held := self.consumer_group.members.get(member.member_id))
            and key in held.held
            and held.held[key].lease == lease
        }
        valid |= {key_of(step) for step in steps if self._is_given_back(step)}
        before = {key: lease.next.position for key, lease in member.held.items()}
        parts = sum(streamlet.parts for streamlet in self.consumer_group.streamlets.values())
        response = at_once(self.consumer_group.consuming(request, SHAPES, self.now_s))
        if answer_lost:
            response = at_once(self.consumer_group.consuming(request, SHAPES, self.now_s))
        at_once(self.consumer_group.answering(response, member.member_id, SHAPES, self.now_s))
        refused = {key_of(step) for step in response.refused}
        if member.busy_ms <= PROGRESS_MS:
            assert refused == set(leases) - valid, "exactly what others have, or may have, is refused"
        for step in steps:
            if key_of(step) not in refused:
                place = (step.next.streamlet_id, step.next.group_id)
                self.processed[place].update(range(before[key_of(step)], step.next.position))
                self._note_told(step, ended=step.next.group_id in ended)
        member.held = {key_of(lease): lease for lease in response.held}  # type: ignore[arg-type]
        member.looks = list(response.look)
        if parts and not any(each.splits for each in self.consumer_group.members.values()):
            self.exact = False
        self.store()

    def _is_given_back(self, step: messages.GroupStep) -> bool:
        """Whether a member gives back, without progress, a group that it has lost and that had no holder since."""
        streamlet = self.consumer_group.streamlets.get(key_of(step)[:2])
        group = streamlet.groups.get(key_of(step)[2:]) if streamlet is not None else None
        known = group is not None and group.lease == step.lease and position_of(step.next) <= group.next
        return step.released and known

    def _note_told(self, step: messages.GroupStep, *, ended: bool) -> None:
        """Count the gaps that a member has reported to its user and to the coordinator."""
        place = (step.next.streamlet_id, step.next.entry)
        self.told[place] += sum(gap.end_record - gap.first_record for gap in step.told)
        if ended:
            group = self.true_group(step.next.streamlet_id, step.next.group_id)
            self.told[place] += step.next_record - group.first_record - step.next.position

    def store(self) -> None:
        for key in self.consumer_group.leases.take_dirty():
            message = self.consumer_group.stored(key)
            if message is None:
                del self.stored[key]
            else:
                self.stored[key] = message.SerializeToString()

    def restart(self) -> None:
        """Another coordinator leads."""
        self.consumer_group = ConsumerGroup("app")
        for value in self.stored.values():
            self.consumer_group.leases.restore(messages.StreamletProgress.FromString(value), self.now_s)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    # -- invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        holders: dict[GroupId, str] = {}
        for member_id, member in self.consumer_group.members.items():
            told = list(leases_of(member))
            assert len(told) == len(member.held)
            for key, group in member.held.items():
                assert key not in holders, "a group is held once"
                holders[key] = member_id
                assert group.member_id == member_id
                assert not group.done
                assert member.splits or not member.stream_ids or (not key.part and group.end is None)
                if self.in_order:
                    assert self.consumer_group.streamlets[key[:2]].is_next(key)
            assert member.give_back | member.splitting <= set(member.held)
        for (_, streamlet_id), streamlet in self.consumer_group.streamlets.items():
            for place, group in streamlet.groups.items():
                assert holders.get(GroupId(STREAM_ID, streamlet_id, *place), "") == group.member_id
                assert place[0] <= streamlet.listed
                assert group.entry == self.true_group(streamlet_id, place[0]).entry
                self._check_parts(streamlet, place)
                self._check_commits(streamlet, place)
            for true in self.groups[streamlet_id]:
                if true.group_id <= streamlet.listed and not any(
                    group_id == true.group_id for group_id, _ in streamlet.groups
                ):
                    assert self.is_done(streamlet_id, true) or true.gone, "nothing is left behind that is not done"
            for entry, position in enumerate(streamlet.cursors):
                for true in self.groups[streamlet_id]:
                    if true.entry == entry and true.group_id < position.group_id and not true.gone:
                        assert self.is_done(streamlet_id, true)

    def _check_parts(self, streamlet: StreamletProgress, key: tuple[int, int]) -> None:
        group, following = streamlet.groups[key], streamlet.groups.get((key[0], key[1] + 1))
        assert (group.end is None) == (following is None), "the rest of a group is known"
        if group.end is not None and following is not None:
            assert following.joined
            assert group.next <= group.end <= following.next
            assert group.end_record in {None, following.first_record}

    def _check_commits(self, streamlet: StreamletProgress, key: tuple[int, int]) -> None:
        group, true = streamlet.groups[key], self.true_group(streamlet.streamlet_id, key[0])
        if not self.exact or true.gone:
            return
        done = self.processed[streamlet.streamlet_id, key[0]]
        first_record = group.first_record if key[1] else true.first_record
        assert first_record is not None
        start = first_record - true.first_record
        assert all(offset in done for offset in range(start, group.next.offset)), "what is committed was done"
        if not group.done and group.next != group.end:
            assert group.next.offset not in done, "no commit is lost"

    def is_done(self, streamlet: int, group: TrueGroup) -> bool:
        """Whether all records are committed, and the group is closed."""
        return group.closed and len(self.processed[streamlet, group.group_id]) == group.length

    def finish(self) -> None:
        """Let the living members go on until nothing changes."""
        for streamlet in self.groups:
            for entry in range(3):
                self.close(streamlet, entry)
        for _ in range(2000):
            self.advance(0.6)
            for member in self.members.values():
                self.round(member, 1.0)
                self.check()
            if self.all_done():
                self.check_told()
                return
        raise AssertionError("groups are left that nobody reads")

    def all_done(self) -> bool:
        return all(
            all(offset in self.processed[streamlet, group.group_id] for offset in range(group.length))
            for streamlet, groups in self.groups.items()
            for group in groups
            if not group.gone
        ) and not any(
            not group.done or group.lost
            for streamlet in self.consumer_group.streamlets.values()
            for group in streamlet.groups.values()
        )

    def check_told(self) -> None:
        """Check that every record was processed, or reported as lost, once."""
        if not self.exact:
            return
        for place, first in self.began.items():
            if (STREAM_ID, place[0]) not in self.consumer_group.streamlets:
                continue  # only a stuck member has looked, and its round does not count
            done = sum(
                self.processed[place[0], group.group_id].total()
                for group in self.groups[place[0]]
                if group.entry == place[1] and group.first_record >= first
            )
            pending = sum(
                gap.end - gap.first for gap in self.consumer_group.streamlets[STREAM_ID, place[0]].lost[place[1]]
            )
            assert done + self.told[place] + pending == self.written[place] - first

    def cursors(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        return {(each.streamlet_id, each.entry): position_of(each) for each in self.consumer_group.cursors(STREAM_ID)}
