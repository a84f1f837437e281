import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.broker.log.arena import Arena
from kera.broker.serving.limits import ServingLimits
from tests.unit.broker.support import SLOT_BYTES, Engine, Log


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A private directory on shared memory. Files that a test leaves in it are a failure."""
    path = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
    try:
        yield path
        assert list(path.iterdir()) == []
    finally:
        shutil.rmtree(path)


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory for the log. It is in memory: its files need to survive only the test."""
    path = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_arena(shm_dir: Path) -> Iterator[Callable[..., Arena]]:
    """Makes arenas, from the number of slots and the bytes of a slot."""
    made = []

    def make(slots: int = 8, slot_bytes: int = SLOT_BYTES) -> Arena:
        arena = Arena.create(
            shm_dir, arena_bytes=slots * slot_bytes, slot_bytes=slot_bytes, data_dir=Path("/data"), ephemeral=True
        )
        made.append(arena)
        return arena

    yield make
    for arena in made:
        arena.close()


@pytest.fixture
def limits() -> ServingLimits:
    """The limits of the test's broker; see `limited`."""
    return ServingLimits()


@pytest.fixture
def arena(make_arena: Callable[..., Arena]) -> Arena:
    """Eight slots, with room for four chunks each."""
    return make_arena()


@pytest.fixture
def make_engine(make_arena: Callable[..., Arena], root: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines, each with a separate log, from the number of slots."""
    made: list[Engine] = []

    def make(slots: int = 8, **options: Any) -> Engine:
        directory = root / str(len(made))
        directory.mkdir()
        made.append(Engine(make_arena(slots), directory, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """Eight slots, with room for four chunks each."""
    return make_engine()


@pytest.fixture
def log(engine: Engine) -> Log:
    """A streamlet of one entry whose groups have two segments."""
    return Log(engine)
