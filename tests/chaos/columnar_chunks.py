"""The spoilt chunks of ``tests.chaos.chunks``, as the columnar engine opens them: ``make fuzz-chunks``.

One JVM opens all of them, with the classes that run in Spark's executors, in memory behind which nothing is mapped.
Promised, and checked: each is read, or refused as a corrupt chunk; the JVM survives with its heap of 512 MiB.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pyarrow as pa

from kera.core.format.chunk import Placement, encode_chunk, place_chunk
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.spark_connector.columns import HEADERS_COLUMN, RECORD_COLUMNS, columns_of
from tests.chaos.chunk_uses import spark_has
from tests.chaos.chunks import VERSIONS, Source, misbuilt, mutated, sources_of
from tests.spark.jvm_harness import Harness, compiled, running
from tests.spark.test_jvm_columns import question, text

AT_ONCE = 250
BYTES_AT_ONCE = 8 << 20
"""The program takes each request as one line of text."""


def crafted(source: Source, payload: bytes) -> bytes:
    """A placed chunk like `source`, with these bytes, and with checksums that match."""
    encoded = encode_chunk(
        pa.py_buffer(payload),
        record_count=source.batch.num_rows,
        stream_id=7,
        streamlet_id=3,
        schema_id=1,
        producer_id=1,
        producer_epoch=0,
        sequence=0,
        created_us=0,
        min_timestamp_us=0,
        max_timestamp_us=0,
        codec=source.codec,
        typed=not source.batch.schema.equals(DEFAULT_SCHEMA),
        version=source.version,
    )
    chunk = bytearray(encoded.to_bytes())
    place_chunk(chunk, 0, Placement(1, 0, 1, 1000, 1))
    return bytes(chunk)


def word_of(outcome: str) -> str:
    """The outcome of a chunk as one word, or the message of the JVM."""
    return "corrupt_chunk" if "CorruptChunk: " in outcome else outcome[:120]


def outcomes_of(
    java: Harness,
    examples: int,
    seed: int,
    spoilt: Callable[[Source, random.Random], bytes],
    version: int | None = None,
) -> Iterator[tuple[int, str]]:
    """Seeds, and the outcomes of their chunks; chunks of one schema go into one request."""
    batches: dict[int, list[tuple[int, bytes]]] = {}
    found = [source for source in sources_of(version) if spark_has(source.batch.schema)]
    for each in range(seed, seed + examples):
        random_ = random.Random(each)
        at = random_.randrange(len(found))
        waiting = batches.setdefault(at, [])
        waiting.append((each, crafted(found[at], spoilt(found[at], random_))))
        if len(waiting) == AT_ONCE or sum(len(chunk) for _, chunk in waiting) > BYTES_AT_ONCE:
            yield from _asked(java, found[at].batch.schema, batches.pop(at))
    for at, waiting in batches.items():
        yield from _asked(java, found[at].batch.schema, waiting)


def _asked(java: Harness, schema: pa.Schema, waiting: list[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    typed = not schema.equals(DEFAULT_SCHEMA)
    wanted = columns_of(schema, typed=True) if typed else type(RECORD_COLUMNS)([*RECORD_COLUMNS, HEADERS_COLUMN])
    chunks = [text(chunk) for _, chunk in waiting]
    answer = java.ask(method="open", chunks=chunks, **question(schema, wanted, typed=typed))
    if "outcomes" not in answer:
        raise AssertionError(f"seeds {waiting[0][0]} to {waiting[-1][0]}: {answer}")
    yield from zip((seed for seed, _ in waiting), answer["outcomes"], strict=True)


def main() -> int:
    """Run the check with the options of the command line; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--structure", action="store_true", help="spoil no bytes, but what they say")
    parser.add_argument("--version", type=int, choices=VERSIONS, help="of the format; without it both")
    arguments = parser.parse_args()
    begun_s = time.monotonic()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, running([*compiled("kera.wire.ColumnsHarness"), folder]) as java:
        spoilt = misbuilt if arguments.structure else mutated
        for seed, outcome in outcomes_of(java, arguments.examples, arguments.seed, spoilt, arguments.version):
            word = word_of(outcome)
            outcomes[word] += 1
            if word not in {"read", "corrupt_chunk"} and outcomes[word] == 1:
                print(f"seed {seed}: {outcome}")
    print(f"{arguments.examples} chunks in {time.monotonic() - begun_s:.0f} s: {dict(outcomes.most_common())}")
    if set(outcomes) - {"read", "corrupt_chunk"}:
        print("FAILED")
        return 1
    print("PASSED: the JVM lives, and each chunk was read, or refused by its name")
    return 0


if __name__ == "__main__":
    sys.exit(main())
