"""Chunks with correct checksums and wrong records, by the hundred thousand: ``make fuzz-chunks``.

Any program may write a chunk. So readers must survive every claim of a record batch: offsets that point beyond their
buffers, wrong counts, text that is not text, a kilobyte that claims to be a gigabyte, or whose values fill a gigabyte
when each is written out (``tests.chaos.growing``). Here record batches of many schemas, of both versions of the format,
plain and compressed, are changed at random in sensitive places, and opened as the SDK opens them. The opened batches
are converted to Python values, printed as ``kera consume`` does, and shaped for Spark as its Python engine does.

With ``--structure`` no byte is spoilt: nodes, counts, null bits and places are wrong (``tests.chaos.lean_structures``,
``tests.chaos.arrow_structures``), and lean payloads are also checked as brokers do and joined with the one before. With
``KERA_NATIVE=0`` in the environment that is done in Python (``make fuzz-structures``).

Promised, and checked: each chunk is opened, or refused with `CorruptChunk`; no process dies, and none takes much
memory. `tests.fuzz.running` does the work in children: a killed child is found, with the chunk that killed it.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import zlib
from decimal import Decimal
from functools import cache
from typing import NamedTuple

import pyarrow as pa

from kera.core.errors import CorruptChunk, KeraError, invariant
from kera.core.format import lean
from kera.core.format.chunk import (
    ARROW_CODECS,
    ARROW_VERSION,
    LEAN_VERSION,
    Codec,
    Placement,
    encode_chunk,
    encode_payload,
    place_chunk,
)
from kera.core.format.joining import join_chunks
from kera.core.format.lean.layout import body_at_of
from kera.core.format.payload import open_payload
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX, shape_of
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.native import describe
from tests.chaos.arrow_structures import restructured
from tests.chaos.chunk_uses import HEADER, USES, Uses, records, reworked
from tests.chaos.growing import GROWING, OTHERS, growing
from tests.chaos.lean_structures import structured
from tests.fuzz import running
from tests.fuzz.target import Target, outcome, random_of

SLOW_S = 15.0
"""Time limit of one chunk, including a look at all its values."""
LONG_S = 1e6
NUMBER = struct.Struct("<I")
"""The index of the payload's source, in front of the payload."""
ROWS = 40
VERSIONS = (ARROW_VERSION, LEAN_VERSION)
CODECS = (Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD)
FEW_USES = (records, reworked)
SOME = 8
"""One in `SOME` misbuilt chunks is used in all ways, and the others in a few: `USES` take longer than all else."""
WILD = (0, 1, -1, 7, 8, 63, 64, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 63) - 1, -(1 << 63))


def batches() -> list[pa.RecordBatch]:
    """One of each kind of schema, with values that a mutation can spoil."""
    words = ["", "a", "Zürich", "𝄞" * 3, "x" * 30] * (ROWS // 5)
    data = [word.encode() for word in words]
    some = [word if number % 4 else None for number, word in enumerate(words)]
    numbers = list(range(ROWS))
    columns: list[dict[str, pa.Array]] = [
        {
            "string": pa.array(some),
            "large": pa.array(some, pa.large_string()),
            "view": pa.array(some, pa.string_view()),
            "binary_view": pa.array(data, pa.binary_view()),
            "fixed": pa.array([b"1234"] * ROWS, pa.binary(4)),
        },
        {
            "list": pa.array([numbers[: number % 5] for number in numbers], pa.list_(pa.int32())),
            "large_list": pa.array([words[: number % 3] for number in numbers], pa.large_list(pa.string())),
            "fixed_list": pa.array([[1, 2]] * ROWS, pa.list_(pa.int64(), 2)),
            "map": pa.array([[("k", 1.5)]] * ROWS, pa.map_(pa.string(), pa.float64())),
            "struct": pa.array([{"a": 1, "b": ["x", None]}] * ROWS),
            "lists": pa.array([[["a"], [], None]] * ROWS),
        },
        {
            "bool": pa.array([True, None, False, True] * (ROWS // 4)),
            "int8": pa.array(numbers, pa.int8()),
            "half": pa.array(numbers, pa.float32()).cast(pa.float16()),
            "decimal": pa.array([Decimal("1.23")] * ROWS, pa.decimal128(10, 2)),
            "date": pa.array(numbers, pa.date32()),
            "date64": pa.array([number * 86_400_000 for number in numbers], pa.date64()),
            "time": pa.array(numbers, pa.time64("us")),
            "timestamp_s": pa.array(numbers, pa.timestamp("s")),
            "timestamp_ns": pa.array(numbers, pa.timestamp("ns", tz="Europe/Zurich")),
            "duration": pa.array(numbers, pa.duration("ms")),
            "nothing": pa.nulls(ROWS),
        },
    ]
    default = [
        {"timestamp": number, "keys": [data[number]], "value": data[number], "headers": [(words[number], b"h")]}
        for number in numbers
    ]
    plain = [{"timestamp": number, "value": data[number]} for number in numbers]
    sharing = [OTHERS[name]() for name in ("list views", "runs", "unions")]
    return [
        pa.RecordBatch.from_pylist(default, DEFAULT_SCHEMA),
        pa.RecordBatch.from_pylist(plain, DEFAULT_SCHEMA),
        *(pa.RecordBatch.from_pydict(each) for each in columns),
        *sharing,
    ]


class Source(NamedTuple):
    """A record batch as a payload that is to be spoilt."""

    batch: pa.RecordBatch
    payload: bytes
    version: int
    """The version of the format."""
    codec: Codec
    body_at: int
    """The offset in the payload of the values, plain or compressed."""


def arrow_source(batch: pa.RecordBatch, codec: Codec = Codec.NONE) -> Source:
    """The batch as an Arrow message."""
    payload: bytes = encode_payload(batch, codec).to_pybytes()
    return Source(batch, payload, ARROW_VERSION, codec, shape_of(memoryview(payload)).body_at)


def lean_source(batch: pa.RecordBatch, codec: Codec = Codec.NONE) -> Source:
    """The batch as a lean payload, also where an honest writer would not make one."""
    payload = lean.encode(batch, ARROW_CODECS.get(codec), bytes_max=sys.maxsize)
    if payload is None:
        raise ValueError("no lean payload")
    nodes_bytes = int.from_bytes(payload[:2], "little")
    return Source(batch, payload, LEAN_VERSION, codec, body_at_of(nodes_bytes, compressed=codec is not Codec.NONE))


def whole() -> list[Source]:
    """Batches that can be read, with each codec, in both versions."""
    found = batches()
    arrow = [arrow_source(batch, codec) for batch in found for codec in CODECS]
    return arrow + [lean_source(batch, codec) for batch in found if lean.is_lean(batch.schema) for codec in CODECS]


def too_large() -> list[Source]:
    """The batches of `GROWING`, which are refused without any change."""
    found = [growing(name) for name in GROWING]
    return [arrow_source(batch) for batch in found] + [lean_source(each) for each in found if lean.is_lean(each.schema)]


def nested() -> list[Source]:
    """Maps nested in all possible types, as payloads of both versions."""
    words = ["", "a", "Zürich", "x" * 30] * (ROWS // 4)
    pairs = [[(word, number)] * (number % 3) for number, word in enumerate(words)]
    batch = pa.RecordBatch.from_pydict(
        {
            "maps of lists": pa.array(
                [[(word, [1, None])] for word in words], pa.map_(pa.string(), pa.list_(pa.int8()))
            ),
            "maps of maps": pa.array([[(1, [("k", 2)])]] * ROWS, pa.map_(pa.int32(), pa.map_(pa.binary(), pa.int8()))),
            "structs as keys": pa.array(
                [[({"a": 1, "b": None}, True)]] * ROWS,
                pa.map_(pa.struct([("a", pa.int16()), ("b", pa.string())]), pa.bool_()),
            ),
            "maps in lists": pa.array([[each] for each in pairs], pa.list_(pa.map_(pa.large_string(), pa.int64()))),
            "maps in structs": pa.array(
                [{"m": each} for each in pairs], pa.struct([("m", pa.map_(pa.string(), pa.int8()))])
            ),
            "lists of lists": pa.array(
                [[[1, 2], None, [3, None]], None] * (ROWS // 2), pa.list_(pa.list_(pa.int64(), 2), 3)
            ),
            "no bytes": pa.array([b""] * ROWS, pa.binary(0)),
        }
    )
    return [arrow_source(batch), *(lean_source(batch, codec) for codec in CODECS[1:])]


def never_null() -> list[Source]:
    """Columns that are not nullable, and decimals and times below nulls, as payloads of both versions."""
    kinds = (pa.int64(), pa.string(), pa.bool_(), pa.list_(pa.int8()), pa.struct([("a", pa.decimal128(3, 1))]))
    values = (1, "a", True, [1, None], {"a": Decimal("1.5")})
    arrays = [pa.array([value] * ROWS, kind) for value, kind in zip(values, kinds, strict=True)]
    fields = [pa.field(f"c{at}", kind, nullable=False) for at, kind in enumerate(kinds)]
    times = [[value, None, value] if at % 2 else None for at, value in enumerate([86_399_999_999] * ROWS)]
    arrays.append(pa.array(times, pa.list_(pa.time64("us"))))
    fields.append(pa.field("times", pa.list_(pa.time64("us"))))
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return [arrow_source(batch), *(lean_source(batch, codec) for codec in CODECS[1:])]


def sources() -> list[Source]:
    """All sources. Stored inputs refer to them by number: append new ones at the end."""
    return whole() + too_large() + nested() + never_null()


def sources_of(version: int | None) -> list[Source]:
    """The sources of one version of the format; None: all."""
    return [source for source in sources() if version in (None, source.version)]


def mutated(source: Source, random_: random.Random) -> bytes:
    """The payload with random changes: in its metadata, its table of buffers, the numbers in its body, or anywhere.

    Half of the time a payload of its schema with a structure that may be wrong.
    """
    if random_.random() < 0.5:
        return misbuilt(source, random_)
    data = bytearray(source.payload)
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        random_.choice((_wild_number, _wild_number, _in_metadata, _in_metadata, _bit, _bit, _byte, _cut, _swap))(
            data, source.body_at, random_
        )
        if len(data) < 16:
            return bytes(data)
    return bytes(data)


def misbuilt(source: Source, random_: random.Random) -> bytes:
    """A payload of the schema of `source` with intact bytes and a structure that may be wrong."""
    codec = ARROW_CODECS.get(source.codec)
    if source.version == LEAN_VERSION:
        return structured(source.batch.schema, source.batch.num_rows, codec, random_)
    return restructured(source.payload, source.batch.schema, codec, random_)


def _wild_number(data: bytearray, body_at: int, random_: random.Random) -> None:
    """Change a number of the body, such as an offset or the size of a compressed buffer."""
    width, code = random_.choice(((4, "<i"), (8, "<q")))
    first = min(body_at, len(data) - width)
    at = first + random_.randrange(max(1, (len(data) - width - first) // width + 1)) * width
    _put(data, at, width, code, random_)


def _in_metadata(data: bytearray, body_at: int, random_: random.Random) -> None:
    """Change a length, a count, or a place in the metadata."""
    width, code = random_.choice(((1, "<b"), (2, "<h"), (4, "<i"), (8, "<q"), (8, "<q")))
    at = random_.randrange(0, max(1, min(body_at, len(data)) - width)) // width * width
    _put(data, at, width, code, random_)


def _put(data: bytearray, at: int, width: int, code: str, random_: random.Random) -> None:
    if at < 0 or at + width > len(data):
        return
    (was,) = struct.unpack_from(code, data, at)
    value = random_.choice((random_.choice(WILD), was + random_.choice((-64, -8, -1, 1, 8, 64)), was * 2, -was))
    bits = width * 8
    struct.pack_into(code, data, at, (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)))


def _bit(data: bytearray, _: int, random_: random.Random) -> None:
    data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)


def _byte(data: bytearray, _: int, random_: random.Random) -> None:
    data[random_.randrange(len(data))] = random_.randrange(256)


def _cut(data: bytearray, _: int, random_: random.Random) -> None:
    del data[random_.randrange(len(data)) :]


def _swap(data: bytearray, _: int, random_: random.Random) -> None:
    """Swap two pieces of sixteen bytes, such as the place and length of two buffers."""
    first, second = (random_.randrange(max(1, len(data) // 16)) * 16 for _ in range(2))
    data[first : first + 16], data[second : second + 16] = data[second : second + 16], data[first : first + 16]


def opened(source: Source, payload: bytes) -> pa.RecordBatch:
    """The record batch of `payload`, which was made of `source`, as readers open it. Raises `CorruptChunk`."""
    header = HEADER._replace(version=source.version, codec=source.codec, record_count=source.batch.num_rows)
    return open_payload(payload, source.batch.schema, header)


def open_as_reader(source: Source, payload: bytes, uses: Uses = USES) -> str:
    """Open a payload, and look at all its values; returns the outcome as one word."""
    try:
        batch = opened(source, payload)
    except KeraError as error:
        return error.code
    return use(batch, uses)


def open_in_all_ways(source: Source, payload: bytes, uses: Uses = USES) -> str:
    """Like `open_as_reader`; a lean payload is also checked as brokers do and joined with others as readers do.

    A reader never opens a payload that a broker refuses.
    """
    if source.version != LEAN_VERSION:
        return open_as_reader(source, payload, uses)
    compressed, records = source.codec != 0, source.batch.num_rows
    taken = True
    try:
        lean.check(
            memoryview(payload),
            lean.known_of(source.batch.schema),
            records,
            compressed=compressed,
            bytes_max=DECOMPRESSED_BYTES_MAX,
        )
    except CorruptChunk:
        taken = False
    found = open_as_reader(source, payload, uses)
    invariant(taken or found == "corrupt_chunk", "a reader opens what a broker refuses")
    if not compressed:
        _join(source, payload)
    return found


def _join(source: Source, payload: bytes) -> None:
    """Join the payload with itself, as a reader does that receives two such chunks in a row."""
    batch, chunks = source.batch, bytearray()
    for number in range(2):
        encoded = encode_chunk(
            payload,
            record_count=batch.num_rows,
            stream_id=7,
            streamlet_id=0,
            schema_id=1,
            producer_id=1,
            producer_epoch=0,
            sequence=number,
            created_us=0,
            min_timestamp_us=0,
            max_timestamp_us=0,
            codec=Codec.NONE,
            typed=True,
            version=LEAN_VERSION,
        )
        at = len(chunks)
        chunks += encoded.to_bytes()
        place_chunk(chunks, at, Placement(1, 0, 1, number * batch.num_rows, 1))
    joined = join_chunks(
        memoryview(chunks),
        0,
        batch.schema,
        1,
        verify=True,
        trusted=False,
        joined_bytes_max=1 << 20,
        bytes_max=DECOMPRESSED_BYTES_MAX,
    )
    if joined is not None:
        joined.batch.validate(full=True)
        reworked(joined.batch)


def use(batch: pa.RecordBatch, uses: Uses = USES) -> str:
    """Use a batch as consumer groups do. A reader would see errors of values."""
    for each in uses:
        each(batch)
    return "read"


def _target(name: str, version: int | None, *, structure: bool) -> Target:
    """A target that spoils bytes, or structures, and opens the result."""

    @cache
    def found() -> list[Source]:
        return sources_of(version)

    def make(random_: random.Random) -> bytes:
        at = random_.randrange(len(found()))
        return NUMBER.pack(at) + (misbuilt if structure else mutated)(found()[at], random_)

    def run(data: bytes) -> str:
        source, payload = found()[NUMBER.unpack_from(data)[0]], data[NUMBER.size :]
        if not structure:
            return open_as_reader(source, payload)
        return open_in_all_ways(source, payload, FEW_USES if zlib.crc32(payload) % SOME else USES)

    return Target(name, make, run, slow_s=SLOW_S)


TARGETS = {
    name: _target(name, version, structure=kind == "structures")
    for kind in ("bytes", "structures")
    for version in (None, *VERSIONS)
    for name in [f"{kind}-{version or 'all'}"]
}


def target_of(version: int | None, *, structure: bool) -> Target:
    """The target for a version and a kind of damage."""
    return TARGETS[f"{'structures' if structure else 'bytes'}-{version or 'all'}"]


def run(examples: int, seed: int, version: int | None = None, *, structure: bool = False) -> running.Report:
    """Open this many chunks; every error that does not report a corrupt chunk is a defect."""
    target = target_of(version, structure=structure)
    report = running.run(target, seed, LONG_S, inputs_max=examples, module="tests.chaos.chunks")
    report.defects += sorted(set(report.outcomes) - {"read", CorruptChunk.code})
    return report


def main() -> int:
    """Run the check with the options of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--structure", action="store_true", help="spoil no bytes, but what they say")
    parser.add_argument("--version", type=int, choices=VERSIONS, help="of the format; without it both")
    parser.add_argument("--again", type=int, metavar="NUMBER", help="only this input, which a defect has named")
    arguments = parser.parse_args()
    if arguments.again is not None:
        target = target_of(arguments.version, structure=arguments.structure)
        print(outcome(target, target.make(random_of(target.name, arguments.seed, arguments.again))))
        return 0
    report = run(arguments.examples, arguments.seed, arguments.version, structure=arguments.structure)
    print(describe(), report, *report.defects, sep="\n")
    print("FAILED" if report.defects else "PASSED: each was read, or refused by its name")
    return bool(report.defects)


if __name__ == "__main__":
    sys.exit(main())
