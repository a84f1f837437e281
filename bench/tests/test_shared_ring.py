"""The work on the bytes of a chunk on its way through a socket and through a ring."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.shared_ring import WAYS, Slots, Take, address_of, compile_taking, taking
from bench.small_requests import NoCompiler
from kera.core.base.settings import KIB
from kera.core.format.checksum import crc32c


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compile_taking(tmp_path_factory.mktemp("taking"))
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(params=WAYS)
def take(request: pytest.FixtureRequest, library: Path) -> Take:
    return taking(library, request.param)


@pytest.mark.parametrize("length", [1, 24 * KIB - 1, 24 * KIB, 24 * KIB + 1, 100 * KIB + 7])
def test_all_bytes_are_copied_and_checked(take: Take, length: int) -> None:
    chunk, copy = bytearray(range(256)) * (length // 256 + 1), bytearray(length)
    del chunk[length:]
    assert take(address_of(memoryview(copy)), address_of(memoryview(chunk)), length) == crc32c(chunk)
    assert copy == chunk


def test_a_damaged_chunk_is_not_kept(take: Take) -> None:
    slots, chunk = Slots(take, 1), bytearray(b"chunk")
    checksum = crc32c(chunk)
    slots.keep(address_of(memoryview(chunk)), len(chunk), checksum)
    chunk[0] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        slots.keep(address_of(memoryview(chunk)), len(chunk), checksum)
    assert slots.chunks == 1
