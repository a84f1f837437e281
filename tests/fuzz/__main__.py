"""Fuzzes everything that a peer sends: ``make fuzz-wire SEED=7 SECONDS=600``.

    python -m tests.fuzz --seed 7 --seconds 600            # all targets
    python -m tests.fuzz --only payloads java-push         # some targets, see --list
    python -m tests.fuzz --seed 7 --again payloads 2398    # repeat a single input, as a defect names it
    python -m tests.fuzz --seed 7 --keep payloads 2398 a-name-that-says-what-was-found

It runs the decoders one after the other, each in a process of its own (`targets`); the decoders in Java (`jvm`), if
there is a JDK; real daemons (`daemons`), also with security on; consumers of poisoned chunks (`consumers`); and clients
whose peers lie (`sessions`). The same seed makes the same inputs. Those for daemons differ in the ids, epochs and times
that a cluster gives out.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kera.core.base.telemetry import configure_logging
from tests.fuzz import consumers, corpus, daemons, jvm, running, sessions
from tests.fuzz.target import outcome, random_of
from tests.fuzz.targets import TARGETS

DAEMONS, SECURED, CONSUMERS, SESSIONS = "daemons", "secured-daemons", "consumers", "sessions"
SHARES = {"decoders": 0.25, "java": 0.1, DAEMONS: 0.25, SECURED: 0.2, CONSUMERS: 0.1, SESSIONS: 0.1}
"""Each part's share of the time."""
CLUSTERS = (DAEMONS, SECURED, CONSUMERS, SESSIONS)
NAMES = [*TARGETS, *(target.name for target in jvm.JAVA_TARGETS), *CLUSTERS]


def fuzz(seed: int, seconds: float, only: Sequence[str]) -> list[str]:
    """Fuzz all targets, or those that `only` names. Returns the defects."""
    chosen = [name for name in NAMES if not only or name in only]
    java = [target for target in jvm.JAVA_TARGETS if target.name in chosen]
    if java and shutil.which("javac") is None:
        print("there is no javac: nothing of Java's is looked at")
        java = []
    decoders = [TARGETS[name] for name in chosen if name in TARGETS]
    parts = {"decoders": bool(decoders), "java": bool(java), **{each: each in chosen for each in CLUSTERS}}
    whole = sum(SHARES[part] for part, is_there in parts.items() if is_there)
    times_s = {part: seconds * share / whole for part, share in SHARES.items()}
    found: list[str] = []
    for target in decoders:
        found += _told([running.run(target, seed, times_s["decoders"] / len(decoders))])
    with tempfile.TemporaryDirectory() as folder:
        if java:
            found += _told(_java(java, seed, times_s["java"] / len(java), Path(folder)))
        for part in (DAEMONS, SECURED):
            if parts[part]:
                secured = part == SECURED
                report = asyncio.run(daemons.run(Path(folder, part), seed, times_s[part], security=secured))
                print("\n".join([f"{part}:", *report.lines()]), flush=True)
                found += report.defects
        if parts[CONSUMERS]:
            found += _told(asyncio.run(consumers.run(Path(folder, CONSUMERS), seed, times_s[CONSUMERS])))
        if parts[SESSIONS]:
            found += _told([asyncio.run(sessions.run(Path(folder, SESSIONS), seed, times_s[SESSIONS]))])
    return found


def _java(targets: Sequence[jvm.JavaTarget], seed: int, seconds: float, folder: Path) -> Iterator[running.Report]:
    (folder / "java").mkdir()
    with jvm.decoding(folder / "java") as java:
        for target in targets:
            yield jvm.run(target, java, seed, seconds)


def _told(reports: Sequence[running.Report] | Iterator[running.Report]) -> list[str]:
    found = []
    for report in reports:
        print("\n".join([str(report), *(f"  {defect}" for defect in report.defects)]), flush=True)
        found += report.defects
    return found


def main() -> int:
    """Fuzz, or list the targets, or repeat or keep a single input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", default=[], choices=NAMES, metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--again", nargs=2, metavar=("TARGET", "NUMBER"))
    parser.add_argument("--keep", nargs=3, metavar=("TARGET", "NUMBER", "NAME"))
    arguments = parser.parse_args()
    configure_logging("critical")
    if arguments.list:
        print("\n".join(NAMES))
        return 0
    if arguments.again or arguments.keep:
        name, number, *keep_as = arguments.again or arguments.keep
        data = TARGETS[name].make(random_of(name, arguments.seed, int(number)))
        if keep_as:
            print(corpus.keep(name, keep_as[0], data))
        print(outcome(TARGETS[name], data))
        return 0
    begun_s = time.monotonic()
    found = fuzz(arguments.seed, arguments.seconds, arguments.only)
    print(f"{'FAILED' if found else 'PASSED'}: {len(found)} found in {time.monotonic() - begun_s:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
