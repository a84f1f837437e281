"""A launch takes over its own memory only, whatever other files in the directory have such names."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.broker.log.arena import Arena
from kera.broker.log.arena_head import HEAD_BYTES
from kera.core.base.ids import EARLIEST
from kera.core.errors import StartError
from tests.examples import first_quick
from tests.unit.broker.restart_support import Launches, lost
from tests.unit.broker.support import CHUNK_BYTES

NOBODY = 65_534
CHUNKS = 6
Plant = Callable[[Path, bytes], None]


@pytest.fixture(autouse=True)
def _cleared(launches: Launches) -> Iterator[None]:
    yield
    for path in launches.shm_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif launches.running and path == launches.engine.arena.path:
            continue
        else:
            path.unlink()


def with_head(memory: bytes, **changed: Any) -> bytes:
    """The same memory with changed values in its head; None removes a value."""
    head = json.loads(memory[:HEAD_BYTES].rstrip(b"\0")) | changed
    text = json.dumps({name: value for name, value in head.items() if value is not None}).encode()
    return text.ljust(HEAD_BYTES, b"\0") + memory[HEAD_BYTES:]


def file(path: Path, content: bytes, *, mode: int = 0o600, user: int | None = None) -> None:
    path.write_bytes(content)
    path.chmod(mode)
    if user is not None:
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(path, user, user)


def link(path: Path, content: bytes) -> None:
    file(path.with_name("elsewhere"), content, user=NOBODY)
    path.symlink_to("elsewhere")


PLANTED: dict[str, Plant] = {
    "file for all": lambda path, content: file(path, content, mode=0o666, user=NOBODY),
    "other owner": lambda path, content: file(path, content, user=NOBODY),
    "link": link,
    "link to nowhere": lambda path, _: path.symlink_to("nowhere"),
    "pipe": lambda path, _: os.mkfifo(path),
    "directory": lambda path, _: path.mkdir(),
    "own file for all, not ours": lambda path, content: file(path, with_head(content, data_dir="/other"), mode=0o666),
}
HEADS: dict[str, Callable[[bytes], bytes]] = {
    "nested too deep": lambda _: b"[" * HEAD_BYTES,
    "nested objects": lambda _: b'{"a":' * (HEAD_BYTES // 5),
    "no text": lambda _: b"\xff\xfe",
    "a list": lambda _: b"[1, 2]",
    "empty": lambda _: b"",
    "no JSON": lambda _: b"{ no json",
    "slots in words": lambda memory: with_head(memory, slots="8"),
    "slots of no number": lambda memory: with_head(memory, slots=8.5),
    "no slots": lambda memory: with_head(memory, slots=None),
    "slots below 0": lambda memory: with_head(memory, slots=-8),
    "slots without end": lambda memory: with_head(memory, slots=1 << 300),
    "slots that do not fit": lambda memory: with_head(memory, slots=9),
    "a slot of 0 bytes": lambda memory: with_head(memory, slot_bytes=0),
    "a slot that is true": lambda memory: with_head(memory, slot_bytes=True),
    "slots elsewhere": lambda memory: with_head(memory, slots_at=[1]),
    "domain of a number": lambda memory: with_head(memory, domain=7),
    "number in words": lambda memory: with_head(memory, number="first"),
    "number that is infinite": lambda memory: with_head(memory, number=float("inf")),
    "format in words": lambda memory: with_head(memory, format="2"),
    "format 1": lambda memory: with_head(memory, format=1),
    "lock of a number": lambda memory: with_head(memory, lock=1),
    "ephemeral in words": lambda memory: with_head(memory, ephemeral="no"),
    "cut short": lambda memory: memory[: len(memory) // 2],
}


def forged(memory: bytes, launches: Launches) -> bytes:
    """Memory that looks like ours but has other bytes in a chunk."""
    changed = bytearray(memory)
    at = launches.engine.arena.slot(0).arena_offset + CHUNK_BYTES - 8
    changed[at : at + 8] = b"planted!"
    return bytes(changed)


def ended(launches: Launches, end: str) -> tuple[Path, bytes]:
    """Launch, append and end as `end` says. Return the path of the memory, and a forged copy of the memory.

    ``stopped``; or ``killed``, with the memory ``there``, ``gone`` or ``damaged``.
    """
    log = launches.begin()
    log.append_many(CHUNKS)
    path = launches.engine.arena.path
    memory = forged(path.read_bytes(), launches)
    if end == "stopped":
        launches.stop()
    else:
        launches.kill()
    if end == "killed, gone":
        path.unlink()
    elif end == "killed, damaged":
        with path.open("r+b") as mapped:
            mapped.write(b"[" * HEAD_BYTES)
    return path, memory


def check(launches: Launches, end: str) -> None:
    """The next launch serves its own data, or reports the loss."""
    launches.start()
    log = launches.log(first_group_id=100)  # the coordinator counts each launch
    if end in ("stopped", "killed, there"):
        assert log.read_all() == list(range(CHUNKS))
        assert not launches.found.lost_memory
    else:
        assert launches.found.lost_memory
        following = lost(log, EARLIEST)
        assert lost(log, EARLIEST._replace(group_id=1, segment_id=1)) == following
        assert log.read(following) == ([], following)
    assert launches.engine.arena.path.stat().st_uid == os.geteuid()
    assert launches.engine.arena.path.stat().st_mode & 0o777 == 0o600
    launches.engine.arena.close()
    launches.running = False
    launches.engine.index.close()


ENDS = ["killed, gone", "stopped", "killed, there", "killed, damaged"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("end", first_quick(ENDS, 1))
def test_files_that_others_have_planted_are_left_alone_with_one_warning(
    launches: Launches, end: str, what: str
) -> None:
    own, memory = ended(launches, end)
    names = [launches.shm_dir / f"kera-{os.getuid()}-{name}.arena" for name in ("00000000", "z" * 32)]
    planted = [*names, *([own] if not own.exists() else [])]  # others cannot replace a file that exists
    for path in planted:
        PLANTED[what](path, memory)
        shutil.copymode(path, path, follow_symlinks=False)
    before = [path.lstat() for path in planted]

    with capture_logs() as lines:
        check(launches, end)

    assert [(path.lstat().st_ino, path.lstat().st_mtime_ns) for path in planted] == [
        (status.st_ino, status.st_mtime_ns) for status in before
    ]
    warnings = [line for line in lines if line["event"].startswith("ignored a path with the name of an arena")]
    assert [line["count"] for line in warnings] == [len(planted)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("end", first_quick(ENDS, 1))
def test_a_file_with_an_invalid_head_does_not_stop_the_start(launches: Launches, end: str, head: str) -> None:
    _, memory = ended(launches, end)
    file(launches.shm_dir / f"kera-{os.getuid()}-00000000.arena", HEADS[head](memory))

    check(launches, end)


def test_own_memory_that_others_may_have_changed_stops_the_start_and_stays(launches: Launches) -> None:
    own, _ = ended(launches, "killed, there")
    own.chmod(0o666)

    with pytest.raises(StartError, match=rf"cannot trust {own}.*mode 0666.*chmod 600"):
        launches.start()
    own.chmod(0o600)
    check(launches, "killed, there")


def test_memory_of_a_newer_version_stops_the_start_and_stays(launches: Launches) -> None:
    own, _ = ended(launches, "killed, there")
    memory = own.read_bytes()
    own.write_bytes(with_head(memory, format=4))

    with pytest.raises(StartError, match=rf"{own} has memory of format 4.*newer version"):
        launches.start()
    own.write_bytes(memory)
    check(launches, "killed, there")


@pytest.mark.parametrize("operation", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_readers_lock_on_the_memory_does_not_make_the_next_launch_lose_it(launches: Launches, operation: int) -> None:
    (launches.root / "lock").touch(0o600)
    launches.begin().append_many(CHUNKS)
    fd = next(iter(launches.engine.arena._files)).open_for_readers()
    launches.kill()
    fcntl.flock(fd, operation)

    check(launches, "killed, there")

    os.close(fd)


def test_memory_of_a_live_owner_with_the_same_directory_name_is_not_taken_over(
    launches: Launches,
) -> None:
    """Two containers share /dev/shm, and each has a data directory of that name."""
    (launches.root / "lock").touch(0o600)
    other = Arena.create(
        launches.shm_dir, arena_bytes=1 << 15, slot_bytes=1 << 12, data_dir=launches.root, ephemeral=False
    )
    (launches.root / "lock").rename(launches.root / "lock.other")
    (launches.root / "lock").touch(0o600)

    log = launches.begin()
    assert launches.engine.arena.path != other.path
    assert other.path.exists()
    log.append()
    launches.stop()
    other.close()


def test_memory_left_by_an_earlier_version_is_taken_over(launches: Launches) -> None:
    """The file's name is shorter, and its head names no lock."""
    own, _ = ended(launches, "killed, there")
    memory = own.read_bytes()
    own.unlink()
    old = own.with_name(f"kera-{os.getuid()}-0a1b2c3d.arena")
    file(old, with_head(memory, lock=None))

    check(launches, "killed, there")
