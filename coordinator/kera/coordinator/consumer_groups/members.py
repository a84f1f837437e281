"""The consumers of a consumer group: what each holds, when it counts as gone, and which groups even out holdings.

No I/O, no waiting. ``assignment`` gives and takes; `evened_out` decides which groups to give back when members hold
unequal numbers of groups.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kera.coordinator.consumer_groups.progress import UNKNOWN_TIMEOUTS, Group, GroupId, Timeouts, cursor_of, ranges_of
from kera.core.base.ids import EntryId
from kera.v1 import consumer_group_pb2 as messages

RECENT_HALF_LIFE_S = 60.0
"""Half-life of recent consumption: older consumption counts less."""
AHEAD = 2
"""Groups per member, where there are enough: while it finishes one, it already fetches the next."""
SPLIT_BYTES = 1 << 20
"""How much of a group a member keeps when others have nothing to read.

Each part costs some requests to the coordinator, which take some milliseconds together, and processing this much takes
longer than that.
"""


@dataclass(slots=True)
class Member:
    """A consumer."""

    member_id: str
    heard_s: float
    client: str = ""
    timeouts: Timeouts = UNKNOWN_TIMEOUTS
    busy_since_s: float | None = None
    """When it went into its user's code; None: it waits for records."""
    groups_max: int = 0
    stream_ids: frozenset[int] = frozenset()
    """The streams it reads; empty: not known yet, and it gets nothing."""
    splits: bool = False
    """Whether it understands parts of groups."""
    in_order: bool = False
    """Whether it wants the entries of its streams in order."""
    bytes_consumed: int = 0
    held: dict[GroupId, Group] = field(default_factory=dict)
    give_back: set[GroupId] = field(default_factory=set)
    """The held groups that it has to give back."""
    splitting: set[GroupId] = field(default_factory=set)
    """The held groups of which it has to give up the rest after `SPLIT_BYTES`."""
    ended: set[GroupId] = field(default_factory=set)
    """The held groups that it has read to the end, and only has to commit."""
    version: int = 0
    """Changes when what it holds, has to give back or has to report changes."""
    told_version: int = -1
    """The version in the last answer that it got."""
    _recent: float = 0.0
    _recent_s: float = 0.0

    @property
    def at_work(self) -> int:
        """The number of groups that it reads."""
        return len(self.held) - len(self.ended)

    @property
    def is_hungry(self) -> bool:
        """Whether it would read more: it has fewer than `AHEAD` groups, and only parts that end soon."""
        if self.at_work >= AHEAD:
            return False
        return all(group.end is not None for key, group in self.held.items() if key not in self.ended)

    def can_hold(self, key: GroupId, group: Group) -> bool:
        """Whether it understands the form of this group."""
        return self.splits or (not key.part and group.end is None)

    def recent(self, now_s: float) -> float:
        """Return the bytes consumed lately, weighted by age."""
        return self._recent * math.exp2((self._recent_s - now_s) / RECENT_HALF_LIFE_S)

    def count(self, consumed_bytes: float, now_s: float) -> None:
        """Add to the bytes consumed lately."""
        self._recent, self._recent_s = self.recent(now_s) + consumed_bytes, now_s

    def is_gone(self, now_s: float) -> bool:
        """Whether the member is dead or stuck."""
        if now_s - self.heard_s > self.timeouts.session_ms / 1000:
            return True
        return self.busy_since_s is not None and 0 < self.timeouts.progress_ms / 1000 < now_s - self.busy_since_s


def leases_of(member: Member) -> Iterator[messages.GroupLease]:
    """Yield the leases of a member, in the form of its answer."""
    for key, group in sorted(member.held.items()):
        entry = EntryId(key.stream_id, key.streamlet_id, group.entry)
        yield messages.GroupLease(
            next=cursor_of(entry, group.next),
            lease=group.lease,
            give_back=key in member.give_back,
            next_record=group.next_record,
            end_record=group.end_record,
            lost=ranges_of(group.lost),
            part=key.part,
            end=cursor_of(entry, group.end) if group.end is not None else None,
            split_bytes=SPLIT_BYTES if key in member.splitting else 0,
        )


def evened_out(members: Mapping[str, Member], recent: Mapping[str, float]) -> Iterator[tuple[str, GroupId]]:
    """Yield the groups to give back, each with its holder: from the member with most to the one with least, in turn.

    This continues until no member has two groups more than a member that could take one of them. It runs for each
    member that joins, even when many join at once. So both kinds are in heaps: a member is pushed again whenever its
    count changes, and its outdated entries are skipped.
    """
    count = {member_id: member.at_work for member_id, member in members.items()}
    able = {m.member_id: m.groups_max for m in members.values() if m.stream_ids}
    takers = [(count[name], recent[name], name) for name, limit in able.items() if count[name] < limit]
    if not takers or max(count.values()) - min(takers)[0] < 2:
        return
    givers = [(-count[name], -recent[name], name) for name in members]
    heapq.heapify(takers)
    heapq.heapify(givers)
    offers: dict[str, list[tuple[bool, GroupId]]] = {}
    while takers:
        has, _, low = heapq.heappop(takers)
        if has != count[low]:
            continue
        found = _offer(members, members[low], givers, count, offers)
        if found is None:
            continue  # later there will be none either: the others have ever less to give
        yield found
        high = found[0]
        count[high] -= 1
        count[low] += 1
        for name in (high, low):
            heapq.heappush(givers, (-count[name], -recent[name], name))
            if count[name] < able.get(name, 0):
                heapq.heappush(takers, (count[name], recent[name], name))


def _suits(low: Member, key: GroupId, high: Member) -> bool:
    return key.stream_id in low.stream_ids and low.can_hold(key, high.held[key])


def _offer(
    members: Mapping[str, Member],
    low: Member,
    givers: list[tuple[int, float, str]],
    count: Mapping[str, int],
    offers: dict[str, list[tuple[bool, GroupId]]],
) -> tuple[str, GroupId] | None:
    """Return the first giver that has a suitable group for a member, and two groups more than it; and that group."""
    passed = []
    found: tuple[str, GroupId] | None = None
    while givers and found is None and -givers[0][0] - count[low.member_id] >= 2:
        giver = heapq.heappop(givers)
        high = giver[2]
        if -giver[0] != count[high]:
            continue
        offer = offers.get(high)
        if offer is None:
            member = members[high]
            offer = sorted((key in member.give_back, key) for key in member.held.keys() - member.ended)
            offers[high] = offer
        at = next((at for at in reversed(range(len(offer))) if _suits(low, offer[at][1], members[high])), None)
        if at is None:
            passed.append(giver)
        else:
            found = high, offer.pop(at)[1]
    for giver in passed:
        heapq.heappush(givers, giver)
    return found
