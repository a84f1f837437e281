"""`kera node` with real brokers: they run on their CPUs, restart after a crash, and end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kera.client import Client
from kera.core.base.cpus import format_cpus, parse_cpus
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster, RunningCluster

BOUND_S = 60.0
CPUS = sorted(os.sched_getaffinity(0))
SMALL = {"KERA_BROKER_ARENA_BYTES": "16MiB", "KERA_BROKER_SEGMENT_BYTES": "1MiB"}


class Node:
    """A running ``kera node`` of two brokers."""

    def __init__(self, directory: Path, bootstrap: str) -> None:
        self.data_dir = directory / "data"
        self._said = directory / "said"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kera.cli", "node", "--data-dir", str(self.data_dir)),
                    *("--coordinator", bootstrap, "--brokers", "2"),
                ],
                env=os.environ | SMALL,
                stdout=said,
                stderr=said,
            )
        self.until(lambda: "Ctrl-C stops them" in self.said)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def pid(self, name: str) -> int:
        """The process id of one of the brokers."""
        command = f"--data-dir\0{self.data_dir / name}\0".encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if command in entry.read_bytes():
                    return int(entry.parent.name)
        raise LookupError(name)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A cluster for this module: brokers that are gone stay on the list of members."""
    with LocalCluster.running(arena_bytes=16 * MIB, segment_bytes=MIB) as running:
        yield running


@pytest.fixture(scope="module")
def node(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    running = Node(tmp_path_factory.mktemp("node"), cluster.bootstrap)
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(BOUND_S) == 0, running.said


async def described(bootstrap: str) -> AsyncIterator[tuple[int, str, str, bool]]:
    async with await Client.connect(bootstrap) as client:
        for broker in (await client.admin.describe_cluster()).brokers:
            yield broker.broker_id, broker.cpus, broker.node_id, broker.alive


@pytest.mark.timeout(180)
async def test_each_broker_runs_on_its_cpus_and_is_restarted_after_a_kill(cluster: RunningCluster, node: Node) -> None:
    groups = [{CPUS[0]}, {CPUS[1] if len(CPUS) > 1 else CPUS[0]}]
    brokers = [one async for one in described(cluster.bootstrap)]
    pinned = [one for one in brokers if one[1] and one[3]]
    assert len({node_id for _, _, node_id, _ in brokers}) == 1, "they share the host's memory"
    assert [parse_cpus(cpus) <= set(CPUS) for _, cpus, _, _ in pinned] == [True, True]
    for number, group in enumerate(groups, 1):
        assert group <= os.sched_getaffinity(node.pid(f"broker-{number}"))
        assert format_cpus(os.sched_getaffinity(node.pid(f"broker-{number}"))) == pinned[number - 1][1]

    os.kill(node.pid("broker-2"), signal.SIGKILL)
    await asyncio.to_thread(node.until, lambda: "broker-2 is back" in node.said)
    assert "broker-2 was killed by SIGKILL, and is started again" in node.said
    again = [one async for one in described(cluster.bootstrap)]
    assert [one[0] for one in again] == [one[0] for one in brokers], "it is the broker that it was"


@pytest.mark.timeout(180)
def test_a_data_directory_allows_one_supervisor_that_starts_all_its_brokers(
    cluster: RunningCluster, node: Node
) -> None:
    command = [sys.executable, "-m", "kera.cli", "node", "--coordinator", cluster.bootstrap]
    command += ["--data-dir", str(node.data_dir)]
    for flags, says in (
        (["--brokers", "2"], "another local cluster uses"),
        (["--brokers", "1"], "has data of 2 brokers, and 1 would be started"),
    ):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=BOUND_S, check=False)
        assert done.returncode == 2
        assert says in done.stderr
    assert node.process.poll() is None


def test_a_broker_that_cannot_start_is_reported_once_and_ends_the_node(cluster: RunningCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kera.cli", "node", "--coordinator", cluster.bootstrap, "--brokers", "2"]
    command += ["--data-dir", str(tmp_path / "data")]
    environment = os.environ | SMALL | {"KERA_BROKER_SEGMENT_BYTES": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False)

    assert done.returncode == 2
    assert done.stderr.count("kera: error: ") == 1
    assert "segment_bytes must be a multiple" in done.stderr
