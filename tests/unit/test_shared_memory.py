"""Directories in shared memory that tests make: what a killed process has left goes when the next one makes its own."""

import os
import subprocess
from pathlib import Path

from tests.shared_memory import make_directory


def test_only_what_a_process_that_is_gone_has_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = (f"kera-trial-{os.getppid()}-a", f"kera-other-{ended.pid}-a", "kera-trial-a")
    kept = [tmp_path / name for name in names]
    for path in (*kept, tmp_path / f"kera-trial-{ended.pid}-a"):
        path.mkdir()
        (path / "arena").touch()

    own = make_directory("trial", tmp_path)

    assert own.name.startswith(f"kera-trial-{os.getpid()}-")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, own])
