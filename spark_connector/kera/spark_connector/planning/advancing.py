"""How far a micro-batch goes, even if streams have changed or vanished since the last one.

Losses are errors that name a way out, or, without ``failOnDataLoss``, warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kera.core.base.ids import EARLIEST
from kera.core.errors import DataLost, InvalidArgument, KeraError, UnknownStream
from kera.spark_connector.planning.admission import Waiting
from kera.spark_connector.planning.cutting import ranges
from kera.spark_connector.planning.now import Now, bounds_of, find_bounds, first_of, heads, may_be_lost
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, EpochMark, Offsets, StreamRecreated

if TYPE_CHECKING:
    from kera.client import EntryBounds


@dataclass(frozen=True)
class Advance:
    """The places between which a micro-batch may lie."""

    start: Offsets
    """The begin of the micro-batch: the previous end, brought up to now. It has exactly the entries to read."""
    heads: Offsets
    """The furthest end of the micro-batch; never before `start`, and with the same entries."""
    warnings: tuple[str, ...] = ()
    """The losses as texts for the log; empty unless losses are allowed."""


class _Losses:
    """Collects losses as warnings, or raises the first one."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self.warnings: list[str] = []

    def add(self, error: KeraError) -> None:
        if self._fail:
            raise error
        self.warnings.append(error.message)


def next_ends(start: Offsets, now: Now, *, fail_on_data_loss: bool) -> Advance:
    """Find the data behind `start` (from the checkpoint, or where the query begins).

    * A stream, streamlet or entry that `start` does not have is new, and begins with its first record.
    * A stream that was deleted, or is no longer subscribed, raises `UnknownStream` (a streamlet: `InvalidArgument`);
      without `fail_on_data_loss` it is left out, with a warning.
    * A stream that was deleted and created again raises `StreamRecreated`; without `fail_on_data_loss` it begins with
      its first record.
    * Lost or removed records raise `DataLost`; without `fail_on_data_loss` the entry goes on after them.
    * If a head lies before the start, as after a restart of a broker, nothing is new, and the place stays.
    """
    losses = _Losses(fail=fail_on_data_loss)
    begin = _still_there(start, now, losses)
    ends: dict[EntryName, EntryOffset] = {}
    for entry, head in heads(now).entries():
        if entry not in begin:
            begin[entry] = first_of(bounds_of(now, entry))
            if bounds_of(now, entry).starts_behind_loss:
                losses.add(_lost(entry, EntryOffset(EARLIEST, 0), bounds_of(now, entry)))
        ends[entry] = _later(begin[entry], head)
    ids = {name: stream.stream_id for name, stream in now.items()}
    return Advance(Offsets.of(begin, ids), Offsets.of(ends, ids), tuple(losses.warnings))


def _still_there(offsets: Offsets, now: Now, losses: _Losses) -> dict[EntryName, EntryOffset]:
    """Return `offsets` for the entries that still exist, moved forward to where these begin now."""
    for name, stream in sorted(offsets.streams.items()):
        if name not in now:
            losses.add(_deleted(name))
        elif stream.stream_id != now[name].stream_id:
            losses.add(_recreated(name, stream.stream_id, now[name].stream_id))
    found: dict[EntryName, EntryOffset] = {}
    for entry, offset in offsets.entries():
        if entry.stream not in now or offsets.streams[entry.stream].stream_id != now[entry.stream].stream_id:
            continue
        there = find_bounds(now, entry)
        if there is None:
            losses.add(_unassigned(entry))
        else:
            found[entry] = _on(entry, offset, there, losses)
    return found


def _on(entry: EntryName, offset: EntryOffset, there: EntryBounds, losses: _Losses) -> EntryOffset:
    """Return `offset`, or the first record of the entry if that comes later; add a loss if records are missing.

    A checkpoint may point to the end of groups that retention has removed since: then nothing is lost, but no broker
    has the place any more. Equal ordinals show that, if they are of the same history. But an entry's ordinals restart
    when its broker loses its memory, and may be equal by chance. So the broker also reports the range that it lost.
    """
    if offset.position >= there.start:
        return offset
    if may_be_lost(there, offset.position) or offset.record != there.first_record:
        losses.add(_lost(entry, offset, there))
    return first_of(there)


def _later(start: EntryOffset, head: EntryOffset) -> EntryOffset:
    # If no record is new, the start stays as it is: the end of a full segment and the start of the next one are two
    # names of the same place. (Any place after the start of a segment means a new record, whatever the ordinals are:
    # they restart when a broker is lost.)
    renamed = head.record == start.record and head.position.offset == 0
    return start if head.position <= start.position or renamed else head


def _deleted(name: str) -> KeraError:
    return UnknownStream(
        f"stream '{name}' is in the checkpoint, but was deleted, is no longer subscribed, or may not be seen any more"
        " by whoever reads. To go on without it set failOnDataLoss to false",
        stream=name,
    )


def _recreated(name: str, before: int, stream_id: int) -> KeraError:
    return StreamRecreated(
        f"stream '{name}' was deleted and created again: the checkpoint belongs to its incarnation {before}, now it is"
        f" {stream_id}. Its offsets mean nothing in the new stream: start the query with a new checkpointLocation, or"
        " set failOnDataLoss to false to go on with all of the new one",
        stream=name,
        checkpoint_stream_id=before,
        stream_id=stream_id,
    )


def _unassigned(entry: EntryName) -> KeraError:
    return InvalidArgument(
        f"{entry} is in the checkpoint, but is no longer assigned. Assign it, start the query with a new"
        " checkpointLocation, or set failOnDataLoss to false to go on without it",
        option="assign",
        **entry._asdict(),
    )


def _lost(entry: EntryName, offset: EntryOffset, there: EntryBounds) -> KeraError:
    gone = 0 if may_be_lost(there, offset.position) else there.first_record - offset.record
    what = f"{gone} records of" if gone > 0 else "an unknown number of records of"
    return DataLost(
        f"{what} {entry} are gone before they were read, from {tuple(offset.position)} on: it starts at"
        f" {tuple(there.start)} now. Let retention keep more, or set failOnDataLoss to false to go on behind them",
        lost_from=tuple(offset.position),
        available_from=tuple(there.start),
        records=max(gone, 0),
        **entry._asdict(),
    )


def cap(advance: Advance, target: Offsets) -> Advance:
    """Return `advance` with no head beyond `target`, for ``availableNow``.

    Streams that are not in `target`, or were created again since, get no data to read.
    """
    ids, allowed, begin = advance.start.stream_ids(), target.places(), advance.start.places()
    ends: dict[EntryName, EntryOffset] = {}
    for entry, head in advance.heads.entries():
        same = entry in allowed and target.streams[entry.stream].stream_id == ids[entry.stream]
        ends[entry] = max(begin[entry], min(head, allowed[entry])) if same else begin[entry]
    return Advance(advance.start, Offsets.of(ends, ids), advance.warnings)


def waiting(advance: Advance, now: Now) -> dict[EntryName, Waiting]:
    """Return the waiting data of all entries that have any, for `admission.decide`."""
    found: dict[EntryName, Waiting] = {}
    for piece in ranges(advance.start, advance.heads, now):
        there = bounds_of(now, piece.entry)
        estimate, most = max(1, piece.length_bytes), max(1, there.length_bytes)
        in_one_segment = piece.start.position[:2] == piece.end.position[:2]
        found[piece.entry] = Waiting(
            max(1, piece.records), estimate, estimate if in_one_segment else max(estimate, most)
        )
    return found


def limited(advance: Advance, places: Mapping[EntryName, EntryOffset]) -> Offsets:
    """Return the end of the micro-batch: the heads, except for the entries of `places`, which end at the place there.

    The entries are those of `admission.Take.shares`. No end is before the start or beyond the head.
    """
    begin = advance.start.places()
    ends: dict[EntryName, EntryOffset] = {}
    for entry, head in advance.heads.entries():
        place = min(head, places.get(entry, head))
        # Compares positions only: a place within the chunk at the start is no end of a micro-batch.
        ends[entry] = place if place.position > begin[entry].position else begin[entry]
    return Offsets.of(ends, advance.heads.stream_ids())


def conclude(
    given: Offsets,
    advance: Advance,
    end: Offsets,
    *,
    group: str = "",
    first: bool = False,
    mark: EpochMark | None = None,
) -> Offsets:
    """Return the end of the micro-batch, in the form that Spark stores.

    If nothing is new, it is `given` itself (the same object), and Spark must get its text back unchanged. Otherwise it
    is `end` with `group` (or that of `given`). It has `since` if the checkpoint would not show where the micro-batch
    begins: for the `first` micro-batch of a query (`given` is the answer of `initialOffset` in this launch), and for a
    micro-batch that does not begin at `given`. A micro-batch with a `mark` is new even if its epochs are empty.
    """
    if mark is None and end.places() == advance.start.places() and not advance.warnings:
        return given
    elsewhere = first or advance.start.streams != given.streams
    return Offsets(end.streams, advance.start.streams if elsewhere else None, group or given.group, mark)


@dataclass(frozen=True)
class Planned:
    """The part of a micro-batch from the checkpoint that can still be read."""

    start: Offsets
    end: Offsets
    warnings: tuple[str, ...] = ()


def revise(start: Offsets, end: Offsets, now: Now, *, fail_on_data_loss: bool) -> Planned:
    """Return the data to read of the micro-batch between two stored offsets, `start` and `end`.

    `end.since` takes precedence over `start`. An earlier launch may have planned the micro-batch. Raises the errors of
    `next_ends`; without `fail_on_data_loss` missing data are left out, with a warning.
    """
    losses = _Losses(fail=fail_on_data_loss)
    since = Offsets(start.streams if end.since is None else end.since)
    before, ids = since.places(), since.stream_ids()
    begins: dict[EntryName, EntryOffset] = {}
    ends: dict[EntryName, EntryOffset] = {}
    for name, stream in sorted(end.streams.items()):
        entries = list(Offsets({name: stream}).entries())
        known = ids.get(name) == stream.stream_id
        if known and all(before.get(entry) == place for entry, place in entries):
            continue  # the micro-batch has no records of this stream, so it does not matter whether it still exists
        if name not in now:
            losses.add(_deleted(name))
        elif now[name].stream_id != stream.stream_id:
            losses.add(_recreated(name, stream.stream_id, now[name].stream_id))
        else:
            for entry, place in entries:
                there = find_bounds(now, entry)
                if there is None:
                    losses.add(_unassigned(entry))
                    continue
                begin = before[entry] if known and entry in before else first_of(there)
                begins[entry] = min(place, _on(entry, begin, there, losses) if begin < place else begin)
                ends[entry] = place
    return Planned(Offsets.of(begins, end.stream_ids()), Offsets.of(ends, end.stream_ids()), tuple(losses.warnings))
