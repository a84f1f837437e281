"""A trace from a producer over a broker and its backup to a Spark query, in a real OpenTelemetry Collector."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kera.client import Client, ClientSettings
from kera.local.cluster import LocalCluster
from tests.collector import collecting

pytestmark = pytest.mark.timeout(1700)  # the first run builds the collector
RECORDS = 20


@pytest.mark.slow  # it starts a JVM; tests/unit/spark_connector/test_traced.py is the quick test
@pytest.mark.parametrize("engine", ["python", "columnar"])
def test_the_span_of_a_micro_batch_links_to_the_traces_of_its_records(tmp_path: Path, engine: str) -> None:
    async def produce(bootstrap: str, traces: str) -> None:
        async with await Client.connect(bootstrap, ClientSettings(traces=traces)) as client:
            await client.admin.create_stream("orders", streamlets=2, replication=1)
            async with client.producer() as producer:
                await producer.prepare("orders")
                await asyncio.gather(*(producer.send("orders", b"%d" % number) for number in range(RECORDS)))

    with collecting(tmp_path) as collector:
        traces = f"otlp {collector.url} 1"
        with LocalCluster.running(brokers=1, backups=1, env={"KERA_BROKER_TRACES": traces}) as cluster:
            asyncio.run(produce(cluster.bootstrap, traces))
            job = [sys.executable, "-m", "tests.spark.traced_job", cluster.bootstrap, "orders", engine]
            env = {**os.environ, "KERA_CLIENT_TRACES": traces, "PYSPARK_PYTHON": sys.executable}
            done = subprocess.run(
                [*job, str(tmp_path / "checkpoint")], env=env, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.split()[-1] == str(RECORDS)
            found = collector.wait_for(*(f"{what} orders" for what in ("create", "append", "replicate", "process")))

    creates = {(each.trace_id, each.span_id) for each in found if each.name == "create orders"}
    (batch,) = [each for each in found if each.name == "process orders"]
    assert batch.links
    assert batch.links <= creates
    appended = {each.trace_id for each in found if each.name == "append orders"}
    assert appended & {trace_id for trace_id, _ in batch.links}
    assert batch.attributes["messaging.batch.message_count"] == str(RECORDS)
    assert batch.attributes["messaging.consumer.group.name"] == f"orders-{engine}"
