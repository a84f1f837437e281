"""A launch that cannot read the data it finds does not start, and leaves the data as it is."""

import shutil
import struct

import pytest

from kera.core.errors import StartError
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import HEADER_CRC_AT, VERSIONS
from tests.unit.broker.restart_support import Launches, commit
from tests.unit.broker.support import CHUNK_BYTES


def of_newer_version(segment: memoryview | bytearray, at: int) -> None:
    """Make the chunk at `at` look as if a newer program had written it."""
    segment[at + 4] = max(VERSIONS) + 1
    struct.pack_into("<I", segment, at + HEADER_CRC_AT, crc32c(bytes(segment[at : at + HEADER_CRC_AT])))


@pytest.mark.parametrize("at", [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_chunks_of_a_newer_version_in_memory_stop_the_start_and_stay(launches: Launches, at: int) -> None:
    log = launches.begin()
    log.append_many(3)
    of_newer_version(log.entry.tail[0].slot.view, at)
    launches.kill()
    before = launches.engine.arena.path.read_bytes()

    with pytest.raises(StartError, match="newer program: it has chunks of format version 3"):
        launches.start()
    assert launches.engine.arena.path.read_bytes() == before


@pytest.mark.parametrize("index", ["whole", "gone"])
@pytest.mark.parametrize("at", [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_chunks_of_a_newer_version_in_a_file_stop_the_start_and_stay(launches: Launches, at: int, index: str) -> None:
    log = launches.begin()
    log.append_many(3)
    commit(log)
    launches.lose_host()
    path = launches.engine.store.path(1)
    content = bytearray(path.read_bytes())
    of_newer_version(content, at)
    path.write_bytes(content)
    if index == "gone":
        shutil.rmtree(launches.root / "index")

    for _ in range(2):
        with pytest.raises(StartError, match="newer program: it has chunks of format version 3"):
            launches.start()
        assert path.read_bytes() == content


def test_segments_larger_than_those_of_this_launch_stop_the_start(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    launches.kill()

    with pytest.raises(StartError, match="--segment-bytes 4096"):
        launches.start(slot_bytes=2048)
    assert launches.begin().read_all() == [0], "nothing has changed"
