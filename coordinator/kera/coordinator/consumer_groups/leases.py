"""Which member of a consumer group holds which group of segments, and which changes have to be stored. No I/O,
no waiting.

A group is held by at most one member. Each time it is given it gets a new lease number, and steps of earlier holders
are refused.
"""

from __future__ import annotations

from kera.coordinator.consumer_groups.members import Member
from kera.coordinator.consumer_groups.progress import GroupId, StreamletProgress
from kera.v1 import consumer_group_pb2 as messages


class Leases:
    """The members and the streamlets of one consumer group."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.streamlets: dict[tuple[int, int], StreamletProgress] = {}
        self.dirty: set[tuple[int, int]] = set()
        """Streamlets whose records have to be stored."""
        self._news: set[str] = set()
        """Members whose leases have changed, or that are gone."""
        self.balanced = False
        """Nothing that affects the assignment has changed since groups were given."""

    def restore(self, message: messages.StreamletProgress, now_s: float) -> None:
        """Load a stored record. Holders of groups are members, and count as just seen."""
        streamlet = StreamletProgress.from_message(message)
        self.streamlets[message.stream_id, message.streamlet_id] = streamlet
        for key, group in streamlet.groups.items():
            if group.member_id:
                member = self.members.setdefault(
                    group.member_id, Member(group.member_id, now_s, timeouts=group.timeouts)
                )
                member.held[GroupId(message.stream_id, message.streamlet_id, *key)] = group

    def take_dirty(self) -> list[tuple[int, int]]:
        """Return the streamlets whose records have to be stored; they count as stored from now on."""
        dirty, self.dirty = self.dirty, set()
        return sorted(dirty)

    def take_news(self) -> set[str]:
        """Return the members for which there is news since the last call."""
        news, self._news = self._news, set()
        return news

    def note(self, member: Member) -> None:
        """Note that a member's leases, or the requests to it, have changed."""
        member.version += 1
        self._news.add(member.member_id)

    def is_gone(self, member_id: str) -> None:
        """Note that a member is gone, so that its waiting round ends."""
        self.balanced = False
        self._news.add(member_id)

    def give(self, key: GroupId, member: Member) -> None:
        """Give a group to a member."""
        streamlet = self.streamlets[key[:2]]
        streamlet.changed()
        group = streamlet.groups[key[2:]]
        streamlet.lease += 1
        group.lease = streamlet.lease
        group.member_id, group.timeouts = member.member_id, member.timeouts
        member.held[key] = group
        self.note(member)
        self.dirty.add(key[:2])

    def free(self, member: Member, key: GroupId) -> None:
        """Take a group from a member."""
        group = member.held.pop(key)
        group.member_id, group.ended = "", False
        self.streamlets[key[:2]].changed()
        member.give_back.discard(key)
        member.splitting.discard(key)
        member.ended.discard(key)
        self.note(member)
        self.balanced = False
        self.dirty.add(key[:2])

    def free_streamlet(self, key: tuple[int, int]) -> None:
        """Take all groups of a streamlet from their holders."""
        streamlet = self.streamlets.get(key)
        for each, group in list(streamlet.groups.items()) if streamlet is not None else ():
            if group.member_id:
                self.free(self.members[group.member_id], GroupId(*key, *each))
