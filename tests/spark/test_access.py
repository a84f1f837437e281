"""Queries on a secured cluster: executors read and write with a token from the driver, and with nothing else.

Here Spark has one process and Python workers; test_secured_cluster.py has a Spark cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kera.client import Client
from tests.spark.secured import SecuredCluster, secrets_in, secured_cluster
from tests.spark.support import both_engines, columnar_first, wait_until

VALUES = sorted(b"%d" % number for number in range(300))
WITHIN_S = 120.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("secured")) as made:
        made.make_user("alice")
        made.make_user("bob")
        made.grant("alice", "group:spark-*", "use")
        yield made


def mine(secured: SecuredCluster, name: str, *, values: list[bytes] = VALUES, user: str = "alice") -> str:
    """Create a stream with values that a user may read and write."""
    secured.create(name, streamlets=2)
    secured.grant(user, f"stream:{name}", "read", "write")
    if values:
        secured.send(name, values)
    return name


class Queries:
    """The queries of a user."""

    def __init__(self, spark: SparkSession, options: dict[str, str], engine: str) -> None:
        self.spark = spark
        self.options = options | {"engine": engine}

    def read(self, stream: str) -> DataFrame:
        # These tests run as the broker's user, and so could read its memory without rights.
        reader = self.spark.read.format("kera").options(**self.options).option("sharedMemory", "never")
        return reader.load(stream)

    def values(self, stream: str) -> list[bytes]:
        return sorted(bytes(row.value) for row in self.read(stream).select("value").collect())

    def write(self, frame: DataFrame, stream: str) -> None:
        frame.write.format("kera").options(**self.options).mode("append").save(stream)

    def stream(self, stream: str) -> DataFrame:
        reader = self.spark.readStream.format("kera").options(**self.options)
        return reader.option("startingOffsets", "earliest").load(stream)


@both_engines
def test_a_batch_is_read_and_written_with_a_token_for_its_streams(
    spark: SparkSession, secured: SecuredCluster, engine: str
) -> None:
    source, sink = mine(secured, f"in-{engine}"), mine(secured, f"out-{engine}", values=[])
    queries = Queries(spark, secured.options("alice"), engine)

    assert queries.values(source) == VALUES
    queries.write(queries.read(source).select("key", "value"), sink)

    assert secured.values(sink) == VALUES
    narrowed = secured.run(tokens_of)
    assert {("alice", (f"stream:{source}",)), ("alice", (f"stream:{sink}",))} <= narrowed


async def tokens_of(client: Client) -> set[tuple[str, tuple[str, ...]]]:
    return {(token.owner, token.resources) for token in await client.access.tokens()}


@columnar_first
def test_a_streaming_query_has_a_token_until_it_stops(
    spark: SparkSession, secured: SecuredCluster, engine: str, tmp_path: Path
) -> None:
    source, sink = mine(secured, f"flow-{engine}"), mine(secured, f"flown-{engine}", values=[])
    queries = Queries(spark, secured.options("alice"), engine)
    writer = queries.stream(source).select("key", "value").writeStream.format("kera").options(**queries.options)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start(sink)
    try:
        wait_until(lambda: secured.values(sink) == VALUES, "the values", WITHIN_S)
        assert ("alice", (f"stream:{source}",)) in secured.run(tokens_of)
    finally:
        query.stop()
    wait_until(
        lambda: ("alice", (f"stream:{source}",)) not in secured.run(tokens_of), "its token to be revoked", WITHIN_S
    )
    for file in (tmp_path / "checkpoint").rglob("*"):
        assert file.is_dir() or secrets_in(file.read_bytes()) == []


@columnar_first
def test_missing_rights_are_an_error_and_hidden_streams_are_unknown(
    spark: SparkSession, secured: SecuredCluster, engine: str
) -> None:
    source, unseen = mine(secured, f"seen-{engine}"), mine(secured, f"unseen-{engine}")
    secured.grant("bob", f"stream:{source}", "describe")
    queries = Queries(spark, secured.options("bob"), engine)
    rows = spark.createDataFrame([(b"1",)], "value binary")
    for refused, text in (
        (lambda: queries.values(source), f"NotAllowed: user:bob may not read stream:{source}: no rule allows it"),
        (lambda: queries.write(rows, source), f"NotAllowed: user:bob may not write stream:{source}: no rule allows it"),
        (lambda: queries.values(unseen), f"UnknownStream: no stream is called '{unseen}'"),
    ):
        with pytest.raises((PySparkException, Py4JJavaError)) as caught:
            refused()
        assert text in str(caught.value)
        assert secrets_in(str(caught.value).encode()) == []
    assert secured.values(source) == VALUES


@columnar_first
def test_a_wrong_password_is_sent_only_once(
    spark: SparkSession, secured: SecuredCluster, engine: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("x5ecret-wrong")
    queries = Queries(spark, secured.options("alice") | {"password.file": str(tmp_path / "wrong")}, engine)
    rows = spark.createDataFrame([(b"1",)], "value binary")
    for refused in (
        lambda: queries.read("any"),
        lambda: queries.stream("any"),
        lambda: queries.write(rows, "any"),
    ):
        before = secured.failures()
        with pytest.raises((PySparkException, Py4JJavaError), match="AuthenticationFailed: the user name or") as caught:
            refused()
        assert secrets_in(str(caught.value).encode()) == []
        assert secured.failures() == before + 1


@columnar_first
def test_plans_and_output_of_a_query_contain_no_secret(
    spark: SparkSession, secured: SecuredCluster, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    frame = Queries(spark, secured.options("alice"), engine).read(mine(secured, f"shown-{engine}"))
    assert len(frame.collect()) == len(VALUES)
    for mode in ("simple", "extended", "codegen", "cost", "formatted"):
        frame.explain(mode)
    shown = capfd.readouterr().out
    assert "kera" in shown
    assert secrets_in(f"{shown} {frame!r} {frame._jdf.queryExecution().toString()}".encode()) == []


@pytest.mark.parametrize("name", ["password", pytest.param("token", marks=pytest.mark.slow)])
def test_a_secret_as_an_option_is_refused(spark: SparkSession, secured: SecuredCluster, name: str) -> None:
    with pytest.raises(PySparkException, match=f"option {name}: options are shown") as caught:
        spark.read.format("kera").options(**secured.options("alice")).option(name, "x5ecret-option").load("any")
    assert secrets_in(str(caught.value).encode()) == []
