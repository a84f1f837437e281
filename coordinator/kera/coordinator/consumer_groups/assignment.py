"""Assignment: which member of a consumer group gets which group of segments, and which one gives some back. Pure.

The oldest unfinished group of each entry goes to some member, and later groups do as long as a member has fewer than
`AHEAD`. A free group goes to the member that holds least; among equals, to the one that has consumed least lately. So
holdings differ by at most one, and as groups come to their ends, the extra ones go round. When a member joins and
nothing is free, the members that hold most are asked to give back groups; no other member is disturbed.

When there are fewer groups than members, a group is shared: its holder is asked to keep a part of it and give up the
rest (`Member.splitting`). The rest goes to a member that has nothing, and is shared further in the same way. So all
members read one group at once, each a different part, and no group is split while there are enough for all.

A stream that a member wants in order is not shared like that: only the oldest unfinished group of each entry is given
to a member.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Set as AbstractSet

from kera.coordinator.consumer_groups.leases import Leases
from kera.coordinator.consumer_groups.members import AHEAD, Member, evened_out
from kera.coordinator.consumer_groups.progress import Group, GroupId, StreamletProgress
from kera.core.base.turns import at_once


class Assignment:
    """Gives the groups of one consumer group to its members."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.is_short = False
        """The next group of some entry has no holder, because the members hold as many groups as they want."""

    def balance(self, now_s: float) -> None:
        """Run `balancing` in one go."""
        at_once(self.balancing(now_s))

    def balancing(self, now_s: float) -> Generator[None, None, None]:
        """Give free groups to members, and decide which members have to give groups back.

        Yields before each group. Changes that happen meanwhile are left to the next call.
        """
        if self._leases.balanced:
            return
        self._leases.balanced = True
        try:
            yield from self._giving(now_s)
        except BaseException:  # the caller has given up: the next call starts anew
            self._leases.balanced = False
            raise

    def _giving(self, now_s: float) -> Generator[None, None, None]:
        recent = {member_id: member.recent(now_s) for member_id, member in self._leases.members.items()}
        takers: dict[tuple[int, bool], list[tuple[int, float, str]]] = {}
        """By stream and whether it is about parts of groups: a heap of the members that may take more, each
        with its number of
        groups and its recent consumption.
        """
        waiting = []
        wanted: set[tuple[int, bool]] = set()
        """The keys of `takers` for which some member may take more. The deeper groups wait, the fewer members
        take them.
        """
        in_order = self._in_order
        self._unsplit()
        for key2, each in list(self._leases.streamlets.items()):
            if each.waiting:
                waiting.append(_keys_of_waiting(key2, each))
                wanted |= {(key2[0], False), (key2[0], True)}
            yield
        self.is_short = False
        for depth, key in heapq.merge(*waiting):
            if not wanted:
                break
            if (key.stream_id, False) not in wanted and not key.part:
                continue
            yield
            group = self._free_group(key, in_order, depth)
            if group is None:
                continue
            kind = key.stream_id, key.part > 0 or group.end is not None
            if kind not in wanted:
                continue
            if kind not in takers:
                takers[kind] = self._takers(key.stream_id, recent, parts=kind[1])
            taker = self._taker(takers[kind])
            if taker is None and not depth:
                self.is_short |= any(key.stream_id in other.stream_ids for other in self._leases.members.values())
            if taker is None or (depth and taker.at_work >= AHEAD):
                wanted.discard(kind)
                if not kind[1]:  # members that take parts take whole groups too
                    wanted.discard((key.stream_id, True))
                continue
            self._leases.give(key, taker)
        recent = {member_id: member.recent(now_s) for member_id, member in self._leases.members.items()}
        self._ask_back(recent)
        yield from self._ask_to_split(recent, in_order)

    def _free_group(self, key: GroupId, in_order: AbstractSet[int], depth: int) -> Group | None:
        """Return the group unless a member has taken or finished it meanwhile, or it may not be given out yet."""
        streamlet = self._leases.streamlets.get(key[:2])
        group = streamlet.groups.get(key[2:]) if streamlet is not None else None
        if streamlet is None or group is None or group.member_id or group.done:
            return None
        waits = key.stream_id in in_order and (depth > 0 or not streamlet.is_next(key))
        return None if waits else group

    def _takers(self, stream_id: int, recent: Mapping[str, float], *, parts: bool) -> list[tuple[int, float, str]]:
        found = [
            (member.at_work, recent.get(member_id, 0.0), member_id)
            for member_id, member in self._leases.members.items()
            if stream_id in member.stream_ids and (member.splits or not parts)
        ]
        heapq.heapify(found)
        return found

    @property
    def _in_order(self) -> set[int]:
        """The streams that a member wants in order."""
        return {each for member in self._leases.members.values() if member.in_order for each in member.stream_ids}

    def _unsplit(self) -> None:
        """Make split groups whole again, if none of the members understands parts."""
        members = self._leases.members.values()
        if not members or any(member.splits or not member.stream_ids for member in members):
            return
        for key, streamlet in self._leases.streamlets.items():
            if streamlet.parts and streamlet.unsplit():
                self._leases.dirty.add(key)

    def _taker(self, heap: list[tuple[int, float, str]]) -> Member | None:
        """Return the member with the least among those that may take more; correct outdated entries of the heap."""
        while heap:
            at_work, recent, member_id = heap[0]
            member = self._leases.members.get(member_id)
            if member is None or len(member.held) >= member.groups_max:
                heapq.heappop(heap)
            elif member.at_work != at_work:
                heapq.heapreplace(heap, (member.at_work, recent, member_id))
            else:
                return member
        return None

    def _ask_back(self, recent: Mapping[str, float]) -> None:
        """Decide anew which members have to give back which groups, keeping earlier requests where possible."""
        asked: dict[str, set[GroupId]] = {member_id: set() for member_id in self._leases.members}
        for high, key in evened_out(self._leases.members, recent):
            asked[high].add(key)
        for member_id, member in self._leases.members.items():
            if member.give_back != asked[member_id]:
                member.give_back = asked[member_id]
                self._leases.note(member)

    def _ask_to_split(self, recent: Mapping[str, float], in_order: AbstractSet[int]) -> Generator[None, None, None]:
        """Decide anew which members give up the rest of a group, for members that have too little to read.

        There are as many such holders as hungry members: first the holders that were asked before, then those that have
        consumed most.
        """
        members = list(self._leases.members.values())
        hungry: Counter[int] = Counter()
        """Hungry members by stream."""
        for member in members:
            if member.splits and len(member.held) < member.groups_max and member.is_hungry:
                hungry.update(member.stream_ids - in_order)
            yield
        asked: dict[str, set[GroupId]] = {}
        holders: list[tuple[bool, float, str, GroupId]] = []
        for member in members if hungry else ():
            for key, group in member.held.items():
                if member.splits and hungry[key.stream_id] and group.end is None and key not in member.ended:
                    holders.append(
                        (key not in member.splitting, -recent.get(member.member_id, 0.0), member.member_id, key)
                    )
            yield
        for _, _, member_id, key in sorted(holders):
            streamlet = self._leases.streamlets.get(key[:2])
            if hungry[key.stream_id] and streamlet is not None and streamlet.may_split:
                hungry[key.stream_id] -= 1
                asked.setdefault(member_id, set()).add(key)
        for member_id, member in self._leases.members.items():
            splitting = asked.get(member_id, set()) & member.held.keys()
            if member.splitting != splitting:
                member.splitting = splitting
                self._leases.note(member)


def _keys_of_waiting(key: tuple[int, int], streamlet: StreamletProgress) -> Iterator[tuple[int, GroupId]]:
    """Return `StreamletProgress.waiting` with full ids of the groups."""
    return ((depth, GroupId(*key, group_id, part)) for depth, group_id, part in streamlet.waiting)
