"""Pytest fixtures with clusters: a fake one in the test's own process, and a real one of several processes.

They are available wherever KerA is installed. KerA is imported only when a test requests one of them.

* `kera_fake_cluster`: a `kera.client.testing.FakeCluster` of one broker, for one test. Needs ``kera[testing]``.
* `kera_dev`: a real cluster such as ``kera dev`` runs, on free ports and in a temporary directory, for all tests of a
  session. Needs ``kera[server,testing]``. A ``conftest.py`` that wants another one overrides `kera_dev_options`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kera.client import ClientSettings
    from kera.client.testing import FakeCluster
    from kera.local.cluster import RunningCluster

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # without pytest-asyncio, no loop runs the fake cluster
    async_fixture = pytest.fixture  # type: ignore[assignment]

SMALL = {"arena_bytes": 64 << 20, "backup_memory_bytes": 64 << 20, "segment_bytes": 1 << 20}


@dataclass(frozen=True)
class KeraDev:
    """A running cluster."""

    bootstrap: str
    """The coordinator's address, for `kera.client.Client.connect` and ``KERA_BOOTSTRAP``."""
    settings: ClientSettings
    """Settings for clients of the cluster, independent of the environment."""
    cluster: RunningCluster
    """The cluster's processes, which can be killed, paused and restarted."""


@async_fixture
async def kera_fake_cluster(request: pytest.FixtureRequest) -> AsyncIterator[FakeCluster]:
    """A fake cluster with one broker, for an asynchronous test: it runs in the test's event loop."""
    function = getattr(request.node, "obj", None)
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if not inspect.iscoroutinefunction(function):
        pytest.fail("kera_fake_cluster runs in the event loop of its test, so this must be an async def", pytrace=False)
    from kera.client.testing import FakeCluster

    async with FakeCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kera_dev_options() -> dict[str, Any]:
    """Options of `kera_dev`: arguments of `kera.local.cluster.LocalCluster`, such as ``brokers``."""
    return {}


@pytest.fixture(scope="session")
def kera_dev(kera_dev_options: dict[str, Any]) -> Iterator[KeraDev]:
    """A real cluster; streams that a test creates still exist in the next test."""
    from kera.client import ClientSettings

    try:
        from kera.local.cluster import LocalCluster
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing; install it with: pip install 'kera[server,testing]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    with LocalCluster.running(**{**SMALL, **kera_dev_options}) as running:
        yield KeraDev(running.bootstrap, ClientSettings(), running)
