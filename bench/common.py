"""Shared by the scripts of this folder: figures, the machine, a broker watched from outside, chunks to send."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ByteSize, TypeAdapter

from kera.cli.bench._cpu import cpu_model
from kera.core.format.chunk import ARROW_VERSION, EncodedChunk, encode_chunk
from kera.local.cluster import LocalCluster

BROKER = "broker-1"
IN_MEMORY = {"flush_delay_ms": 3_600_000}
"""Settings of brokers and backups with which nothing goes to disk while there is room."""
ROOT = Path(__file__).resolve().parents[1]
NO_SOURCES = (":!bench/results", ":!docs", ":!*.md")
TIMEOUT_S = 600.0
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def size(text: str) -> int:
    """A size on the command line: ``8MiB``."""
    return int(_SIZE.validate_python(text))


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all scripts."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dir", type=Path, default=None, help="where data goes; absent: a temporary directory")
    return made


@contextlib.contextmanager
def directory(arguments: argparse.Namespace) -> Iterator[Path]:
    """A new directory in ``--dir``, which is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="kera-bench-", dir=arguments.dir))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


# -- figures ---------------------------------------------------------------------------------------------------


class Figures:
    """Samples by name; printed as median (least-most) in a table, and whole as a line of JSON."""

    def __init__(self, bench: str, arguments: argparse.Namespace, where: Path) -> None:
        self._head: dict[str, Any] = {"bench": bench, "machine": machine(where), "arguments": _plain(vars(arguments))}
        self._samples: dict[str, tuple[str, list[float]]] = {}
        self.notes: dict[str, str] = {}

    def add(self, name: str, value: float, unit: str) -> None:
        """Add one sample."""
        self._samples.setdefault(name, (unit, []))[1].append(value)

    def median(self, name: str) -> float:
        """The middle of the samples so far."""
        return statistics.median(self._samples[name][1])

    def best(self, name: str) -> float:
        """The largest of the samples so far."""
        return max(self._samples[name][1])

    def values(self, name: str) -> list[float]:
        """All samples so far, in order of arrival."""
        return list(self._samples[name][1])

    def unit(self, name: str) -> str:
        """The unit of the samples."""
        return self._samples[name][0]

    @property
    def names(self) -> list[str]:
        """The names of all samples, in order of arrival."""
        return list(self._samples)

    def print(self) -> None:
        """Print to standard output."""
        print(f"## {self._head['bench']}\n\n{describe(self._head['machine'])}\n")
        print("| what | median | min-max | unit | samples |\n|---|---|---|---|---|")
        for name, (unit, values) in self._samples.items():
            spread = f"{_short(min(values))}-{_short(max(values))}"
            print(f"| {name} | {_short(statistics.median(values))} | {spread} | {unit} | {len(values)} |")
        for name, note in self.notes.items():
            print(f"\n{name}: {note}")
        print("\n" + self.json(), flush=True)

    def json(self) -> str:
        """Everything as one line."""
        samples = {name: {"unit": unit, "values": values} for name, (unit, values) in self._samples.items()}
        return json.dumps({**self._head, "samples": samples, "notes": self.notes})

    def cell(self, name: str) -> str:
        """Median (least-most), for other tables."""
        values = self._samples[name][1]
        middle = _short(statistics.median(values))
        return middle if len(values) == 1 else f"{middle} ({_short(min(values))}-{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def machine(where: Path) -> dict[str, Any]:
    """The machine, the commit and the time of the figures."""
    return {
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": _file_system(where),
        "load": os.getloadavg()[0],
    }


def describe(found: dict[str, Any]) -> str:
    """`machine` as one line."""
    measured = f"; commit {found['commit'][:10]}, {found['time'][:10]}" if found.get("commit") else ""
    return (
        f"{found['cores']} cores ({found['cpu']}), {found['memory_bytes'] / 2**30:.0f} GiB, {found['file_system']},"
        f" Linux {found['kernel']}, Python {found['python']}; load before: {found['load']:.1f}{measured}"
    )


@functools.cache
def commit() -> str | None:
    """The commit that is checked out, as it was when this process first asked; None if it is not known.

    A `+` follows if sources differ from it. Recorded results and texts are not sources.
    """
    head = git("rev-parse", "HEAD")
    if head is None:
        return None
    return head + "+" * bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", *NO_SOURCES))


def git(*arguments: str) -> str | None:
    """The answer of git about this tree; None without an answer."""
    found = shutil.which("git")
    if found is None:
        return None
    done = subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _file_system(path: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


# -- a broker --------------------------------------------------------------------------------------------------


class Broker:
    """A cluster of one broker, to be observed."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    @property
    def pid(self) -> int:
        """Id of the broker's process."""
        return self.cluster.processes[BROKER]

    @property
    def arena(self) -> Path:
        """The broker's memory."""
        return Path(self.cluster.ready[BROKER]["arena_path"])

    async def metrics(self) -> dict[str, float]:
        """The metrics by name, without the common prefix."""
        url = f"http://{self.cluster.ready[BROKER]['metrics_address']}/metrics"
        lines = (await asyncio.to_thread(_get, url)).splitlines()
        pairs = (line.removeprefix("kera_broker_").split() for line in lines if line.startswith("kera_broker_"))
        return {name: float(value) for name, value in pairs}

    async def until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        """Wait until the metrics satisfy `condition`."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(await self.metrics()):
                await asyncio.sleep(0.01)

    def memory(self) -> dict[str, int]:
        """Resident bytes of the process: its own (anon), the arena (shmem), files such as the index (file)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        rows = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
        return {name.removeprefix("Rss").lower(): int(value.split()[0]) << 10 for name, value in rows.items()}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 - our own broker
        return str(response.read().decode())


@contextlib.asynccontextmanager
async def broker(
    data_dir: Path | None, *, arena_bytes: int, segment_bytes: int, backups: int = 0, **settings: object
) -> AsyncIterator[Broker]:
    """A running broker; without `data_dir` it keeps nothing, and has everything in memory as long as there is room."""
    cluster = LocalCluster(
        data_dir=data_dir,
        arena_bytes=arena_bytes,
        segment_bytes=segment_bytes,
        backups=backups,
        backup_memory_bytes=arena_bytes,
        broker_settings={"metrics_port": 0, **settings},
    )
    async with cluster:
        made = Broker(cluster)
        try:
            yield made
        finally:
            last = made.arena
    last.unlink(missing_ok=True)  # left by a broker that did not stop in time


def sample_chunk(
    payload: pa.Buffer | bytes,
    record_count: int = 1,
    *,
    stream_id: int = 1,
    schema_id: int = 1,
    streamlet_id: int = 0,
    producer_id: int = 1,
    sequence: int = 0,
    version: int = ARROW_VERSION,
) -> EncodedChunk:
    """A chunk as a producer makes it; the defaults do not matter for measurements."""
    return encode_chunk(
        payload,
        record_count=record_count,
        stream_id=stream_id,
        streamlet_id=streamlet_id,
        schema_id=schema_id,
        producer_id=producer_id,
        producer_epoch=1,
        sequence=sequence,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
        version=version,
    )


def alternating(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Each name in turn, `rounds` times, so that disturbances affect all names equally."""
    for _ in range(rounds):
        yield from names
