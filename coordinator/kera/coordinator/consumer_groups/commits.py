"""Members' reports on the groups that they read: their progress, and new groups that they have found. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kera.coordinator.consumer_groups.leases import Leases
from kera.coordinator.consumer_groups.members import Member
from kera.coordinator.consumer_groups.progress import (
    Group,
    GroupId,
    StreamletProgress,
    key_of,
    known,
    position_of,
    records_in,
)
from kera.coordinator.consumer_groups.requests import StreamShape, checked_start
from kera.core.errors import InvalidArgument
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

ENDED_MAX = 4096
"""Maximum of ended leases that are remembered while there are members, so that a repeated report is not refused
as late.
"""


class Commits:
    """Carries out the commits of one consumer group."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._ended: OrderedDict[tuple[int, int, int], str] = OrderedDict()
        """(Stream, streamlet, lease) → the member that finished or released the group."""

    def __len__(self) -> int:
        """Return how many ended leases are remembered."""
        return len(self._ended)

    def forget_ended(self) -> None:
        """Forget the ended leases, once no member is left that could repeat a report."""
        self._ended.clear()

    def carry_out(
        self, member_id: str, steps: Iterable[messages.GroupStep]
    ) -> tuple[set[tuple[int, int]], list[messages.GroupStep]]:
        """Carry out steps; return the streamlets that they change, and the steps that came too late.

        Raises `InvalidArgument`.
        """
        changed = set()
        refused = []
        member = self._leases.members.get(member_id)
        for step in steps:
            key = key_of(step)
            group = member.held.get(key) if member is not None else None
            if member is None or group is None or group.lease != step.lease:
                if not self._is_repeated(member_id, step, key):
                    refused.append(step)
                continue
            if step.next.entry != group.entry:
                raise InvalidArgument(f"group {key.group_id} belongs to entry {group.entry}, not {step.next.entry}")
            if self._go_on(key, group, step):
                changed.add(key[:2])
            for told in records_in(step.told):
                if told in group.lost:
                    group.lost.remove(told)
                    self._leases.dirty.add(key[:2])
                    changed.add(key[:2])
            if step.HasField("split"):
                self._split(key, step)
                changed.add(key[:2])
            if step.finished or step.released:
                self._end(member, key, step)
                changed.add(key[:2])
        return changed, refused

    def _go_on(self, key: GroupId, group: Group, step: messages.GroupStep) -> bool:
        """Record a member's progress in a group that it holds; return False if there is none."""
        position = position_of(step.next)
        if group.end is not None and position > group.end:
            raise InvalidArgument(
                f"part {key.part} of group {key.group_id} ends at {tuple(group.end)}, before {tuple(position)}"
            )
        if position <= group.next:
            return False
        self._leases.dirty.add(key[:2])  # also if a later step makes no sense
        group.next, group.next_record = position, known(step, "next_record")
        return True

    def _end(self, member: Member, key: GroupId, step: messages.GroupStep) -> None:
        """End a member's lease of a group that it has finished or released."""
        group = member.held[key]
        group.done = step.finished
        if step.finished and group.end_record is None:
            group.end_record = known(step, "next_record")
        self._ended[(*key[:2], step.lease)] = member.member_id
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self._leases.free(member, key)

    def _split(self, key: GroupId, step: messages.GroupStep) -> None:
        """Split the group where the member gives up the rest, unless that is not wanted any more."""
        at = position_of(step.split)
        if (step.split.group_id, step.split.entry) != (key.group_id, step.next.entry):
            raise InvalidArgument(f"group {key.group_id} cannot be split at {tuple(at)}, in another group or entry")
        streamlet = self._leases.streamlets[key[:2]]
        streamlet.split(key, at, known(step, "split_record"))
        self._leases.members[streamlet.groups[key[2:]].member_id].splitting.discard(key)
        self._leases.balanced = False

    def _is_repeated(self, member_id: str, step: messages.GroupStep, key: GroupId) -> bool:
        """Whether a step was carried out before, and its answer was lost."""
        if self._ended.get((*key[:2], step.lease)) == member_id:
            return True
        streamlet = self._leases.streamlets.get(key[:2])
        return streamlet is not None and streamlet.has_done(step)

    def begin(
        self, starts: Iterable[messages.StreamletStart], shapes: Mapping[int, StreamShape]
    ) -> set[tuple[int, int]]:
        """Begin streamlets that the consumer group has not begun yet; return these."""
        begun = set()
        for start in starts:
            key, cursors, records = checked_start(start, shapes)
            if key not in self._leases.streamlets:
                self._leases.streamlets[key] = StreamletProgress(*key, cursors, records)
                begun.add(key)
        return begun

    def see(self, seen: Iterable[messages.SeenGroups]) -> set[tuple[int, int]]:
        """Add groups that a member has found; return the streamlets that they change."""
        changed = set()
        for each in seen:
            key = (each.stream_id, each.streamlet_id)
            if key in self._leases.streamlets and self._leases.streamlets[key].see(each):
                changed.add(key)
                self._leases.balanced = False
        return changed

    def advance(self, changed: Iterable[tuple[int, int]], moved: dict[tuple[int, int, int], common_pb2.Cursor]) -> None:
        """Drop finished groups from the streamlets, and add the cursors that move thereby to `moved`."""
        for key in sorted(changed):
            self._leases.dirty.add(key)
            streamlet = self._leases.streamlets[key]
            entries, telling = streamlet.advance()
            moved.update({(*key, entry): streamlet.cursor(entry) for entry in entries})
            for group in telling:
                if group.member_id:
                    self._leases.note(self._leases.members[group.member_id])
