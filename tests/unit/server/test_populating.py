"""`kera.server.populating`: the kernel gives memory page by page, and each single call is short."""

import mmap
from unittest.mock import Mock

import pytest

from kera.server.populating import PIECE_BYTES, populate

POPULATE_WRITE = 23


@pytest.mark.parametrize("size", [mmap.PAGESIZE, PIECE_BYTES, 2 * PIECE_BYTES + mmap.PAGESIZE])
def test_all_memory_is_populated_in_pieces(size: int) -> None:
    memory = Mock(__len__=lambda _: size)
    populate(memory)

    huge, *pieces = [call.args for call in memory.madvise.call_args_list]
    assert huge == (mmap.MADV_HUGEPAGE,)
    assert {advice for advice, _, _ in pieces} == {POPULATE_WRITE}
    assert [at for _, at, _ in pieces] == [*range(0, size, PIECE_BYTES)]
    assert sum(length for _, _, length in pieces) == size
    assert max(length for _, _, length in pieces) <= PIECE_BYTES


def test_populating_keeps_the_contents() -> None:
    memory = mmap.mmap(-1, 3 * PIECE_BYTES)
    memory[PIECE_BYTES + 7] = 1
    populate(memory)

    assert (memory[PIECE_BYTES + 7], memory[PIECE_BYTES + 8]) == (1, 0)


def test_a_kernel_without_populate_is_no_error() -> None:
    memory = Mock(__len__=lambda _: PIECE_BYTES)
    memory.madvise.side_effect = OSError(22, "Invalid argument")
    populate(memory)
