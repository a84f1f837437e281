"""Routing of the columnar engine's tasks: to the client's broker after the client's pauses, or to an end."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kera.client import ClientSettings
from kera.client.cluster.retry import RetryTime
from kera.core.errors import (
    CorruptChunk,
    DataLost,
    InvalidCursor,
    KeraError,
    NotOwner,
    Recovering,
    Unavailable,
    UnknownStream,
    error_to_attributes,
)
from kera.spark_connector.planning.offsets import StreamRecreated
from kera.spark_connector.service.routing import Again, Asked, End, Router, Skip, decide
from tests.unit.spark_connector.fakes import BROKER, FakeClient, at

ADDRESSES = {
    "broker_id": 1,
    "node_id": "here",
    "frames_address": "broker-1.invalid:7501",
    "frames_unix_path": "/run/frames",
    "push_unix_path": "/run/push",
}
ASKED = Asked("r", "numbers", 7, 0, 0, at(1), at(3), fail_on_data_loss=True, progressed=False, error=None)
LOST = DataLost("it is gone", lost_from=[1, 1, 64], available_from=list(at(2)))


def params(error: KeraError | None = None, **more: Any) -> dict[str, Any]:
    """The request of a task that reads the second and the third chunk of streamlet 0."""
    failed = None
    if error is not None:
        document = {"code": error.code, "message": error.message, "retriable": error.retriable}
        failed = {"broker_id": 1, "error": document | {"attributes": error_to_attributes(error)}}
    return {
        "reader": "r",
        "connection": {"bootstrap": "h:1", "files": {}},
        "stream": "numbers",
        "stream_id": 7,
        "streamlet": 0,
        "entry": 0,
        "position": list(at(1)),
        "end": list(at(3)),
        "fail_on_data_loss": True,
        "shared_memory": "auto",
        "progressed": False,
        "failed": failed,
    } | more


def patience() -> RetryTime:
    return RetryTime(ClientSettings(retry_timeout_ms=10_000, recovery_timeout_ms=60_000))


class Impatient(Router):
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


# -- decisions after errors ------------------------------------------------------------------------------------


def test_a_transient_error_is_retried_until_the_timeout() -> None:
    waiting = patience()

    first = decide(ASKED, NotOwner("it has moved"), waiting, 100.0)
    assert isinstance(first, Again)
    assert isinstance(decide(ASKED, Unavailable("it is away"), waiting, 105.0), Again)
    with pytest.raises(Unavailable, match="it is away"):
        decide(ASKED, Unavailable("it is away"), waiting, 110.0)


def test_recovery_is_retried_until_its_longer_timeout() -> None:
    waiting = patience()

    for now_s in range(100, 160, 9):
        assert isinstance(decide(ASKED, Recovering("soon"), waiting, now_s), Again)
    with pytest.raises(Recovering):
        decide(ASKED, Recovering("soon"), waiting, 161.0)


@pytest.mark.parametrize("error", [LOST, InvalidCursor("no chunk is there"), CorruptChunk("noise")])
def test_a_permanent_error_ends_the_task(error: KeraError) -> None:
    with pytest.raises(type(error)):
        decide(ASKED, error, patience(), 100.0)


def test_a_tolerated_loss_is_skipped() -> None:
    lenient = replace(ASKED, fail_on_data_loss=False)

    assert decide(lenient, LOST, patience(), 100.0) == Skip(at(2), "it is gone")
    assert decide(replace(lenient, end=None), LOST, patience(), 100.0) == Skip(at(2), "it is gone")
    assert decide(lenient, InvalidCursor("no chunk"), patience(), 100.0) == End("no chunk")
    assert decide(replace(lenient, position=at(2)), LOST, patience(), 100.0) == End("it is gone")
    assert decide(replace(lenient, end=at(2)), LOST, patience(), 100.0) == End("it is gone")
    with pytest.raises(CorruptChunk):  # the chunk exists
        decide(lenient, CorruptChunk("noise"), patience(), 100.0)


def test_the_error_of_a_broker_keeps_its_type_and_attributes() -> None:
    asked = Asked.of(params(LOST))

    assert isinstance(asked.error, DataLost)
    assert asked.error.attributes["available_from"] == list(at(2))
    assert (asked.position, asked.end) == (at(1), at(3))
    assert Asked.of(params(end=None)).end is None


async def route(router: Router, cluster: Any, asked: Asked) -> dict[str, Any]:
    return await router.route(cluster, asked)


# -- answers -----------------------------------------------------------------------------------------------------


async def test_a_task_without_a_broker_gets_one_without_a_pause(cluster: FakeClient, router: Impatient) -> None:
    answer = await route(router, cluster, Asked.of(params()))

    assert answer == {"broker": ADDRESSES, "position": list(at(1))}
    assert router.pauses == []


async def test_a_task_is_sent_to_the_new_owner_after_a_failure(cluster: FakeClient, router: Impatient) -> None:
    cluster.streams["numbers"].broker = replace(BROKER, broker_id=2, frames_address="broker-2.invalid:7501")

    answer = await route(router, cluster, Asked.of(params(NotOwner("it has moved"))))

    assert answer["broker"]["broker_id"] == 2
    assert router.pauses == [0.005]


async def test_pauses_grow_until_the_task_makes_progress(cluster: FakeClient, router: Impatient) -> None:
    asked = Asked.of(params(NotOwner("it has moved")))

    for _ in range(3):
        await route(router, cluster, asked)
    await route(router, cluster, replace(asked, progressed=True))
    await route(router, cluster, replace(asked, reader="another"))
    await route(router, cluster, asked)

    assert [pause > 0.005 for pause in router.pauses] == [False, True, True, False, False, True]


async def test_a_stream_unknown_to_a_broker_is_looked_up_at_the_coordinator(
    cluster: FakeClient, router: Impatient
) -> None:
    error = UnknownStream("no such stream here")

    assert (await route(router, cluster, Asked.of(params(error))))["broker"] == ADDRESSES
    assert len(router.pauses) == 1

    del cluster.streams["numbers"]
    with pytest.raises(UnknownStream, match="no stream is called 'numbers'"):
        await route(Impatient(), cluster, Asked.of(params(error)))
    lenient = Asked.of(params(error, fail_on_data_loss=False))
    assert await route(Impatient(), cluster, lenient) == {
        "end": True,
        "lost": "no stream is called 'numbers'",
    }


async def test_a_recreated_stream_is_not_read(cluster: FakeClient) -> None:
    cluster.stream_id = 8

    with pytest.raises(StreamRecreated, match="it was incarnation 7, now it is 8"):
        await route(Impatient(), cluster, Asked.of(params()))
    answer = await route(Impatient(), cluster, Asked.of(params(fail_on_data_loss=False)))
    assert answer["end"] is True


async def test_the_answer_after_a_skip_has_the_loss_and_the_next_position(cluster: FakeClient) -> None:
    asked = Asked.of(params(LOST, fail_on_data_loss=False))

    answer = await route(Impatient(), cluster, asked)

    assert answer == {"broker": ADDRESSES, "position": list(at(2)), "lost": "it is gone"}


async def test_the_last_known_broker_is_used_while_the_coordinator_is_away(
    cluster: FakeClient, router: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await route(router, cluster, Asked.of(params()))
    cluster.away = True

    answer = await route(router, cluster, Asked.of(params(NotOwner("it has moved"))))
    assert answer["broker"] == ADDRESSES
    assert len(router.pauses) == 1
    monkeypatch.setenv("KERA_CLIENT_RETRY_TIMEOUT_MS", "0")
    with pytest.raises(Unavailable, match="does not say where stream 'numbers' is"):
        await route(Impatient(), cluster, Asked.of(params()))


async def test_the_position_is_located_again_when_a_broker_is_unreachable(
    cluster: FakeClient, router: Impatient
) -> None:
    for error in (NotOwner("it has moved"), Unavailable("it is away"), Unavailable("it is away")):
        await route(router, cluster, Asked.of(params(error, progressed=True)))

    assert cluster.looked_for == [at(1), at(1)]
    assert len(router.pauses) == 3


async def test_the_number_of_remembered_readers_is_bounded(cluster: FakeClient) -> None:
    router = Impatient(readers_max=2)
    asked = Asked.of(params(NotOwner("it has moved")))

    for reader in ("a", "b", "a", "c", "a", "b"):
        await route(router, cluster, replace(asked, reader=reader))

    assert [pause > 0.005 for pause in router.pauses] == [False, False, True, False, True, False]
