"""``kera inspect``: lists the segments on a broker's disk, and their chunks. Read-only, also while the broker runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError, extra, interruptible
from kera.cli._streams import warn
from kera.cli._table import format_time, table

if TYPE_CHECKING:
    from kera.broker.log.scan import SegmentScan
    from kera.broker.records import SegmentAddress, SegmentRecord

COPIES_MAX = 3
"""How often the index of a running broker is copied at most: it may change during a copy, which is then repeated."""
SEGMENT_HEADING = (
    "STREAM", "STREAMLET", "ENTRY", "GROUP", "SEGMENT", "FILE", "STATE", "CHUNKS", "RECORDS", "BYTES", "FIRST RECORD",
    "FROM", "TO",
)  # fmt: skip
CHUNK_HEADING = ("OFFSET", "PRODUCER", "EPOCH", "SEQUENCE", "RECORDS", "BYTES", "FROM", "TO", "STATE")


class SegmentRow(NamedTuple):
    """The row of a segment; unknown values are None."""

    stream_id: int | None
    streamlet_id: int | None
    entry: int | None
    group_id: int | None
    segment_id: int | None
    path: Path
    state: str | None
    """open or closed; missing or unreadable if the index has the segment, but its file cannot be read."""
    chunks: int
    records: int
    length_bytes: int
    first_record: int | None
    min_timestamp_us: int | None
    max_timestamp_us: int | None


class ChunkRow(NamedTuple):
    """The row of a chunk. Values that a damaged header does not have are None; a punctuation has no producer."""

    offset: int
    producer_id: int | None
    producer_epoch: int | None
    sequence: int | None
    records: int | None
    length_bytes: int
    min_timestamp_us: int | None
    max_timestamp_us: int | None
    damage: str | None


def inspect(
    path: Path = typer.Argument(
        ..., exists=True, metavar="PATH", help="Data directory of a broker, or a segment file."
    ),
    stream: int | None = typer.Option(None, min=1, metavar="ID", help="Show only segments of this stream."),
    chunks: bool = typer.Option(
        False, "--chunks", help="Also list the chunks of each segment, and verify their checksums."
    ),
    output: Output = OUTPUT_OPTION,
) -> None:
    """List the segments on a broker's disk.

    Read-only; can be used while the broker runs.
    """
    if path.is_file() and stream is not None:
        raise UsageError("--stream is for a data directory; a file has one segment")
    if (path / "backup.json").exists():
        raise UsageError(f"{path} is the data directory of a backup; use kera verify")
    with extra("server"):
        import kera.broker.verify  # noqa: F401 - so that a missing package is reported here
    with interruptible():
        if path.is_file():
            _show(_of_file(path, with_chunks=chunks), with_chunks=chunks, output=output)
        else:
            _show(_of_directory(path, stream, with_chunks=chunks), with_chunks=chunks, output=output)


def _show(found: Iterator[tuple[SegmentRow, list[ChunkRow] | None]], *, with_chunks: bool, output: Output) -> None:
    if output.is_document:
        show_document([_to_json(*item) for item in found], output)
    elif with_chunks:
        for segment, chunks in found:
            print(table(SEGMENT_HEADING, [_segment_row(segment)]), "", sep="\n")
            print(table(CHUNK_HEADING, [_chunk_row(chunk) for chunk in chunks or []]), "", sep="\n")
    elif rows := [_segment_row(segment) for segment, _ in found]:
        print(table(SEGMENT_HEADING, rows))
    else:
        print("no segments", file=sys.stderr)


def _of_file(path: Path, *, with_chunks: bool) -> Iterator[tuple[SegmentRow, list[ChunkRow] | None]]:
    from kera.broker.verify import read_segment, scan_all

    try:
        view = read_segment(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    scan = scan_all(view)
    if scan.address is None:
        raise UsageError(f"{path} has no chunk: it is not a segment, or it is empty")
    yield _scanned(path, scan.address, scan, None), _chunks(view, scan) if with_chunks else None


def _of_directory(
    data_dir: Path, stream: int | None, *, with_chunks: bool
) -> Iterator[tuple[SegmentRow, list[ChunkRow] | None]]:
    from kera.broker.storage.segment_files import segment_path
    from kera.broker.verify import IndexCopy, index_copy
    from kera.server.verifying import unused

    root = data_dir.absolute() / "log"
    if not root.is_dir():
        raise UsageError(f"{data_dir} is not a broker's data directory: it has no log")
    with unused(data_dir) as free:
        stopped = free
    if not stopped:
        print("kera: note: the broker is running; what is only in its memory is not shown", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        copy = IndexCopy(None)
        for _ in range(1 if stopped else COPIES_MAX):
            copy = stack.enter_context(index_copy(root / "index"))
            if copy.whole:
                break
        if not copy.whole:
            warn("the index is damaged or missing; see kera verify")
        if copy.index is None:
            return
        found = copy.index.all_segments() if stream is None else copy.index.segments_of_stream(stream)
        for address, record in found:
            yield _of_record(segment_path(root, record.physical_id), address, record, with_chunks=with_chunks)


def _of_record(
    path: Path, address: SegmentAddress, record: SegmentRecord, *, with_chunks: bool
) -> tuple[SegmentRow, list[ChunkRow] | None]:
    from kera.broker.log.scan import scan_segment
    from kera.broker.verify import read_segment, scan_all

    segment = SegmentRow(
        *address,
        path,
        "closed",
        record.chunk_count,
        record.record_count,
        record.length,
        record.first_record,
        record.min_timestamp_us,
        record.max_timestamp_us,
    )
    if not with_chunks and not record.open:
        return segment if path.exists() else segment._replace(state="missing"), None
    try:
        view = read_segment(path, None if record.open else record.length)
    except OSError as error:
        return segment._replace(state="missing" if isinstance(error, FileNotFoundError) else "unreadable"), None
    if record.open:  # the length of an open segment is only in its file
        scan = scan_all(view, address=address)
        segment = _scanned(path, address, scan, "open")
    else:
        scan = scan_segment(view, address=address, length=record.length)
    return segment, _chunks(view, scan) if with_chunks else None


def _scanned(path: Path, address: SegmentAddress, scan: SegmentScan, state: str | None) -> SegmentRow:
    """Return the row of a segment, with values from its chunks."""
    headers = scan.headers
    return SegmentRow(
        *address,
        path,
        state,
        len(headers),
        scan.record_count,
        scan.end,
        headers[0].first_record if headers else None,
        min((header.min_timestamp_us for header in headers), default=None),
        max((header.max_timestamp_us for header in headers), default=None),
    )


def _chunks(view: memoryview, scan: SegmentScan) -> list[ChunkRow]:
    from kera.core.errors import CorruptChunk
    from kera.core.format.chunk import ChunkHeader, verify_header
    from kera.core.format.punctuation import is_punctuation

    def chunk(offset: int, end: int, header: ChunkHeader | None, damage: str | None) -> ChunkRow:
        if header is None:
            return ChunkRow(offset, None, None, None, None, end - offset, None, None, damage)
        times = header.min_timestamp_us, header.max_timestamp_us
        producer = header.producer_id, header.producer_epoch, header.sequence
        if is_punctuation(header):
            return ChunkRow(offset, None, None, None, header.record_count, end - offset, *times, damage)
        return ChunkRow(offset, *producer, header.record_count, end - offset, *times, damage)

    headers, holes = iter(scan.headers), {hole.start: hole.reason for hole in scan.holes}
    found, start = [], 0
    for end in scan.chunk_ends:
        header = None
        if start not in holes:
            header = next(headers)
        else:
            with contextlib.suppress(CorruptChunk):  # only the payload may be damaged
                header = verify_header(view, start)
        found.append(chunk(start, end, header, holes.get(start)))
        start = end
    return found


def _segment_row(segment: SegmentRow) -> tuple[object, ...]:
    times = _time(segment.min_timestamp_us), _time(segment.max_timestamp_us)
    return (*segment[:5], segment.path.name, *segment[6:11], *times)


def _chunk_row(chunk: ChunkRow) -> tuple[object, ...]:
    times = _time(chunk.min_timestamp_us), _time(chunk.max_timestamp_us)
    return (*chunk[:6], *times, _state_of(chunk))


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else format_time(time_us)


def _to_json(segment: SegmentRow, chunks: list[ChunkRow] | None) -> dict[str, Any]:
    document = segment._asdict() | {"path": str(segment.path)}
    return document if chunks is None else document | {"chunk_list": [chunk._asdict() for chunk in chunks]}


def _state_of(chunk: ChunkRow) -> str:
    if chunk.damage:
        return f"damaged: {chunk.damage}"
    return "punctuation" if chunk.records == 0 else "ok"
