"""The consumers of a consumer group: what each one holds, when it counts as gone, and who gives back groups to whom.

No I/O, no waiting. ``consumer_groups`` gives and takes; here it is decided, when members hold unequal numbers of
groups, how that is evened out (`evened_out`).
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
"""Older consumption counts less."""
AHEAD = 2
"""Groups for each member, where there are so many: while one is at its end, the next one is being fetched."""
SPLIT_BYTES = 1 << 20
"""How much of a group a member keeps when others have nothing to read. Each part costs some requests to the
coordinator, of some milliseconds together; so it is as much as takes longer to process than that."""


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
    """Empty: not known yet; it gets nothing."""
    splits: bool = False
    """It understands parts of groups."""
    in_order: bool = False
    """It wants the entries of its streams in order."""
    bytes_consumed: int = 0
    held: dict[GroupId, Group] = field(default_factory=dict)
    give_back: set[GroupId] = field(default_factory=set)
    """The held groups that it has to give back."""
    splitting: set[GroupId] = field(default_factory=set)
    """Likewise: it is to give up the rest of them after `SPLIT_BYTES`."""
    ended: set[GroupId] = field(default_factory=set)
    """Likewise: it has nothing more to do with them but to commit."""
    version: int = 0
    """Changes with what it holds, is to give back or to tell."""
    told_version: int = -1
    """Version of the last answer that it got."""
    _recent: float = 0.0
    _recent_s: float = 0.0

    @property
    def at_work(self) -> int:
        """How many groups it reads."""
        return len(self.held) - len(self.ended)

    @property
    def is_hungry(self) -> bool:
        """It would read more if there was more: it has fewer than `AHEAD`, and only parts that end soon."""
        if self.at_work >= AHEAD:
            return False
        return all(group.end is not None for key, group in self.held.items() if key not in self.ended)

    def can_hold(self, key: GroupId, group: Group) -> bool:
        """Whether it understands what it would be given."""
        return self.splits or (not key.part and group.end is None)

    def recent(self, now_s: float) -> float:
        """Bytes consumed lately."""
        return self._recent * math.exp2((self._recent_s - now_s) / RECENT_HALF_LIFE_S)

    def count(self, consumed_bytes: float, now_s: float) -> None:
        """It has consumed more."""
        self._recent, self._recent_s = self.recent(now_s) + consumed_bytes, now_s

    def is_gone(self, now_s: float) -> bool:
        """Dead or stuck."""
        if now_s - self.heard_s > self.timeouts.session_ms / 1000:
            return True
        return self.busy_since_s is not None and 0 < self.timeouts.progress_ms / 1000 < now_s - self.busy_since_s


def leases_of(member: Member) -> Iterator[messages.GroupLease]:
    """The leases of a member, as in its answer."""
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
    """The groups to give back and the members that do, in turn: the first of those with most to the first of those with
    least.

    That goes on until nobody has two groups more than somebody who could take one of them. It is done for each
    member that joins, also when many do at once: so both are kept in heaps, into which a member is put anew
    whenever its count changes. What was said of it before is passed over.
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
            continue  # nor will there be anything later: others have ever less to give
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
    """The first of the givers that has a group for a member, and two more than it; and which group."""
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
