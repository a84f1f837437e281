"""Chunks of ``tests.chaos.chunks`` with a wrong structure, as the Go client opens them: ``make fuzz-structures``.

The client's own tests read them as vectors, like those of ``docs/vectors.json``: chunks with the records that Python
reads in them, and chunks that Python refuses. All have the default schema, the only one that this client knows.
Promised, and checked: it reads the same records, and refuses the same chunks as corrupt; no process dies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from scripts.vectors import as_json, header_fields

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import PLACEMENT_AT, verify_header
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.chaos.chunks import VERSIONS, Source, misbuilt, opened, sources_of
from tests.chaos.columnar_chunks import crafted

MODULE = Path(__file__).resolve().parents[2] / "clients" / "go"
TESTS = "TestChunks"
"""The client's own tests that read vectors of chunks."""
AT_ONCE = 2_000


def vectors(seeds: Iterable[int], version: int | None = None) -> dict[str, list[Any]]:
    """A chunk of each seed, in the form of ``docs/vectors.json``."""
    found = [source for source in sources_of(version) if source.batch.schema.equals(DEFAULT_SCHEMA)]
    chunks, unreadable = [], []
    for seed in seeds:
        random_ = random.Random(seed)
        source = random_.choice(found)
        payload = misbuilt(source, random_)
        placed = crafted(source, payload)
        try:
            records = _records(source, payload)
        except CorruptChunk as error:
            unreadable.append({"why": f"seed {seed}: {error.message}", "chunk": placed.hex()})
            continue
        chunks.append(
            {
                "what": f"seed {seed}",
                "header": header_fields(verify_header(placed)),
                "payload": payload.hex(),
                "chunk": (placed[:PLACEMENT_AT] + bytes(128 - PLACEMENT_AT) + placed[128:]).hex(),
                "placed": placed.hex(),
                "records": records,
            }
        )
    return {"chunks": chunks, "unreadable_chunks": unreadable}


def _records(source: Source, payload: bytes) -> list[dict[str, Any]]:
    batch = opened(source, payload)
    numbers = batch.set_column(0, "timestamp", batch.column(0).cast(pa.int64()))  # Python has no years beyond 9999
    return [{name: as_json(value) for name, value in each.items()} for each in numbers.to_pylist()]


def main() -> int:
    """Run the check with the options of the command line; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--version", type=int, choices=VERSIONS, help="of the format; without it both")
    parser.add_argument("--go", default="go", help="the command")
    arguments = parser.parse_args()
    begun_s, read, refused, failed = time.monotonic(), 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        program, file = Path(folder, "tests"), Path(folder, "vectors.json")
        subprocess.run([arguments.go, "test", "-c", "-o", program, "./kera"], cwd=MODULE, check=True)
        for first in range(arguments.seed, arguments.seed + arguments.examples, AT_ONCE):
            seeds = range(first, min(first + AT_ONCE, arguments.seed + arguments.examples))
            made = vectors(seeds, arguments.version)
            file.write_text(json.dumps(made), encoding="utf-8")
            done = subprocess.run(
                [program, "-test.run", TESTS],
                cwd=MODULE / "kera",
                env=os.environ | {"KERA_VECTORS": str(file)},
                capture_output=True,
                text=True,
                check=False,
            )
            read += len(made["chunks"])
            refused += len(made["unreadable_chunks"])
            if done.returncode:
                failed += re.findall(r"--- FAIL: \w+/(.*) \(", done.stdout) or [f"seeds {first} to {seeds[-1]}"]
                print(f"{done.stdout}{done.stderr}"[-4_000:])
    took_s = time.monotonic() - begun_s
    print(f"{arguments.examples} chunks in {took_s:.0f} s: Python reads {read}, and refuses {refused}")
    if failed:
        print(f"FAILED: Go does otherwise with {len(failed)}: {failed[:20]}")
        return 1
    print("PASSED: Go reads the same records, and refuses the same chunks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
