"""The alerts of deploy/, in a real Prometheus that scrapes a real cluster whose faults trigger them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster
from tests.integration.support import until_found

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "kera.rules.yml"
FIRES_S = 60.0
PAUSE_S = 1.0
SHORTENED = (
    (r"for: \w+", "for: 0s"),
    (r"\[1h\]", "[1m]"),
    (r"\[10m\]", "[10s]"),
    (r"\[[15]m\]", "[5s]"),
    ("> 100000", "> 10"),
    (r"< 0\.15", "< 1.1"),  # the test does not fill a disk: any disk counts as too full
)
"""Hours become seconds, and limits become values that a test reaches."""


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def configuration(cluster: LocalCluster) -> str:
    """As in deploy/prometheus, for these addresses and every second."""
    kept = re.findall(r"regex: (\S+)\n\s+action: keep", RULES.with_name("prometheus.yml").read_text())
    jobs = []
    for kind in ("coordinator", "broker", "backup"):
        found = [each["metrics_address"] for name, each in cluster.ready.items() if name.startswith(kind)]
        jobs.append({"job_name": f"kera-{kind}", "static_configs": [{"targets": found}]})
    for kind, job, regex in (("broker", jobs[1], kept[0]), ("coordinator", jobs[0], kept[1])):
        keep = {"source_labels": ["__name__"], "regex": regex, "action": "keep"}
        few = {"metrics_path": "/metrics/all", "metric_relabel_configs": [keep]}
        jobs.append({**job, "job_name": f"kera-{kind}-all", **few})
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return json.dumps({"global": times, "rule_files": ["kera.rules.yml"], "scrape_configs": jobs})  # JSON is YAML


class Prometheus:
    """The alerts of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/alerts"

    def firing(self) -> set[str]:
        """The names of the firing alerts."""
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    async def until(self, reached: Callable[[set[str]], bool]) -> None:
        """Wait until the firing alerts satisfy `reached`."""
        fire: set[str] = set()

        async def so() -> bool:
            nonlocal fire
            try:
                fire = await asyncio.to_thread(self.firing)
            except OSError:
                return False  # Prometheus is still starting
            return reached(fire)

        try:
            await until_found(so, FIRES_S)
        except TimeoutError:
            pytest.fail(f"these alerts fire: {sorted(fire)}")


@asynccontextmanager
async def prometheus(cluster: LocalCluster, folder: Path) -> AsyncIterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    folder.mkdir()
    rules = RULES.read_text()
    for before, after in SHORTENED:
        rules = re.sub(before, after, rules)
    (folder / "kera.rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(configuration(cluster))
    port = free_port()
    arguments = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(program, *arguments, stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        await process.wait()


async def test_lags_stalls_and_lost_daemons_fire_their_alerts(tmp_path: Path) -> None:
    served = {"metrics_port": 0}
    cluster = LocalCluster(
        brokers=2,
        backups=2,
        replication=2,
        data_dir=tmp_path / "data",
        arena_bytes=32 * MIB,
        backup_memory_bytes=32 * MIB,
        segment_bytes=256 * KIB,
        coordinator_settings=served | {"group_lag_interval_ms": 1000},
        broker_settings=served,
        backup_settings=served,
    )
    async with (
        cluster,
        prometheus(cluster, tmp_path / "prometheus") as alerts,
        await Client.connect(cluster.bootstrap) as client,
    ):
        await alerts.until(lambda firing: firing == {"KeraDiskFilling"})

        # A consumer group has read a record, and reads none of the later ones, here or in other streamlets.
        await client.admin.create_stream("s", streamlets=4)
        async with client.producer() as producer:
            await producer.prepare("s")
            await producer.send("s", b"first", streamlet=0)
            async with client.group_consumer("g", "s") as consumer:
                assert (await anext(aiter(consumer))).value == b"first"
                await consumer.commit()
            writing = asyncio.create_task(_write(producer))
            await alerts.until(lambda firing: "KeraConsumerGroupLagging" in firing)

            # A producer lets chunks fill for longer than records may take.
            await client.latency.create("late", ["s"], 10, window_ms=1_000)
            async with client.producer(linger_ms=100) as slow:
                await slow.prepare("s")
                late = asyncio.create_task(_write(slow))
                await alerts.until(lambda firing: "KeraLatencyNotHeld" in firing)
                late.cancel()
                await asyncio.wait([late])
            await client.latency.delete("late")

            # A loop is held up again and again.
            holding = asyncio.create_task(_hold_up(cluster))
            await alerts.until(lambda firing: "KeraLoopSaturated" in firing)
            holding.cancel()
            await asyncio.wait([holding])
            await cluster.resume("broker-1")

            # A backup is gone, while each record needs two.
            await cluster.kill("backup-2")
            await alerts.until(lambda firing: {"KeraBackupLost", "KeraUnderReplicated", "KeraDaemonDown"} <= firing)
            await cluster.restart("backup-2")

            await cluster.kill("broker-2")
            await alerts.until(lambda firing: "KeraBrokerLost" in firing)
            writing.cancel()
            await asyncio.wait([writing])


async def _write(producer: object) -> None:
    while True:
        await asyncio.gather(*(producer.send("s", b"more", streamlet=each) for each in range(4)))  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)


async def _hold_up(cluster: LocalCluster) -> None:
    while True:
        await cluster.pause("broker-1")
        await asyncio.sleep(PAUSE_S)  # sleep: the loop is held up
        await cluster.resume("broker-1")
        await asyncio.sleep(PAUSE_S / 2)  # sleep: the loop runs
