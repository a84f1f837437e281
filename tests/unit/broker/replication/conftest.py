"""The world of these tests: a broker with three running backups that keep bytes."""

import pytest

from tests.unit.broker.replication_support import DELAY_MS, Replicated
from tests.unit.broker.support import Engine


@pytest.fixture
def world(engine: Engine) -> Replicated:
    """A broker with three running backups."""
    return Replicated(engine, repair_delay_ms=DELAY_MS, wait_ms_max=5000)
