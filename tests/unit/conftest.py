"""Files of unit tests need to survive only the test."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _files_are_not_synced() -> Iterator[None]:
    """A sync of a real disk takes milliseconds. Tests of failing syncs have functions of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in memory: the `tmp_path` of modules whose tests would mostly wait for a disk."""
    with tempfile.TemporaryDirectory(prefix="kera-test-", dir="/dev/shm") as path:
        yield Path(path)
