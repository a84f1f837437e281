"""Rounds: the journal's records of what a copy into a stream is about to append.

A round lists pieces, and for each piece the chunks that its rows become: per streamlet the sequence number of the first
chunk, and the number of chunks. The round is in the journal before the first of its chunks is sent. So a process that
continues the copy, after any failure, finds in the last round everything that may have been sent without an answer. It
appends the same pieces under the same numbers again, and the broker takes each number once. After that the copy is at
`places`.

    journal      round 1      round 2      round 3
                 p0: 0…90     p0: 90…170   p0: 170…260
                 as #0, #1    as #2        as #3, #4     ◄── the last one: may be stored, in part, or not at all
    streamlet 0  #0 #1        #2           #3?

Rows of the source may change before they can be appended again, so that the same chunks cannot be made any more. Then
the next round, without pieces, abandons the last one: the copy returns to where the abandoned pieces began, and
continues under the next producer epoch, whose sequences begin with 0. Some of those rows may then be stored twice; none
is missing.

Rounds have numbers without gaps, and the journal takes each number once, too. If two processes run the same copy, one
finds the number of its round taken, and ends. Even if it wakes up in the middle of a round, it can only append the
chunks of that round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kera.connect.errors import CopyMismatch
from kera.connect.pieces import Place, Span
from kera.core.errors import invariant

VERSION = 2
"""Version 2 adds digests of spans, the producer's epoch and the partitioner; rounds of version 1 can be read."""
DEFAULT_PARTITIONER = "crc32c"
"""The partitioner of rounds without one."""
FIRST_EPOCH = 1


class Chunks(NamedTuple):
    """Consecutive chunks of one streamlet."""

    first: int
    """Sequence of the first chunk."""
    number: int
    """Number of chunks."""


class Written(NamedTuple):
    """A piece of a round, and the chunks that it becomes."""

    span: Span
    keyless: int | None
    """The streamlet of rows without a key; None: each streamlet of `chunks` has all rows, whatever their keys."""
    chunks: Mapping[int, Chunks]
    """The chunks by streamlet."""
    starts: tuple[int, ...] = ()
    """The place of the first row of each chunk, if all rows are in one streamlet. Empty: not known, or the places of
    rows are consecutive numbers."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round: the pieces that are about to be appended, and the place of the copy after them."""

    number: int
    """The number of the round; round 0 has no pieces, and marks the begin of the copy."""
    run: str
    """Id of the process that has written the round."""
    source: str
    """The source in words without secrets."""
    stream_id: int
    """Id of the target stream; a later stream of the same name has another id."""
    pieces: tuple[Written, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    sequences: Mapping[int, int] = field(default_factory=dict)
    """The sequence of the next chunk, per streamlet."""
    epoch: int = FIRST_EPOCH
    """The producer epoch of the chunks, which grows with each abandoned round."""
    records: int = 0
    """Number of rows of this round and all before it."""
    partitioner: str = DEFAULT_PARTITIONER
    """How keys determine streamlets. It is the same in all rounds, so that rows can be split again as they were."""

    def encode(self) -> bytes:
        """Return the round in the journal's form."""
        return json.dumps(
            {
                "version": VERSION,
                "round": self.number,
                "run": self.run,
                "source": self.source,
                "stream_id": self.stream_id,
                "records": self.records,
                "epoch": self.epoch,
                "partitioner": self.partitioner,
                "places": dict(self.places),
                "sequences": {str(streamlet): sequence for streamlet, sequence in self.sequences.items()},
                "pieces": [
                    [*each.span, each.keyless, [[streamlet, *chunks] for streamlet, chunks in each.chunks.items()]]
                    for each in self.pieces
                ],
                # Not within the pieces, so that older programs can read those.
                "starts": {str(at): each.starts for at, each in enumerate(self.pieces) if each.starts},
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Round:
        """Parse a round of the journal. Raises `CopyMismatch` if it is damaged, or of a newer program."""
        try:
            found = json.loads(data)
            version = found["version"]
            if isinstance(version, int) and version > VERSION:
                raise CopyMismatch(
                    f"a newer program wrote the journal of the copy (version {version}, this one knows {VERSION}):"
                    " continue with that program",
                    version=version,
                )
            return cls(
                number=_whole(found["round"]),
                run=str(found["run"]),
                source=str(found["source"]),
                stream_id=_whole(found["stream_id"]),
                records=_whole(found["records"]),
                epoch=_whole(found.get("epoch", FIRST_EPOCH)),
                partitioner=str(found.get("partitioner", DEFAULT_PARTITIONER)),
                places=dict(found["places"]),
                sequences={int(streamlet): _whole(sequence) for streamlet, sequence in found["sequences"].items()},
                pieces=tuple(
                    _written(each, found.get("starts", {}).get(str(at), ())) for at, each in enumerate(found["pieces"])
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CopyMismatch(
                f"the journal of the copy is damaged: its last record is {data[:80]!r}; restart the copy with kera"
                " connect forget"
            ) from error

    @property
    def spans(self) -> list[Span]:
        """The spans of the pieces."""
        return [written.span for written in self.pieces]


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number")
    return value


def _written(found: Any, starts: Any) -> Written:
    part, start, end, rows, *digest, keyless, chunks = found
    return Written(
        Span(str(part), start, end, _whole(rows), *map(str, digest)),
        None if keyless is None else _whole(keyless),
        {_whole(streamlet): Chunks(_whole(first), _whole(count)) for streamlet, first, count in chunks},
        tuple(map(_whole, starts)),
    )


class Planned(NamedTuple):
    """A piece for the next round."""

    span: Span
    keyless: int | None
    """See `Written`."""
    counts: Mapping[int, int]
    """The number of chunks, per streamlet."""
    starts: tuple[int, ...] = ()
    """See `Written`."""


def next_round(last: Round, run: str, pieces: Sequence[Planned]) -> Round:
    """Return the round after `last`. Its chunks have the numbers after those of all earlier rounds."""
    sequences, places, written = dict(last.sequences), dict(last.places), []
    for span, keyless, counts, starts in pieces:
        if span.part in places:
            invariant(places[span.part] == span.start, "a piece begins where the one before it ended", part=span.part)
        places[span.part] = span.end
        chunks = {}
        for streamlet, count in counts.items():
            first = sequences.get(streamlet, 0)
            chunks[streamlet] = Chunks(first, count)
            sequences[streamlet] = first + count
        written.append(Written(span, keyless, chunks, starts))
    return replace(
        last,
        number=last.number + 1,
        run=run,
        pieces=tuple(written),
        places=places,
        sequences=sequences,
        records=last.records + sum(planned.span.rows for planned in pieces),
    )


def abandoned(last: Round, run: str) -> Round:
    """Return the round that abandons `last`: the pieces of `last` are copied anew, from where they began."""
    places = dict(last.places)
    for span in reversed(last.spans):
        if span.start is None:
            places.pop(span.part, None)
        else:
            places[span.part] = span.start
    return replace(
        last,
        number=last.number + 1,
        run=run,
        pieces=(),
        places=places,
        sequences={},
        epoch=last.epoch + 1,
        records=last.records - sum(span.rows for span in last.spans),
    )
