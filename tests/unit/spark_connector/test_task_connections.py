"""How tasks connect: with a token from a driver that authenticates, and like the driver otherwise."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from kera.client import ClientSettings
from kera.spark_connector.columns import columns_of
from kera.spark_connector.delegation import asking
from kera.spark_connector.reading.batch import KeraBatchReader
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.reading.streaming import KeraStreamReader
from kera.spark_connector.service.methods import Service
from kera.spark_connector.source import KeraDataSource
from kera.spark_connector.writing.writers import KeraBatchWriter, KeraStreamWriter
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient, FakeStream, at

PLAIN = {"kera.bootstrap.servers": "h:1", "path": "numbers"}
SECURED = {**PLAIN, "tls.ca": "/ca", "user": "alice", "password.file": "/password"}
COLUMNS = columns_of(SCHEMA, typed=True)
ROWS = StructType([StructField("value", BinaryType())])
TOKEN = "kera_1_x5ecret"


class Keeper:
    """Answers each request with a token, and remembers the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.ended = 0
        self.token = TOKEN

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(dict(asked))
        return {"token": self.token}

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    made = Keeper()
    monkeypatch.setattr(asking._Asking, "_answer", lambda _, asked: made.answer(asked))
    monkeypatch.setattr(asking._Asking, "_end", lambda _: made.end())
    return made


@pytest.fixture
def cluster(cluster: FakeClient) -> FakeClient:
    cluster.chunks = {0: [[3, 4]], 1: [[5]]}
    return cluster


def shown(settings: ClientSettings) -> tuple[str, Path | None, str | None]:
    token = settings.token
    return settings.user, settings.password_file, None if token is None else token.get_secret_value()


def in_worker(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def test_a_batch_is_read_with_a_token_for_its_streams(cluster: FakeClient, keeper: Keeper) -> None:
    reader = KeraDataSource(SECURED).reader(COLUMNS)
    assert isinstance(reader, KeraBatchReader)
    partitions = reader.partitions()
    assert shown(cluster.settings[-1]) == ("alice", Path("/password"), None)

    for partition in partitions:
        assert list(in_worker(reader).read(in_worker(partition)))

    assert shown(cluster.settings[-1]) == ("", None, TOKEN)
    assert cluster.settings[-1].tls_ca == Path("/ca")
    (asked,) = keeper.asked
    assert (asked["resources"], asked["hold"]) == (("stream:numbers",), False)
    assert TOKEN not in repr(partitions)


def test_a_batch_with_a_certificate_is_read_without_a_token(cluster: FakeClient, keeper: Keeper) -> None:
    reader = KeraDataSource({**PLAIN, "tls.ca": "/ca", "tls.cert": "/c", "tls.key": "/k"}).reader(COLUMNS)
    for partition in reader.partitions():
        assert list(in_worker(reader).read(in_worker(partition)))
    assert keeper.asked == []
    assert {settings.tls_key for settings in cluster.settings} == {Path("/k")}


@pytest.mark.usefixtures("cluster")
def test_token_lifetime_replaces_a_certificate_by_a_token(keeper: Keeper) -> None:
    options = {**PLAIN, "tls.ca": "/ca", "tls.cert": "/c", "tls.key": "/k", "token.lifetime": "1h"}
    (first, *_) = KeraDataSource(options).reader(COLUMNS).partitions()
    assert cast("KeraPartition", first).connection is not None
    assert keeper.asked[0]["lifetime_ms"] == 3_600_000


@pytest.mark.usefixtures("cluster")
def test_each_micro_batch_gets_the_current_token_until_the_query_stops(keeper: Keeper) -> None:
    reader = KeraDataSource({**SECURED, "startingOffsets": "earliest"}).streamReader(COLUMNS)
    assert isinstance(reader, KeraStreamReader)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    tokens = []
    for token in (TOKEN, "kera_2_x5ecret"):
        keeper.token = token
        for partition in reader.partitions(start, end):
            connection = cast("KeraPartition", partition).connection
            assert connection is not None
            assert connection.token is not None
            tokens.append(connection.token.reveal())
            assert connection.drivers_ca == "/ca"
    assert tokens == [TOKEN, TOKEN, "kera_2_x5ecret", "kera_2_x5ecret"]
    assert {(asked["resources"], asked["hold"]) for asked in keeper.asked} == {(("stream:numbers",), True)}
    assert keeper.ended == 0
    reader.stop()
    assert keeper.ended == 1


def test_rows_are_written_with_a_token_for_their_stream_or_for_all_streams(cluster: FakeClient, keeper: Keeper) -> None:
    cluster.streams["plain"] = FakeStream(8, {0: [[]]}, typed=False)
    named = {name: value for name, value in SECURED.items() if name != "path"} | {"stream": "plain"}
    by_rows = {name: value for name, value in named.items() if name != "stream"}
    rows = StructType([*ROWS, StructField("stream", StringType())])
    made: list[KeraBatchWriter | KeraStreamWriter] = [
        KeraBatchWriter(named, ROWS, overwrite=False),
        KeraStreamWriter(named, ROWS, overwrite=False),
        KeraBatchWriter(by_rows, rows, overwrite=False),
    ]
    assert [asked["resources"] for asked in keeper.asked] == [("stream:plain",), ("stream:plain",), ("stream:*",)]
    for writer in made:
        connection = in_worker(writer)._connection
        assert connection.token.reveal() == TOKEN
        assert connection.credentials == {}


def test_the_columnar_engine_gets_a_token_beside_its_pieces_and_routes_with_it(
    cluster: FakeClient, keeper: Keeper
) -> None:
    service = Service()
    options = {**SECURED, "startingOffsets": "earliest"}
    params = {"options": options, "schema": COLUMNS.json()}
    planned = service.call("plan_batch", params)
    assert planned["token"] == TOKEN
    assert TOKEN not in json.dumps(planned["pieces"])
    assert "password" not in json.dumps(planned["pieces"])

    handle = service.call("open", params)["stream"]
    start = service.call("initial_offset", {"stream": handle})["offset"]
    limit = {"type": "all"}
    end = service.call("latest_offset", {"stream": handle, "start": start, "limit": limit})["offset"]
    assert service.call("plan", {"stream": handle, "start": start, "end": end})["token"] == TOKEN
    assert keeper.ended == 1  # the token of the batch
    service.call("close", {"stream": handle})
    assert keeper.ended == 2

    asked = {
        "connection": planned["pieces"][0]["connection"],
        "token": planned["token"],
        "reader": "r",
        "stream": "numbers",
        "stream_id": 7,
        "streamlet": 0,
        "entry": 0,
        "position": list(at(0)),
        "end": list(at(1)),
        "fail_on_data_loss": True,
    }
    assert service.call("route", asked)["broker"]["broker_id"] == 1
    assert shown(cluster.settings[-1]) == ("", None, TOKEN)
    service.close()
