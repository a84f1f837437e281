"""The benefit of faulting the arena in at the start, and of huge pages for it.

Each round makes a file in shared memory, maps it like the arena's, and writes it segment by segment, twice: the first
time touches each page, unless it was faulted in (MADV_POPULATE_WRITE) before, which is timed as well. The same follows
on a file system with huge pages, if mounting one is permitted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.common import Figures, alternating, parser, say, size
from kera.core.base.settings import MIB
from kera.server.populating import populate

SHM = Path("/dev/shm")  # noqa: S108 - the benchmark is about shared memory


def measure(directory: Path, name: str, length: int, segment_bytes: int, figures: Figures) -> None:
    """Make one mapping, and write it twice."""
    path = directory / f"kera-bench-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        begun_s = time.perf_counter()
        os.ftruncate(fd, length)
        memory = mmap.mmap(fd, length)
        if "prefaulted" in name:
            populate(memory)
            figures.add(f"{name}: make and fault in", time.perf_counter() - begun_s, "s")
        with memoryview(memory) as view:
            data = os.urandom(segment_bytes)
            for what in ("first write", "second write"):
                begun_s = time.perf_counter()
                for at in range(0, length - segment_bytes + 1, segment_bytes):
                    view[at : at + segment_bytes] = data
                figures.add(f"{name}: {what}", length / 1e9 / (time.perf_counter() - begun_s), "GB/s")
        memory.close()
    finally:
        os.close(fd)
        path.unlink()


@contextlib.contextmanager
def huge_pages(length: int) -> Iterator[tuple[Path | None, str]]:
    """A file system with huge pages, or the reason why it cannot be mounted."""
    if os.geteuid():
        yield None, "skipped: mounting needs root"
        return
    with tempfile.TemporaryDirectory(prefix="kera-bench-") as directory:
        mount = ["mount", "-t", "tmpfs", "-o", f"huge=always,size={length + 64 * MIB}", "tmpfs", directory]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            yield None, f"skipped: {done.stderr.strip()}"
            return
        try:
            yield Path(directory), "measured"
        finally:
            subprocess.run(["umount", directory], check=True)  # noqa: S607 - wherever it is


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--bytes", type=size, default=1 << 30)
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    made.add_argument("--rounds", type=int, default=5)
    arguments = made.parse_args()
    figures = Figures("arena_prefault", arguments, SHM)
    with huge_pages(arguments.bytes) as (huge, note):
        figures.notes["huge pages"] = note
        places = {"small pages, touched": SHM, "small pages, prefaulted": SHM}
        if huge is not None:
            places |= {"huge pages, touched": huge, "huge pages, prefaulted": huge}
        for name in alternating(list(places), arguments.rounds):
            say(name)
            measure(places[name], name, arguments.bytes, arguments.segment_bytes, figures)
    figures.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
