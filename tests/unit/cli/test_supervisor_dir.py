"""`kera.local.directory`: one supervisor per directory, and removal of the directories of killed ones."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kera.core.errors import PathNotWritable
from kera.local.directory import ClusterDirectory, DirectoryInUse, remove_abandoned


def test_one_supervisor_at_a_time_uses_a_directory(tmp_path: Path) -> None:
    first = ClusterDirectory.open(tmp_path / "deep" / "data")

    with pytest.raises(DirectoryInUse, match="data"):
        ClusterDirectory.open(tmp_path / "deep" / "data")

    first.release()
    first.release()
    ClusterDirectory.open(tmp_path / "deep" / "data").release()
    assert (tmp_path / "deep" / "data").is_dir()


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(PathNotWritable, match="file/data"):
        ClusterDirectory.open(tmp_path / "file" / "data")


@pytest.mark.parametrize("make", [ClusterDirectory.open, ClusterDirectory.make_temporary])
def test_a_directory_that_cannot_be_locked_is_refused_and_closed(
    make: Callable[[Path], ClusterDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = open_files()

    with pytest.raises(PathNotWritable, match="No locks available"):
        make(tmp_path)

    assert open_files() == before


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_release_of_a_temporary_directory_removes_it(tmp_path: Path) -> None:
    directory = ClusterDirectory.make_temporary(tmp_path)
    (directory.path / "broker-1").mkdir()

    directory.release()

    assert not directory.path.exists()


def test_only_the_directories_of_killed_supervisors_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from kera.local.directory import ClusterDirectory\n"
        f"directory = ClusterDirectory.make_temporary(Path({str(tmp_path)!r}))\n"
        "print(directory.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    abandoned = Path(ended.stdout.strip())
    assert abandoned.is_dir()
    somebody_elses = tmp_path / "kera-local-no-lock"
    somebody_elses.mkdir()
    used = ClusterDirectory.make_temporary(tmp_path)

    assert not abandoned.exists()
    assert remove_abandoned(tmp_path) == []
    assert used.path.is_dir()
    assert somebody_elses.is_dir()
    used.release()
    assert list(tmp_path.iterdir()) == [somebody_elses]


@pytest.mark.parametrize("planted", ["directory", "lock"])
def test_the_target_of_a_link_is_not_removed_as_abandoned(tmp_path: Path, planted: str) -> None:
    own = tmp_path / "own"
    own.mkdir(0o700)
    (own / ".lock").touch(0o600)
    if planted == "directory":
        (tmp_path / "kera-local-planted").symlink_to(own)
    else:
        (tmp_path / "kera-local-planted").mkdir(0o700)
        (tmp_path / "kera-local-planted" / ".lock").symlink_to(own / ".lock")

    assert remove_abandoned(tmp_path) == []
    assert (own / ".lock").exists()
