"""All consumer groups: by name, with or without members, by the streams that they read, and by unstored changes."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kera.coordinator.cluster.keys import streamlet_key
from kera.coordinator.cluster.shares import CONSUMER_GROUPS as GROUPS_LIMIT
from kera.coordinator.cluster.shares import Shares
from kera.coordinator.cluster.state import State
from kera.coordinator.consumer_groups.consumer_group import ConsumerGroup
from kera.coordinator.consumer_groups.polls import Polls
from kera.coordinator.consumer_groups.progress import lowest
from kera.coordinator.consumer_groups.uses import Uses
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, QuotaExceeded
from kera.v1 import common_pb2
from kera.v1 import consumer_group_pb2 as messages

log = get_logger("kera.consumer_groups")

CONSUMER_GROUPS = "applications/"
NAME_CHARS_MAX = 200
CONSUMER_GROUPS_MAX = 10_000

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class ConsumerGroupRegistry:
    """Finds consumer groups by name, by stream and by activity, and lists the changed ones."""

    def __init__(self, state: State, uses: Uses, polls: Polls, shares: Shares, *, groups_max: int) -> None:
        self._state = state
        self._uses = uses
        self._polls = polls
        self._shares = shares
        self._groups_max = groups_max
        self.groups: dict[str, ConsumerGroup] = {}
        self._active: set[str] = set()
        """Consumer groups that need regular checks: those with members, and those that have begun no streamlet."""
        self._readers: defaultdict[int, set[str]] = defaultdict(set)
        """The consumer groups that have begun a stream, by stream."""
        self._short: set[str] = set()
        """Consumer groups whose consumers do not take all groups that they should, and for which the log has a
        warning.
        """
        self._busy: Counter[str] = Counter()
        """How many changes in steps are under way, by consumer group."""
        self._changed: set[str] = set()
        """Consumer groups with changes that have to be stored."""
        self.changes = 0
        """Counts everything that may have changed something."""
        self.stored = 0
        """Changes up to this number are in the store."""

    def load(self, now_s: float) -> None:
        """Load the consumer groups from the ledger. Their members get a full time-out to send a heartbeat."""
        for value in self._state.ledger.values(CONSUMER_GROUPS):
            self.take_up(value, now_s)

    def active(self) -> list[ConsumerGroup]:
        """Return the consumer groups with members, and those that have begun no streamlet."""
        return [self.groups[name] for name in self._active]

    def take_changed(self) -> list[ConsumerGroup]:
        """Return the consumer groups with changes to store; they count as stored from now on."""
        names, self._changed = self._changed, set()
        return [self.groups[name] for name in sorted(names)]

    def note_change(self) -> None:
        """Note a change outside consumer groups: the next write stores it."""
        self.changes += 1

    def note_stored(self, through: int) -> None:
        """Note that changes up to this number are stored, or taken back."""
        self.stored = through

    def use(self, name: str, now_s: float, *, unnamed: bool = False) -> None:
        """Take note that a consumer group is used."""
        self._uses.use(name, now_s, unnamed=unnamed)
        self.changes += self._uses.dirty

    @contextlib.contextmanager
    def changing_in_steps(self, consumer_group: ConsumerGroup) -> Iterator[None]:
        """Do the same as `change` for a change in steps, between which other requests are served, of this
        consumer group, too.
        """
        self._busy[consumer_group.name] += 1
        try:
            with self.change(consumer_group):
                yield
        finally:
            self._busy[consumer_group.name] -= 1
            if not self._busy[consumer_group.name]:
                del self._busy[consumer_group.name]

    def take_up(self, value: bytes, now_s: float) -> None:
        """Load a record of a consumer group in a streamlet."""
        record = messages.StreamletProgress.FromString(value)
        name = record.consumer_group
        consumer_group = self.groups.setdefault(name, ConsumerGroup(name))
        consumer_group.leases.restore(record, now_s)
        self._readers[record.stream_id].add(name)
        if consumer_group.members:
            self._active.add(name)

    def take_back(self, lost: Mapping[str, Iterable[tuple[int, int]]], now_s: float) -> None:
        """Reload consumer groups from the ledger: those whose changes are lost, and all that have other changes by now.

        `lost`: the streamlets, by consumer group.
        """
        for name in lost.keys() | self._changed:
            consumer_group = self.groups.pop(name)
            self._active.discard(name)
            self._short.discard(name)
            known = {*lost.get(name, ()), *consumer_group.leases.dirty, *consumer_group.streamlets}
            for stream_id, _ in known:
                self._readers[stream_id].discard(name)
            for streamlet in sorted(known):
                value = self._state.ledger.get(record_key(name, *streamlet))
                if value is not None:
                    self.take_up(value, now_s)
        self._changed.clear()

    def cursors_of(self, stream_id: int) -> list[common_pb2.Cursor]:
        """Return, for each entry of a stream that a consumer group has begun, the position up to which all
        groups are done.
        """
        return lowest(
            cursor for name in self._readers.get(stream_id, ()) for cursor in self.groups[name].cursors(stream_id)
        )

    def __len__(self) -> int:
        return len(self.groups)

    def holdings(self, count_max: int) -> Iterator[tuple[str, int, int]]:
        """Yield the first consumer groups by name, each with its number of consumers and of the groups that they hold.

        Safe in any thread: it works on copies, each made in one step.
        """
        for name, consumer_group in heapq.nsmallest(count_max, list(self.groups.items()), key=lambda item: item[0]):
            members = list(consumer_group.members.values())
            yield name, len(members), sum(len(member.held) for member in members)

    def exists(self, name: str) -> bool:
        """Whether there is a consumer group of this name."""
        return name in self.groups

    def reads(self, name: str, stream_id: int) -> bool:
        """Whether a consumer group has begun a stream."""
        return name in self._readers.get(stream_id, ())

    def named(self, name: str) -> ConsumerGroup:
        """Return the consumer group of this name. Raises `InvalidArgument` if there is none."""
        if name not in self.groups:
            raise InvalidArgument(f"there is no consumer group {name!r}", consumer_group=name)
        return self.groups[name]

    def create(self, name: str, now_s: float) -> ConsumerGroup:
        """Return the consumer group of this name; create it if there is none.

        Raises `InvalidArgument`, and `QuotaExceeded` if the caller has created as many as one principal may.
        """
        consumer_group = self.groups.get(name)
        if consumer_group is not None:
            return consumer_group
        check_name(name)
        if len(self.groups) >= self._groups_max:
            self.tidy(now_s)  # drop groups that exist only because of requests that were refused
        if len(self.groups) >= self._groups_max:
            raise InvalidArgument(
                f"there are {self._groups_max} consumer groups, which is the limit; delete unused ones",
                consumer_group=name,
                limit=self._groups_max,
            )
        principal = self._shares.caller()
        self._check_share(principal, now_s)
        consumer_group = self.groups[name] = ConsumerGroup(name)
        self._uses.made_by(name, principal)
        self._active.add(name)
        return consumer_group

    def _check_share(self, principal: str, now_s: float) -> None:
        def made() -> int:
            return 1 + sum(self._uses.maker(name) == principal for name in self.groups)

        try:
            self._shares.check(GROUPS_LIMIT, self._groups_max, principal, made)
        except QuotaExceeded:
            self.tidy(now_s)
            self._shares.check(GROUPS_LIMIT, self._groups_max, principal, made)

    def forget(self, consumer_group: ConsumerGroup) -> None:
        """Forget everything about a consumer group; call it within `change`."""
        consumer_group.forget({stream_id for stream_id, _ in consumer_group.streamlets})
        self._uses.forget(consumer_group.name)
        self.changes += self._uses.dirty

    def expire(self, consumer_group: ConsumerGroup, now_s: float) -> None:
        """Remove members that are gone; call it within `change`."""
        for member_id in consumer_group.expire(now_s):
            log.warning(
                "consumer is gone; others get its groups", consumer_group=consumer_group.name, member_id=member_id
            )

    @contextlib.contextmanager
    def change(self, consumer_group: ConsumerGroup) -> Iterator[None]:
        """Surround whatever may change a consumer group: the next write stores the change, and waiting rounds
        get the news.
        """
        try:
            yield
        finally:  # changes before an error stay
            if self.groups.get(consumer_group.name) is consumer_group:
                self._note_change(consumer_group)

    def _note_change(self, consumer_group: ConsumerGroup) -> None:
        if consumer_group.leases.dirty:
            self.changes += 1
            self._changed.add(consumer_group.name)
            for key in consumer_group.leases.dirty:
                readers = self._readers[key[0]]
                (readers.add if key in consumer_group.streamlets else readers.discard)(consumer_group.name)
        if consumer_group.members or not consumer_group.streamlets:
            self._active.add(consumer_group.name)
        else:
            self._active.discard(consumer_group.name)
        self._warn_if_short(consumer_group)
        self._polls.wake(consumer_group.name, consumer_group.leases.take_news())

    def _warn_if_short(self, consumer_group: ConsumerGroup) -> None:
        """Log once that no consumer reads some entries."""
        if not consumer_group.assignment.is_short:
            self._short.discard(consumer_group.name)
        elif consumer_group.name not in self._short:
            self._short.add(consumer_group.name)
            log.warning(
                "entries wait: all consumers hold as many groups as they want; start more, or raise groups_max",
                consumer_group=consumer_group.name,
                consumers=len(consumer_group.members),
            )

    def tidy(self, now_s: float) -> None:
        """Remove members that are gone, streams that were deleted, and consumer groups that never began."""
        for stream_id in [stream_id for stream_id in self._readers if stream_id not in self._state.catalog]:
            for name in self._readers.pop(stream_id):
                with self.change(self.groups[name]):
                    self.groups[name].forget([stream_id])
        for name in list(self._active):
            consumer_group = self.groups[name]
            with self.change(consumer_group):
                self.expire(consumer_group, now_s)
            unused = not (consumer_group.members or consumer_group.streamlets or name in self._busy)
            if unused and self.stored == self.changes:
                del self.groups[name]
                self._active.discard(name)
                self._short.discard(name)
                self._uses.forget(name)
                self.changes += self._uses.dirty


def check_name(name: str) -> None:
    """Raise `InvalidArgument` for a name that no consumer group can have."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX or name in {".", ".."}:
        raise InvalidArgument(
            f"a consumer group cannot be called {name[: NAME_CHARS_MAX + 1]!r}: a name has 1 to {NAME_CHARS_MAX}"
            " letters, digits, dots, underscores and hyphens, and is not . or ..",
            consumer_group=name[: NAME_CHARS_MAX + 1],
        )


def record_key(name: str, stream_id: int, streamlet_id: int) -> str:
    """Return the key of the record of a consumer group in a streamlet."""
    return streamlet_key(f"{CONSUMER_GROUPS}{name}/", stream_id, streamlet_id)
