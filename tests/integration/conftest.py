"""Real daemons for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.core.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster

SHM = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of pytest-xdist without it, too: these tests also run one after the other."""
    config.addinivalue_line("markers", "xdist_group(name): run on one worker")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Two brokers with small segments, shared by the tests of a module; they use streams of their own."""
    with LocalCluster.running(brokers=2, arena_bytes=256 * MIB, segment_bytes=512 * KIB) as running:
        arenas = [Path(ready["arena_path"]) for name, ready in running.ready.items() if name.startswith("broker")]
        assert all(path.parent == SHM and path.exists() for path in arenas)
        yield running
    assert not any(path.exists() for path in arenas), "a cluster that has stopped leaves nothing in shared memory"
