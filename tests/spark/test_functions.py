"""Python functions of users on columns: each result belongs to its row, with either engine.

Spark would pass Arrow columns to Python without a copy and read on meanwhile. KerA's columns are valid only until the
next batch.
"""

from pathlib import Path

import pytest
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  # the usual name

from tests.spark.support import Kera, columnar_first

SENT = range(600)
pytestmark = columnar_first


@pytest.fixture
def filled(kera: Kera, stream: str) -> str:
    kera.create(stream, streamlets=2)
    # Large chunks stay single and small ones are joined; either way there are many batches.
    kera.send(stream, SENT, flush_every=10, payload="arrow")
    return stream


def with_functions(frame: DataFrame) -> DataFrame:
    """Add functions of columns from chunks, of columns made for Spark, and one without arguments."""

    def same(column: str, returned: str) -> Column:
        return F.udf(lambda value: value, returned)(column).alias(f"{column} again")

    one = F.udf(lambda: 1, "int").asNondeterministic()
    return frame.select(
        "value", same("value", "binary"), "timestamp", "offset", "streamlet", same("key", "binary"), "key"
    ).withColumn("one", one())


def check(rows: list[Row]) -> None:
    assert sorted(int(bytes(row.value)[1:]) for row in rows) == list(SENT)
    assert {row.one for row in rows} == {1}
    wrong = [row for row in rows if row.value != row["value again"] or row.key != row["key again"]]
    assert wrong == []
    assert all(bytes(row.key) == b"k%d" % (int(bytes(row.value)[1:]) % 7) for row in rows)
    places = {(row.streamlet, row.offset): row for row in rows}
    assert len(places) == len(SENT)


def test_the_results_of_functions_belong_to_their_rows_in_a_batch(kera: Kera, filled: str) -> None:
    check(with_functions(kera.read(filled)).collect())


@pytest.mark.slow
def test_a_function_without_arguments_leaves_the_other_columns_unchanged(kera: Kera, filled: str) -> None:
    one = F.udf(lambda: 1, "int").asNondeterministic()
    rows = kera.read(filled).select("value", "offset", "streamlet", one().alias("one")).collect()
    assert sorted(int(bytes(row.value)[1:]) for row in rows) == list(SENT)
    assert len({(row.streamlet, row.offset) for row in rows}) == len(SENT)


@pytest.mark.slow
def test_the_results_of_functions_belong_to_their_rows_in_a_stream(kera: Kera, filled: str, tmp_path: Path) -> None:
    found: list[Row] = []
    query = (
        with_functions(kera.stream(filled, startingOffsets="earliest"))
        .writeStream.foreachBatch(lambda frame, _: found.extend(frame.collect()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    check(found)
