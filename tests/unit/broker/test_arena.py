import contextlib
import errno
import fcntl
import gc
import json
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kera.broker.log.arena import Arena, SlotContent
from kera.broker.log.arena_file import remove_orphans
from kera.broker.log.arena_head import HEAD_BYTES, PAGE_BYTES, ROW_BYTES
from kera.core.base.blocks import FileCalls
from kera.core.errors import ArenaFull, InternalError, PathNotWritable, SharedMemoryTooSmall, StartError
from tests.unit.broker.support import SLOT_BYTES

MakeArena = Callable[..., Arena]
CONTENT = SlotContent(7, 1, 2, 5, 3, 11, 2048, 1024, closed=False)


def open_files(folder: Path) -> list[str]:
    """Files below `folder`, removed ones too, that this process has open."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that reads the directory
            names.append(str(descriptor.readlink()))
    return [name for name in names if name.startswith(f"{folder}/")]


def generation_in_file(arena: Arena, slot: int) -> int:
    """The generation of a slot, as seen by a reader that has only the file."""
    with arena.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        at = HEAD_BYTES + ROW_BYTES * slot
        return int.from_bytes(memory[at : at + 8], "little")


def create(shm_dir: Path, arena_bytes: int = 4 * SLOT_BYTES, **calls: Any) -> Arena:
    return Arena.create(
        shm_dir,
        arena_bytes=arena_bytes,
        slot_bytes=SLOT_BYTES,
        data_dir=Path("/data"),
        ephemeral=False,
        calls=FileCalls(**calls),
    )


# --- creation ----------------------------------------------------------------------------------------------


def test_the_head_of_the_file_describes_its_slots(shm_dir: Path) -> None:
    arena = create(shm_dir, arena_bytes=600 * 4096 + 4095)
    head = json.loads(arena.path.read_bytes()[:HEAD_BYTES].rstrip(b"\0"))
    slots_at = head.pop("slots_at")

    expected = {
        "given": 0,
        "format": 2,
        "data_dir": "/data",
        "lock": "",
        "ephemeral": False,
        "slot_bytes": 4096,
        "slots": 600,
    }
    assert head == expected
    assert slots_at % PAGE_BYTES == 0
    assert slots_at >= HEAD_BYTES + 64 * 600, "the rows must not reach into the first slot"
    assert [arena.slot(index).arena_offset for index in (0, 1, 599)] == [
        slots_at,
        slots_at + 4096,
        slots_at + 599 * 4096,
    ]
    assert arena.path.stat().st_size == slots_at + 600 * 4096
    assert arena.slot_count == arena.free_slots == 600
    arena.close()


def test_bytes_in_a_slot_are_in_the_file_at_its_offset(arena: Arena) -> None:
    slot = arena.slot(3)
    slot.view[5:10] = b"hello"

    assert arena.path.read_bytes()[slot.arena_offset :][:10] == bytes(5) + b"hello"


def test_all_memory_is_reserved_at_the_creation(make_arena: MakeArena) -> None:
    stat = make_arena(slots=64, slot_bytes=4096).path.stat()

    assert stat.st_blocks * 512 >= stat.st_size


def test_only_its_own_user_may_open_an_arena(arena: Arena) -> None:
    assert arena.path.stat().st_mode & 0o777 == 0o600
    assert arena.path.match(f"kera-{os.getuid()}-*.arena")


def test_an_arena_larger_than_the_file_system_is_refused_with_both_sizes_and_advice(
    shm_dir: Path,
) -> None:
    def fail(*_: int) -> None:
        pytest.fail("filled up what others need as well")

    with pytest.raises(SharedMemoryTooSmall) as raised:
        create(shm_dir, arena_bytes=1 << 50, reserve=fail)

    error = raised.value
    free = os.statvfs(shm_dir).f_bavail * os.statvfs(shm_dir).f_frsize
    assert error.attributes["path"] == str(shm_dir)
    assert 1 << 50 < error.attributes["needed_bytes"] < 1 << 51
    assert error.attributes["available_bytes"] == pytest.approx(free, rel=0.5)
    assert f"{error.attributes['available_bytes'] >> 20} MiB free" in error.message
    assert f"needs {-(-error.attributes['needed_bytes'] >> 20)} MiB" in error.message
    assert "--arena-bytes" in error.message
    assert "remount" in error.message
    assert isinstance(error, StartError)
    assert open_files(shm_dir) == []


@pytest.mark.parametrize(
    ("number", "refused"),
    [(errno.ENOSPC, SharedMemoryTooSmall), (errno.ENOMEM, SharedMemoryTooSmall), (errno.EIO, PathNotWritable)],
)
def test_an_arena_without_memory_fails_with_the_reason_and_leaves_no_file(
    shm_dir: Path, number: int, refused: type[StartError]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StartError) as raised:
        create(shm_dir, reserve=fail)

    assert type(raised.value) is refused
    assert list(shm_dir.iterdir()) == []
    assert open_files(shm_dir) == []


@pytest.mark.parametrize("name", ["missing", "file"])
def test_the_error_names_a_directory_that_cannot_take_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathNotWritable, match=name) as raised:
        create(tmp_path / name)

    assert raised.value.attributes == {"path": str(tmp_path / name)}


def test_a_failed_lock_leaves_no_file(shm_dir: Path) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    with pytest.raises(PathNotWritable, match="no locks available"):
        create(shm_dir, lock=fail)

    assert list(shm_dir.iterdir()) == []
    assert open_files(shm_dir) == []


def test_an_arena_removed_as_an_orphan_during_its_creation_is_created_again(
    shm_dir: Path,
) -> None:
    removed: list[Path | None] = []

    def other_broker_is_faster(fd: int, operation: int) -> None:
        if not removed:
            removed.append(None)
            removed[:] = remove_orphans(shm_dir, Path("/other"))
        fcntl.flock(fd, operation)

    arena = create(shm_dir, lock=other_broker_is_faster)

    assert len(removed) == 1, "the other broker took the file for an orphan: there was no lock yet"
    assert list(shm_dir.iterdir()) == [arena.path]
    assert remove_orphans(shm_dir, Path("/data")) == []
    arena.close()


def test_closing_removes_the_file_and_leaves_mapped_memory_as_it_is(shm_dir: Path) -> None:
    arena = create(shm_dir)
    slot = arena.slot(0)
    slot.view[:5] = b"hello"
    arena.close()

    assert list(shm_dir.iterdir()) == []
    assert bytes(slot.view[:5]) == b"hello"


# --- slots -------------------------------------------------------------------------------------------------


def test_the_last_retired_slot_is_allocated_first(arena: Arena) -> None:
    first, second, third = (arena.allocate() for _ in range(3))
    for slot in (second, first, third):
        slot.retire()

    assert [arena.allocate() for _ in range(3)] == [third, first, second]


def test_a_full_arena_is_a_retriable_error_until_a_slot_is_free(make_arena: MakeArena) -> None:
    arena = make_arena(slots=2)
    slot, _ = arena.allocate(), arena.allocate()
    with pytest.raises(ArenaFull, match="the 2 segments") as raised:
        arena.allocate()
    slot.retire()

    assert raised.value.retriable
    assert raised.value.attributes == {"slots": 2, "slot_bytes": 4096}
    assert arena.allocate() is slot


def test_the_generation_in_the_file_grows_each_time_a_slot_is_retired(arena: Arena) -> None:
    slot = arena.allocate()
    seen = [generation_in_file(arena, slot.index)]
    for _ in range(3):
        slot.retire()
        seen.append(generation_in_file(arena, slot.index))
        assert arena.allocate() is slot
        assert generation_in_file(arena, slot.index) == slot.generation

    assert seen == [1, 2, 3, 4]
    assert generation_in_file(arena, slot.index + 1) == 1, "other slots keep theirs"


def test_a_retired_slot_is_used_again_only_after_its_last_lease(make_arena: MakeArena) -> None:
    arena = make_arena(slots=1)
    slot = arena.allocate()
    slot.view[:4] = b"data"
    slot.lease()
    slot.lease()
    slot.retire()
    slot.release()

    assert arena.free_slots == 0
    assert generation_in_file(arena, 0) == 1
    with pytest.raises(ArenaFull):
        arena.allocate()
    assert bytes(slot.view[:4]) == b"data"

    slot.release()

    assert arena.free_slots == 1
    assert generation_in_file(arena, 0) == 2


def test_the_end_of_a_lease_does_not_free_a_slot_that_is_in_use(make_arena: MakeArena) -> None:
    arena = make_arena(slots=1)
    arena.allocate().retire()
    slot = arena.allocate()
    slot.lease()
    slot.release()

    assert arena.free_slots == 0


@pytest.mark.parametrize("leased", [False, True])
def test_retiring_a_slot_twice_is_an_internal_error_and_frees_no_slot_twice(
    make_arena: MakeArena, leased: bool
) -> None:
    arena = make_arena(slots=2)
    slot = arena.allocate()
    if leased:
        slot.lease()
    slot.retire()
    with pytest.raises(InternalError, match="retired twice"):
        slot.retire()

    assert arena.free_slots == (1 if leased else 2)


def test_releasing_a_slot_without_a_lease_is_an_internal_error_and_changes_nothing(make_arena: MakeArena) -> None:
    arena = make_arena(slots=1)
    slot = arena.allocate()
    with pytest.raises(InternalError, match="released twice"):
        slot.release()
    slot.retire()

    assert arena.free_slots == 1


@pytest.mark.parametrize("retired", [False, True])
def test_the_end_of_a_last_lease_wakes_waiters_for_memory(make_arena: MakeArena, retired: bool) -> None:
    arena = make_arena(slots=1)
    told: list[int] = []
    slot = arena.allocate()
    slot.lease()
    slot.lease()
    if retired:
        slot.retire()
    arena.released.listen(lambda: told.append(arena.free_slots))
    slot.release()
    assert told == []
    slot.release()

    assert told == [1 if retired else 0], "a slot in use may now be taken for another segment"


# --- rows --------------------------------------------------------------------------------------------------


def row_in_file(arena: Arena, slot: int) -> bytes:
    at = HEAD_BYTES + ROW_BYTES * slot
    return arena.path.read_bytes()[at : at + ROW_BYTES]


def test_a_row_in_the_file_describes_the_segment_in_its_slot(arena: Arena) -> None:
    slot = arena.slot(2)
    slot.assign(CONTENT)
    slot.lease()

    assert row_in_file(arena, 2) == struct.pack("<4Q8I", 1, 7, 5, 11, 1, 2, 3, 1, 2048, 1024, 1, 0)
    assert row_in_file(arena, 1) == struct.pack("<4Q8I", 1, *[0] * 11), "a free slot has a generation and nothing else"
    assert slot.content == CONTENT


def test_a_row_follows_its_segment(arena: Arena) -> None:
    slot = arena.allocate()
    seen = [(slot.content, slot.open)]
    slot.assign(CONTENT)
    slot.write_head(3072)
    slot.write_durable_head(2048)
    seen.append((slot.content, slot.open))
    slot.write_closed()
    seen.append((slot.content, slot.open))
    slot.retire()
    seen.append((slot.content, slot.open))

    grown = CONTENT._replace(head=3072, durable_head=2048)
    assert seen == [(None, False), (grown, True), (grown._replace(closed=True), False), (None, False)]


# --- the arena of a launch that was killed -----------------------------------------------------------------


def kill(arena: Arena) -> None:
    """Release the lock, as the kernel does when the owner dies."""
    arena.close(keep=True)


def attach(shm_dir: Path, data_dir: str = "/data") -> Arena | None:
    return Arena.attach(shm_dir, Path(data_dir))


def test_a_killed_launch_leaves_its_segments_to_the_next(shm_dir: Path) -> None:
    before = create(shm_dir)
    slots = [before.allocate() for _ in range(3)]
    slots[1].assign(CONTENT)
    slots[1].view[:5] = b"hello"
    kill(before)
    arena = attach(shm_dir)
    assert arena is not None

    assert [slot.content for slot in arena.slots()] == [None, CONTENT, None, None]
    assert bytes(arena.slot(1).view[:5]) == b"hello"
    assert (arena.path, arena.slot_bytes, arena.slot_count, arena.free_slots) == (before.path, SLOT_BYTES, 4, 3)
    assert arena.slot(1) not in [arena.allocate() for _ in range(3)]
    arena.close()


def test_generations_go_on_growing_over_launches(shm_dir: Path) -> None:
    before = create(shm_dir)
    before.allocate().retire()
    kill(before)
    arena = attach(shm_dir)
    assert arena is not None
    arena.slot(1).retired = False
    assert [slot.generation for slot in arena.slots()] == [2, 1, 1, 1]
    arena.allocate().retire()

    assert sum(slot.generation for slot in arena.slots()) == 6
    arena.close()


def test_slots_leased_in_the_last_launch_are_kept_until_their_release(shm_dir: Path) -> None:
    before = create(shm_dir)
    used, free = before.allocate(), before.allocate()
    used.assign(CONTENT)
    for slot in (used, used, free):
        slot.lease()
    free.retire()
    kill(before)
    arena = attach(shm_dir)
    assert arena is not None

    assert sorted(slot.index for slot in arena.inherited) == [used.index, free.index]
    assert [slot.leases for slot in arena.inherited] == [1, 1], "all leases of the last launch are one"
    assert arena.free_slots == 2
    for slot in arena.inherited:
        slot.release()
    assert arena.free_slots == 3
    assert arena.slot(used.index).content == CONTENT
    arena.slot(used.index).retire()
    assert arena.free_slots == 4
    arena.close()


def test_the_arena_of_a_living_broker_is_not_taken_over(shm_dir: Path) -> None:
    arena = create(shm_dir)

    assert attach(shm_dir) is None
    arena.close()


def test_an_arena_that_was_taken_over_has_one_owner(shm_dir: Path) -> None:
    kill(create(shm_dir))
    arena = attach(shm_dir)
    assert arena is not None

    assert attach(shm_dir) is None
    assert remove_orphans(shm_dir, Path("/data")) == []
    arena.close()


@pytest.mark.parametrize("change", ["none", "data_dir", "ephemeral", "format", "slots", "size", "head"])
def test_an_arena_of_another_broker_or_with_damage_is_not_taken_over(shm_dir: Path, change: str) -> None:
    before = create(shm_dir)
    head = json.loads(before.path.read_bytes()[:HEAD_BYTES].rstrip(b"\0"))
    kill(before)
    changed = {"data_dir": "/other", "ephemeral": True, "format": 1, "slots": 5}
    text = b"{" if change == "head" else json.dumps(head | {k: v for k, v in changed.items() if k == change}).encode()
    with before.path.open("r+b") as file:
        file.write(text.ljust(HEAD_BYTES, b"\0"))
        if change == "size":
            file.truncate(HEAD_BYTES + PAGE_BYTES)
    path = before.path
    del before
    gc.collect()
    arena = attach(shm_dir)

    assert (arena is not None) == (change == "none")
    assert bool(open_files(shm_dir)) == (change == "none")
    if arena is not None:
        arena.close()
    path.unlink(missing_ok=True)
