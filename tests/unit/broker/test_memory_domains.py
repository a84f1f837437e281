"""Memory domains: segments of different domains are in different files, and no domain sees data of another."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.broker.log.arena import Arena, Slot, SlotContent
from kera.broker.log.arena_file import ArenaFile, remove_orphans
from kera.core.base.blocks import FileCalls
from kera.core.errors import ArenaFull
from tests.unit.broker.support import SLOT_BYTES

MakeArena = Callable[..., Arena]
MARK = b"secret of the other domain"
CONTENT = SlotContent(7, 1, 2, 5, 3, 11, 2048, 1024, closed=False)


@contextmanager
def mapped(file: ArenaFile) -> Iterator[mmap.mmap]:
    """Map a file, as a reader does that got it and keeps it."""
    fd = file.open_for_readers()
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            yield memory
    finally:
        os.close(fd)


def write(slot: Slot) -> Slot:
    slot.assign(CONTENT)
    slot.view[:] = (MARK * (len(slot.view) // len(MARK) + 1))[: len(slot.view)]
    return slot


def used_bytes(arena: Arena) -> int:
    """Shared memory of all files of an arena, without their heads and rows."""
    files = {slot.file for slot in arena.slots()}
    return sum(
        file.path.stat().st_blocks * 512 - (file.geometry.slots_at if file.path.exists() else 0) for file in files
    )


def create(shm_dir: Path, slots: int = 4, **calls: Any) -> Arena:
    return Arena.create(
        shm_dir,
        arena_bytes=slots * SLOT_BYTES,
        slot_bytes=SLOT_BYTES,
        data_dir=Path("/data"),
        ephemeral=False,
        calls=FileCalls(**calls),
    )


def test_data_of_a_domain_is_in_no_mapping_of_another(make_arena: MakeArena) -> None:
    arena = make_arena(slots=4)
    with ExitStack() as stack:
        default = stack.enter_context(mapped(arena.file()))
        theirs = write(arena.allocate("eu"))
        eu = stack.enter_context(mapped(theirs.file))
        ours = arena.allocate()
        ours.view[:4] = b"ours"

        assert MARK in eu[:]
        assert MARK not in default[:]
        assert default[ours.arena_offset :][:4] == b"ours"
        assert eu[ours.arena_offset :][:4] == bytes(4)


def test_the_content_of_a_slot_is_gone_when_another_domain_gets_it(make_arena: MakeArena) -> None:
    """Neither readers of its new memory nor readers that keep its old file see the old content."""
    arena = make_arena(slots=1)
    slot = write(arena.allocate("eu"))
    with mapped(slot.file) as eu:
        assert MARK in eu[:]
        slot.retire()
        again = arena.allocate("us")
        with mapped(again.file) as us:
            assert again is slot
            assert MARK not in us[:]
            assert MARK not in eu[:]
            assert bytes(again.view) == bytes(len(again.view))


def test_slots_of_all_domains_together_take_no_more_than_the_arena_has(make_arena: MakeArena) -> None:
    arena = make_arena(slots=4, slot_bytes=16 * 4096)
    for turn in range(20):
        write(arena.allocate(f"domain-{turn % 3}")).retire()
        assert used_bytes(arena) <= 4 * 16 * 4096
    for domain in ("a", "b", "default", "c"):
        write(arena.allocate(domain))

    assert used_bytes(arena) == 4 * 16 * 4096
    with pytest.raises(ArenaFull):
        arena.allocate("d")


def test_a_slot_of_the_same_domain_is_taken_first(make_arena: MakeArena) -> None:
    arena = make_arena(slots=4)
    eu, us = arena.allocate("eu"), arena.allocate("us")
    us.retire()
    eu.retire()

    assert [arena.allocate("us"), arena.allocate("eu")] == [us, eu]


def test_the_generation_in_the_old_file_grows_when_a_slot_changes_its_domain(make_arena: MakeArena) -> None:
    arena = make_arena(slots=1)
    slot = arena.allocate("eu")
    file, pushed = slot.file, slot.generation
    slot.retire()
    arena.allocate("us").retire()
    seen = int.from_bytes(file.row(0)[:8], "little")
    assert seen > pushed
    arena.allocate("eu")

    assert int.from_bytes(file.row(0)[:8], "little") >= seen


def test_a_slot_that_gets_no_memory_is_an_error_and_is_tried_again(shm_dir: Path) -> None:
    full = False

    def reserve(fd: int, offset: int, size: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, size)

    arena = create(shm_dir, slots=2, reserve=reserve)
    arena.file("us")
    full = True
    for _ in range(3):
        with pytest.raises(ArenaFull, match="'us': No space left"):
            arena.allocate("us")
    assert arena.free_slots == 2, "though none of them has memory any more"
    full = False

    assert [arena.allocate(domain).file.domain for domain in ("us", "default")] == ["us", "default"]
    arena.close()


def test_pages_that_readers_touched_in_holes_are_taken_back_when_memory_is_short(make_arena: MakeArena) -> None:
    arena = make_arena(slots=4)
    file = arena.allocate("eu").file
    file.note_given()

    def reserve(fd: int, offset: int, size: int) -> None:
        if used_bytes(arena) > 4 * SLOT_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, size)

    with mapped(file) as theirs:
        assert len(theirs[:]) == file.geometry.file_bytes  # touch each page
        assert used_bytes(arena) > 4 * SLOT_BYTES
        file._calls = FileCalls(reserve=reserve)
        assert write(arena.allocate("eu")).file is file
        assert used_bytes(arena) <= 4 * SLOT_BYTES


def test_a_renewed_domain_gets_memory_without_old_mappings(make_arena: MakeArena) -> None:
    arena = make_arena(slots=4)
    before = arena.allocate("eu")
    file = before.file
    with mapped(file) as kept:
        arena.renew("eu")
        after = write(arena.allocate("eu"))

        assert after.file is not file
        assert MARK not in kept[:]
        assert arena.is_renewed(file)
        assert file.path.exists(), "a segment is in it"
        before.retire()
        assert write(arena.allocate("eu")) is before
        assert before.file is after.file
        assert not file.path.exists()
        assert MARK not in kept[:]


def test_the_file_of_the_default_domain_can_be_renewed(make_arena: MakeArena) -> None:
    arena = make_arena(slots=4)
    with mapped(arena.file()) as kept:
        arena.renew("default")
        for _ in range(4):
            write(arena.allocate())

        assert MARK not in kept[:]
        assert used_bytes(arena) == 4 * SLOT_BYTES


def test_a_killed_launch_leaves_the_segments_of_all_domains_to_the_next(shm_dir: Path) -> None:
    before = create(shm_dir)
    kept = {}
    for domain in ("default", "eu", "us", "eu"):
        slot = write(before.allocate(domain))
        kept[slot.index] = domain
    before.slot(next(index for index, domain in kept.items() if domain == "us")).retire()
    before.renew("eu")
    before.close(keep=True)
    arena = Arena.attach(shm_dir, Path("/data"))
    assert arena is not None

    found = {slot.index: slot.file.domain for slot in arena.slots() if slot.content is not None}
    assert found == {index: domain for index, domain in kept.items() if domain != "us"}
    assert all(MARK in bytes(arena.slot(index).view) for index in found)
    assert arena.free_slots == 1
    last = arena.allocate("eu")
    assert last.file is arena.file("eu")
    assert bytes(last.view) == bytes(len(last.view))
    arena.close()


def test_a_file_that_a_killed_launch_gave_to_readers_gets_no_new_data(shm_dir: Path) -> None:
    """Only that launch knew its readers, and a reader that has lost the right meanwhile may still look."""
    before = create(shm_dir)
    kept, given = before.allocate("us"), before.allocate("eu")
    given.assign(CONTENT)
    given.file.note_given()
    with mapped(given.file) as theirs:
        before.close(keep=True)
        arena = Arena.attach(shm_dir, Path("/data"))
        assert arena is not None

        assert arena.slot(given.index).content == CONTENT
        assert arena.file("us").path == kept.file.path
        assert write(arena.allocate("eu")).file.path != given.file.path
        assert MARK not in theirs[:]
        arena.slot(given.index).retire()
        assert write(arena.allocate("eu")).index == given.index
        assert not given.file.path.exists()
        assert MARK not in theirs[:]
        arena.close()


def test_the_next_launch_gives_memory_to_slots_without_it(shm_dir: Path) -> None:
    def fails(_fd: int, offset: int, _size: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = create(shm_dir, slots=1)
    path = before.file("eu").path
    before.close(keep=True)
    again = Arena.attach(shm_dir, Path("/data"))
    assert again is not None
    again.file("eu")._calls = FileCalls(reserve=fails)  # others take the memory while the slot changes its file
    with pytest.raises(ArenaFull):
        again.allocate("eu")
    again.close(keep=True)
    assert path.exists()
    arena = Arena.attach(shm_dir, Path("/data"))
    assert arena is not None
    assert [slot.has_memory for slot in arena.slots()] == [False]

    write(arena.allocate("eu"))
    assert used_bytes(arena) == SLOT_BYTES
    arena.close()


def test_all_files_of_a_dead_broker_are_orphans(shm_dir: Path) -> None:
    before = create(shm_dir)
    before.allocate("eu")
    before.close(keep=True)

    assert len(remove_orphans(shm_dir, Path("/other"))) == 0
    assert len(remove_orphans(shm_dir, Path("/data"))) == 2
