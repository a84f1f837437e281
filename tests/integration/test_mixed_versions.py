"""Daemons of an earlier commit and of this one in one cluster, under load, for each order of upgrades."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from kera.cli.check._options import Options
from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster
from kera.server.feature_level import FEATURE_LEVEL
from tests.chaos.checked import LOAD_S_MAX, under_check
from tests.integration.support import until_found

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
EARLIER = os.environ.get("KERA_EARLIER", "HEAD~1")
"""A commit of this repository."""
PACKAGES = ("proto", "core", "broker", "backup", "coordinator", "client")
KINDS = ("coordinator", "broker", "backup")
TIMEOUT_S = 120


def git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"there is no earlier commit here: {done.stderr.decode().strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the earlier commit, with its native core if it can be built."""
    folder = tmp_path_factory.mktemp("earlier")
    subprocess.run(["tar", "-x", "-C", folder], input=git("archive", EARLIER), timeout=TIMEOUT_S, check=True)
    build = folder / "core" / "native" / "build.py"
    subprocess.run([sys.executable, build, "--auto"], cwd=folder, timeout=TIMEOUT_S, check=True, capture_output=True)
    return folder


def of_earlier(earlier: Path) -> list[str]:
    """The prefix of a command that runs with the earlier sources."""
    return ["env", "PYTHONPATH=" + os.pathsep.join(str(earlier / package) for package in PACKAGES)]


class MixedCluster(LocalCluster):
    """A cluster whose upgraded daemons run this version from their next start on."""

    def __init__(self, data_dir: Path, earlier: Path) -> None:
        super().__init__(
            brokers=2,
            backups=2,
            replication=1,
            data_dir=data_dir,
            arena_bytes=32 * MIB,
            backup_memory_bytes=32 * MIB,
            segment_bytes=256 * KIB,
        )
        self._earlier = earlier
        self.upgraded: set[str] = set()

    def _argv_of(self, name: str) -> list[str]:
        argv = super()._argv_of(name)
        if name in self.upgraded:
            return argv
        return [*of_earlier(self._earlier), *argv]

    def of_kind(self, kind: str) -> list[str]:
        return [name for name in self.ready if name.startswith(kind)]


def test_the_earlier_daemons_run_the_earlier_sources(earlier: Path) -> None:
    program = (
        "import kera.core.errors, kera.broker.engine; print(kera.core.errors.__file__, kera.broker.engine.__file__)"
    )
    command = [*of_earlier(earlier), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)

    assert done.stdout.split() == [
        str(earlier / "core/kera/core/errors.py"),
        str(earlier / "broker/kera/broker/engine.py"),
    ]


async def feature_level(cluster: LocalCluster) -> int:
    async with await Client.connect(cluster.bootstrap) as client:
        return (await client.admin.describe_cluster()).feature_level


@pytest.mark.parametrize("order", list(permutations(KINDS)), ids="-".join)
async def test_daemons_can_be_upgraded_in_any_order_without_loss(
    order: tuple[str, ...], earlier: Path, tmp_path: Path
) -> None:
    options = Options(LOAD_S_MAX, replication=1, rate=300.0, seed=1)
    async with MixedCluster(tmp_path / "data", earlier) as cluster:
        async with under_check(cluster.bootstrap, options) as load:
            await load.goes_on()
            before = await feature_level(cluster)
            for kind in order:
                for name in cluster.of_kind(kind):
                    cluster.upgraded.add(name)
                    await cluster.restart(name)
                    await load.goes_on()
                    assert await feature_level(cluster) == before or cluster.upgraded == set(cluster.ready)
        assert cluster.upgraded == set(cluster.ready)

        async def raised() -> bool:
            return await feature_level(cluster) == FEATURE_LEVEL

        await until_found(raised)
