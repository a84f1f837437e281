"""Looks up the places of the options in the streams as they are now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidArgument
from kera.spark_connector.planning.now import Now, StreamNow, bounds_of, first_of, last_of, may_be_lost
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets, StreamRecreated
from kera.spark_connector.planning.places import Place, Time, Where

if TYPE_CHECKING:
    from kera.client import EntryBounds


class Question(NamedTuple):
    """A place to look up in an entry, between its `EntryBounds`.

    With a time, it asks for the first chunk from `start` on and before `end` that has a record at or after the time,
    else for `end` (`Client.locate` with all three). Without a time, `start` and `end` are the same position, which a
    user gave, and it asks for the ordinal of the record there (`locate` with records_max=1). `locate` raises
    `InvalidCursor` for a position that is not a chunk boundary; callers raise it again with the name of the option.

    The answer is an `EntryOffset` in both cases.
    """

    entry: EntryName
    start: Position
    end: Position
    timestamp_us: int | None


def questions(where: Where, now: Now, *, now_us: int) -> list[Question]:
    """Return the questions whose answers `resolve` needs to find the places of `where` now.

    Raises `InvalidArgument`, naming the option, if streams, streamlets or entries do not match the existing ones, and
    `StreamRecreated` for offsets of an earlier stream of the same name.
    """
    asked = (_question(entry, place, bounds_of(now, entry), now_us) for entry, place in _spelled(where, now).items())
    return [question for question in asked if question is not None]


def resolve(
    where: Where, now: Now, answers: Mapping[Question, EntryOffset], *, now_us: int, fail_on_data_loss: bool = True
) -> Offsets:
    """Return the places that `where` means; `answers` has one for each of `questions` (with the same arguments).

    * A position before the first record, or `earliest` if records right before the first one were lost: `DataLost`;
      without `fail_on_data_loss`, the first record.
    * A position beyond the head: `InvalidArgument` that names the option; without `fail_on_data_loss`, the head.
    * A time after all records of a streamlet: `InvalidArgument`, or the end of the streamlet, as `where.behind` says.
    """
    places: dict[EntryName, EntryOffset] = {}
    behind: dict[tuple[str, int], bool] = {}
    """Per streamlet with a time: whether none of its entries has a record at or after it."""
    for entry, place in _spelled(where, now).items():
        there = bounds_of(now, entry)
        question = _question(entry, place, there, now_us)
        if question is not None:
            places[entry] = answers[question]
        elif isinstance(place, str):
            if place == "earliest" and there.starts_behind_loss and fail_on_data_loss:
                raise _lost_before(where, entry, there)
            places[entry] = first_of(there) if place == "earliest" else last_of(there)
        elif isinstance(place, Time):  # the entry is empty
            places[entry] = last_of(there)
        else:
            places[entry] = _at_the_bounds(where, entry, place, there, fail_on_data_loss=fail_on_data_loss)
        if isinstance(place, Time):
            streamlet = (entry.stream, entry.streamlet)
            behind[streamlet] = behind.get(streamlet, True) and places[entry].position >= there.end
            if places[entry].position >= there.end:
                places[entry] = last_of(there)
    if where.behind == "error":
        for (stream, number), nothing in behind.items():
            if nothing:
                raise InvalidArgument(
                    f"option {where.option}: no record of streamlet {number} of stream '{stream}' is at or after that"
                    " time. To begin at the end of such streamlets set startingOffsetsByTimestampStrategy to latest",
                    option=where.option,
                    stream=stream,
                    streamlet=number,
                )
    return Offsets.of(places, {name: stream.stream_id for name, stream in now.items()})


def _question(entry: EntryName, place: Place, there: EntryBounds, now_us: int) -> Question | None:
    if isinstance(place, Time):
        return Question(entry, there.start, there.end, place.at(now_us)) if there.start < there.end else None
    if isinstance(place, str):
        return None
    position = _position(place)
    return Question(entry, position, position, None) if there.start < position < there.end else None


def _position(place: Position | EntryOffset) -> Position:
    return place.position if isinstance(place, EntryOffset) else place


def _at_the_bounds(
    where: Where, entry: EntryName, place: Position | EntryOffset, there: EntryBounds, *, fail_on_data_loss: bool
) -> EntryOffset:
    """Return the offset for a position that is not between the bounds."""
    position = _position(place)
    if position >= there.end:
        if position > there.end and fail_on_data_loss:
            raise InvalidArgument(
                f"option {where.option}: {tuple(position)} is beyond the end of {entry}, which is"
                f" {tuple(there.end)}. Use latest, or set failOnDataLoss to false to take the end",
                option=where.option,
                **entry._asdict(),
            )
        return last_of(there)
    read_all = (
        isinstance(place, EntryOffset)
        and place.record == there.first_record
        and not may_be_lost(there, position)  # otherwise the ordinals may be of another history
    )
    oldest = position.group_id == 0
    if oldest and there.starts_behind_loss and fail_on_data_loss:
        raise _lost_before(where, entry, there)
    if position < there.start and fail_on_data_loss and not read_all and not oldest:
        raise DataLost(
            f"option {where.option}: {tuple(position)} of {entry} was removed: the entry starts at"
            f" {tuple(there.start)} now. Use earliest, or set failOnDataLoss to false to read the present records",
            option=where.option,
            lost_from=tuple(position),
            available_from=tuple(there.start),
            **entry._asdict(),
        )
    return first_of(there)


def _lost_before(where: Where, entry: EntryName, there: EntryBounds) -> DataLost:
    lost_from = there.lost[0] if there.lost is not None else EARLIEST
    return DataLost(
        f"option {where.option}: what {entry} had from {tuple(lost_from)} up to {tuple(there.start)} was lost with the"
        " memory of its broker's host. Set failOnDataLoss to false to begin with what is there",
        option=where.option,
        lost_from=tuple(lost_from),
        available_from=tuple(there.start),
        **entry._asdict(),
    )


def _spelled(where: Where, now: Now) -> dict[EntryName, Place]:
    """Return one place for each entry that is read."""
    spelled: dict[EntryName, Place] = {}
    for name in sorted(set(where.streams or ()).difference(now)):
        raise InvalidArgument(
            f"option {where.option}: names stream '{name}', which does not exist or is not read", option=where.option
        )
    for name, stream in sorted(now.items()):
        said_of = where.stream_ids.get(name, stream.stream_id)
        if said_of != stream.stream_id:
            raise StreamRecreated(
                f"option {where.option}: stream '{name}' was deleted and created again: the offsets belong to"
                f" incarnation {said_of}, and it is {stream.stream_id} now. They have no meaning in the new stream:"
                " use earliest, latest or offsets of this one",
                stream=name,
                stream_id=stream.stream_id,
                option=where.option,
            )
        for streamlet, row in _rows(where, stream).items():
            for entry, place in enumerate(row):
                spelled[EntryName(name, streamlet, entry)] = place
    return spelled


def _rows(where: Where, stream: StreamNow) -> dict[int, list[Place]]:
    everywhere = where.everywhere if where.streams is None or stream.name in where.streams else where.unnamed
    named = (where.streams or {}).get(stream.name)
    if named is None and everywhere is not None:
        return {streamlet: [everywhere] * len(entries) for streamlet, entries in sorted(stream.bounds.items())}
    if named is None:
        raise InvalidArgument(f"option {where.option}: must name stream '{stream.name}', too", option=where.option)
    if set(named) != set(stream.bounds):
        raise InvalidArgument(
            f"option {where.option}: must name each streamlet: stream '{stream.name}' has {sorted(stream.bounds)},"
            f" the option names {sorted(named)}",
            option=where.option,
            stream=stream.name,
        )
    rows: dict[int, list[Place]] = {}
    for streamlet, entries in sorted(stream.bounds.items()):
        said = named[streamlet]
        rows[streamlet] = said if isinstance(said, list) else [said] * len(entries)
        if len(rows[streamlet]) != len(entries):
            raise InvalidArgument(
                f"option {where.option}: streamlet {streamlet} of stream '{stream.name}' has {len(entries)} entries,"
                f" {len(rows[streamlet])} places are given",
                option=where.option,
                stream=stream.name,
                streamlet=streamlet,
            )
    return rows
