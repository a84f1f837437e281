"""Pieces for the columnar engine: everything that a task needs, and the hosts that suit it."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from kera.client import BrokerDescription
from kera.core.format.schema import schema_from_bytes
from kera.spark_connector.options.reading import parse_read_options
from kera.spark_connector.planning import Piece
from kera.spark_connector.reading.batch import plan_batch
from kera.spark_connector.service.pieces import Hosts, as_json
from tests.unit.spark_connector.fakes import BROKER, CHUNK_BYTES, SCHEMA, FakeClient, at

OPTIONS = parse_read_options({"kera.bootstrap.servers": "h:1", "subscribe": "numbers", "sharedMemory": "never"})


def hosts() -> Hosts:
    return Hosts({"broker-1.invalid": ("10.0.0.1", "127.0.1.1"), "here": ()})


async def planned(cluster: Any) -> list[Piece]:
    return await plan_batch(cluster, OPTIONS, None)


async def documents(cluster: Any, found: list[Piece]) -> list[dict[str, Any]]:
    return await as_json(cluster, found, OPTIONS, hosts())


async def test_a_piece_has_everything_that_a_task_needs(cluster: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CONSUMER_CONSUMER_GROUP", "etl")
    monkeypatch.setenv("KERA_CLIENT_TRANSPORT", "tcp")
    cluster.chunks = {0: [[2, 3]], 1: [[]]}

    (document,) = await documents(cluster, await planned(cluster))

    assert schema_from_bytes(base64.b64decode(document.pop("schema"))) == SCHEMA
    assert document == {
        "stream": "numbers",
        "stream_id": 7,
        "streamlet": 0,
        "entry": 0,
        "start": list(at(0)),
        "end": list(at(2)),
        "first_record": 0,
        "records": 5,
        "bytes": 2 * CHUNK_BYTES,
        "typed": True,
        "memory_domain": "default",
        "schema_id": 1,
        "earlier_schemas": {},
        "stop": None,
        "fail_on_data_loss": True,
        "shared_memory": "never",
        "connection": {"bootstrap": "h:1", "files": {}, "drivers_ca": ""},
        "settings": {
            "fetch_bytes_max": 2 << 20,
            "prefetch_bytes_max": 8 << 20,
            "request_timeout_ms": 10_000,
            "connect_timeout_ms": 5_000,
            "verify_checksums": True,
            "transport": "tcp",
            "consumer_group": "etl",
            "tls": None,
        },
        "broker": {
            "broker_id": 1,
            "node_id": "here",
            "frames_address": "broker-1.invalid:7501",
            "frames_unix_path": "/run/frames",
            "push_unix_path": "/run/push",
        },
        "hosts": ["broker-1.invalid", "10.0.0.1", "here"],
    }


async def test_a_piece_of_a_deleted_or_recreated_stream_has_no_broker(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2]], 1: [[]]}
    found = await planned(cluster)

    cluster.stream_id = 8
    (document,) = await documents(cluster, found)
    assert (document["stream_id"], document["broker"], document["hosts"]) == (7, None, [])
    del cluster.streams["numbers"]
    (document,) = await documents(cluster, found)
    assert (document["broker"], document["schema"]) == (None, "")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "0.0.0.0:1", "[::]:1", "169.254.1.2:1", ""]
)
async def test_local_and_missing_addresses_become_the_brokers_node(address: str) -> None:
    broker = broker_at(address)

    assert await hosts().of(broker) == ["here"]


def broker_at(address: str) -> BrokerDescription:
    return replace(BROKER, frames_address=address, grpc_address=address)


async def test_an_unresolved_host_is_looked_up_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        raise OSError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    patient, impatient = Hosts({"here": ()}), Hosts({"here": ()}, again_s=0.0)
    broker = broker_at("somewhere:1")

    for _ in range(2):
        assert await patient.of(broker) == ["somewhere", "here"]
    assert asked == ["somewhere"]
    asked.clear()
    for _ in range(2):
        await impatient.of(broker)
    assert asked == ["somewhere"] * 2
