"""The violations in a history."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kera.client.checking.history import History, Place, Value

EVIDENCE_MAX = 5
"""Number of cases of each kind that are reported in full."""


def violations(history: History) -> list[str]:
    """Describe the promises that the cluster has broken; an empty list if there are none. The promises:

    * Each acknowledged record is stored, exactly once, at the place that its producer got.
    * A record without an acknowledgement is stored at most once; a refused one is not; there are no other records.
    * In each entry, the records of a producer keep the order of sending.
    * Records of an entry have ordinals without a gap.
    * Each record that a reader has seen is stored, at its place; records came in order, with none left out.
    * A consumer group got all acknowledged records.

    Only records whose removal was requested may be missing.
    """
    found: list[str] = []
    for each in (
        _lost(history),
        _repeated(history),
        _misplaced(history),
        _unknown(history),
        _out_of_order(history.stored),
        _gaps("the stream", history.stored, history.removed),
        _vanished(history),
        *(_gaps(f"reader {reader}", read, history.removed) for reader, read in sorted(history.read.items())),
        _unprocessed(history),
    ):
        cases = list(each)
        found += cases[:EVIDENCE_MAX]
        if len(cases) > EVIDENCE_MAX:
            found.append(f"… and {len(cases) - EVIDENCE_MAX} more of the last kind")
    return found


def _lost(history: History) -> Iterator[str]:
    stored = {value for _, value in history.stored}
    for value, place in sorted(history.acknowledged.items()):
        if value not in stored and not history.may_be_removed(value):
            yield f"lost: {value} was acknowledged, at {place or 'an unknown place'}, and is not there"


def _repeated(history: History) -> Iterator[str]:
    places: dict[Value, list[Place]] = defaultdict(list)
    for place, value in history.stored:
        places[value].append(place)
    for value, where in sorted(places.items()):
        if len(where) > 1:
            yield f"stored more than once: {value} is at {'; '.join(map(str, where))}"
    for place, count in sorted(Counter(place for place, _ in history.stored).items()):
        if count > 1:
            yield f"{place} was read {count} times at the end"


def _misplaced(history: History) -> Iterator[str]:
    there = dict(history.stored)
    for value, place in sorted(history.acknowledged.items()):
        if place is not None and not _is_there(history, there, place, value):
            yield f"not where it was acknowledged: {value} at {place}, where there is {there.get(place)}"


def _is_there(history: History, there: Mapping[Place, Value], place: Place, value: Value) -> bool:
    found = there.get(place)
    return found == value or (found is None and history.is_removed(place))


def _unknown(history: History) -> Iterator[str]:
    for place, value in history.stored:
        if value in history.refused:
            yield f"refused, and yet stored: {value} at {place}"
        elif value not in history.sent:
            yield f"never sent: {value} at {place}"


def _out_of_order(stored: Iterable[tuple[Place, Value]]) -> Iterator[str]:
    last: dict[tuple[int, int, str], Value] = {}
    for place, value in sorted(stored):
        key = place.streamlet_id, place.entry, value.producer
        if key in last and last[key] >= value:
            yield f"out of order: {value} at {place} comes behind {last[key]}"
        last[key] = value


def _gaps(whose: str, read: Iterable[tuple[Place, Value]], removed: Mapping[tuple[int, int], int]) -> Iterator[str]:
    following: dict[tuple[int, int], int] = defaultdict(int)
    for place, value in read:
        expected = following[place[:2]]
        if place.record != expected and not expected < place.record <= removed.get(place[:2], 0):
            yield f"{whose} went from record {expected - 1} to {place.record} ({value}) in {place}"
        following[place[:2]] = place.record + 1


def _vanished(history: History) -> Iterator[str]:
    there = dict(history.stored)
    for reader, read in sorted(history.read.items()):
        for place, value in read:
            if not _is_there(history, there, place, value):
                yield f"{reader} has read {value} at {place}, where there is {there.get(place)} at the end"


def _unprocessed(history: History) -> Iterator[str]:
    for group, processed in sorted(history.processed.items()):
        for value in sorted(history.acknowledged.keys() - processed):
            if not history.may_be_removed(value):
                yield f"consumer group {group} was never given {value}, which was acknowledged"
