"""Read sessions of a client against a real broker service: each chunk comes once, whatever is lost."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from kera.broker.serving.limits import ServingLimits
from kera.client.cluster.fetch import Wanted, batches_of
from kera.client.cluster.read_session import ReadSession, Told
from kera.client.settings import ConsumerSettings
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import KeraError, ProtocolError, Uncertain
from kera.core.rpc import Reply
from kera.v1 import broker_pb2
from tests.examples import first_quick
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.support import FakeCluster, Fault, description, stream_info

STREAMLETS = 6
FAULTS = [Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST]


@dataclass(eq=False)
class Part:
    """A range and the values read from it."""

    wanted: Wanted
    values: list[bytes]


def part(streamlet: int, start: Position = EARLIEST, end: Position | None = None) -> Part:
    return Part(Wanted(EntryId(7, streamlet, 0), start, end), [])


def take(given: list[Told[Part]]) -> None:
    for item, fetched, _ in given:
        assert fetched.error is None
        for chunk in batches_of(fetched, description(), ConsumerSettings()):
            item.values += chunk.batch["value"].to_pylist()
        item.wanted = item.wanted._replace(start=fetched.next)


async def read(session: ReadSession[Part], **options: Any) -> list[Told[Part]]:
    return await session.read(**{"bytes_max": 1 << 20, "wait_ms": 0, "timeout_s": 10.0} | options)


@pytest.fixture
def limits() -> ServingLimits:
    """The limits of the broker."""
    return ServingLimits()


@pytest.fixture
async def wide(make_cluster: Any, limits: ServingLimits) -> FakeCluster:
    cluster: FakeCluster = make_cluster(stream_info(streamlets=STREAMLETS), limits=limits)
    return cluster


@pytest.mark.parametrize("seed", first_quick(range(25), 4))
async def test_each_chunk_comes_once_and_in_order_despite_faults(
    wide: FakeCluster, make_producer: MakeProducer, seed: int
) -> None:
    choices = random.Random(seed)
    producer = make_producer(wide, chunk_bytes_max=1024)
    await producer.prepare("s")
    parts = [part(number) for number in range(STREAMLETS)]
    inside = set(range(STREAMLETS))
    session = ReadSession(wide.loopback, "reader", parts)
    written: list[list[bytes]] = [[] for _ in range(STREAMLETS)]
    happened: set[str] = set()
    for number in range(80):
        streamlet = choices.randrange(STREAMLETS)
        match choices.choice(["write", "write", "read", "read", "fault", "leave"]):
            case "write":
                value = b"%d" % number * choices.choice([1, 200])
                await producer.send("s", value, streamlet=streamlet)
                written[streamlet].append(value)
            case "leave" if streamlet in inside:
                session.remove(parts[streamlet])
                inside.remove(streamlet)
            case "leave":
                session.add(parts[streamlet])
                inside.add(streamlet)
            case "fault":
                wide.loopback.read_faults.append(choices.choice(FAULTS))
                with pytest.raises(KeraError):
                    await read(session)
                happened.add("fault")
            case _:
                take(await read(session, bytes_max=choices.choice([500, 1 << 20])))
                happened.add("kept" if session._kept else "not kept")
    for streamlet in set(range(STREAMLETS)) - inside:
        session.add(parts[streamlet])
    while given := await read(session):
        take(given)
    assert [each.values for each in parts] == written
    assert {"fault", "kept"} <= happened


async def test_a_session_that_the_broker_has_lost_begins_anew(wide: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(wide)
    await producer.prepare("s")
    await producer.send("s", b"a", streamlet=0)
    first, second = part(0), part(1)
    session = ReadSession(wide.loopback, "", [first, second])
    take(await read(session))
    wide.loopback.peer.closed()  # the broker also forgets the session
    await producer.send("s", b"b", streamlet=0)
    await producer.send("s", b"c", streamlet=1)
    take(await read(session))
    assert (first.values, second.values) == ([b"a", b"b"], [b"c"])


async def test_a_range_that_failed_leaves_the_session(wide: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(wide)
    await producer.prepare("s")
    await producer.send("s", b"a", streamlet=0)
    whole, wrong = part(0), part(0, Position(1, 1, 1))
    session = ReadSession(wide.loopback, "", [whole, wrong])
    good, bad = await read(session)
    assert (good.item, good.ended) == (whole, False)
    assert (bad.item, bad.ended, bad.fetched.error is not None) == (wrong, True, True)
    assert session.items == [whole]


class Other:
    """A broker that gives an invalid answer."""

    transport = "tcp"

    def __init__(self, reply: Reply[Any]) -> None:
        self.reply = reply

    async def answer(self) -> Reply[Any]:
        return self.reply

    def submit(self, *_: Any, **__: Any) -> Any:
        return self.answer()


async def test_an_answer_with_an_unknown_handle_is_rejected() -> None:
    reply = Reply(broker_pb2.MultiReadChunksResponse(results=[broker_pb2.ReadResult(handle=77)]))
    session = ReadSession(Other(reply), "", [part(0)])  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="77"):
        await read(session)


async def test_an_answer_with_fewer_bytes_than_it_claims_is_rejected() -> None:
    results = [broker_pb2.ReadResult(handle=1, length_bytes=65)]
    reply = Reply(broker_pb2.MultiReadChunksResponse(results=results), [memoryview(bytes(64))])
    session = ReadSession(Other(reply), "", [part(0)])  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="65 bytes for a range, and its answer has 64 left"):
        await read(session)


async def test_a_range_removed_and_added_again_goes_on_at_its_position(
    wide: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(wide)
    await producer.prepare("s")
    await producer.send("s", b"a", streamlet=0)
    item = part(0)
    session = ReadSession(wide.loopback, "", [item])
    wide.loopback.read_faults.append(Fault.ANSWER_LOST)
    with pytest.raises(Uncertain):
        await read(session)
    session.remove(item)
    session.add(item)
    take(await read(session))
    session.remove(item)
    await producer.send("s", b"b", streamlet=0)
    assert await read(session) == []
    session.add(item)
    take(await read(session))
    assert item.values == [b"a", b"b"]


@pytest.mark.parametrize("limits", [ServingLimits(), ServingLimits(connection_ranges_max=1)], ids=["kept", "not kept"])
async def test_more_ranges_than_a_request_takes_go_in_several_requests(
    wide: FakeCluster, make_producer: MakeProducer
) -> None:
    """This also holds when the broker keeps no session: then each request has other ranges."""
    producer = make_producer(wide, chunk_bytes_max=1024)
    await producer.prepare("s")
    parts = [part(number) for number in range(STREAMLETS)]
    for number in range(STREAMLETS):
        await producer.send("s", b"%d" % number, streamlet=number)
    session = ReadSession(wide.loopback, items=parts, ranges_max=2)

    for _ in range(STREAMLETS):
        take(await read(session))

    assert [each.values for each in parts] == [[b"%d" % number] for number in range(STREAMLETS)]
