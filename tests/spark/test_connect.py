"""The format ``kera`` through Spark Connect: a server as its start script starts it, and clients without KerA."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from kera.local.cluster import RunningCluster
from kera.spark_connector import jar_path
from tests.spark.support import Kera, Sent, wait_until

pytestmark = [
    pytest.mark.slow,  # the server is a second JVM
    pytest.mark.timeout(300),
    pytest.mark.skipif(" " in sys.executable, reason="Spark does not look for data sources below a path with a space"),
]

CLIENT = Path(__file__).with_name("connect_client.py")
CLIENT_TIMEOUT_S = 200
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
"""The class that Spark's start-connect-server.sh runs."""
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""When this process is killed, as after a time-out, the kernel ends the server."""

Work = Callable[..., Any]
"""Runs a client's function by name, on a stream, with options for reading; returns the client's output."""


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Connect server."""
    folder = tmp_path_factory.mktemp("connect")
    home = Path(pyspark.__file__).parent
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # for a short life
        "spark.driver.memory": "1g",
        "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [
                *DIES_WITH_US,
                home / "bin" / "spark-submit",
                "--master",
                "local[2]",
                "--class",
                SERVER,
                "--jars",
                jar_path(),
                *conf,
                "spark-internal",
            ],
            cwd=folder,
            env=os.environ | {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the tests, which end the server themselves
        )

    def address() -> str | None:
        assert server.poll() is None, log.read_text()[-4000:]
        found = re.search(r"Spark Connect server started at: (\S+:\d+)\n", log.read_text())
        return found and found[1]

    try:
        yield f"sc://{wait_until(address, 'the Connect server', 200)}"
    finally:
        server.terminate()  # it removes its files; its Python workers end after it
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture
def work(remote: str, cluster: RunningCluster, tmp_path: Path) -> Work:
    def run(name: str, stream: str, **options: str) -> Any:
        folder = tmp_path / "folder"
        done = subprocess.run(
            [sys.executable, "-I", CLIENT, remote, name, cluster.bootstrap, stream, folder, json.dumps(options)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return run


engines = pytest.mark.parametrize("engine", ["python", "columnar"])
"""The server has the jar."""


def rows(produced: list[Sent]) -> list[list[Any]]:
    return sorted([record.streamlet, record.offset, record.value.decode()] for record in produced)


@engines
def test_a_client_of_connect_reads_a_batch(kera: Kera, stream: str, work: Work, engine: str) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(500))

    assert work("batch", stream, engine=engine) == rows(produced)


@engines
def test_a_client_of_connect_reads_a_stream_and_goes_on_from_its_checkpoint(
    kera: Kera, stream: str, work: Work, engine: str
) -> None:
    stream_id = kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(500))

    first = work("streaming", stream, engine=engine)
    more = kera.send(stream, range(500, 700))
    second = work("streaming", stream, engine=engine)

    assert first["rows"] == rows(produced)
    assert second["rows"] == rows(produced + more)
    assert f'"stream_id": {stream_id}' in json.dumps(json.loads(second["end"]))


def test_a_client_of_connect_takes_batches_in_foreach_batch(kera: Kera, stream: str, work: Work) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(500))

    assert work("foreach", stream) == rows(produced)


def test_a_client_of_connect_writes_a_batch_and_a_stream(kera: Kera, stream: str, work: Work) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(100))

    found = work("write", stream)

    # The records themselves, once more from the batch, and all of these once more from the query.
    assert sorted(value for *_, value in found) == sorted(record.value.decode() for record in produced * 4)


def test_a_client_of_connect_gets_the_suggestion_for_an_unknown_option(kera: Kera, stream: str, work: Work) -> None:
    kera.create(stream)

    said = work("mistake", stream)

    assert "did you mean startingOffsets?" in said
