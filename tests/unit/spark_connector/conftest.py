"""A cluster in memory, as a fixture."""

from collections.abc import Iterator

import pytest

from kera.client import Client
from kera.spark_connector import portal
from tests.unit.spark_connector.fakes import FakeClient


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    """Every `Client.connect` of the test connects to this cluster: one empty stream with two streamlets."""
    fake = FakeClient({0: [[]], 1: [[]]})
    monkeypatch.setattr(Client, "connect", fake.connect)
    monkeypatch.setattr(portal, "_shared", {})
    yield fake
    for shared in portal._shared.values():
        shared.close()
