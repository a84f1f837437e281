"""The extension in C: its contents, when it is used, and that it agrees with its twins in Python."""

from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c

from kera.client.producing.encoding.payloads import records_to_batch
from kera.core import native
from kera.core.errors import CorruptChunk
from kera.core.format import chunk as chunk_module
from kera.core.format import joining, lean, record_batch
from kera.core.format.chunk import ChunkHeader, Placement, encode_chunk, place_chunk, verify_chunk
from kera.core.format.header_table import check_headers
from kera.core.format.lean import layout as lean_layout
from kera.core.format.lean.layout import ENCODING_SHIFT, Kind, Places, put_prefix
from kera.core.format.many_chunks import begin_chunks
from kera.core.rpc import frames
from kera.core.rpc.frames import with_header
from tests.native_twins import (
    MODULES,
    TYPES,
    Refused,
    accelerated,
    alone,
    lean_check,
    lean_encode,
    needs_native,
    outcome,
    python_only,
    twin_of,
)

PLACEMENT = Placement(1 << 40, 2, 3, 1 << 41, 5, 64)


def placed(payload: bytes, sequence: int = 0) -> bytes:
    chunk = bytearray(
        encode_chunk(
            pa.py_buffer(payload),
            record_count=3,
            stream_id=1 << 40,
            streamlet_id=2,
            schema_id=3,
            producer_id=1 << 63,
            producer_epoch=4,
            sequence=sequence,
            created_us=5,
            min_timestamp_us=-6,
            max_timestamp_us=7,
        ).to_bytes()
    )
    place_chunk(chunk, 0, PLACEMENT)
    return bytes(chunk)


SMALL = placed(b"small")
LARGE = placed(bytes(range(256)) * 1024)
RUN = SMALL + placed(b"more" * 100, 1) + placed(b"", 2)
ENDS = array("I", [len(SMALL), len(RUN) - 128, len(RUN)])
ENCODED = pa.record_batch({"text": ["a", "é", "ccc"], "number": [1, 2, 300]})
PAYLOAD = lean.encode(ENCODED, None, bytes_max=1 << 20)
KNOWN = lean.learn(ENCODED.schema)
LARGE_PAYLOAD = lean.encode(pa.record_batch({"number": [n * n for n in range(10_000)]}), None, bytes_max=1 << 20)
LARGE_KNOWN = lean.learn(pa.schema([("number", pa.int64())]))
TEXT_KNOWN = lean.learn(pa.schema([("text", pa.string())]))

# --- whether it runs ---------------------------------------------------------------------------------------


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {native.VARIABLE: ""} | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_extension_can_be_turned_off_and_the_description_says_so() -> None:
    code = (
        "from kera.core import native; from kera.core.format import chunk;"
        " print(native.native, native.describe(), type(chunk.verify_header))"
    )

    ran = run(code, KERA_NATIVE="0")

    assert ran.stdout == "None without native core: KERA_NATIVE=0 <class 'function'>\n"
    assert ran.stderr == ""


def test_an_extension_of_another_version_is_not_used_with_a_warning() -> None:
    fake = "import sys, types; sys.modules['kera.core._native'] = types.SimpleNamespace(VERSION=0)"

    ran = run(f"{fake}\nfrom kera.core import native; print(native.native)")

    assert ran.stdout == "None\n"
    assert ran.stderr == (
        f"kera: warning: without native core: built for another version: 0, this is {native.VERSION}; run make setup\n"
    )


def test_a_missing_extension_is_described_without_a_warning() -> None:
    ran = run(
        "import sys; sys.modules['kera.core._native'] = None\nfrom kera.core import native; print(native.describe())"
    )

    assert ran.stdout == "without native core: not built\n"
    assert ran.stderr == ""


@needs_native
def test_a_built_extension_is_used_for_all_its_functions() -> None:
    assert native.describe() == "native core"
    assert native.native is not None
    assert native.native.VERSION == native.VERSION
    assert accelerated(*MODULES).keys() == {
        "begin_chunks",
        "chained_checksums",
        "check",
        "check_headers",
        "combined_checksum",
        "crc32_each",
        "crc32c",
        "crc32c_each",
        "decode_header",
        "encode_completed",
        "encode_header",
        "encode_plain",
        "encode_records",
        "murmur2",
        "murmur2_each",
        "place_chunk",
        "records",
        "seal_chunks",
        "verify_chunk",
        "verify_header",
        "verify_payload",
        "verify_placed",
        "verify_run",
        "with_header",
    }


@needs_native
def test_only_functions_of_the_extension_can_be_bound() -> None:
    assert native.native is not None
    bind = native.native.bind
    with pytest.raises(LookupError, match="there is no nothing"):
        bind("nothing", print, None)
    for name, returned in (("verify_header", None), ("verify_header", dict), ("verify_header", 1), ("check", tuple)):
        with pytest.raises(TypeError, match=f"{name} returns no"):
            bind(name, print, returned)


# --- knowledge that both share -----------------------------------------------------------------------------


@needs_native
def test_the_extension_and_python_have_the_same_layout() -> None:
    assert native.native is not None
    found = native.native.layout()

    fields, at = [], 0
    for field in chunk_module._HEADER.format.removeprefix("<").replace("4s", "s"):
        fields.append((at, field))
        at += 4 if field == "s" else struct.calcsize("<" + field)
    names = ChunkHeader._fields
    assert found.pop("fields") == fields
    assert found.pop("PAYLOAD_BYTES_FIELD") == names.index("payload_bytes")
    assert found.pop("PAYLOAD_CRC_FIELD") == names.index("payload_crc32c")
    assert found.pop("PAYLOAD_BYTES_AT") == fields[names.index("payload_bytes")][0]
    assert found.pop("PAYLOAD_CRC_AT") == fields[names.index("payload_crc32c")][0]
    assert found.pop("VERSIONS") == [min(chunk_module.VERSIONS), max(chunk_module.VERSIONS)]
    assert len(chunk_module.VERSIONS) == max(chunk_module.VERSIONS) - min(chunk_module.VERSIONS) + 1
    assert found.pop("VALUES_MAX") == lean_layout.VALUES_MAX
    assert found.pop("DEPTH_MAX") == lean_layout.DEPTH_MAX
    assert found.pop("RECORDS_WITHOUT_BYTES") == lean_check.RECORDS_WITHOUT_BYTES
    assert found.pop("PACKED_VALUES_MAX") == lean_encode.PACKED_VALUES_MAX
    assert found.pop("NODES_BYTES_MAX") == lean_layout.NODES_BYTES_MAX
    assert found.pop("DECOMPRESSED_BYTES_MAX") == record_batch.DECOMPRESSED_BYTES_MAX
    assert found.pop("BATCH_RECORDS_WITHOUT_BYTES") == record_batch.RECORDS_WITHOUT_BYTES
    assert found.pop("JOINED_PAYLOAD_BYTES_MAX") == joining.JOINED_PAYLOAD_BYTES_MAX
    assert found.pop("JOINED_RECORDS_MAX") == joining.JOINED_RECORDS_MAX
    assert found == {name: getattr(chunk_module, name) for name in found}
    assert len(found) == 6


# --- valid arguments do not need the twin ------------------------------------------------------------------

BATCH = pa.record_batch({"text": ["a", None, "ccc"], "many": [[1], [], [2, 3]], "number": [7, 7, 8]})

FIELDS = (2, 2, 3, 1 << 60, 5, 6, 1 << 40, 7, 0, 9, 1 << 50, (1 << 50) - 1, (1 << 50) + 1)
"""Fields of a header, as `encode_header` takes them."""
OWN = [array("q", [number, 2**32 - 1, 0]) for number in range(3)] + [array("q", [-1, 7, 2**62]) for _ in range(3)]
OWN[3] = array("q", [1, 2, 2**63 - 1])
COMMON = (2, 3, 1 << 60, 4, 1 << 40, 0, 1 << 50)
"""Fields of chunks for `seal_chunks`: `OWN` has one value for each chunk, `COMMON` one for all."""

FRAME = with_header(b"head", frames.FrameKind.REQUEST, 1, 2, 9) + bytes(9)
SPOILT_FRAMES = [FRAME[:at] + bytes([FRAME[at] ^ 1]) + FRAME[at + 1 :] for at in range(32)]
SPOILT_FRAMES.append(with_header(bytes((4 << 20) + 1), frames.FrameKind.REQUEST, 1, 2, 9))

GOOD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("crc32c", (SMALL,), {}),
    ("crc32c", (memoryview(LARGE), 7), {}),
    ("crc32c_each", (b"123456789abc", array("i", [0, 9, 9, 12])), {}),
    ("crc32c_each", (memoryview(b"x123456789abc")[1:], np.array([3, 9, 12], np.int32)), {}),
    ("crc32c_each", (b"abcd", array("I", [2])), {}),
    ("crc32_each", (b"123456789abc", array("i", [0, 9, 9, 12])), {}),
    ("murmur2_each", (memoryview(b"x123456789abc")[1:], np.array([3, 9, 12], np.int32)), {}),
    ("murmur2", (b"\xff" * 7,), {}),
    ("murmur2", (memoryview(b"xfoobar")[1:],), {}),
    ("verify_header", (SMALL,), {}),
    ("verify_header", (memoryview(RUN), len(SMALL)), {}),
    ("verify_chunk", (bytearray(SMALL), 0), {}),
    ("verify_chunk", (LARGE,), {}),
    ("verify_payload", (pa.py_buffer(LARGE), 0, verify_chunk(LARGE)), {}),
    ("verify_placed", (memoryview(RUN), ENDS[0], 9), {}),
    ("verify_run", (memoryview(RUN), 1000, 9, 4), {}),
    ("verify_run", (memoryview(RUN), 0, 0, 2), {}),
    ("verify_run", (memoryview(LARGE), 0, 0, 1), {}),
    ("verify_run", (memoryview(b""), 0, 0, 1), {}),
    ("chained_checksums", (memoryview(RUN), 0, ENDS, 9), {}),
    ("chained_checksums", (RUN, 0, array("I"), 9), {}),
    ("chained_checksums", (RUN, 0, memoryview(b"\0" + ENDS.tobytes())[1:].cast("I"), 9), {}),
    ("combined_checksum", (memoryview(RUN), 0, ENDS, 9), {}),
    ("combined_checksum", (RUN, len(SMALL), ENDS[1:], 9), {}),
    ("combined_checksum", (LARGE, 0, array("I", [len(LARGE)]), 0), {}),
    ("combined_checksum", (RUN, 0, array("I"), 9), {}),
    ("place_chunk", (bytearray(SMALL), 0, PLACEMENT), {}),
    ("place_chunk", (memoryview(bytearray(SMALL)), 0, (1, 2, 3, 4, 5, 6)), {}),
    ("encode_header", (PAYLOAD, *FIELDS), {}),
    ("encode_header", (pa.py_buffer(LARGE), 255, 255, 1, 2**64 - 1, 2**32 - 1, 0, 2**63, 0, True, 5, -1, -2, -3), {}),
    ("encode_header", (b"", *[0] * 13), {}),
    ("with_header", (b"head", frames.FrameKind.REPLY, 1, 1 << 63, 7), {}),
    ("with_header", (b"", 255, (1 << 32) - 1, (1 << 64) - 1, (1 << 32) - 1), {}),
    ("decode_header", (memoryview(FRAME), 0, 9), {}),
    ("decode_header", (memoryview(b"x" + FRAME), 1, 1 << 40), {}),
    ("check_headers", (memoryview(RUN[:128] * 5),), {}),
    ("check_headers", (memoryview(RUN[:128] * 520),), {}),
    ("check", (memoryview(PAYLOAD or b""), KNOWN, 3), {"compressed": False, "bytes_max": 1 << 20}),
    ("check", (memoryview(LARGE_PAYLOAD or b""), LARGE_KNOWN, 10_000), {"compressed": False, "bytes_max": 1 << 20}),
]


SIZES = array("q", [0, 64, 65])


def unsealed() -> bytearray:
    """Chunks with payloads of these sizes, without headers."""
    payloads = [b"", b"x" * 64, b"y" * 65]
    return bytearray().join(bytes(128) + payload + bytes(-len(payload) % 64) for payload in payloads)


GOOD_CHUNKS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("seal_chunks", (unsealed(), SIZES, *OWN, *COMMON), {}),
    ("seal_chunks", (memoryview(unsealed()), np.array(SIZES), *map(np.array, OWN), *COMMON), {}),
    ("seal_chunks", (bytearray(), *[array("q")] * 7, *COMMON), {}),
]


@needs_native
@pytest.mark.parametrize(("name", "arguments", "named"), GOOD + GOOD_CHUNKS)
def test_valid_arguments_give_the_twins_outcome_without_the_twin(
    name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    function = accelerated(*MODULES)[name]
    with python_only():
        expected = outcome(twin_of(function) or function, *arguments, **named)

    assert expected.error is None
    assert outcome(alone(name), *arguments, **named) == expected
    assert outcome(function, *arguments, **named) == expected


NOTHING_OF_THAT_KIND: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("crc32c", (), {}),
    ("crc32c", ("text",), {}),
    ("crc32c", (SMALL, "text"), {}),
    ("crc32c", (SMALL, 0, -1), {}),
    ("crc32c_each", (b"", array("I")), {}),
    ("crc32c_each", (b"abc", [0, 3]), {}),
    ("crc32c_each", (b"abc", array("i", [0, 4])), {}),
    ("crc32c_each", (b"abc", array("i", [-1, 3])), {}),
    ("crc32c_each", (b"abc", array("i", [3, 2])), {}),
    ("crc32c_each", (b"abc", array("q", [0, 3])), {}),
    ("crc32c_each", ("abc", array("i", [0, 3])), {}),
    ("crc32_each", (b"abc", array("i", [3, 2])), {}),
    ("murmur2_each", (b"abc", array("i", [0, 4])), {}),
    ("murmur2", (), {}),
    ("murmur2", ("text",), {}),
    ("verify_header", (SMALL, -len(SMALL)), {}),
    ("verify_header", (), {"buffer": SMALL}),
    ("verify_header", (SMALL,), {"offset": 0}),
    ("verify_header", (SMALL, 1 << 70), {}),
    ("verify_header", (None,), {}),
    ("verify_header", (memoryview(SMALL).cast("I"),), {}),
    ("verify_header", (memoryview(SMALL)[::2],), {}),
    ("verify_header", (SMALL, 0, 0), {}),
    ("verify_header", (SMALL, True), {}),
    ("verify_chunk", (SMALL, 2.0), {}),
    ("verify_payload", (SMALL, 0, ()), {}),
    ("verify_payload", (SMALL, 0, verify_chunk(SMALL)._replace(payload_bytes=-1)), {}),
    ("verify_payload", (SMALL, 0, verify_chunk(SMALL)._replace(payload_bytes=1 << 40)), {}),
    ("verify_payload", (SMALL, 64, verify_chunk(SMALL)), {}),
    ("verify_payload", (SMALL, -len(SMALL), verify_chunk(SMALL)), {}),
    ("verify_placed", (memoryview(SMALL), 0, -1), {}),
    ("verify_run", (memoryview(RUN), 0xFFFFFFFF, 0, 4), {}),
    ("verify_run", (memoryview(RUN), 0, 0, -1), {}),
    ("verify_run", (memoryview(RUN + b"\0"), 0, 0, 9), {}),
    ("chained_checksums", (memoryview(RUN), 0, [len(SMALL)], 0), {}),
    ("chained_checksums", (memoryview(RUN), 0, array("Q", [len(SMALL)]), 0), {}),
    ("chained_checksums", (memoryview(RUN), 0, array("f", [1e-45, 2.0]), 0), {}),
    ("chained_checksums", (memoryview(RUN), 0, array("i", [-len(SMALL), 7]), 0), {}),
    ("chained_checksums", (memoryview(RUN), 0, array("I", [1 << 30, 7]), 0), {}),
    ("combined_checksum", (memoryview(RUN), 0, [len(SMALL)], 0), {}),
    ("combined_checksum", (memoryview(RUN), 0, array("Q", [len(SMALL)]), 0), {}),
    ("combined_checksum", (memoryview(RUN), 0, array("I", [127]), 0), {}),
    ("combined_checksum", (memoryview(RUN), 0, array("I", [len(RUN), len(SMALL)]), 0), {}),
    ("combined_checksum", (memoryview(RUN), 0, array("I", [len(RUN) + 1]), 0), {}),
    ("combined_checksum", (memoryview(RUN), -128, array("I", [len(SMALL)]), 0), {}),
    ("combined_checksum", (memoryview(RUN), 0, ENDS, -1), {}),
    ("place_chunk", (SMALL, 0, PLACEMENT), {}),
    ("place_chunk", (bytearray(SMALL), 1, PLACEMENT), {}),
    ("place_chunk", (bytearray(SMALL), 64, PLACEMENT), {}),
    ("place_chunk", (bytearray(SMALL), -len(SMALL), PLACEMENT), {}),
    ("place_chunk", (bytearray(SMALL), 0, PLACEMENT[:5]), {}),
    ("place_chunk", (bytearray(SMALL), 0, list(PLACEMENT)), {}),
    ("place_chunk", (bytearray(SMALL), 0, (1, 2, 3, 4, 5, 1 << 32)), {}),
    ("place_chunk", (bytearray(SMALL), 0, (-1, 2, 3, 4, 5, 6)), {}),
    ("place_chunk", (bytearray(SMALL), 0, ("1", 2, 3, 4, 5, 6)), {}),
    ("encode_header", (PAYLOAD, *FIELDS[:-1]), {}),
    ("encode_header", (PAYLOAD, 256, *FIELDS[1:]), {}),
    ("encode_header", (PAYLOAD, -1, *FIELDS[1:]), {}),
    ("encode_header", (PAYLOAD, 2, 0, 2**32, *FIELDS[3:]), {}),
    ("encode_header", (PAYLOAD, 2, 0, 3, 2**64, *FIELDS[4:]), {}),
    ("encode_header", (PAYLOAD, *FIELDS[:-1], 2**63), {}),
    ("encode_header", (PAYLOAD, *FIELDS[:-1], -(2**63) - 1), {}),
    ("encode_header", (PAYLOAD, *FIELDS[:-1], "9"), {}),
    ("encode_header", (PAYLOAD, *FIELDS[:-1], 9.0), {}),
    ("encode_header", (None, *FIELDS), {}),
    ("encode_header", (PAYLOAD, *FIELDS[:-1]), {"max_timestamp_us": 9}),
    ("with_header", (b"", 256, 1, 1, 0), {}),
    ("with_header", (b"", 1, 1 << 32, 1, 0), {}),
    ("with_header", (b"", 1, -1, 1, 0), {}),
    ("with_header", (b"", 1, 1, 1 << 64, 0), {}),
    ("with_header", (b"", 1, 1, 1.0, 0), {}),
    ("with_header", ("head", 1, 1, 1, 0), {}),
    ("with_header", (bytearray(b"head"), 1, 1, 1, 0), {}),
    ("with_header", (b"", 1, 1, 1, 1 << 32), {}),
    ("with_header", (b"", 1, 1, 1), {}),
    ("decode_header", (memoryview(FRAME), 0, 8), {}),
    ("decode_header", (memoryview(FRAME), -len(FRAME), 9), {}),
    ("decode_header", (memoryview(FRAME), 1, 9), {}),
    ("decode_header", (memoryview(FRAME)[:31], 0, 9), {}),
    ("decode_header", (memoryview(FRAME), 0, -1), {}),
    ("decode_header", (memoryview(bytes(64)).cast("I"), 0, 9), {}),
    ("decode_header", (memoryview(FRAME), 0), {}),
    *((("decode_header", (memoryview(spoilt), 0, 9), {})) for spoilt in SPOILT_FRAMES),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:5], *COMMON), {}),
    ("seal_chunks", (bytes(unsealed()), SIZES, *OWN, *COMMON), {}),
    ("seal_chunks", (unsealed()[1:], SIZES, *OWN, *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES[:2], *OWN, *COMMON), {}),
    ("seal_chunks", (unsealed(), array("q", [0, -64, 65]), *OWN, *COMMON), {}),
    ("seal_chunks", (unsealed(), array("q", [0, 64, 2**62]), *OWN, *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:5], array("q", [1, 2]), *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:5], array("i", [1, 2, 3]), *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:5], array("d", [1, 2, 3]), *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:5], [1, 2, 3], *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:5], np.arange(6)[::2], *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, array("q", [1, -1, 0]), *OWN[1:], *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN[:2], array("q", [1, 2**32, 0]), *OWN[3:], *COMMON), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN, 256, *COMMON[1:]), {}),
    ("seal_chunks", (unsealed(), SIZES, *OWN, *COMMON[:-1], "9"), {}),
    ("check_headers", (memoryview(RUN[:100]),), {}),
    ("check", (memoryview(PAYLOAD or b""), KNOWN, 3), {"bytes_max": 1 << 20, "compressed": False}),
    ("check", (memoryview(PAYLOAD or b""), KNOWN, 3, False, 1 << 20), {}),
    ("check", (memoryview(PAYLOAD or b""), KNOWN, 3), {"compressed": 0, "bytes_max": 1 << 20}),
    ("check", (memoryview(PAYLOAD or b""), KNOWN, -3), {"compressed": False, "bytes_max": 1 << 20}),
    ("check", (memoryview(PAYLOAD or b""), KNOWN, 3), {"compressed": False, "bytes_max": 1 << 70}),
]


@needs_native
def test_invalid_arguments_give_the_twins_outcome() -> None:
    functions = accelerated(*MODULES)
    for name, arguments, named in NOTHING_OF_THAT_KIND:
        function = functions[name]
        with python_only():
            expected = outcome(twin_of(function) or function, *arguments, **named)

        assert outcome(function, *arguments, **named) == expected, (name, arguments, named)


def test_an_invalid_placement_does_not_change_the_chunk() -> None:
    for placement in ((1, 2, 3, 4, 5, 1 << 32), (1, 2, 3, 4, 5, "6")):
        chunk = bytearray(SMALL)
        with pytest.raises(struct.error):
            place_chunk(chunk, 0, placement)  # type: ignore[arg-type]
        assert chunk == SMALL


# --- checksums ---------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("name", ["crc32c", "crc32c_by_tables"])
def test_checksums_agree_with_the_package_for_any_length_and_address(name: str) -> None:
    made = alone(name)
    data = memoryview(random.Random(1).randbytes(60_000))
    lengths = [*range(200), 767, 768, 769, 1535, 1536, 1543, 24_575, 24_576, 24_577, 24_600, 49_152, 50_001]
    for length in lengths:
        for start in (0, 1, 3, 4, 7):
            part = data[start : start + length]
            assert made(part) == crc32c(part)
            assert made(part, 0xDEADBEEF) == crc32c(part, 0xDEADBEEF)


# --- text --------------------------------------------------------------------------------------------------


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@needs_native
def test_the_check_of_utf_8_agrees_with_python() -> None:
    check = alone("check")
    edges = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
    texts = [bytes(each) for count in (1, 2) for each in product(range(0x80, 0x100), *[edges] * (count - 1))]
    texts += [bytes(each) for each in product(range(0xE0, 0x100), edges, edges)]
    texts += [bytes(each) for each in product(range(0xEF, 0x100), edges, (0x7F, 0x80, 0xBF, 0xC0), (0x7F, 0x80, 0xBF))]
    wrong = []
    for text in texts:
        nodes = bytes([Kind.TEXT | Places.SAME << ENCODING_SHIFT, len(text)])
        payload = memoryview(put_prefix(nodes, 0, compressed=False) + text)
        good = outcome(check, payload, TEXT_KNOWN, 1, compressed=False, bytes_max=1 << 20).error is None
        if good != is_utf8(text):
            wrong.append(text)

    assert wrong == []
    assert sum(map(is_utf8, texts)) > 100


# --- memory ------------------------------------------------------------------------------------------------


def good_and_bad(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Callable[[], Any]]:
    """A call with valid arguments, and one with damaged ones. Not with the twin: numpy keeps its own memory."""
    spoilt = bytearray(arguments[0])
    if spoilt:
        spoilt[len(spoilt) // 2] ^= 1
        spoilt[3] ^= 1
    function = alone(name)
    return [
        lambda: outcome(function, *arguments, **named),
        lambda: outcome(function, memoryview(bytes(spoilt)), *arguments[1:], **named),
    ]


@needs_native
@pytest.mark.parametrize(("name", "arguments", "named"), GOOD)
def test_a_call_leaks_no_references_and_no_memory(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    calls = good_and_bad(name, arguments, named)
    # Numbers may be immortal, and then have no meaningful count.
    held = [each for each in (*arguments, TYPES.get(name), b"KERA") if each is not None and not isinstance(each, int)]

    def rounds(number: int) -> tuple[int, int]:
        """The growth of references and of memory."""
        references, memory = sum(map(sys.getrefcount, held)), tracemalloc.get_traced_memory()[0]
        for _ in range(number):
            for call in calls:
                call()
        gc.collect()  # errors are in reference cycles
        return sum(map(sys.getrefcount, held)) - references, tracemalloc.get_traced_memory()[0] - memory

    gc.freeze()  # so that collections are quick; gc.unfreeze() would make those of later tests slow
    tracemalloc.start()
    try:
        # Memory that is allocated only once does not grow in every round.
        found = [rounds(100) for _ in range(3)]
    finally:
        tracemalloc.stop()
    assert min(references for references, _ in found) < 100
    assert min(memory for _, memory in found) < 100 * 16


@needs_native
@pytest.mark.parametrize(("name", "arguments", "named"), GOOD)
def test_a_buffer_is_released_after_a_call(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    function = accelerated(*MODULES)[name]
    for data in (bytearray(arguments[0]), bytearray(len(arguments[0]))):
        outcome(function, data, *arguments[1:], **named)
        data.append(0)  # BufferError while a view of it exists


@needs_native
def test_a_bound_function_releases_its_type() -> None:
    assert native.native is not None
    references = sys.getrefcount(ChunkHeader)
    for _ in range(1000):
        native.native.bind("verify_header", lambda: None, ChunkHeader)
        native.native.layout()
        with pytest.raises(TypeError):
            native.native.bind("verify_header", lambda: None, None)
    assert sys.getrefcount(ChunkHeader) - references < 20


@needs_native
def test_headers_are_tuples_tracked_by_the_garbage_collector() -> None:
    header = alone("verify_header")(SMALL)
    assert type(header) is ChunkHeader
    assert gc.is_tracked(header)
    assert header == verify_chunk(SMALL)
    assert hash(header) == hash(tuple(header))


@needs_native
def test_a_refusal_has_no_context() -> None:
    with pytest.raises(Refused) as caught:
        alone("verify_header")(SMALL, 1 << 70)
    assert caught.value.__context__ is None
    assert check_headers(memoryview(b"")) is None


# --- batches of lean payloads ------------------------------------------------------------------------------

PLAIN = pa.record_batch({"number": [n * n * 10**9 for n in range(3000)], "text": ["x" * (n % 7) for n in range(3000)]})


def decoded(buffer: pa.Buffer, batch: pa.RecordBatch) -> pa.RecordBatch:
    return lean.decode(buffer, batch.schema, records=batch.num_rows, codec=None, bytes_max=1 << 20, trusted=True)


def payload_of(batch: pa.RecordBatch) -> bytearray:
    payload = lean.encode(batch, None, bytes_max=1 << 20)
    assert payload is not None
    return bytearray(payload)


def is_held(memory: bytearray) -> bool:
    try:
        memory += b"x"
    except BufferError:
        return True
    del memory[-1:]
    return False


@needs_native
@pytest.mark.parametrize("batch", [BATCH, PLAIN], ids=["packed", "plain"])
def test_a_payload_is_held_as_long_as_any_of_its_columns(batch: pa.RecordBatch) -> None:
    memory = payload_of(batch)
    found = decoded(pa.py_buffer(memory), batch)
    column = found.column(1)
    assert found.equals(batch)
    del found
    assert is_held(memory)
    assert column.equals(batch.column(1))
    del column
    assert not is_held(memory)


@needs_native
def test_the_last_column_may_be_freed_on_another_thread() -> None:
    memory = payload_of(PLAIN)
    held = [decoded(pa.py_buffer(memory), PLAIN)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert not is_held(memory)


@needs_native
def test_a_refused_payload_is_not_held() -> None:
    memory = payload_of(PLAIN)
    for end in (0, 1, 5, len(memory) - 1):
        cut = memory[:end]
        with pytest.raises(CorruptChunk):
            decoded(pa.py_buffer(cut), PLAIN)
        assert not is_held(cut)


@needs_native
def test_a_batch_whose_import_fails_is_released() -> None:
    assert native.native is not None
    memory, schema = payload_of(PLAIN), PLAIN.schema
    kind = native.native.lean_type(schema)

    def refuse(_address: int, _schema: pa.Schema) -> None:
        raise Refused

    with pytest.raises(Refused):
        native.native.decode_in_place(memory, kind, schema, PLAIN.num_rows, 1 << 20, refuse)
    assert not is_held(memory)


@needs_native
def test_large_columns_are_read_in_place() -> None:
    memory = payload_of(PLAIN)
    buffer = pa.py_buffer(memory)
    values = decoded(buffer, PLAIN).column(0).buffers()[1]
    assert buffer.address <= values.address < buffer.address + buffer.size


@needs_native
def test_invalid_schemas_and_types_are_refused() -> None:
    assert native.native is not None
    assert native.native.lean_type(pa.schema([("a", pa.string_view())])) is None
    assert native.native.lean_type(pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))])) is None
    with pytest.raises(AttributeError):
        native.native.lean_type(7)
    with pytest.raises(TypeError):
        native.native.decode_in_place()
    for kind in (None, 7):
        with pytest.raises((TypeError, ValueError)):
            native.native.decode_in_place(b"", kind, PLAIN.schema, 1, 1, None)
        with pytest.raises((TypeError, ValueError)):
            native.native.join_chunks(b"", 0, kind, PLAIN.schema, 1, True, False, 1, 1, None)
    with pytest.raises(TypeError):
        native.native.join_chunks()


@needs_native
@pytest.mark.parametrize("ends", [[3], [0, 1, 1, 3], [2], []])
@pytest.mark.parametrize("rows", [BATCH, PLAIN, BATCH.slice(1, 2).slice(0)], ids=["packed", "plain", "slice"])
@pytest.mark.parametrize("order", [None, [2, 0, 1], [1, 1, 1]])
def test_payloads_of_parts_agree_with_python(rows: pa.RecordBatch, ends: list[int], order: list[int] | None) -> None:
    bounds = array("I", [min(end, rows.num_rows) for end in ends])
    last = bounds[-1] if bounds else 0
    numbers = None if order is None else np.resize(np.array(order) % rows.num_rows, last)
    made = alone("begin_chunks")(rows, numbers, bounds, 1 << 20)
    twin = twin_of(begin_chunks)
    assert twin is not None
    with python_only():
        assert made == twin(rows, numbers, bounds, 1 << 20)


@needs_native
@pytest.mark.parametrize("ends", [[4], [2, 1], array("Q", [3]), array("i", [3]), [3, 2**32 - 1]])
@pytest.mark.parametrize("order", [None, np.array([0, 1, 2])])
def test_invalid_parts_are_left_to_the_twin(ends: Any, order: Any) -> None:
    with pytest.raises(Refused):
        alone("begin_chunks")(BATCH, order, ends if isinstance(ends, array) else array("I", ends), 1 << 20)


@needs_native
def test_ends_that_do_not_ascend_are_left_to_the_twin() -> None:
    """Only the sanitizers of `make test-native-asan` detect reads of rows behind the end of the order."""
    with pytest.raises(Refused):
        alone("begin_chunks")(BATCH, np.zeros(1, np.int64), array("I", [300, 1]), 1 << 20)


@needs_native
@pytest.mark.parametrize("order", [[0, 3], [-1, 0], [0], [0, 1, 2], np.array([0, 1], np.int32), [0, 2**40]])
def test_invalid_rows_are_left_to_the_twin(order: Any) -> None:
    with pytest.raises(Refused):
        alone("begin_chunks")(BATCH, np.asarray(order), array("I", [2]), 1 << 20)


RECORDS = [b"a" * n for n in (0, 1, 300, 2)]
TIMES = array("q", [5, 5, 7, 1 << 40])
KEYS: list[Any] = [
    None,
    [(b"a",), (b"b",), (b"c",), (b"d",)],
    [(b"",)] * 4,
    [()] * 4,
    [(b"a", b"bc"), (), (b"" * 300,), (b"d",)],
]


@needs_native
@pytest.mark.parametrize("keys", KEYS)
def test_a_payload_of_values_and_keys_equals_that_of_a_batch(keys: Any) -> None:
    batch = records_to_batch(RECORDS, TIMES, keys, None)
    for times in (TIMES, np.array(TIMES)):
        made = alone("encode_records")(RECORDS, times, keys, 1 << 20)
        with python_only():
            assert made == lean.encode(batch, None, bytes_max=1 << 20)


@needs_native
@pytest.mark.parametrize(
    "arguments",
    [
        (tuple(RECORDS), TIMES, None, 1 << 20),
        ([*RECORDS[1:], None], TIMES, None, 1 << 20),
        ([*RECORDS[1:], bytearray(b"x")], TIMES, None, 1 << 20),
        (RECORDS[1:], TIMES, None, 1 << 20),
        (RECORDS, array("d", TIMES), None, 1 << 20),
        (RECORDS, array("Q", TIMES), None, 1 << 20),
        (RECORDS, list(TIMES), None, 1 << 20),
        (RECORDS, TIMES, None, -1),
        ([b""] * 2000, array("q", [0] * 2000), None, 100),
        (RECORDS, TIMES, [(b"k",)] * 3, 1 << 20),
        (RECORDS, TIMES, ((b"k",),) * 4, 1 << 20),
        (RECORDS, TIMES, [(b"k",)] * 3 + [None], 1 << 20),
        (RECORDS, TIMES, [(b"k",)] * 3 + [[b"k"]], 1 << 20),
        (RECORDS, TIMES, [(b"k",)] * 3 + [(None,)], 1 << 20),
    ],
)
def test_other_kinds_of_records_are_left_to_the_twin(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(Refused):
        alone("encode_records")(*arguments)


ORDER, ENDS = np.array([2, 0, 1]), array("I", [1, 3])


@needs_native
def test_encoding_and_decoding_leak_no_references_and_no_memory() -> None:
    def use() -> None:
        for rows in (BATCH, PLAIN):
            lean.encode(rows, None, bytes_max=1 << 20)
            decoded(pa.py_buffer(payload_of(rows)), rows)
            for order in (None, ORDER):
                alone("begin_chunks")(rows, order, ENDS, 1 << 20)
            with pytest.raises(Refused):
                alone("begin_chunks")(rows, ORDER[::-1], ENDS, 1 << 20)
        for keys in KEYS:
            alone("encode_records")(RECORDS, TIMES, keys, 1 << 20)
            with pytest.raises(Refused):
                alone("encode_records")([*RECORDS[1:], None], TIMES, keys, 1 << 20)
        alone("seal_chunks")(chunks, SIZES, *OWN, *COMMON)
        with pytest.raises(Refused):
            alone("seal_chunks")(chunks, SIZES, *OWN[:5], TIMES, *COMMON)
        with pytest.raises(Refused):
            alone("seal_chunks")(chunks, SIZES[1:], *OWN, *COMMON)

    chunks = unsealed()
    held = (BATCH, PLAIN, BATCH.schema, RECORDS, TIMES, *RECORDS, *KEYS[1:], chunks, SIZES, ORDER, ENDS, *OWN)
    use()
    gc.collect()
    references, memory = sum(map(sys.getrefcount, held)), pa.total_allocated_bytes()
    for _ in range(50):
        use()
    gc.collect()
    assert sum(map(sys.getrefcount, held)) == references
    assert pa.total_allocated_bytes() == memory
