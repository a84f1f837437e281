"""The cluster of these tests: three running backups, and brokers that a test starts and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.broker.takeover_support import Cluster, cluster


@pytest.fixture
async def world(root: Path, shm_dir: Path) -> AsyncIterator[Cluster]:
    async with cluster(root, shm_dir, 3) as found:
        yield found
