"""The health of a backup's disks."""

from types import SimpleNamespace
from typing import cast

import pytest

from kera.backup.engine import Engine
from kera.backup.health import watch_disks
from kera.core.base.health import Health, State
from kera.core.errors import BackupFull
from tests.unit.backup.support import FRAME_BYTES, FakeBackup, Segment, placed

CHUNK = placed(1)


def test_the_disks_are_a_problem_as_soon_as_no_disk_takes_another_replica() -> None:
    backup = FakeBackup(bytes_max=2 * FRAME_BYTES - 1)
    health = Health()
    watch_disks(health, cast(Engine, SimpleNamespace(store=backup.store)))

    def state() -> State:
        return next(check.state for check in health.checks() if check.name == "disks")

    assert state() is State.OK
    Segment(1).append(backup, CHUNK)
    assert state() is State.PROBLEM
    with pytest.raises(BackupFull):
        Segment(2).append(backup, CHUNK)
