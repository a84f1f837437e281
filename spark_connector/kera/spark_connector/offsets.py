"""Offsets: what a checkpoint, a query's progress and the JSON forms of the options say about places in a stream.

A checkpoint holds one JSON object per micro-batch:

    {"stream": "flights", "stream_id": 7,
     "streamlets": {"0": [[3, 1, 81920, 40000]], "1": [[4, 2, 0, 39500]]},
     "since": {"0": [[1, 1, 0, 0]], "1": [[2, 1, 0, 0]]}}

Per streamlet there is a list with one place per entry: group, segment, byte offset in the segment, and the ordinal of
the next record in the entry. The first three are the cursor that readers follow. The ordinal says how many records
lie between two offsets without asking a broker: it drives ``maxOffsetsPerTrigger`` and lets anyone compute the lag
from the start, end and latest offsets of a query's progress.

Promises:

* the same offsets always give the same text, because Spark compares offsets as text;
* `stream_id` is the stream's incarnation: offsets of a stream that was deleted and created again are refused
  (`StreamRecreated`), never applied to the new stream;
* `since` is where the whole query began, and is only in the end of its first micro-batch. Spark does not store where
  a query begins, it asks again; a query that starts at "latest" and is killed in its first micro-batch would
  otherwise begin later when it comes back, and skip records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kera.core.errors import InvalidArgument, NotAccepted
from kera.core.ids import Position

Lane = tuple[int, int]
"""Streamlet and entry."""


class StreamRecreated(NotAccepted):
    """A checkpoint belongs to an earlier stream of the same name. Start the query with a new checkpoint."""

    code = "stream_recreated"


class EntryOffset(NamedTuple):
    """A place in one entry; compares in log order."""

    position: Position
    record: int
    """Ordinal within the entry of the first record at or after the position."""


Place = Literal["earliest", "latest"] | Position
"""What a user may say about one entry."""


@dataclass(frozen=True)
class Places:
    """``startingOffsets`` or ``endingOffsets``: a default, or one or more places per streamlet."""

    everywhere: Place | None = None
    streamlets: Mapping[int, Place | tuple[Place, ...]] | None = None
    """One place for all entries of the streamlet, or one per entry. Must name every streamlet of the stream."""


EARLIEST_PLACES = Places(everywhere="earliest")
LATEST_PLACES = Places(everywhere="latest")


@dataclass(frozen=True)
class StreamOffsets:
    """A place in every entry of one incarnation of a stream."""

    stream: str
    stream_id: int
    streamlets: Mapping[int, tuple[EntryOffset, ...]]
    since: Mapping[int, tuple[EntryOffset, ...]] | None = None

    def lanes(self) -> Iterator[tuple[Lane, EntryOffset]]:
        """Each entry with its place, in order."""
        for streamlet, entries in sorted(self.streamlets.items()):
            for entry, offset in enumerate(entries):
                yield (streamlet, entry), offset

    def to_json(self) -> dict[str, Any]:
        """The object that Spark stores. Key order is fixed: see "Promises" above."""
        document: dict[str, Any] = {
            "stream": self.stream,
            "stream_id": self.stream_id,
            "streamlets": _streamlets_to_json(self.streamlets),
        }
        if self.since is not None:
            document["since"] = _streamlets_to_json(self.since)
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> StreamOffsets:
        """The inverse of `to_json`; raises `InvalidArgument` for anything else."""
        try:
            since = document.get("since")
            return StreamOffsets(
                stream=str(document["stream"]),
                stream_id=int(document["stream_id"]),
                streamlets=_streamlets_from_json(document["streamlets"]),
                since=None if since is None else _streamlets_from_json(since),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                f"the checkpoint holds offsets that are not of the kera source: {json.dumps(document)[:200]}"
            ) from error

    def require(self, stream_id: int) -> None:
        """Raise `StreamRecreated` unless these offsets are of the incarnation `stream_id`."""
        if self.stream_id != stream_id:
            raise StreamRecreated(
                f"stream '{self.stream}' was deleted and created again: the checkpoint belongs to its incarnation"
                f" {self.stream_id}, now it is {stream_id}. Its offsets mean nothing in the new stream: start the"
                " query with a new checkpointLocation",
                stream=self.stream,
                checkpoint_stream_id=self.stream_id,
                stream_id=stream_id,
            )


def parse_places(option: str, text: str, stream: str) -> Places:
    """``earliest``, ``latest``, or JSON; raises `InvalidArgument` that names `option`.

    The JSON is ``{"<stream>": {"<streamlet>": place, ...}}`` as for Kafka, or the object that a query's progress shows.
    A place is "earliest" (or -2), "latest" (or -1), or a list with one place per entry: "earliest", "latest", or
    [group, segment, offset].
    """
    word = text.strip().lower()
    if word == "earliest":
        return EARLIEST_PLACES
    if word == "latest":
        return LATEST_PLACES

    def refuse(problem: str) -> InvalidArgument:
        return InvalidArgument(f"option {option}: {problem}; it is {text!r}", option=option, value=text)

    try:
        document = json.loads(text)
    except ValueError:
        raise refuse("must be 'earliest', 'latest' or a JSON object") from None
    if isinstance(document, dict) and "streamlets" in document and "stream" in document:
        document = {document["stream"]: document["streamlets"]}
    if not isinstance(document, dict) or set(document) != {stream} or not isinstance(document[stream], dict):
        raise refuse(f'must have the form {{"{stream}": {{"0": place, ...}}}} and name only that stream')
    streamlets: dict[int, Place | tuple[Place, ...]] = {}
    for name, value in document[stream].items():
        try:
            streamlet = int(name)
            if isinstance(value, list):
                streamlets[streamlet] = tuple(_place(item) for item in value)
            else:
                streamlets[streamlet] = _place(value)
        except (TypeError, ValueError) as error:
            raise refuse(f"streamlet {name!r}: {error}") from None
    return Places(streamlets=streamlets)


def _place(value: Any) -> Place:
    if value in ("earliest", -2):
        return "earliest"
    if value in ("latest", -1):
        return "latest"
    if isinstance(value, list) and len(value) in (3, 4) and all(isinstance(part, int) for part in value):
        return Position(*value[:3])  # a fourth number is the ordinal that progress shows; it is looked up anew
    raise ValueError(f"{json.dumps(value)} is no place: use earliest, latest or [group, segment, offset]")


def _streamlets_to_json(streamlets: Mapping[int, tuple[EntryOffset, ...]]) -> dict[str, list[list[int]]]:
    return {
        str(streamlet): [[*offset.position, offset.record] for offset in entries]
        for streamlet, entries in sorted(streamlets.items())
    }


def _streamlets_from_json(document: Mapping[str, Any]) -> dict[int, tuple[EntryOffset, ...]]:
    return {
        int(streamlet): tuple(
            EntryOffset(Position(int(group), int(segment), int(offset)), int(record))
            for group, segment, offset, record in entries
        )
        for streamlet, entries in document.items()
    }
