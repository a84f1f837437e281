"""The coordinator's data directory, which belongs to one coordinator."""

from __future__ import annotations

import os
from pathlib import Path

from kera.core.base.home import expanded
from kera.core.base.own_directory import take
from kera.core.base.settings import setting
from kera.core.errors import StartError


class DataDirInUse(StartError):
    """Another running daemon uses the data directory."""

    code = "data_dir_in_use"


class DataDir:
    """A directory that exists, can be written, and is locked until `close` or the end of the process.

    Raises `InvalidSettings`, `PathNotWritable`, `DataDirInUse`, or `StartError` if it is a broker's or a backup's.
    """

    def __init__(self, path: Path) -> None:
        with setting("data_dir"):
            self.path = expanded(path).absolute()
        self._lock = take(self.path, "coordinator", in_use=DataDirInUse)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
