"""The demo's job on a secured cluster: its sums are right, and it leaks no secret.

There are two coordinators on a secured ZooKeeper, three brokers, two backups, and separate executors of Spark with
tokens. A broker and the leading coordinator are killed during the job.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kera.core.security.issuing import Authority
from tests.integration.zookeeper import ZooKeeper, secured_by
from tests.spark.jvm_harness import OPENED
from tests.spark.secured import HOST, SecuredCluster, secured_cluster
from tests.spark.shown import hidden, keep_what_is_shown
from tests.spark.standalone import standalone
from tests.spark.submitting import environment, java_of_tests
from tests.spark.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLIGHTS = 20_000
FEEDING_S = 40
KILLED_AT = FLIGHTS // 4
KILLED = "broker-1", "coordinator-1"
STREAMS = ("flights", "weather")
ROOT = Path(__file__).parents[2]


@contextmanager
def secured_zookeeper(folder: Path) -> Iterator[str]:
    """Run a ZooKeeper that requires certificates of the cluster's authority; yield its address."""
    authority, _ = Authority.open_or_make(folder / "certificates")
    one = authority.issue(HOST)
    with ZooKeeper(folder / "zookeeper", secure=secured_by(authority, one)) as server:
        yield server.secure_address


@contextmanager
def started(secured: SecuredCluster, folder: Path, master: str, engine: str) -> Iterator[subprocess.Popen[str]]:
    """Start the job."""
    config = {
        "engine": engine,
        "bootstrap": secured.bootstrap,
        "master": master,
        "folder": str(folder),
        "flights": FLIGHTS,
        "seconds": FEEDING_S,
        "conf": {
            "spark.driver.host": HOST,
            "spark.driver.memory": "1g",
            "spark.executor.memory": "1g",
            "spark.cores.max": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": folder.as_uri(),
            "spark.local.dir": str(folder),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.ui.port": "0",
            "spark.ui.showConsoleProgress": "false",
            "spark.executorEnv.KERA_CLIENT_TRANSPORT": "tcp",
        },
    }
    analyst = {
        "KERA_CLIENT_TRANSPORT": "tcp",
        "KERA_CLIENT_TLS_CA": str(secured.ca),
        "KERA_CLIENT_USER": "analyst",
        "KERA_CLIENT_PASSWORD_FILE": str(secured.password_file("analyst")),
    }
    with (folder / "driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.secured_demo", json.dumps(config)],
            cwd=ROOT,
            env=environment() | analyst,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("engine", ["python", "columnar"])
def test_the_demo_on_a_secured_cluster_is_right_and_leaks_no_secret(tmp_path: Path, engine: str) -> None:
    opened = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
    folder = tmp_path / "job"
    folder.mkdir()
    with (
        secured_zookeeper(tmp_path) as zookeeper,
        secured_cluster(
            tmp_path,
            coordinators=2,
            zookeeper=zookeeper,
            brokers=3,
            backups=2,
            replication=1,
            log_dir=tmp_path / "logs",
            coordinator_settings={"zookeeper_tls": True},
        ) as secured,
        standalone(tmp_path / "spark", java_of_tests(), opened) as spark,
    ):
        secured.make_user("analyst")
        for stream in STREAMS:
            secured.grant("analyst", f"stream:{stream}", "create", "read", "write")
        secured.grant("analyst", "group:spark-*", "use")
        with started(secured, folder, spark.url, engine) as process:
            last: dict[str, Any] = {}
            killed = False
            assert process.stdout is not None
            while "ui" not in last:
                line = process.stdout.readline()
                assert line, (folder / "driver.log").read_text()[-4000:]
                last = json.loads(line)
                if last.get("processed", 0) >= KILLED_AT and not killed:
                    assert secured.tokens() != []
                    for name in KILLED:
                        secured.cluster.kill(name)
                    killed = True
            ui = last.pop("ui")
            assert last == {"differences": [], "stored": FLIGHTS + 1, "late": 0, "flights": FLIGHTS}
            assert killed
            keep_what_is_shown(spark, ui, folder)
            process.communicate("\n")
            assert process.returncode == 0
        wait_until(lambda: secured.tokens() == [], "the tokens to be revoked")
    assert hidden(tmp_path, secured.folder) == {}
