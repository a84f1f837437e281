"""Positions in users' arguments: names such as ``"latest"``, or one per streamlet and entry. Checked, never guessed.

A guess for an unknown name would make a consumer begin at the wrong place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from kera.client.types import StreamDescription
from kera.core.base.ids import Position
from kera.core.base.spelling import closest
from kera.core.errors import InvalidArgument

NUMBERS_MAX = (1 << 64) - 1
"""Maximum of a number of a position in messages."""
_MEANT = {
    **dict.fromkeys(("now", "end", "newest", "last", "largest", "tail", "head"), "latest"),
    **dict.fromkeys(("begin", "beginning", "start", "oldest", "first", "smallest", "0"), "earliest"),
    **dict.fromkeys(("stored", "cursor", "group"), "committed"),
}
"""Other names for the same places, for hints."""


class ChunkPlace(NamedTuple):
    """A place in an entry: a chunk boundary or, if it was searched by record, a record within the chunk there."""

    position: Position
    """The chunk boundary at which reading starts."""
    record: int
    """Ordinal of the record at this place."""
    bytes: int
    """Size of the chunks between the query's start and `position`."""
    skip_records: int = 0
    """Number of records of the chunk at `position` before `record`; 0: `record` is the chunk's first one."""
    lost_from: Position | None = None
    """The start of lost records right before `position`, if the searched record may have been among them; else None. A
    reader that starts at this place gets `DataLost` first, or continues after it, by its settings."""

    @property
    def start(self) -> Position:
        """The position for a reader to start at, so that it notices a loss; for an end, use `position`."""
        return self.position if self.lost_from is None else self.lost_from


Positions = Mapping[int, Sequence[Position]]
"""Per streamlet, one position per entry."""
Places = Mapping[int, Sequence[Position | ChunkPlace]]
"""Per streamlet, one position or place per entry: where a consumer starts."""


def check_place(what: str, given: Any, names: Collection[str], *, others: str = "", records: bool = False) -> None:
    """Raise `InvalidArgument` unless `given` is one of `names` or a mapping of positions.

    `what` is the parameter. `others` describes further values that it takes. `records`: each position may be a
    `ChunkPlace`, which can lie within a chunk.
    """
    if isinstance(given, str):
        if given not in names:
            raise InvalidArgument(
                f"{what} is {given!r}, and takes {_listed(names, others)}{_hint(given, names)}", **{what: given}
            )
    elif not isinstance(given, Mapping):
        raise InvalidArgument(
            f"{what} is {given!r}, and takes {_listed(names, others)}; positions of a time are those of"
            " client.positions_at()",
            **{what: repr(given)},
        )
    else:
        for streamlet_id, entries in given.items():
            if not isinstance(streamlet_id, int) or isinstance(entries, str | bytes | Position):
                raise _no_positions(what, {streamlet_id: entries})
            try:
                found = list(entries)
            except TypeError:
                raise _no_positions(what, {streamlet_id: entries}) from None
            for each in found:
                check_position(what, each.position if records and isinstance(each, ChunkPlace) else each)


def check_position(what: str, given: Any) -> Position:
    """Return `given` as a position. Raises `InvalidArgument`."""
    if isinstance(given, ChunkPlace):
        raise InvalidArgument(
            f"{what} has {given!r}, and takes chunk boundaries only: give the place's position", **{what: repr(given)}
        )
    if not _is_position(given):
        raise InvalidArgument(
            f"{what} has {given!r}, which is not a position: Position(group_id, segment_id, offset), as"
            " consumer.positions() and client.bounds() give them",
            **{what: repr(given)},
        )
    return Position(*given)


def check_streamlets(given: Places, stream: StreamDescription) -> None:
    """Raise `StreamletOutOfRange` or `InvalidArgument` for positions in streamlets or entries that do not exist."""
    for streamlet_id, entries in given.items():
        for entry in range(len(entries)):
            stream.entry_id(streamlet_id, entry)


def _is_position(given: Any) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(given, tuple | list)
        and len(given) == len(Position._fields)
        and all(isinstance(number, int) and 0 <= number <= NUMBERS_MAX for number in given)
    )


def _no_positions(what: str, given: Any) -> InvalidArgument:
    return InvalidArgument(
        f"{what} has {given!r}: positions are {{streamlet: [Position, …]}}, one for each entry, as consumer.positions()"
        " gives them",
        **{what: repr(given)},
    )


def _listed(names: Collection[str], others: str) -> str:
    return ", ".join([*map(repr, names), *([others] if others else []), "or positions per streamlet and entry"])


def _hint(given: str, names: Collection[str]) -> str:
    meant = _MEANT.get(given.strip().casefold(), "")
    meant = meant if meant in names else closest(given.strip(), names) or ""
    return f"; did you mean {meant!r}?" if meant else ""
