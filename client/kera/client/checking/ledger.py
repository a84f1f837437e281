"""Checks the actions and observations of clients under a long load as they come, with about thirty bytes per record.

It finds the same violations as `kera.client.checking.verdict` in a history of some thousand records (a test compares
the two), and violations that only show while the load is on: a durable end that goes back, a place whose record
changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kera.client.checking.findings import Violations
from kera.client.checking.history import Place
from kera.client.checking.numbers import (
    PRODUCERS_MAX,
    RECORDS_MAX,
    STRANGE,
    UNSEEN,
    Column,
    Numbers,
    packed,
    unpacked,
)

LAST_READER = "the last reader"
"""The reader that reads everything at the end."""
MOMENT_S = 1.0
"""Precision of the time when a record was first read."""
BEYOND_MAX = 1 << 20
"""How far an ordinal may be beyond the number of sent records: other programs may have written some as well."""
SENT, ACKNOWLEDGED, REFUSED = range(3)
_NOWHERE = -1

Entry = tuple[int, int]
"""Streamlet, and the entry in it."""


class _Producer:
    """The fates of a producer's records, by number."""

    __slots__ = ("acknowledged_ms", "place", "processed", "state", "stored_at")

    def __init__(self) -> None:
        self.state = Column(np.uint8, SENT)
        self.place = Column(np.int64, _NOWHERE)
        """Places that the producer was given."""
        self.acknowledged_ms = Column(np.uint32, 0)
        self.processed = Column(np.bool_, 0)
        self.stored_at = Column(np.int64, _NOWHERE)
        """Places at the end."""

    def grow(self, count: int) -> None:
        for column in (self.state, self.place, self.acknowledged_ms, self.processed):
            column.grow(count)

    @property
    def acknowledged(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.state.values == ACKNOWLEDGED)

    def unprocessed(self, losses: Losses, *, read_back: bool) -> npt.NDArray[np.bool_]:
        """See `Ledger.unprocessed`."""
        self.stored_at.grow(self.state.size)
        missing = self.acknowledged & ~self.processed.values
        gone = losses.may_have_taken(self.place.values, anywhere=not read_back)
        return np.asarray(missing & ((self.stored_at.values != _NOWHERE) | ~gone))


class Losses:
    """The losses that the cluster has reported."""

    def __init__(self, *, are_allowed: bool) -> None:
        self.are_allowed = are_allowed
        """Whether the loss of acknowledged records is permitted if the cluster reports it."""
        self.entries: set[Entry] = set()
        """Entries with reported losses."""
        self.first: dict[Entry, int] = {}
        """For each of those entries: the ordinal of the first record that may be lost; missing: any of them may be."""

    @property
    def any_allowed(self) -> bool:
        """Whether acknowledged records may be lost."""
        return self.are_allowed and bool(self.entries)

    def may_have_taken(self, places: npt.NDArray[np.int64], *, anywhere: bool = False) -> npt.NDArray[np.bool_]:
        """Return whether the record that was acknowledged at each place may be lost without a violation.

        `anywhere`: the ordinal of the first record that may be lost is not known yet.
        """
        if not self.any_allowed:
            return np.zeros(len(places), np.bool_)
        found: npt.NDArray[np.bool_] = np.asarray(places == _NOWHERE)
        for entry in self.entries:
            first = _packed_place(Place(*entry, 0 if anywhere else self.first.get(entry, 0)))
            found |= (first <= places) & (places < _packed_place(Place(*entry, 0)) + RECORDS_MAX)
        return found


class _Seen:
    """The values that were seen in an entry, by ordinal."""

    __slots__ = ("moments", "values")

    def __init__(self) -> None:
        self.values = Column(np.int64, UNSEEN)
        self.moments: list[tuple[int, float]] = []
        """Ordinals behind the records read, with the time; ascending, one per second."""

    def note(self, end: int, now_s: float) -> None:
        known, known_s = self.moments[-1] if self.moments else (0, -MOMENT_S)
        if end > known and now_s >= known_s + MOMENT_S:
            self.moments.append((end, now_s))
        elif end > known:
            self.moments[-1] = end, known_s

    def when(self, record: int) -> float | None:
        """Return the time when a record was first read, as far as it was noted."""
        low, high = 0, len(self.moments)
        while low < high:
            middle = (low + high) // 2
            if self.moments[middle][0] > record:
                high = middle
            else:
                low = middle + 1
        return self.moments[low][1] if low < len(self.moments) else None


class Ledger:
    """The ledger of one stream. Times are seconds since the beginning, from `now_s`."""

    def __init__(self, now_s: Callable[[], float], *, may_lose: bool = False) -> None:
        """`may_lose`: acknowledged records may be lost if the cluster reports it, as at durability leader."""
        self._now_s = now_s
        self._producers: list[_Producer] = []
        self._seen: dict[Entry, _Seen] = defaultdict(_Seen)
        self._next: dict[str, dict[Entry, int]] = defaultdict(dict)
        """By reader and entry: the next ordinal."""
        self._acknowledged_to: dict[Entry, int] = {}
        self._ends: dict[Entry, tuple[tuple[int, ...], int, float]] = {}
        """By entry: the last seen durable end, the ordinal there, and when it was seen."""
        self._ends_behind: set[Entry] = set()
        """Entries whose last seen end was before its floor."""
        self.losses = Losses(are_allowed=may_lose)
        self._unreadable: set[Place] = set()
        """Places where unreadable chunks begin."""
        self._last_stored: dict[tuple[int, int, int], int] = {}
        self.findings = Violations()
        self._note = self.findings.add
        self.sent = self.acknowledged = self.refused = self.uncertain = self.processed_again = 0
        self.uncertain_stored = self.lost_as_told = 0
        """Stored records without an acknowledgement; acknowledged records that are lost, as reported."""

    # -- producers ---------------------------------------------------------------------------------------------

    def add_producer(self) -> int:
        """Return the number of a new producer. A producer with a new identity counts as new: no order spans both."""
        if len(self._producers) == PRODUCERS_MAX:
            raise OverflowError(f"more than {PRODUCERS_MAX} producers")
        self._producers.append(_Producer())
        return len(self._producers) - 1

    def send(self, producer: int) -> int:
        """Return the number of the record that a producer is about to send."""
        each = self._producers[producer]
        number = each.state.size
        each.grow(number + 1)
        self.sent += 1
        return number

    def acknowledge(self, producer: int, number: int, place: Place | None) -> None:
        """Note that a record was acknowledged; `place`: None if the producer got none."""
        each = self._producers[producer]
        each.state.values[number] = ACKNOWLEDGED
        each.acknowledged_ms.values[number] = round(self._now_s() * 1000)
        self.acknowledged += 1
        if place is not None:
            each.place.values[number] = _packed_place(place)
            entry = place.streamlet_id, place.entry
            self._acknowledged_to[entry] = max(self._acknowledged_to.get(entry, 0), place.record + 1)

    def refuse(self, producer: int, number: int) -> None:
        """Note that a producer got an error for a record, which is not stored."""
        self._producers[producer].state.values[number] = REFUSED
        self.refused += 1

    def give_up(self) -> None:
        """Note that the outcome of a record is uncertain: it may be stored or not."""
        self.uncertain += 1

    # -- readers -----------------------------------------------------------------------------------------------

    def read(self, reader: str, entry: Entry, first: int, values: Numbers, strange: Callable[[int], str]) -> None:
        """Note records that a reader has seen, from ordinal `first` on. `strange`: describes one of them."""
        if not self._follows(reader, entry, first, len(values)):
            return
        self._is_ours(entry, first, values, strange)
        seen, end = self._seen[entry], first + len(values)
        seen.values.grow(end)
        seen.note(end, self._now_s())
        there = seen.values.values[first:end]
        unseen = there == UNSEEN
        for at in np.flatnonzero(~unseen & (there != values)):
            place = Place(*entry, first + int(at))
            before, now = _name(int(there[at])), _name(int(values[at]))
            text = f"{reader} has read {now} at {place}, where {before} was read before"
            self._note("changed", text, int(there[at]), place, seen.when(place.record))
        there[unseen] = values[unseen]

    def store(self, entry: Entry, first: int, values: Numbers, strange: Callable[[int], str]) -> None:
        """Note records that the last reader has seen, which reads everything at the end; see `read`."""
        self.read(LAST_READER, entry, first, values, strange)
        ordinals = np.arange(first, first + len(values), dtype=np.int64)
        known = self._known(values)
        producers = values >> 40
        for producer in np.unique(producers[known]):
            mine = known & (producers == producer)
            self._store_of(int(producer), entry, values[mine] & (RECORDS_MAX - 1), ordinals[mine])

    def _store_of(self, producer: int, entry: Entry, numbers: Numbers, ordinals: Numbers) -> None:
        stored_at = self._producers[producer].stored_at
        stored_at.grow(self._producers[producer].state.size)
        places = _packed_place(Place(*entry, 0)) + ordinals
        repeated = stored_at.values[numbers] != _NOWHERE
        first_of: npt.NDArray[np.bool_] = np.zeros(len(numbers), np.bool_)
        first_of[np.unique(numbers, return_index=True)[1]] = True
        fresh = ~repeated & first_of
        stored_at.values[numbers[fresh]] = places[fresh]
        for at in np.flatnonzero(~fresh):
            number, place = int(numbers[at]), Place(*entry, int(ordinals[at]))
            elsewhere = _place(int(stored_at.values[number]))
            text = f"{_name(packed(producer, number))} is at {elsewhere} and at {place}"
            self._note("stored twice", text, packed(producer, number), place)
        key = (*entry, producer)
        before = np.concatenate(([self._last_stored.get(key, -1)], numbers[:-1]))
        for at in np.flatnonzero(numbers < before):
            number, place = int(numbers[at]), Place(*entry, int(ordinals[at]))
            text = f"{_name(packed(producer, number))} at {place} comes behind record {before[at]} of its producer"
            self._note("out of order", text, packed(producer, number), place)
        self._last_stored[key] = int(numbers[-1])

    def unreadable(self, reader: str, entry: Entry, first: int, count: int, what: str) -> None:
        """Note that a reader has passed an unreadable chunk of `count` records. `what`: describes it."""
        if self._follows(reader, entry, first, count) and (place := Place(*entry, first)) not in self._unreadable:
            self._unreadable.add(place)
            text = f"{reader} cannot read {count} record{'s' * (count != 1)} at {place}, in {what}"
            self._note("corrupt", text, None, place, self._now_s())

    def process(self, values: Numbers) -> None:
        """Note records that a member of the consumer group got."""
        known = self._known(values)
        producers = values >> 40
        for producer in np.unique(producers[known]):
            numbers = values[known & (producers == producer)] & (RECORDS_MAX - 1)
            processed = self._producers[int(producer)].processed.values
            self.processed_again += int(np.count_nonzero(processed[numbers]))
            processed[numbers] = True

    def _follows(self, reader: str, entry: Entry, first: int, count: int) -> bool:
        expected = self._next[reader].get(entry, 0)
        if first != expected and entry not in self.losses.entries:
            place = Place(*entry, first)
            text = f"{reader} went from record {expected - 1} to {first} of streamlet {entry[0]}, entry {entry[1]}"
            self._note("gap" if first > expected else "came again", text, None, place, self._now_s())
        self._next[reader][entry] = first + count
        return first + count <= self.sent + BEYOND_MAX

    def _known(self, values: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of the values were sent."""
        sent = np.array([each.state.size for each in self._producers] or [0], np.int64)
        producers = np.clip(values >> 40, 0, len(sent) - 1)
        known = (values >= 0) & (values >> 40 < len(self._producers))
        return np.asarray(known & ((values & (RECORDS_MAX - 1)) < sent[producers]))

    def _is_ours(self, entry: Entry, first: int, values: Numbers, strange: Callable[[int], str]) -> None:
        known = self._known(values)
        seen = self._seen[entry].values
        for at in np.flatnonzero(~known):
            place, value = Place(*entry, first + int(at)), int(values[at])
            if place.record < seen.size and seen.values[place.record] == value:
                continue  # reported when another reader has seen it
            what = strange(int(at)) if value == STRANGE else _name(value)
            text = f"{what} is at {place}: did another program write it?"
            self._note("never sent", text, None, place, self._now_s())

    # -- durable ends ------------------------------------------------------------------------------------------

    def floors(self) -> dict[Entry, int]:
        """Return the floors of the ends of entries, for a later `ends_at`: behind all acknowledged or read records."""
        found = dict(self._acknowledged_to)
        for entries in self._next.values():
            for entry, record in entries.items():
                found[entry] = max(found.get(entry, 0), record)
        return found

    def ends_at(
        self,
        entry: Entry,
        position: tuple[int, ...],
        record: int,
        floor: int,
        lost: tuple[tuple[int, ...], tuple[int, ...]] | None,
    ) -> None:
        """Note the durable end of an entry. `floor`: its minimum, from `floors`; `lost`: the reported loss, if any."""
        if lost is not None:
            self.tell_lost(entry, f"from {tuple(lost[0])} to {tuple(lost[1])}")
        before = self._ends.get(entry)
        if entry not in self.losses.entries:
            where = f"streamlet {entry[0]}, entry {entry[1]}"
            if before is not None and (position < before[0] or record < before[1]):
                text = f"the end of {where} was at record {before[1]}, and is at {record}"
                self._note("end went back", text, None, Place(*entry, record), before[2])
            elif record < floor and entry not in self._ends_behind:
                text = f"the end of {where} is at record {record}, when {floor} were acknowledged or read"
                self._note("end behind", text, None, Place(*entry, record), self._now_s())
        if record < floor:
            self._ends_behind.add(entry)
        else:
            self._ends_behind.discard(entry)
        self._ends[entry] = position, record, self._now_s()

    def tell_lost(self, entry: Entry, what: str, reader: str | None = None) -> bool:
        """Note that the cluster reports a loss in an entry; from there on, new records may have the same places.

        `reader`: the reader that got the error, at its next record. Returns whether it is the entry's first loss.
        """
        if reader is not None:
            record = self._next[reader].get(entry, 0)
            self.losses.first[entry] = min(record, self.losses.first.get(entry, record))
        if entry in self.losses.entries:
            return False
        self.losses.entries.add(entry)
        self._seen[entry] = _Seen()
        if not self.losses.are_allowed:
            text = f"the cluster reported that data of streamlet {entry[0]}, entry {entry[1]} are lost, {what}"
            self._note("told as lost", text, None, Place(*entry, 0), self._now_s())
        return True

    def note(self, kind: str, text: str) -> None:
        """Add a violation of another kind."""
        self._note(kind, text, None, None, self._now_s())

    # -- the verdict -------------------------------------------------------------------------------------------

    def next_of(self, reader: str) -> dict[Entry, int]:
        """Return the next ordinal of a reader, by entry."""
        return self._next[reader]

    @property
    def memory_bytes(self) -> int:
        """Memory for records, including free space for more."""
        columns = [each.values for each in self._seen.values()]
        for producer in self._producers:
            columns += [
                producer.state,
                producer.place,
                producer.acknowledged_ms,
                producer.processed,
                producer.stored_at,
            ]
        return sum(column.memory_bytes for column in columns)

    def unprocessed(self, *, read_back: bool = False) -> int:
        """Return the number of acknowledged records that exist and that no member of the consumer group got.

        In entries with reported losses, only reading back shows which records exist, because readers may have read
        records that were lost later. Until then the records of these entries do not count.
        """
        return sum(
            int(np.count_nonzero(each.unprocessed(self.losses, read_back=read_back))) for each in self._producers
        )

    def close(self, *, group: bool, read_back: bool = True) -> None:
        """Make the checks that are only possible at the end.

        `group`: there is a consumer group. `read_back`: the last reader has read everything, so records that it has not
        seen do not exist.
        """
        for producer, each in enumerate(self._producers):
            each.stored_at.grow(each.state.size)
            if read_back:
                self._close_stored(producer, each)
            if group:
                for number in np.flatnonzero(each.unprocessed(self.losses, read_back=read_back)):
                    text = f"{_name(packed(producer, int(number)))} was acknowledged; no member was given it"
                    self._note_acknowledged("not processed", text, producer, int(number))
        if read_back:
            self._close_seen()

    def _close_stored(self, producer: int, each: _Producer) -> None:
        stored, places = each.stored_at.values, each.place.values
        missing = stored == _NOWHERE
        gone = each.acknowledged & missing
        excused = gone & self.losses.may_have_taken(places)
        self.lost_as_told += int(np.count_nonzero(excused))
        gone &= ~excused
        for number in np.flatnonzero(gone):
            told = int(places[number])
            where = "an unknown place" if told == _NOWHERE else str(_place(told))
            text = f"{_name(packed(producer, int(number)))} was acknowledged at {where}, and is not there"
            self._note_acknowledged("lost", text, producer, int(number))
        for number in np.flatnonzero(each.acknowledged & ~missing & (places != _NOWHERE) & (places != stored)):
            told_place, place = _place(int(places[number])), _place(int(stored[number]))
            if told_place[:2] not in self.losses.entries:
                text = f"{_name(packed(producer, int(number)))} was acknowledged at {told_place}, and is at {place}"
                self._note_acknowledged("misplaced", text, producer, int(number))
        for number in np.flatnonzero((each.state.values == REFUSED) & ~missing):
            place = _place(int(stored[number]))
            text = f"{_name(packed(producer, int(number)))} was refused, and is at {place}"
            self._note("refused, yet stored", text, packed(producer, int(number)), place)
        self.uncertain_stored += int(np.count_nonzero((each.state.values == SENT) & ~missing))

    def _close_seen(self) -> None:
        stored = self._next[LAST_READER]
        for entry, seen in sorted(self._seen.items()):
            end = stored.get(entry, 0)
            for at in np.flatnonzero(seen.values.values[end:] != UNSEEN):
                place, value = Place(*entry, end + int(at)), int(seen.values.values[end + at])
                text = f"{_name(value)} was read at {place}, and is not there at the end"
                self._note("vanished", text, value, place, seen.when(place.record))

    def _note_acknowledged(self, kind: str, text: str, producer: int, number: int) -> None:
        each = self._producers[producer]
        told = int(each.place.values[number])
        place = None if told == _NOWHERE else _place(told)
        self._note(kind, text, packed(producer, number), place, int(each.acknowledged_ms.values[number]) / 1000)


def _name(value: int) -> str:
    if value < 0:
        return "a record of another program"
    producer, number = unpacked(value)
    return f"record {number} of producer {producer}"


def _packed_place(place: Place) -> int:
    return place.streamlet_id << 48 | place.entry << 40 | place.record


def _place(value: int) -> Place:
    return Place(value >> 48, value >> 40 & 0xFF, value & (RECORDS_MAX - 1))
