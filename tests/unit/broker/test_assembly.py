"""The memory for assembling segments: bounded, reused, and never shared by two segments."""

import errno
from pathlib import Path

import pytest

from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.recovery.assembly import Assembly, Target
from kera.broker.recovery.layout import Places
from kera.broker.storage.disk import BLOCK_BYTES

LENGTH = 3 * BLOCK_BYTES - 64


def target(number: int, length: int = LENGTH, *, holes: bool = False) -> Target:
    record = SegmentRecord(0, length, False, 1, 0, 0, 1, 0, 0, 0)
    address = SegmentAddress(1, 0, 0, number, 0)
    return Target(address, record, Places(), Path("nowhere"), number, holes=holes)


@pytest.fixture
def assembly() -> Assembly:
    """An assembly with room for two segments."""
    return Assembly(6 * BLOCK_BYTES)


def test_memory_is_bounded_and_a_segment_without_memory_stays_in_its_file(assembly: Assembly) -> None:
    targets = [target(number) for number in range(3)]
    found = [assembly.begin(each) for each in targets]
    assert [memory is not None and len(memory) for memory in found] == [3 * BLOCK_BYTES, 3 * BLOCK_BYTES, False]
    assert assembly.begin(targets[0]) is found[0], "all of a segment is in one place"
    for each in [targets[0], *targets]:
        assembly.end(each)
    assembly.release(targets[0])
    assert assembly.begin(targets[2]) is None, "part of it is in its file"
    assert assembly.begin(target(3)) is not None


def test_reused_memory_is_empty(assembly: Assembly) -> None:
    first = target(0)
    memory = assembly.begin(first)
    assert memory is not None
    memory[:] = bytes([7]) * len(memory)
    assembly.end(first)
    assembly.release(first)
    assembly.release(first)
    again, third = assembly.begin(target(1, LENGTH - BLOCK_BYTES)), assembly.begin(target(2))
    assert again is memory
    assert not any(again)
    assert third is not None
    assert third is not memory
    assert assembly.begin(target(3)) is None, "it was released once"


def test_released_memory_is_not_reused_while_a_write_to_it_goes_on(assembly: Assembly) -> None:
    first = target(0)
    memory = assembly.begin(first)
    assembly.release(first)
    others = [assembly.begin(target(number)) for number in (1, 2)]
    assert None not in others
    assert all(other is not memory for other in others)
    assert assembly.begin(first) is None


def test_smaller_free_memory_makes_room_for_a_larger_segment(assembly: Assembly) -> None:
    small = [target(number) for number in range(2)]
    for each in small:
        assembly.begin(each)
        assembly.end(each)
        assembly.release(each)
    large = assembly.begin(target(2, 6 * BLOCK_BYTES))
    assert large is not None
    assert len(large) == 6 * BLOCK_BYTES


def test_a_segment_that_gets_no_memory_from_the_host_stays_in_its_file_and_costs_no_room(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as context:
        context.setattr("kera.broker.recovery.assembly.mmap.mmap", no_memory)
        assert [assembly.begin(target(number)) for number in range(2)] == [None, None]

    assert None not in [assembly.begin(target(number)) for number in (2, 3)]


def test_a_segment_with_holes_is_assembled_in_its_file(assembly: Assembly) -> None:
    assert assembly.begin(target(0, holes=True)) is None
