"""Runs targets in child processes, to find inputs that end a process, exhaust its memory or never return.

A child keeps the number of its current input in a page of shared memory. When it ends or hangs, another child takes
its place. Nothing is written per input, because some decoders take a hundred thousand inputs a second.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kera.core.base.telemetry import configure_logging
from tests.fuzz.target import Target, outcome, random_of

MEMORY_BYTES_MAX = 3 << 30
"""Address space of a child. An input that takes more is a defect."""
STILL_S_MAX = 20.0
"""An input that takes longer never returns."""
GROWTH_BYTES_MAX = 64 << 20
"""The most that a child's memory may grow after a tenth of its inputs: growth beyond it is a leak."""
LOOK_S = 0.05
KEPT = 5
"""Inputs that are reported of the same defect."""
_AT = struct.Struct("<q")


@dataclass
class Report:
    """The outcomes and defects of a target's inputs."""

    target: str
    seed: int
    module: str = ""
    inputs: int = 0
    taken_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    grown_bytes: int = 0
    """Growth of the child's memory since it had seen a tenth of its inputs."""

    def __str__(self) -> str:
        rate = self.inputs / self.taken_s if self.taken_s else 0.0
        most = ", ".join(f"{word} {count}" for word, count in self.outcomes.most_common(6))
        return (
            f"{self.target:<18}{self.inputs:>9} inputs {rate:>9.0f}/s  slowest {self.slowest_s * 1000:.0f} ms,"
            f" {self.grown_bytes >> 20} MiB more: {most}"
        )


def run(
    target: Target, seed: int, seconds: float, *, inputs_max: int = sys.maxsize, module: str = "tests.fuzz.targets"
) -> Report:
    """Give inputs for `seconds` to a target from the `TARGETS` of `module`, and report the outcomes."""
    report = Report(target.name, seed, module)
    first, deadline_s = 0, time.monotonic() + seconds
    while first < inputs_max and (left_s := deadline_s - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            first = _one_child(report, first, inputs_max, left_s, Path(folder))
    if report.grown_bytes > GROWTH_BYTES_MAX:
        report.defects.append(f"{target.name} seed {seed}: the process has grown by {report.grown_bytes >> 20} MiB")
    return report


def _one_child(report: Report, first: int, inputs_max: int, seconds: float, folder: Path) -> int:
    """Run inputs from `first` on in a child until it ends. Returns the number of the next input."""
    place, result, found = folder / "at", folder / "result", folder / "found"
    place.write_bytes(_AT.pack(first))
    found.touch()
    command = [sys.executable, "-m", "tests.fuzz.running", report.module, report.target, str(report.seed), str(first)]
    command += [str(inputs_max), str(seconds), str(folder)]
    begun_s = time.monotonic()
    with (folder / "errors").open("w+") as errors, subprocess.Popen(command, stderr=errors) as child:
        at = _watched(child, place, first)
        errors.seek(0)
        said = errors.read()[-2_000:]
    report.defects += [json.loads(line) for line in found.read_text().splitlines()]
    if child.returncode == 0:
        told = json.loads(result.read_text())
        report.outcomes.update(told["outcomes"])
        report.slowest_s = max(report.slowest_s, told["slowest_s"])
        report.grown_bytes = max(report.grown_bytes, told["grown_bytes"])
        report.taken_s += told["taken_s"]
        following = int(told["next"])
    else:
        how = "never returned" if child.returncode == -9 else f"ended with {child.returncode}"
        report.defects.append(f"{report.target} seed {report.seed} input {at}: the process {how}: {said}")
        report.taken_s += time.monotonic() - begun_s
        following = at + 1
    report.inputs += following - first
    return following


def _watched(child: subprocess.Popen[bytes], place: Path, first: int) -> int:
    """Wait for the child, and kill it if it hangs. Returns the number of its last input."""
    at, since_s = first, time.monotonic() + STILL_S_MAX  # the child is slow to start
    while child.poll() is None:
        time.sleep(LOOK_S)
        (now,) = _AT.unpack(place.read_bytes())
        if now != at:
            at, since_s = now, time.monotonic()
        elif time.monotonic() > since_s + STILL_S_MAX:
            child.kill()
            break
    child.wait()
    return int(_AT.unpack(place.read_bytes())[0])


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def child(target: Target, seed: int, first: int, inputs_max: int, seconds: float, folder: Path) -> None:
    """Give inputs to a target for `seconds`. Defects go to a file at once, since the next input may end the process."""
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # asan maps terabytes that it does not use
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (folder / "at").open("r+b") as file:
        at = mmap.mmap(file.fileno(), _AT.size)
    outcomes: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    slowest_s, warm_bytes, number = 0.0, 0, first
    with contextlib.suppress(Exception):  # the first input also fills caches, which is slow
        target.make(random_of(target.name, seed, first))
    begun_s = now_s = time.monotonic()
    with (folder / "found").open("a", buffering=1) as found:
        while number < inputs_max and now_s < begun_s + seconds:
            _AT.pack_into(at, 0, number)
            data = target.make(random_of(target.name, seed, number))
            made_s = time.monotonic()
            try:
                outcomes[outcome(target, data)] += 1
            except Exception as error:  # noqa: BLE001 - it is reported
                outcomes[type(error).__name__] += 1
                kept[what := f"{type(error).__name__} {traceback.extract_tb(error.__traceback__)[-1].lineno}"] += 1
                if kept[what] <= KEPT:
                    found.write(json.dumps(told(target, seed, number, error)) + "\n")
            now_s = time.monotonic()
            if now_s - made_s > target.slow_s:
                found.write(json.dumps(f"{target.name} seed {seed} input {number}: took {now_s - made_s:.1f} s") + "\n")
            slowest_s = max(slowest_s, now_s - made_s)
            number += 1
            if not warm_bytes and now_s > begun_s + seconds / 10:
                warm_bytes = resident_bytes()
    grown_bytes = max(0, resident_bytes() - warm_bytes) if warm_bytes else 0
    result = {"outcomes": outcomes, "slowest_s": slowest_s, "grown_bytes": grown_bytes, "next": number}
    (folder / "result").write_text(json.dumps({**result, "taken_s": now_s - begun_s}))


def told(target: Target, seed: int, number: int, error: BaseException) -> str:
    """The text of a defect, with the place of the error."""
    lines = traceback.format_exception(error)
    return f"{target.name} seed {seed} input {number}: {error!r}\n{''.join(lines[-4:])}"


def main(arguments: Sequence[str]) -> None:
    """Run a child process, see `child`."""
    configure_logging("critical")
    module, name, seed, first, inputs_max, seconds, folder = arguments
    target: Target = importlib.import_module(module).TARGETS[name]
    with contextlib.suppress(KeyboardInterrupt):
        child(target, int(seed), int(first), int(inputs_max), float(seconds), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
