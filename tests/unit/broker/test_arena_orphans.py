"""Orphaned arenas of dead brokers: which broker removes which of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.broker.log.arena import Arena
from kera.broker.log.arena_file import remove_orphans

OURS = Path("/data/ours")
OTHERS = Path("/data/others")


def create(shm_dir: Path, data_dir: Path, *, ephemeral: bool = False) -> Arena:
    return Arena.create(shm_dir, arena_bytes=16384, slot_bytes=4096, data_dir=data_dir, ephemeral=ephemeral)


def orphan(shm_dir: Path, data_dir: Path, *, ephemeral: bool = False) -> Path:
    """The arena of a dead broker: the kernel has ended its lock, and its file is left."""
    arena = create(shm_dir, data_dir, ephemeral=ephemeral)
    arena.close(keep=True)
    return arena.path


@pytest.fixture
def named(shm_dir: Path) -> Iterator[Path]:
    """A path that is named like one of our arenas."""
    path = shm_dir / f"kera-{os.getuid()}-00000000.arena"
    yield path
    path.unlink(missing_ok=True)


def test_the_arena_of_an_earlier_launch_is_removed(shm_dir: Path) -> None:
    path = orphan(shm_dir, OURS)

    assert remove_orphans(shm_dir, OURS) == [path]
    assert not path.exists()


def test_the_arena_of_a_dead_ephemeral_broker_is_removed_by_any_broker(shm_dir: Path) -> None:
    path = orphan(shm_dir, OTHERS, ephemeral=True)

    assert remove_orphans(shm_dir, OURS) == [path]


def test_the_arena_of_another_broker_that_may_come_back_is_left_alone(shm_dir: Path) -> None:
    path = orphan(shm_dir, OTHERS)

    assert remove_orphans(shm_dir, OURS) == []
    assert path.exists()
    assert remove_orphans(shm_dir, OTHERS) == [path]


@pytest.mark.parametrize("data_dir", [OURS, OTHERS])
@pytest.mark.parametrize("ephemeral", [False, True])
def test_the_arena_of_a_living_broker_is_left_alone(shm_dir: Path, data_dir: Path, ephemeral: bool) -> None:
    arena = create(shm_dir, data_dir, ephemeral=ephemeral)

    assert remove_orphans(shm_dir, OURS) == []
    assert arena.path.exists()
    arena.close()


@pytest.mark.parametrize("content", [b"", bytes(4096), b"{ no json", b"[1, 2]", b"\xff\xfe"])
def test_an_arena_file_without_a_valid_head_is_removed(named: Path, content: bytes) -> None:
    named.write_bytes(content)
    named.chmod(0o600)

    assert remove_orphans(named.parent, OURS) == [named]


def test_all_orphans_are_removed_and_the_others_stay(shm_dir: Path) -> None:
    removed = sorted([orphan(shm_dir, OURS), orphan(shm_dir, OURS), orphan(shm_dir, OTHERS, ephemeral=True)])
    living, waiting = create(shm_dir, OURS), orphan(shm_dir, OTHERS)

    assert remove_orphans(shm_dir, OURS) == removed
    assert sorted(shm_dir.iterdir()) == sorted([living.path, waiting])
    living.close()
    waiting.unlink()


def test_files_with_other_names_and_of_other_users_are_left_alone(shm_dir: Path) -> None:
    paths = [
        shm_dir / name for name in ("psm_1234", f"kera-{os.getuid()}.arena", f"kera-{os.getuid() + 1}-00000000.arena")
    ]
    for path in paths:
        path.touch()

    assert remove_orphans(shm_dir, OURS) == []
    for path in paths:
        path.unlink()


def test_a_directory_named_like_an_arena_does_not_stop_a_start(named: Path) -> None:
    named.mkdir()
    path = orphan(named.parent, OURS)

    assert remove_orphans(named.parent, OURS) == [path]
    named.rmdir()


def test_a_dangling_link_named_like_an_arena_does_not_stop_a_start(named: Path) -> None:
    named.symlink_to("nowhere")
    path = orphan(named.parent, OURS)

    assert remove_orphans(named.parent, OURS) == [path]


@pytest.mark.timeout(10)
def test_a_pipe_named_like_an_arena_does_not_hold_up_a_start(named: Path) -> None:
    os.mkfifo(named)
    path = orphan(named.parent, OURS)

    assert remove_orphans(named.parent, OURS) == [path]


def test_a_killed_process_leaves_an_orphan(shm_dir: Path) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from kera.broker.log.arena import Arena
        arena = Arena.create(
            Path(sys.argv[1]), arena_bytes=16384, slot_bytes=4096, data_dir=Path(sys.argv[2]), ephemeral=False
        )
        print(arena.path, flush=True)
        sys.stdin.read()
    """
    lines = "\n".join(line.removeprefix(" " * 8) for line in program.splitlines())
    with subprocess.Popen(
        [sys.executable, "-c", lines, shm_dir, OURS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert remove_orphans(shm_dir, OURS) == [], "it is alive"
        process.send_signal(signal.SIGKILL)

    assert remove_orphans(shm_dir, OURS) == [path]
