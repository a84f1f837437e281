"""The cost of a segment for the thread that flushes it: ``python -m bench.flush_cost``, in MB/s of segments' bytes.

In each round, one after the other, over segments full of chunks of each size, whose memory has left the processor's
caches since it was written:

* `disk`: the raw disk, a new file for each, written at once around the page cache and durable; then the same again;
* `checksum`: read, or combined of what is in the chunks' headers;
* `flush`: a file made, written and checksummed, with either; and the index told of every few;
* `remove`: files removed, one after the other.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from bench.common import Figures, directory, parser, sample_chunk, say, size
from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import put_segment
from kera.core.base.settings import KIB, MIB
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import HEADER_BYTES, Placement, place_chunk
from kera.core.format.combined_checksum import combined_checksum
from kera.core.native import describe

Checksum = Callable[[memoryview], int]


def fill(segment: memoryview, chunk_bytes: int) -> array[int]:
    """Fill a segment with chunks; returns the end of each."""
    ends = array("I")
    for at in range(0, len(segment), chunk_bytes):
        payload = pa.py_buffer(os.urandom(chunk_bytes - HEADER_BYTES))
        segment[at : at + chunk_bytes] = sample_chunk(payload, sequence=len(ends)).to_bytes()
        place_chunk(segment, at, Placement(1, 1, 0, len(ends), 1, at))
        ends.append(at + chunk_bytes)
    return ends


class Flushing:
    """A disk and an index to write segments to."""

    def __init__(self, root: Path, job_segments: int) -> None:
        """`job_segments`: the index is updated once for this many segments."""
        self._root = root
        self._disk = LocalDisk(root)
        self._index = SegmentIndex.open(root / "index")
        self._job_segments = job_segments
        self._written: list[Path] = []

    def raw(self, segments: Sequence[memoryview], name: str = "raw") -> None:
        """Only write files; new ones if no files have that name yet."""
        for number, segment in enumerate(segments):
            path = self._root / f"{name}-{number}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | self._disk.direct, 0o600)
            if os.pwritev(fd, [segment], 0, os.RWF_DSYNC) != len(segment):
                raise OSError(f"{path} was not written at once")
            os.close(fd)

    def flush(self, segments: Sequence[memoryview], checksum: Checksum) -> None:
        """Do the segment store's work on closed segments."""
        changes = []
        for number, segment in enumerate(segments, 1):
            path = self._root / "segments" / f"{number}"
            self._disk.create(path, len(segment))
            self._disk.write(path, 0, segment)
            self._written.append(path)
            record = SegmentRecord(number, len(segment), False, 1, checksum(segment), 0, 1, 1, 1, 1)  # noqa: FBT003
            changes.append(put_segment(SegmentAddress(1, 0, 0, 1, number), record))
            if len(changes) == self._job_segments or number == len(segments):
                self._index.commit(changes)
                changes = []

    def remove(self) -> None:
        """Remove the flushed files."""
        for path in self._written:
            self._disk.remove(path)
        self._written.clear()


def measure(figures: Figures, flushing: Flushing, segments: Sequence[memoryview], ends: array[int], name: str) -> None:
    """One round."""

    def by_reading(segment: memoryview) -> int:
        return crc32c(segment)

    def combined(segment: memoryview) -> int:
        return combined_checksum(segment, 0, ends, 0)

    if by_reading(segments[0]) != combined(segments[0]):
        raise ValueError("the checksums differ")
    total = sum(map(len, segments)) / 1e6

    def timed(what: str, do: Callable[[], object]) -> None:
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        do()
        figures.add(f"{name}: {what}", total / (time.perf_counter() - begun_s), "MB/s")
        figures.add(f"{name}: {what}, CPU", (time.thread_time() - begun_cpu_s) / total * 1e6, "us/MB")

    ways: dict[str, Checksum] = {"read": by_reading, "combined": combined}
    timed("disk, new files", lambda: flushing.raw(segments))
    timed("disk, the same files", lambda: flushing.raw(segments))
    for way, checksum in ways.items():
        timed(f"checksum {way}", lambda checksum=checksum: [checksum(each) for each in segments])  # type: ignore[misc]
    for way, checksum in ways.items():
        timed(f"flush, checksum {way}", lambda checksum=checksum: flushing.flush(segments, checksum))  # type: ignore[misc]
        timed("remove", flushing.remove)


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--segments", type=int, default=24, help="per round; all of them are more than any cache has")
    made.add_argument("--job-segments", type=int, default=2, help="of which the index is told together")
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    made.add_argument("--chunk-bytes", type=size, nargs="+", default=[256 * KIB, KIB])
    arguments: argparse.Namespace = made.parse_args()
    memory = memoryview(mmap.mmap(-1, arguments.segments * arguments.segment_bytes))
    segments = [memory[at : at + arguments.segment_bytes] for at in range(0, len(memory), arguments.segment_bytes)]
    with directory(arguments) as root:
        figures = Figures("flush_cost", arguments, root)
        figures.notes["core"] = describe()
        for chunk_bytes in arguments.chunk_bytes:
            name = f"{chunk_bytes // KIB} KiB"
            ends = fill(segments[0], chunk_bytes)
            for segment in segments[1:]:
                segment[:] = segments[0]
            for number in range(arguments.rounds):
                say(f"chunks of {name}: round {number + 1} of {arguments.rounds}")
                folder = root / f"{chunk_bytes}-{number}"
                folder.mkdir()
                measure(figures, Flushing(folder, arguments.job_segments), segments, ends, name)
                for path in folder.glob("raw-*"):
                    path.unlink()
        figures.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
