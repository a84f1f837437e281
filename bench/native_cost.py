"""The cost of the native core's functions, beside the same in Python: ``python -m bench.native_cost``.

Each core runs in processes of its own, in turns, as others use the machine as well; the least time of each function
counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import timeit
from array import array
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from kera.core.format import lean
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import (
    LEAN_VERSION,
    Codec,
    chained_checksums,
    encode_chunk,
    place_chunk,
    verify_chunk,
    verify_header,
    verify_payload,
    verify_placed,
    verify_run,
)
from kera.core.format.header_table import verify_headers
from kera.core.format.payload import check_payload, encode_lean, open_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.native import VARIABLE, native

Table = Callable[[dict[str, float], dict[str, float]], str]
"""Makes a table from the measurements in Python and with the native core."""
KIB = 1024
HEADER = 128
PLACEMENT = (1 << 40, 2, 0, 1 << 30, 5 << 32, 64 * KIB)
SECONDS = 0.02
"""The times of several runs of a function."""
RUNS = 9


def chunk_of(payload: pa.Buffer, records: int = 10, version: int = 1) -> bytearray:
    """A placed chunk, whose numbers have their usual sizes."""
    now_us = 1_700_000_000_000_000
    encoded = encode_chunk(
        payload,
        record_count=records,
        stream_id=1 << 40,
        streamlet_id=11,
        schema_id=1,
        producer_id=1 << 41,
        producer_epoch=14,
        sequence=1 << 20,
        created_us=now_us,
        min_timestamp_us=now_us,
        max_timestamp_us=now_us + 1,
        version=version,
    )
    chunk = bytearray(encoded.to_bytes())
    place_chunk(chunk, 0, PLACEMENT)
    return chunk


def records(count: int) -> pa.RecordBatch:
    """Records of the default schema, of about 100 bytes each."""
    rows = [{"timestamp": 1_700_000_000_000_000 + each, "value": b"v" * (100 - each % 7)} for each in range(count)]
    return pa.RecordBatch.from_pylist(rows, DEFAULT_SCHEMA)


def chunk_calls(size: int) -> dict[str, Callable[[], object]]:
    """The functions for a chunk of a size in bytes."""
    chunk = memoryview(chunk_of(pa.py_buffer(bytes(size - HEADER))))
    header = verify_header(chunk)
    name = f"{size // KIB} KiB chunk"
    return {
        f"`verify_payload`, {name}": lambda: verify_payload(chunk, 0, header),
        f"`verify_chunk`, {name}": lambda: verify_chunk(chunk, 0),
        f"`verify_placed`, {name}": lambda: verify_placed(chunk, 0, 0),
    }


def lean_calls(count: int) -> dict[str, Callable[[], object]]:
    """The functions for a lean payload with a number of records."""
    payload = encode_lean(records(count), Codec.NONE)
    if payload is None:
        raise ValueError("the default schema is lean")
    chunk = memoryview(chunk_of(payload, count, LEAN_VERSION))
    header = verify_header(chunk)
    batch, held, known = records(count), pa.py_buffer(payload), lean.known_of(DEFAULT_SCHEMA)
    return {
        f"`check_payload`, {count} records, lean": lambda: check_payload(chunk, 0, header, known),
        f"`encode_lean`, {count} records": lambda: encode_lean(batch, Codec.NONE),
        f"`open_payload`, {count} records, lean": lambda: open_payload(held, DEFAULT_SCHEMA, header),
    }


def text_call(name: str, text: str) -> dict[str, Callable[[], object]]:
    """A lean payload of 2,500 values of text."""
    batch = pa.record_batch({"text": [text[: 90 - number % 7] for number in range(2500)]})
    payload, known = memoryview(lean.encode(batch, None, bytes_max=1 << 30) or b""), lean.known_of(batch.schema)
    size = f"{len(payload) // KIB} KiB of {name}"
    return {f"`lean.check`, {size}": lambda: lean.check(payload, known, 2500, compressed=False, bytes_max=1 << 30)}


def all_calls() -> dict[str, Callable[[], object]]:
    """All calls that are measured."""
    small = chunk_of(pa.py_buffer(bytes(KIB - HEADER)))
    run, headers = memoryview(bytes(small) * 64), memoryview(bytes(small[:HEADER]) * 64)
    ends = array("I", range(KIB, 65 * KIB, KIB))
    calls: dict[str, Callable[[], object]] = {
        "`verify_header`": lambda: verify_header(small, 0),
        "`place_chunk`": lambda: place_chunk(small, 0, PLACEMENT),
        "`verify_run`, 64 chunks of 1 KiB": lambda: verify_run(run, 0, 0, 64),
        "`chained_checksums`, 64 chunks": lambda: chained_checksums(run, 0, ends, 0),
        "`verify_headers`, 64 headers": lambda: verify_headers(headers),
    }
    for size in (KIB, 16 * KIB, 256 * KIB):
        calls |= chunk_calls(size)
    for count in (10, 100, 1000):
        calls |= lean_calls(count)
    calls |= text_call("ASCII", "abcdefghij" * 10) | text_call("other text", "äöüß€abcde" * 10)
    for size in (28, 84, 896, 256 * KIB):
        calls[f"`crc32c`, {size:,} bytes"] = partial(crc32c, memoryview(bytes(size)))
    return calls


def measure() -> dict[str, float]:
    """Nanoseconds of each call, with the core of this process."""
    found = {}
    for name, call in all_calls().items():
        timer = timeit.Timer(call)
        number = max(1, int(SECONDS / max(timer.timeit(3) / 3, 1e-8)))
        found[name] = min(timer.repeat(RUNS, number)) / number * 1e9
    return found


def measure_elsewhere(module: str, core: str) -> dict[str, float]:
    """The measurements of `module` in a process of its own; `core`: 0 without the native core, 1 with it."""
    command = [sys.executable, "-m", module, "--json"]
    ran = subprocess.run(command, env=os.environ | {VARIABLE: core}, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def table(python: dict[str, float], fast: dict[str, float]) -> str:
    """Both cores beside each other, in Markdown."""
    rows = ["| call | Python, ns | native, ns | |", "|---|--:|--:|--:|"]
    rows += [
        f"| {name} | {python[name]:,.0f} | {fast[name]:,.0f} | {python[name] / fast[name]:.1f}× |" for name in fast
    ]
    return "\n".join(rows)


def beside(module: str, measure: Callable[[], dict[str, float]], table: Table, description: str) -> None:
    """The command line of a module that measures both cores: in turns, the least of each figure counts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3, help="how often each of them")
    parser.add_argument("--json", action="store_true", help="only the core that runs here, as JSON")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(measure()))
        return
    if native is None:
        sys.exit("there is no native core here: run make setup")
    rounds = [(measure_elsewhere(module, "0"), measure_elsewhere(module, "1")) for _ in range(arguments.rounds)]
    python, fast = ({name: min(each[name] for each in core) for name in core[0]} for core in zip(*rounds, strict=True))
    print(table(python, fast))


def main() -> None:
    """Measure as the command line says."""
    beside("bench.native_cost", measure, table, "Measure the native core beside Python.")


if __name__ == "__main__":
    main()
