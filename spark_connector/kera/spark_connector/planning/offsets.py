"""Offsets: what a checkpoint and a query's progress say about places in streams. Pure, and without a type of Spark.

A checkpoint holds one JSON object per micro-batch:

    {"version": 2,
     "streams": {"flights": {"stream_id": 7, "streamlets": {"0": [[3, 1, 81920, 40000]], "1": [[4, 2, 0, 39500]]}}},
     "since": {"flights": {"stream_id": 7, "streamlets": {"0": [[1, 1, 0, 0]], "1": [[2, 1, 0, 0]]}}},
     "epoch": {"ms": 10000, "first": 176743, "next": 176744},
     "group": "spark-kera-source-1a2b3c4d"}

Per streamlet there is a list with one place per entry: group, segment, byte offset in the segment, and the ordinal of
the next record in the entry. The first three are the cursor that readers follow. The ordinal says how many records
lie between two offsets without asking a broker: it drives ``maxOffsetsPerTrigger`` and lets anyone compute the lag
from the start, end and latest offsets of a query's progress.

Promises:

* the same offsets always give the same text, because Spark compares offsets as text;
* `stream_id` is the stream's incarnation: offsets of a stream that was deleted and created again are never applied to
  the new stream;
* `since` is where the micro-batch that ends here begins, if that is not the previous end. The first micro-batch has it
  because Spark does not store where a query begins (it asks again, and "latest" has moved by then). A later one has it
  if it begins elsewhere than the previous one ended, as when a stream has joined or data are lost. So a micro-batch
  that is planned again after a restart has the same records;
* `epoch` is present in queries with the option of that name: the epochs of the micro-batch that ends here;
* `group` is the name under which the query's progress is stored in the cluster; empty: it is not stored.

Version 1, of one stream, is still read: ``{"stream": …, "stream_id": …, "streamlets": …, "since": {"0": …}}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument, NotAccepted

VERSION = 2


class StreamRecreated(NotAccepted):
    """A checkpoint belongs to an earlier stream of the same name. Start the query with a new checkpoint."""

    code = "stream_recreated"


class EntryName(NamedTuple):
    """An entry of a streamlet of a stream: the unit within which records are ordered."""

    stream: str
    streamlet: int
    entry: int

    def __str__(self) -> str:
        return f"stream '{self.stream}', streamlet {self.streamlet}, entry {self.entry}"


class EntryOffset(NamedTuple):
    """A place in one entry; compares in log order."""

    position: Position
    record: int
    """Ordinal within the entry of the first record at or after the position."""


class EpochMark(NamedTuple):
    """The epochs of a micro-batch."""

    epoch_ms: int
    """The length of an epoch."""
    first: int | None
    """The micro-batch's first epoch; at the begin of a query, the first epoch that it may read (None: any epoch)."""
    next: int | None
    """The first epoch after the micro-batch; None: the query begins here."""


@dataclass(frozen=True)
class StreamOffsets:
    """A place in every entry of one incarnation of a stream."""

    stream_id: int
    streamlets: Mapping[int, tuple[EntryOffset, ...]]
    """The places in the streamlets that the query reads (``assign`` may leave some out)."""


@dataclass(frozen=True)
class Offsets:
    """A place in every entry of all streams of a query."""

    streams: Mapping[str, StreamOffsets]
    since: Mapping[str, StreamOffsets] | None = None
    """Where the micro-batch that ends here begins, if that is not the previous end."""
    group: str = ""
    """Named cursor of the query; empty: it has no cursor."""
    epoch: EpochMark | None = None
    """None: the query has no epochs."""

    def entries(self) -> Iterator[tuple[EntryName, EntryOffset]]:
        """Yield each entry with its place, in order."""
        for name, stream in sorted(self.streams.items()):
            for streamlet, entries in sorted(stream.streamlets.items()):
                for entry, offset in enumerate(entries):
                    yield EntryName(name, streamlet, entry), offset

    def places(self) -> dict[EntryName, EntryOffset]:
        """Return `entries` as a mapping."""
        return dict(self.entries())

    def stream_ids(self) -> dict[str, int]:
        """Return the incarnation of each stream."""
        return {name: stream.stream_id for name, stream in self.streams.items()}

    @staticmethod
    def of(places: Mapping[EntryName, EntryOffset], stream_ids: Mapping[str, int]) -> Offsets:
        """Return the inverse of `places`, which must have all entries of a streamlet. Leave out other streams."""
        streams: dict[str, dict[int, list[EntryOffset]]] = {}
        for entry in sorted(places):
            streams.setdefault(entry.stream, {}).setdefault(entry.streamlet, []).append(places[entry])
        return Offsets(
            {
                name: StreamOffsets(stream_ids[name], {streamlet: tuple(row) for streamlet, row in streamlets.items()})
                for name, streamlets in streams.items()
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that Spark stores. Key order is fixed: see "Promises" above."""
        document: dict[str, Any] = {"version": VERSION, "streams": _streams_to_json(self.streams)}
        if self.since is not None:
            document["since"] = _streams_to_json(self.since)
        if self.epoch is not None:
            mark = {"ms": self.epoch.epoch_ms, "first": self.epoch.first, "next": self.epoch.next}
            document["epoch"] = {name: number for name, number in mark.items() if number is not None}
        if self.group:
            document["group"] = self.group
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Offsets:
        """Return the inverse of `to_json`, also for version 1; raises `InvalidArgument` for anything else."""
        try:
            version = document.get("version", 1)
            if version == VERSION:
                since = document.get("since")
                return Offsets(
                    streams=_streams_from_json(document["streams"]),
                    since=None if since is None else _streams_from_json(since),
                    group=str(document.get("group", "")),
                    epoch=_mark_from_json(document.get("epoch")),
                )
            if version == 1:
                return _of_version_1(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgument(
                f"the checkpoint holds offsets that are not of the kera source: {json.dumps(document)[:200]}. Start the"
                " query with a checkpointLocation of its own"
            ) from error
        raise InvalidArgument(
            f"the checkpoint holds offsets of version {version!r}; this connector reads up to {VERSION}. Use the newer"
            " connector that has written them",
            version=version,
        )


def _of_version_1(document: Mapping[str, Any]) -> Offsets:
    name, stream_id = str(document["stream"]), int(document["stream_id"])
    since = document.get("since")

    def streams(streamlets: Mapping[str, Any]) -> dict[str, StreamOffsets]:
        return {name: StreamOffsets(stream_id, _streamlets_from_json(streamlets))}

    return Offsets(streams(document["streamlets"]), None if since is None else streams(since))


def _mark_from_json(document: Mapping[str, Any] | None) -> EpochMark | None:
    if document is None:
        return None
    first, behind = document.get("first"), document.get("next")
    return EpochMark(
        int(document["ms"]), None if first is None else int(first), None if behind is None else int(behind)
    )


def _streams_to_json(streams: Mapping[str, StreamOffsets]) -> dict[str, Any]:
    return {
        name: {
            "stream_id": stream.stream_id,
            "streamlets": {
                str(streamlet): [[*offset.position, offset.record] for offset in entries]
                for streamlet, entries in sorted(stream.streamlets.items())
            },
        }
        for name, stream in sorted(streams.items())
    }


def _streams_from_json(document: Mapping[str, Any]) -> dict[str, StreamOffsets]:
    return {
        name: StreamOffsets(int(stream["stream_id"]), _streamlets_from_json(stream["streamlets"]))
        for name, stream in document.items()
    }


def _streamlets_from_json(document: Mapping[str, Any]) -> dict[int, tuple[EntryOffset, ...]]:
    return {
        int(streamlet): tuple(
            EntryOffset(Position(int(group), int(segment), int(offset)), int(record))
            for group, segment, offset, record in entries
        )
        for streamlet, entries in document.items()
    }
