"""Answers to the columnar engine's writers: the new owners for failed chunks, and the stored rows."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.core.errors import (
    CorruptChunk,
    KeraError,
    NotOwner,
    OutOfSequence,
    ProducerFenced,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.spark_connector.service.writes import Failed, WriteRouter, failures_of, rows_as_json
from tests.unit.spark_connector.fakes import BROKER, FakeClient

MOVED = NotOwner("it has moved")


class Impatient(WriteRouter):
    """Does not wait, and remembers its pauses."""

    def __init__(self, **limits: int) -> None:
        self.pauses: list[float] = []
        super().__init__(pause=self._note, **limits)

    async def _note(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        await asyncio.sleep(0)


@pytest.fixture
def router() -> Impatient:
    return Impatient()


async def route(
    router: WriteRouter,
    cluster: FakeClient,
    *errors: KeraError,
    writer: str = "w",
    stream_id: int = 7,
    progressed: bool = False,
) -> dict[str, Any]:
    """The answer to a writer whose chunks for streamlets 0, 1 … failed with these errors."""
    failed = [Failed(streamlet, progressed, error) for streamlet, error in enumerate(errors)]
    client: Any = cluster
    return await router.route(client, writer, "numbers", stream_id, failed)


async def test_a_chunk_is_sent_to_the_current_owner_of_the_streamlet(cluster: FakeClient, router: Impatient) -> None:
    cluster.streams["numbers"].broker = replace(BROKER, broker_id=2, frames_address="broker-2.invalid:7501")

    answer = await route(router, cluster, MOVED)

    assert answer["owners"] == [2]
    assert [broker["frames_address"] for broker in answer["brokers"]] == ["broker-2.invalid:7501"]
    assert router.pauses == [0.005]


async def test_pauses_grow_until_a_chunk_is_acknowledged(cluster: FakeClient, router: Impatient) -> None:
    for _ in range(3):
        await route(router, cluster, MOVED)
    await route(router, cluster, MOVED, progressed=True)
    await route(router, cluster, MOVED, writer="another")
    await route(router, cluster, MOVED)

    assert [pause > 0.005 for pause in router.pauses] == [False, True, True, False, False, True]


async def test_the_longest_pause_of_all_failures_applies(cluster: FakeClient, router: Impatient) -> None:
    await route(router, cluster, MOVED, Uncertain("who knows"))

    assert router.pauses == [0.05]


async def test_a_stream_unknown_to_a_broker_is_looked_up_at_the_coordinator(
    cluster: FakeClient, router: Impatient
) -> None:
    assert (await route(router, cluster, UnknownStream("no such stream here")))["owners"] == [1]
    assert len(router.pauses) == 1

    del cluster.streams["numbers"]
    with pytest.raises(UnknownStream, match="no stream is called 'numbers'"):
        await route(router, cluster, MOVED)


async def test_writing_to_a_recreated_stream_is_an_error(cluster: FakeClient, router: Impatient) -> None:
    with pytest.raises(UnknownStream, match="was deleted and created again"):
        await route(router, cluster, MOVED, stream_id=6)


@pytest.mark.parametrize("error", [CorruptChunk("no"), OutOfSequence("chunk 3 is missing")])
async def test_a_permanent_error_ends_the_task(cluster: FakeClient, router: Impatient, error: KeraError) -> None:
    with pytest.raises(type(error), match=error.message):
        await route(router, cluster, MOVED, error)
    assert router.pauses == []


async def test_the_error_of_a_fenced_task_names_the_cause(cluster: FakeClient, router: Impatient) -> None:
    with pytest.raises(ProducerFenced, match="a higher txnVersion of this txnAppId, has been written already"):
        await route(router, cluster, ProducerFenced("epoch 1 was fenced by 2"))


async def test_retries_end_at_the_timeout(cluster: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CLIENT_RETRY_TIMEOUT_MS", "0")
    with pytest.raises(NotOwner, match="it has moved"):
        await route(Impatient(), cluster, MOVED)


async def test_the_last_known_owner_is_used_while_the_coordinator_is_away(
    cluster: FakeClient, router: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await route(router, cluster, MOVED)
    cluster.away = True
    assert (await route(router, cluster, MOVED))["owners"] == [1]

    monkeypatch.setenv("KERA_CLIENT_RETRY_TIMEOUT_MS", "1")
    with pytest.raises(Unavailable, match="does not say where stream 'numbers' is"):
        await route(Impatient(), cluster, MOVED)


async def test_the_number_of_remembered_streamlets_is_bounded(cluster: FakeClient) -> None:
    router = Impatient(streamlets_max=2)

    for writer in ("a", "b", "a", "c", "a", "b"):
        await route(router, cluster, MOVED, writer=writer)

    assert [pause > 0.005 for pause in router.pauses] == [False, False, True, False, True, False]


def test_failures_are_parsed_from_json() -> None:
    error = {"code": "not_owner", "message": "it has moved", "attributes": {"broker_id": "3"}}
    (failed,) = failures_of({"failed": [{"streamlet": 2, "progressed": True, "error": error}]})

    assert (failed.streamlet, failed.progressed, type(failed.error)) == (2, True, NotOwner)
    assert failed.error.attributes == {"broker_id": 3}


def lengths(text: str) -> list[int]:
    return list(map(int, np.frombuffer(base64.b64decode(text), np.int32)))


def test_rows_go_to_the_engine_as_lengths_and_bytes() -> None:
    rows: Sequence[tuple[Any, ...]] = [
        (9, [b"left out"], b"left out", [("left out", b"left out")]),
        (1, [b"k", b""], b"v", [("h", None), ("é", b"x")]),
        (2, None, None, None),
        (3, [], b"", []),
    ]
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), DEFAULT_SCHEMA, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA).slice(1)

    told = rows_as_json(batch, timed=True)

    assert told["count"] == 3
    assert np.frombuffer(base64.b64decode(told["times"]), np.int64).tolist() == [1, 2, 3]
    assert (lengths(told["key_counts"]), lengths(told["header_counts"])) == ([2, -1, 0], [2, -1, 0])
    for name, expected in {
        "values": ([1, -1, 0], b"v"),
        "keys": ([1, 0], b"k"),
        "header_names": ([1, 2], "hé".encode()),
        "header_values": ([-1, 1], b"x"),
    }.items():
        assert (lengths(told[name]["lengths"]), base64.b64decode(told[name]["bytes"])) == expected, name
    assert rows_as_json(batch, timed=False)["times"] is None
