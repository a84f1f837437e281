"""Without the columnar engine Python reads, and says so once; who insists on the engine is told how to get it."""

import logging
from collections.abc import Iterator

import pytest

from kera.core.errors import InvalidArgument
from kera.spark_connector import source
from kera.spark_connector.columns import columns_of
from kera.spark_connector.source import KeraDataSource
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient

NEEDED = {"kera.bootstrap.servers": "h:1", "path": "numbers"}
COLUMNS = columns_of(SCHEMA, typed=True)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(source, "_told", False)
    with caplog.at_level(logging.WARNING, logger="kera.spark_connector"):
        yield


def test_it_is_said_once_per_process_how_to_load_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        KeraDataSource(NEEDED).reader(COLUMNS)
        KeraDataSource(NEEDED).streamReader(COLUMNS)

    (record,) = caplog.records
    assert "configure(builder)" in record.getMessage()
    assert "option('engine', 'python')" in record.getMessage()


def test_nothing_is_said_to_who_wants_python_or_only_metadata(caplog: pytest.LogCaptureFixture) -> None:
    KeraDataSource({**NEEDED, "engine": "python"}).reader(COLUMNS)
    KeraDataSource({**NEEDED, "engine": "python"}).streamReader(COLUMNS)
    KeraDataSource({**NEEDED, "metadata": "streams", "engine": "columnar"}).schema()

    assert caplog.records == []


@pytest.mark.usefixtures("cluster")
def test_who_insists_on_the_engine_is_refused_wherever_spark_shows_it() -> None:
    insisting = KeraDataSource({**NEEDED, "engine": "columnar"})

    for ask in (
        insisting.schema,
        lambda: insisting.reader(COLUMNS),
        lambda: insisting.streamReader(COLUMNS).initialOffset(),
    ):
        with pytest.raises(InvalidArgument, match="option engine: the columnar engine is not on Spark's class path"):
            ask()


def test_python_gives_the_columns_when_it_is_wanted(cluster: FakeClient) -> None:
    assert KeraDataSource({**NEEDED, "engine": "python"}).schema() == COLUMNS
    assert cluster.closed
