"""A broker that has not been launched yet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.broker.restart_support import Launches


@pytest.fixture
def launches(shm_dir: Path, root: Path) -> Iterator[Launches]:
    launches = Launches(shm_dir, root)
    yield launches
    if launches.running:
        launches.kill()
    for path in shm_dir.iterdir():
        path.unlink()
