"""Health of a cluster of real daemons: over HTTP, and by `kera cluster health`."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from kera.local.cluster import LocalCluster
from tests.integration.command_line import run_kera
from tests.integration.control_support import HEARTBEAT_MS, HEARTBEATS_MISSED_MAX
from tests.integration.support import TIMEOUT_S, troubles

pytestmark = pytest.mark.timeout(180)
METRICS = {f"KERA_{kind}_METRICS_PORT": "0" for kind in ("BROKER", "BACKUP", "COORDINATOR")}
HEARTBEATS = {"heartbeat_interval_ms": HEARTBEAT_MS, "heartbeats_missed_max": HEARTBEATS_MISSED_MAX}
POLL_S = 0.1
DAEMONS = ("coordinator", "broker-1", "broker-2", "backup-1")


def get(cluster: Any, daemon: str, path: str) -> tuple[int, str]:
    url = f"http://{cluster.ready[daemon]['metrics_address']}{path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def health(cluster: Any) -> tuple[int, dict[str, Any]]:
    done = run_kera("cluster", "health", "--json", "--bootstrap", cluster.bootstrap)
    return done.returncode, json.loads(done.stdout)


def test_a_cluster_is_healthy_then_degraded_then_broken() -> None:
    with LocalCluster.running(brokers=2, backups=1, env=METRICS, coordinator_settings=HEARTBEATS) as cluster:
        for daemon in DAEMONS:
            assert get(cluster, daemon, "/livez") == (200, "live\n")
            status, text = get(cluster, daemon, "/readyz")
            assert status == 200, text
            assert text.startswith("ready\n[+] state: it serves\n")
            assert "kera_build_info{" in get(cluster, daemon, "/metrics")[1]
            assert get(cluster, daemon, "/metrics/all")[0] == 200
            assert get(cluster, daemon, "/")[0] == 404

        bootstrap = ("--bootstrap", cluster.bootstrap)
        assert (
            run_kera("stream", "create", "orders", "--streamlets", "2", "--replication", "0", *bootstrap).returncode
            == 0
        )
        assert run_kera("produce", "orders", *bootstrap, stdin=b"a\nb\n").returncode == 0
        assert 'kera_broker_stream_streamlets{stream="orders"} 1.0' in get(cluster, "broker-1", "/metrics/all")[1]
        assert troubles(health(cluster)[1]) == []
        doctor = run_kera("doctor", *bootstrap)
        assert doctor.returncode == 0, doctor.stdout

        cluster.kill("backup-1")
        while not troubles((found := health(cluster))[1]):
            time.sleep(POLL_S)  # the test's time-out bounds it
        assert found[0] == 1
        assert [each["subject"] for each in troubles(found[1])] == ["backup 1"]
        cluster.kill("broker-1")
        while (found := health(cluster))[0] != 2:
            time.sleep(POLL_S)
        assert ("problem", "streamlets") in [(each["severity"], each["subject"]) for each in found[1]["findings"]]
        address = cluster.bootstrap
    gone = run_kera("cluster", "health", "--bootstrap", address)
    assert gone.returncode == 2
    assert gone.stdout.startswith(b"broken\n")


@pytest.mark.slow
def test_metrics_report_the_lag_of_a_consumer_group() -> None:
    """Its consumers share the streamlets: only the coordinator knows those from which it has read nothing yet."""
    env = METRICS | {"KERA_COORDINATOR_GROUP_LAG_INTERVAL_MS": "100"}
    with LocalCluster.running(brokers=2, env=env) as cluster:
        bootstrap = ("--bootstrap", cluster.bootstrap)
        made = run_kera("stream", "create", "orders", "--streamlets", "4", "--replication", "0", *bootstrap)
        assert made.returncode == 0
        ten = b"".join(b"%d\n" % number for number in range(10))
        assert run_kera("produce", "orders", *bootstrap, stdin=ten).returncode == 0
        read = run_kera("consume", "orders", "--group", "audit", "--count", "10", *bootstrap)
        assert sorted(read.stdout.split()) == sorted(ten.split())
        assert run_kera("produce", "orders", *bootstrap, stdin=ten).returncode == 0

        told = run_kera("group", "describe", "audit", "--json", *bootstrap)
        assert sum(each["lag"]["records"] for each in json.loads(told.stdout)["entries"]) == 10
        shown = 'kera_coordinator_consumer_group_lag_records{consumer_group="audit",stream="orders"} 10.0'
        while shown not in get(cluster, "coordinator", "/metrics/all")[1]:
            time.sleep(POLL_S)  # the test's time-out bounds it
