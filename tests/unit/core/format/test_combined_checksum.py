"""The combined checksum of chunks: equal to the checksum of their bytes, unless the bytes have changed since."""

from __future__ import annotations

from array import array
from itertools import accumulate
from random import Random

import pytest

from kera.core.format.checksum import crc32c
from kera.core.format.combined_checksum import combined_checksum
from tests.unit.core.test_native import placed

pytestmark = pytest.mark.usefixtures("either_core")

SIZES = (0, 1, 63, 64, 65, 896, 5_000, 70_000, 300_000)


def chunks(*sizes: int) -> tuple[bytearray, array[int]]:
    """Chunks with payloads of these sizes, and the end of each."""
    each = [placed(Random(number).randbytes(size), number) for number, size in enumerate(sizes)]
    return bytearray(b"".join(each)), array("I", accumulate(map(len, each)))


@pytest.mark.parametrize("sizes", [(), *((size,) for size in SIZES), SIZES, SIZES[::-1], (896,) * 40])
@pytest.mark.parametrize("before", [0, 0xDEADBEEF])
def test_the_combined_checksum_is_the_checksum_of_the_bytes(sizes: tuple[int, ...], before: int) -> None:
    data, ends = chunks(*sizes)

    assert combined_checksum(data, 0, ends, before) == crc32c(data, before)


def test_the_combined_checksum_continues_chunk_by_chunk() -> None:
    data, ends = chunks(*SIZES)
    checksum = start = 0
    for end in ends:
        checksum = combined_checksum(data, start, array("I", [end]), checksum)
        start = end
        assert checksum == crc32c(data[:end])


def test_the_combined_checksum_differs_from_that_of_changed_bytes() -> None:
    data, ends = chunks(64, 896, 0)
    middle = range(ends[0], ends[1])
    for at in (*middle, len(data) - 128, len(data) - 1):
        data[at] ^= 1 << at % 8
        assert combined_checksum(data, 0, ends, 0) != crc32c(data), f"byte {at}"
        data[at] ^= 1 << at % 8
    assert combined_checksum(data, 0, ends, 0) == crc32c(data)


@pytest.mark.parametrize(
    ("start", "ends"), [(0, [127]), (0, [192, 1000]), (192, [192]), (0, [2000]), (-128, [192]), (256, [192])]
)
def test_invalid_ends_of_chunks_are_refused(start: int, ends: list[int]) -> None:
    data, _ = chunks(64, 64)

    with pytest.raises(ValueError, match=f"no chunks end there: from {start} on in {len(data)} bytes"):
        combined_checksum(data, start, array("I", ends), 0)
