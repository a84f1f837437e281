"""Assignment: which member of a consumer group is given which group of segments, and which one gives some back. Pure.

The oldest group of each entry that is not done is given to some member, and more of them as long as somebody has fewer
than `AHEAD`. A free group goes to the member that holds least, and of those to the one that has consumed least lately.
So holdings differ by at most one, and as groups come to their ends, the extra ones go round. When a member joins and
nothing is free, those that hold most are asked to give back groups: nobody else is disturbed.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Mapping

from kera.coordinator.consumer_groups.leases import Leases
from kera.coordinator.consumer_groups.members import Member, evened_out
from kera.coordinator.consumer_groups.progress import GroupId, StreamletProgress
from kera.core.turns import at_once

AHEAD = 2
"""Groups for each member, where there are so many: while one is at its end, the next one is being fetched."""


class Assignment:
    """Gives the groups of one consumer group to its members."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.is_short = False
        """The next group of some entry is with nobody: the members hold as many as they want."""

    def balance(self, now_s: float) -> None:
        """`balancing`, at once."""
        at_once(self.balancing(now_s))

    def balancing(self, now_s: float) -> Generator[None, None, None]:
        """Give free groups to members, and decide which of them are to give back some.

        Yields before each group. What has changed meanwhile is for the next caller.
        """
        if self._leases.balanced:
            return
        self._leases.balanced = True
        try:
            yield from self._giving(now_s)
        except BaseException:  # nobody waits for it any more: others begin anew
            self._leases.balanced = False
            raise

    def _giving(self, now_s: float) -> Generator[None, None, None]:
        recent = {member_id: member.recent(now_s) for member_id, member in self._leases.members.items()}
        takers: dict[int, list[tuple[int, float, str]]] = {}
        """By stream, those who may take more of it, as a heap: how much they have, and had lately."""
        waiting = []
        for key2, each in list(self._leases.streamlets.items()):
            if each.waiting:
                waiting.append(_keys_of_waiting(key2, each))
            yield
        self.is_short = False
        wanted = {stream_id for stream_id, _ in self._leases.streamlets}
        """Streams of which somebody may take more. The deeper groups wait, the fewer take them."""
        for depth, key in heapq.merge(*waiting):
            if not wanted:
                break
            if key.stream_id not in wanted:
                continue
            yield
            streamlet = self._leases.streamlets.get(key[:2])
            group = streamlet.groups.get(key.group_id) if streamlet is not None else None
            if group is None or group.member_id or group.done:
                continue  # since it was looked for
            if key.stream_id not in takers:
                takers[key.stream_id] = self._takers(key.stream_id, recent)
            taker = self._taker(takers[key.stream_id])
            if taker is None and not depth:
                self.is_short |= any(key.stream_id in other.stream_ids for other in self._leases.members.values())
            if taker is None or (depth and taker.at_work >= AHEAD):
                wanted.discard(key.stream_id)
                continue
            self._leases.give(key, taker)
        self._ask_back({member_id: member.recent(now_s) for member_id, member in self._leases.members.items()})

    def _takers(self, stream_id: int, recent: Mapping[str, float]) -> list[tuple[int, float, str]]:
        found = [
            (member.at_work, recent.get(member_id, 0.0), member_id)
            for member_id, member in self._leases.members.items()
            if stream_id in member.stream_ids
        ]
        heapq.heapify(found)
        return found

    def _taker(self, heap: list[tuple[int, float, str]]) -> Member | None:
        """Who has least, of those who may take more; what the heap says of others is brought up to date."""
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
        """Decide anew who is to give back what, as much as possible the same as before."""
        asked: dict[str, set[GroupId]] = {member_id: set() for member_id in self._leases.members}
        for high, key in evened_out(self._leases.members, recent):
            asked[high].add(key)
        for member_id, member in self._leases.members.items():
            if member.give_back != asked[member_id]:
                member.give_back = asked[member_id]
                self._leases.note(member)


def _keys_of_waiting(key: tuple[int, int], streamlet: StreamletProgress) -> Iterator[tuple[int, GroupId]]:
    """As `StreamletProgress.waiting`, with what names them everywhere."""
    return ((depth, GroupId(*key, group_id)) for depth, group_id in streamlet.waiting)
