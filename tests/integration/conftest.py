"""Real daemons for the tests of this folder, and the distribution of tests over the workers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.forked_programs import begin_to_fork, started_alone
from tests.integration.control_support import control_cluster_of
from tests.integration.go_client import GoClient, find_go
from tests.integration.kafka import Kafka, kafka_or_skip
from tests.integration.postgres import Postgres, postgres_or_skip
from tests.integration.shared_cluster import SharedCluster
from tests.integration.zookeeper import ZooKeeper

HERE = Path(__file__).parent
SHM = Path("/dev/shm")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests with a server go to one worker, as do those of a module."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("xdist_group") is None:
            for group in ("zookeeper", "kafka"):
                if group in getattr(item, "fixturenames", ()):
                    item.add_marker(pytest.mark.xdist_group(group))
                    break


@pytest.fixture(scope="session", autouse=True)
def forks_are_ready() -> None:
    """Clusters are started by threads, which cannot begin to fork."""
    begin_to_fork()


@pytest.fixture
def programs_start_alone() -> Iterator[None]:
    """For tests that look at a program's command line."""
    with started_alone():
        yield


@pytest.fixture
def chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers do not merge small chunks: for tests that look at chunks."""
    monkeypatch.setenv("KERA_CONSUMER_JOINED_BYTES_MAX", "0")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    """Two brokers with small segments for all tests that kill none of them; each uses streams of its own."""
    often = {"heartbeat_interval_ms": 200, "heartbeats_missed_max": 40}  # tests wait for what heartbeats report
    with LocalCluster.running(
        brokers=2, arena_bytes=256 * MIB, segment_bytes=512 * KIB, coordinator_settings=often
    ) as running:
        arenas = [Path(ready["arena_path"]) for name, ready in running.ready.items() if name.startswith("broker")]
        assert all(path.parent == SHM and path.exists() for path in arenas)
        yield running
    assert not any(path.exists() for path in arenas), "a cluster that has stopped leaves nothing in shared memory"


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    """A server that tests share; they use roots of their own: ``<address>/<root>``."""
    with ZooKeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker that tests share; they use topics of their own. Skips where there is no Kafka."""
    with kafka_or_skip(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server that tests share; they use tables of their own. Skips where there is no PostgreSQL."""
    with postgres_or_skip() as server:
        yield server


@pytest.fixture(scope="session")
def shared_members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    with SharedCluster(lambda: control_cluster_of(tmp_path_factory.mktemp("members"))) as shared:
        yield shared


@pytest.fixture
async def members(shared_members: SharedCluster) -> SharedCluster:
    """Three persistent brokers and backups for tests that kill them: each test finds all of them running."""
    await shared_members.make_whole()
    return shared_members


@pytest.fixture(scope="session")
def go(tmp_path_factory: pytest.TempPathFactory) -> GoClient:
    """The client in Go of clients/go; the test is skipped where there is no Go."""
    client = GoClient(find_go(), tmp_path_factory.mktemp("go"))
    client.build()
    return client
