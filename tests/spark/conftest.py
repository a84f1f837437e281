"""One Spark session and one cluster for all tests of this folder, because each takes seconds to start.

Tests do not share streams: each test creates its own, named by the fixture `stream`.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kera.local.cluster import LocalCluster, RunningCluster
from kera.spark_connector import configure
from tests.forked_programs import begin_to_fork
from tests.spark.support import QUICK_JVM, Kera, with_kera

HERE = Path(__file__).parent
_numbers = itertools.count(1)


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            # One session on one worker; tests that start processes share one worker, so that few run at once.
            own = "spark" not in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("spark-processes" if own else "spark"))
            # Spark warns on import, but these tests use it without pandas.
            item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"))


@pytest.fixture(scope="session", autouse=True)
def forks_are_ready() -> None:
    """Begin to fork here, because the threads that start clusters cannot."""
    begin_to_fork()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    # Small segments, because each entry holds one, and a stream of several segments is written quickly.
    with LocalCluster.running(brokers=2, arena_bytes=128 << 20, segment_bytes=1 << 20) as running:
        yield running


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    folder = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2]").appName("kera tests")
    for name, value in {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": QUICK_JVM,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("KERA_TESTS_FORK") != "0":
            patch.setenv("PYTHONPATH", str(HERE / "preloaded"), prepend=os.pathsep)  # of Spark's processes
        session = with_kera(configure(builder).getOrCreate())
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The engine that reads; without a parameter it is the users' default."""
    return str(getattr(request, "param", "auto"))


@pytest.fixture
def kera(spark: SparkSession, cluster: RunningCluster, engine: str) -> Kera:
    return Kera(spark, cluster.bootstrap, engine)


@pytest.fixture
def stream(request: pytest.FixtureRequest, kera: Kera) -> Iterator[str]:
    """A unique name for the test's stream; afterwards all streams with this prefix are deleted."""
    name = f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower())[:40].strip('-')}-{next(_numbers)}"
    yield name
    for each in kera.streams():
        if each == name or each.startswith(f"{name}-"):
            kera.delete(each)
