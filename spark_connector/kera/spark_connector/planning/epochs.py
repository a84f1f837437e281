"""Micro-batches that end with epochs: at the same time in all entries, and the same ones whenever they are planned.

Epoch k of an entry goes from boundary(kE) up to boundary((k+1)E), where boundary(T) is the first chunk in the order of
the log with a time at or after T (docs/epochs.md): a function of the log alone. A micro-batch has whole, closed epochs,
to which no more records can come. So a number determines where it ends; the checkpoint has that number, and the places
that it stands for.

A decision that has to look up places is a generator. It yields lists of `Question`, receives the answers, and returns
its decision.

    begin ─► the first offset        next_epochs ─► conclude ─► the checkpoint        divided ─► ranges, cut

The first micro-batch of a query determines the query's first epoch: that of the first record in the log after the place
where the query begins. So a query that starts before any record finds the same epoch as a query that starts a year
later.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from kera.core.errors import EpochPassed, InvalidArgument
from kera.core.format.punctuation import NO_TIME
from kera.spark_connector.planning.advancing import Advance, Planned, limited
from kera.spark_connector.planning.now import Now, StreamNow, bounds_of, first_of
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, EpochMark, Offsets
from kera.spark_connector.planning.places import Time, Where
from kera.spark_connector.planning.resolving import Question

if TYPE_CHECKING:
    from kera.client import EntryBounds

T = TypeVar("T")
Asking: TypeAlias = Generator[list[Question], Mapping[Question, EntryOffset], T]
"""A decision that asks for the places of times."""

SEARCHED_AT_ONCE = 16
"""The search for an epoch divides the candidates into this number of parts with each question."""
TIME_MIN_US, TIME_MAX_US = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Cadence:
    """The epoch options."""

    epoch_ms: int
    exactly: int | None = None
    """The exact number of epochs in a micro-batch, even if they are empty; None: no exact number."""
    at_most: int | None = None
    """The maximum number of epochs in a micro-batch; None: all that are closed."""

    @property
    def epoch_us(self) -> int:
        """The length of an epoch in microseconds."""
        return 1000 * self.epoch_ms

    def start_of(self, epoch: int) -> int:
        """Return when an epoch begins, in microseconds since the Unix epoch, clamped to 64 bits."""
        return min(max(epoch * self.epoch_us, TIME_MIN_US), TIME_MAX_US)

    def mark_of(self, offsets: Offsets) -> EpochMark:
        """Return the epoch mark of `offsets`. Raises `InvalidArgument` if they are not of a query with these epochs."""
        mark = offsets.epoch
        if mark is None:
            raise InvalidArgument(
                "option epoch: the checkpoint belongs to a query without it, and its micro-batches end anywhere."
                " Start the query with a new checkpointLocation, or leave the option out",
                option="epoch",
            )
        if mark.epoch_ms != self.epoch_ms:
            raise InvalidArgument(
                f"option epoch: the checkpoint belongs to a query with epochs of {mark.epoch_ms} ms, not"
                f" {self.epoch_ms}. Set the same length, or start the query with a new checkpointLocation",
                option="epoch",
                epoch_ms=mark.epoch_ms,
            )
        return mark


def check_kept(offsets: Offsets) -> None:
    """Raise `InvalidArgument` if `offsets` are of a query with epochs; the caller plans without epochs."""
    if offsets.epoch is not None:
        raise InvalidArgument(
            f"option epoch: the checkpoint belongs to a query with epochs of {offsets.epoch.epoch_ms} ms, and later"
            f" micro-batches would end anywhere. Set epoch to '{offsets.epoch.epoch_ms}ms', or start the query with"
            " a new checkpointLocation",
            option="epoch",
            epoch_ms=offsets.epoch.epoch_ms,
        )


class Reach(NamedTuple):
    """How far an entry is settled."""

    settled_us: int | None
    """The time up to which epochs are settled: an older record that follows is counted to a later epoch. None: it is
    not known."""
    promised_us: int
    """The time up to which the broker promises this for its durable head; `NO_TIME`: it has not promised."""
    is_exempt: bool
    """Whether the entry holds up no epoch: it never had records, and its broker does not have to promise anything."""


def check_streams(streams: Iterable[StreamNow], cadence: Cadence) -> None:
    """Raise `InvalidArgument` unless the query's epoch is a multiple of the epoch of each stream."""
    for stream in streams:
        if not stream.epoch_ms:
            raise InvalidArgument(
                f"option epoch: stream '{stream.name}' has no epochs; kera stream alter {stream.name} --epoch says how"
                " long they are",
                option="epoch",
                stream=stream.name,
            )
        if cadence.epoch_ms % stream.epoch_ms:
            raise InvalidArgument(
                f"option epoch: {cadence.epoch_ms} ms are not a multiple of the {stream.epoch_ms} ms of stream"
                f" '{stream.name}'",
                option="epoch",
                stream=stream.name,
                epoch_ms=stream.epoch_ms,
            )


def reaches(advance: Advance, now: Now) -> dict[EntryName, Reach]:
    """Return how far each entry that is read is settled."""
    found = {}
    for entry, start in advance.start.entries():
        there, stream = bounds_of(now, entry), now[entry.stream]
        if there.end < start.position and there.next_record < start.record:
            found[entry] = Reach(None, NO_TIME, is_exempt=False)  # its broker has not recovered all of it
            continue
        promises = there.promised_us is not None and there.end >= there.promised_at
        promised_us = there.promised_us if promises and there.promised_us is not None else NO_TIME
        written_us = NO_TIME if there.watermark_us is None else there.watermark_us
        settled_us = max(promised_us, written_us)
        # Compares no positions: the end of an empty entry that has moved is no longer `EARLIEST`.
        is_empty = there.watermark_us is None and not there.next_record
        is_exempt = is_empty and there.promised_us is None and not stream.is_by_clock
        found[entry] = Reach(None if settled_us == NO_TIME else settled_us, promised_us, is_exempt)
    return found


def closed_before(reached: Mapping[EntryName, Reach], cadence: Cadence) -> int | None:
    """Return the first epoch that is not known to be closed; None: no epoch is closed."""
    times = [reach.settled_us for reach in reached.values() if not reach.is_exempt]
    known = [time_us for time_us in times if time_us is not None]
    return min(known) // cadence.epoch_us if times and len(known) == len(times) else None


def held_up_by(reached: Mapping[EntryName, Reach]) -> tuple[EntryName, int | None] | None:
    """Return the entry that is settled least far, and up to which time; None: no entry holds up an epoch."""
    there = [(entry, reach.settled_us) for entry, reach in reached.items() if not reach.is_exempt]
    return min(there, key=lambda each: (NO_TIME if each[1] is None else each[1], each[0]), default=None)


# -- where a query begins ---------------------------------------------------------------------------------------


def begin(where: Where, now: Now, cadence: Cadence, *, now_us: int) -> Asking[Offsets]:
    """Return where a query without a checkpoint begins: with an epoch from which no records were removed.

    ``earliest``: the first such epoch; ``latest``: the epoch that is being filled; a time: the epoch that contains it.
    Raises `InvalidArgument` for streams without matching epochs, and for places that are not at the same time in all
    entries.
    """
    check_streams(now.values(), cadence)
    place = where.everywhere
    if where.streams is not None or not (isinstance(place, Time) or place in ("earliest", "latest")):
        raise InvalidArgument(
            f"option {where.option}: with option epoch a query begins at the same time in all entries: say earliest,"
            " latest, or a time with startingTimestamp",
            option=where.option,
        )
    first = _first_whole(now, cadence)
    if place != "earliest":
        wanted = place.at(now_us) // cadence.epoch_us if isinstance(place, Time) else _open_now(now, cadence)
        if wanted is not None:
            first = wanted if first is None else max(wanted, first)
    places = {
        EntryName(name, streamlet, entry): first_of(there)
        for name, stream in now.items()
        for streamlet, entries in stream.bounds.items()
        for entry, there in enumerate(entries)
    }
    if first is not None:
        asked = {
            entry: Question(entry, there.start, there.end, cadence.start_of(first))
            for entry in places
            if (there := bounds_of(now, entry)).start < there.end
        }
        answers = yield list(asked.values())
        places |= {entry: answers[question] for entry, question in asked.items()}
    ids = {name: stream.stream_id for name, stream in now.items()}
    return replace(Offsets.of(places, ids), epoch=EpochMark(cadence.epoch_ms, first, None))


def _first_whole(now: Now, cadence: Cadence) -> int | None:
    """Return the first epoch from which no records were removed; None: no records were removed at all."""
    removed = [
        _latest_removed_us(there) // cadence.epoch_us
        for stream in now.values()
        for entries in stream.bounds.values()
        for there in entries
        if there.first_record
    ]
    return max(removed) + 1 if removed else None


def _latest_removed_us(there: EntryBounds) -> int:
    """Return the greatest time of the records that were removed from an entry, or an upper bound of it."""
    times = (there.removed_watermark_us, there.watermark_us)
    return next((time_us for time_us in times if time_us is not None), 0)


def _open_now(now: Now, cadence: Cadence) -> int | None:
    """Return the first epoch that is not closed yet; None: no entry has a known time."""
    settled = [
        max(times)
        for stream in now.values()
        for entries in stream.bounds.values()
        for there in entries
        if (times := [time_us for time_us in (there.watermark_us, there.promised_us) if time_us is not None])
    ]
    return min(settled) // cadence.epoch_us if settled else None


# -- the next micro-batch ---------------------------------------------------------------------------------------


class Aligned(NamedTuple):
    """A micro-batch that ends with an epoch."""

    advance: Advance
    """The places between which the micro-batch lies; it begins at their start."""
    end: Offsets
    mark: EpochMark


def next_epochs(
    given: Offsets, advance: Advance, now: Now, cadence: Cadence, *, until: int | None, fail_on_data_loss: bool
) -> Asking[Aligned | None]:
    """Return the micro-batch after `given`; None: it is not closed yet, or there is nothing to read.

    `until`: with ``availableNow``, the first epoch that the query does not read. Raises `InvalidArgument` for a
    checkpoint with other epochs and for new streams without matching epochs, and `EpochPassed` if records came late.
    """
    mark = cadence.mark_of(given)
    check_streams((now[name] for name in advance.start.streams if name not in given.streams), cadence)
    plan = _Plan(advance, reaches(advance, now), cadence)
    if mark.next is not None and fail_on_data_loss:
        yield from _check_comes_after(plan, given, mark.next)
    closed = closed_before(plan.reached, cadence)
    if closed is None:
        return None
    closed = closed if until is None else min(closed, until)
    first = mark.first if mark.next is None else mark.next
    if first is not None and closed <= first:
        return None
    if mark.next is None:
        first = yield from _first_of_query(plan, mark.first, closed)
    return None if first is None else (yield from _whole_epochs(plan, first, closed))


@dataclass
class _Plan:
    """A micro-batch that is being planned."""

    advance: Advance
    reached: Mapping[EntryName, Reach]
    cadence: Cadence

    def questions(self, *epochs: int) -> dict[tuple[EntryName, int], Question]:
        """Return the questions where these epochs begin, for entries with data to read."""
        heads = self.advance.heads.places()
        return {
            (entry, epoch): Question(entry, start.position, heads[entry].position, self.cadence.start_of(epoch))
            for entry, start in self.advance.start.entries()
            if start.position < heads[entry].position
            for epoch in epochs
        }

    def known(self, epoch: int, found: Mapping[tuple[EntryName, int], EntryOffset]) -> dict[EntryName, EntryOffset]:
        """Return where an epoch begins, for the entries where no further record can change that."""
        places = {}
        for entry, head in self.advance.heads.entries():
            reach = self.reached[entry]
            place = found.get((entry, epoch), head)
            promised = reach.promised_us >= self.cadence.start_of(epoch)
            if place.position < head.position or promised or reach.is_exempt:
                places[entry] = place
        return places

    def boundaries(self, *epochs: int) -> Asking[dict[int, dict[EntryName, EntryOffset]]]:
        """Return where these epochs begin in all entries. Leave out epochs whose begin is uncertain in any entry."""
        asked = self.questions(*epochs)
        answers = yield list(asked.values())
        found = {key: answers[question] for key, question in asked.items()}
        entries = sum(1 for _ in self.advance.heads.entries())
        places = {epoch: self.known(epoch, found) for epoch in epochs}
        return {epoch: there for epoch, there in places.items() if len(there) == entries}


def _first_of_query(plan: _Plan, first: int | None, closed: int) -> Asking[int | None]:
    """Return the first epoch with records, which is closed, and move the start of the plan to where `first` begins.

    None: the begin of `first` is still uncertain, or no closed epoch has records.
    """
    if first is not None:
        begins = (yield from plan.boundaries(first)).get(first)
        if begins is None:
            return None
        plan.advance = replace(plan.advance, start=limited(plan.advance, begins))
    return (yield from _at_hand(plan, first, closed))


def _at_hand(plan: _Plan, first: int | None, closed: int) -> Asking[int | None]:
    """Return the first epoch from `first` on that has records; None: no epoch before `closed` has any.

    Brokers can say whether there are records before the end of an epoch. Each step asks this for several candidates.
    """
    low = TIME_MIN_US // plan.cadence.epoch_us if first is None else first
    high = closed - 1
    found = False
    while not found or low < high:
        parts = range(1, SEARCHED_AT_ONCE + 1)
        ends = sorted({low + (high - low) * part // SEARCHED_AT_ONCE + 1 for part in parts})
        asked = plan.questions(*ends)
        origins = {
            entry: question._replace(timestamp_us=TIME_MIN_US) for (entry, _), question in asked.items()
        }  # the start of the micro-batch, under the name that the answers use for it
        answers = yield [*asked.values(), *origins.values()]
        begun = [
            end
            for (entry, end), question in asked.items()
            if answers[question].position > answers[origins[entry]].position
        ]
        if not begun:
            return None
        found, high = True, min(begun) - 1
        low = max([low, *(end for end in ends if end <= high)])
    return high


def _whole_epochs(plan: _Plan, first: int, closed: int) -> Asking[Aligned | None]:
    """Return the micro-batch of the next epochs from `first` on; None: too few are closed, or all are empty."""
    cadence = plan.cadence
    count = cadence.exactly or cadence.at_most
    target = closed if count is None else min(closed, first + count)
    if cadence.exactly is not None and target < first + cadence.exactly:
        return None
    aligned = yield from _ending(plan, first, target)
    if aligned is None or cadence.exactly is not None or aligned.end.places() != plan.advance.start.places():
        return aligned
    # Without an exact number of epochs, a micro-batch of empty epochs has no use.
    found = yield from _at_hand(plan, target, closed)
    if found is None:
        return None
    return (yield from _ending(plan, found, closed if count is None else min(closed, found + count)))


def _ending(plan: _Plan, first: int, target: int) -> Asking[Aligned | None]:
    """Return the micro-batch of the epochs from `first` up to `target`, or fewer; None: not even one is certain.

    Fewer epochs may be certain because a broker's last records may not be durable yet.
    """
    fewer: list[int] = []
    if plan.cadence.exactly is None and target > first + 1:
        steps = range((target - first).bit_length())
        fewer = sorted({first + 1, *(target - 2**step for step in steps if target - 2**step > first)})
    for tried in ([target], fewer):
        known = yield from plan.boundaries(*tried)
        if known:
            last = max(known)
            mark = EpochMark(plan.cadence.epoch_ms, first, last)
            return Aligned(plan.advance, limited(plan.advance, known[last]), mark)
    return None


def _check_comes_after(plan: _Plan, given: Offsets, epoch: int) -> Asking[None]:
    """Raise `EpochPassed` if an entry that was empty has got records of epochs that the query has already read."""
    untouched = {entry for entry, place in given.entries() if not place.record}
    asked = {entry: question for (entry, _), question in plan.questions(epoch).items() if entry in untouched}
    if not asked:
        return
    answers = yield list(asked.values())
    starts = plan.advance.start.places()
    for entry, question in asked.items():
        if answers[question].record > starts[entry].record:
            raise EpochPassed(
                f"{entry} got records of epochs before {epoch} after these were read without it: it was empty"
                " then, and had no promise that older records are over. Set failOnDataLoss to false to read them"
                " with the next epoch",
                epoch=epoch,
                **entry._asdict(),
            )


# -- the epochs of a micro-batch --------------------------------------------------------------------------------


def divided(planned: Planned, mark: EpochMark) -> Asking[list[tuple[int, Planned]]]:
    """Divide a micro-batch into its epochs. Return those that are not empty, with their numbers."""
    if mark.first is None or mark.next is None:
        return []
    cadence = Cadence(mark.epoch_ms)
    ends = planned.end.places()
    inner = range(mark.first + 1, mark.next)
    asked = {
        (entry, epoch): Question(entry, start.position, ends[entry].position, cadence.start_of(epoch))
        for entry, start in planned.start.entries()
        if start.position < ends[entry].position
        for epoch in inner
    }
    answers: Mapping[Question, EntryOffset] = {}
    if asked:
        answers = yield list(asked.values())
    found = []
    begins, ids = planned.start.places(), planned.start.stream_ids()
    for epoch in (*inner, mark.next):
        stops = dict(ends)
        if epoch != mark.next:
            for entry in begins:
                question = asked.get((entry, epoch))
                stops[entry] = ends[entry] if question is None else answers[question]
        if stops != begins:
            found.append((epoch - 1, Planned(Offsets.of(begins, ids), Offsets.of(stops, ids))))
        begins = stops
    return found
