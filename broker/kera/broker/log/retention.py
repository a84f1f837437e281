"""Retention: decides which segments to remove by age, by size, and by consumption. Pure.

Retention removes whole closed segments, oldest first. A rule that is not set removes nothing. The named consumer groups
limit all rules: data that one of them still has to read stays, whatever its age and size. The age of a segment counts
from the append of its last chunk, by the broker's clock; producers' timestamps do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.records import NO_SEGMENT, Key, SegmentRecord
from kera.core.base.ids import Position
from kera.v1 import common_pb2

SEGMENTS_MAX = 4096
"""Maximum number of segments in one pass over a streamlet; the next pass continues."""


class Rules(NamedTuple):
    """The retention rules of a stream."""

    age_us: int = 0
    bytes_max: int = 0
    """Maximum size of a streamlet."""
    consumer_groups: tuple[str, ...] = ()
    consumed: bool = False

    @classmethod
    def of(cls, config: common_pb2.StreamConfig) -> Rules:
        """Return the rules of a stream's configuration."""
        return cls(
            config.retention_ms * 1000,
            config.retention_bytes,
            tuple(config.retention_consumer_groups),
            config.retention_consumed,
        )

    def __bool__(self) -> bool:
        return bool(self.age_us or self.bytes_max or (self.consumed and self.consumer_groups))


class NewStart(NamedTuple):
    """The new start of an entry."""

    entry: Entry
    position: Position
    record: int
    """Ordinal of the first record there."""


class _Aged(NamedTuple):
    """A segment that retention may remove."""

    key: Key
    segment: Segment | SegmentRecord
    newest_us: int
    """When its last chunk was appended; see `_with_age` for times in the future."""


def new_starts(streamlet: Streamlet, rules: Rules, now_us: int, segments_max: int = SEGMENTS_MAX) -> list[NewStart]:
    """Return the new starts of the entries that lose segments; `now_us` is the broker's time of day."""
    if not rules:
        return []
    walks = {entry: _with_age(_removable(entry, rules), now_us) for entry in streamlet.entries.made}
    heads = {entry: found for entry, walk in walks.items() if (found := next(walk, None)) is not None}
    surplus = 0
    if rules.bytes_max:
        surplus = streamlet.length_bytes - sum(map(_leaving_bytes, streamlet.entries.made)) - rules.bytes_max
    starts: dict[Entry, NewStart] = {}
    for _ in range(segments_max):
        if not heads:
            break
        entry = min(heads, key=lambda candidate: heads[candidate].newest_us)  # the oldest of all entries
        key, segment, newest_us = heads[entry]
        size = length_of(segment)
        too_old = bool(rules.age_us) and newest_us < now_us - rules.age_us
        too_much = bool(rules.bytes_max) and surplus >= size
        read = rules.consumed and bool(rules.consumer_groups)
        if not (too_old or too_much or read):
            del heads[entry]
            continue
        starts[entry] = _behind(entry, key, segment)
        surplus -= size
        following = next(walks[entry], None)
        if following is None:
            del heads[entry]
        else:
            heads[entry] = following
    return list(starts.values())


def _leaving_bytes(entry: Entry) -> int:
    """Return the size of segments before the entry's start, which its length still includes until they are removed."""
    leaving, start_key = 0, (entry.start.group_id, entry.start.segment_id)
    found = entry.following(NO_SEGMENT)
    while found is not None and found[0] < start_key:
        leaving += length_of(found[1])
        found = entry.following(found[0])
    return leaving


def _with_age(segments: Iterator[tuple[Key, Segment | SegmentRecord]], now_us: int) -> Iterator[_Aged]:
    """Yield segments with their age. A segment with a future time counts as old as the next one with a past time."""
    odd: list[tuple[Key, Segment | SegmentRecord]] = []
    for key, segment in islice(segments, SEGMENTS_MAX):
        if segment.newest_us > now_us:
            odd.append((key, segment))
            continue
        for each in odd:
            yield _Aged(*each, segment.newest_us)
        odd.clear()
        yield _Aged(key, segment, segment.newest_us)
    for key, segment in odd:
        yield _Aged(key, segment, segment.newest_us)


def _removable(entry: Entry, rules: Rules) -> Iterator[tuple[Key, Segment | SegmentRecord]]:
    """Yield the closed segments that the consumer groups have read, in order."""
    limit = entry.end
    for consumer_group in rules.consumer_groups:
        limit = min(limit, entry.committed.get(consumer_group, entry.start))
    for key, segment in entry.segments():
        closed = segment.closed if isinstance(segment, Segment) else not segment.open
        if not closed or Position(*key, length_of(segment)) > limit:
            return
        yield key, segment


def _behind(entry: Entry, key: Key, segment: Segment | SegmentRecord) -> NewStart:
    # The segment's end, not the start of the next one: a reader at its end has missed nothing.
    return NewStart(entry, Position(*key, length_of(segment)), segment.first_record + segment.record_count)
