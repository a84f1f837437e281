"""Without the columnar engine Python reads and warns once; `engine=columnar` is refused with a way to get it."""

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


def test_reading_with_python_warns_once_per_process_how_to_load_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        KeraDataSource(NEEDED).reader(COLUMNS)
        KeraDataSource(NEEDED).streamReader(COLUMNS)

    (record,) = caplog.records
    assert "configure(builder)" in record.getMessage()
    assert "option('engine', 'python')" in record.getMessage()


def test_there_is_no_warning_with_engine_python_or_for_metadata(caplog: pytest.LogCaptureFixture) -> None:
    KeraDataSource({**NEEDED, "engine": "python"}).reader(COLUMNS)
    KeraDataSource({**NEEDED, "engine": "python"}).streamReader(COLUMNS)
    KeraDataSource({**NEEDED, "metadata": "streams", "engine": "columnar"}).schema()

    assert caplog.records == []


@pytest.mark.usefixtures("cluster")
def test_engine_columnar_is_refused_in_each_call_of_spark() -> None:
    insisting = KeraDataSource({**NEEDED, "engine": "columnar"})

    for ask in (
        insisting.schema,
        lambda: insisting.reader(COLUMNS),
        lambda: insisting.streamReader(COLUMNS).initialOffset(),
    ):
        with pytest.raises(InvalidArgument, match="option engine: the columnar engine is not on Spark's class path"):
            ask()


def test_engine_python_gives_the_columns_and_closes_its_client(cluster: FakeClient) -> None:
    assert KeraDataSource({**NEEDED, "engine": "python"}).schema() == COLUMNS
    assert cluster.closed
