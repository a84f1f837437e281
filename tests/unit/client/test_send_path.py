"""`Producer.send` in C: records that it takes itself, calls that it leaves to its Python twin, and its references."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from typing import Any

import pytest

from kera.client.producing.encoding.partitioner import PARTITIONERS, Partitioner, streamlet_of
from kera.client.producing.open_chunks.accumulator import Accumulator, Pending
from kera.client.producing.producer import Producer
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.serializing import Serialization
from kera.client.settings import ProducerSettings
from kera.core.base.clock import FakeClock
from kera.core.native import native
from tests.native_twins import Refused, needs_native
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.support import WAIT_S, FakeCluster

pytestmark = needs_native

VALUE, KEY = b"v" * 10, b"k"


class Open:
    """The state of a producer with an open chunk for each of two streams."""

    def __init__(self) -> None:
        self.plain, self.keyed = Accumulator("s", 0, 0.0), Accumulator("t", 1, 0.0)
        self.keyed.keys = []
        self.filling: dict[str, Any] = {"s": self.plain}
        self.chunks: dict[str, Any] = {"t": (2, {0: self.keyed, 1: self.keyed})}
        self.buffer = Buffer(1000)

    def sender(
        self,
        twin: Any = None,
        accepted: Any = Pending,
        chunk_bytes_max: int = 500,
        partitioner: str = "crc32c",
    ) -> Any:
        assert native is not None
        return native.sender(
            twin or refuse, accepted, self.filling, self.chunks, self.buffer, chunk_bytes_max, partitioner
        )


def refuse(*_: Any, **__: Any) -> None:
    raise Refused


def test_a_value_without_a_key_goes_to_the_filling_chunk() -> None:
    there = Open()
    before_s = time.time()
    pending = [there.sender()("s", value) for value in (VALUE, b"")]
    chunk = there.plain
    assert [type(each) for each in pending] == [Pending] * 2
    assert [(each._accumulator is chunk, each._index) for each in pending] == [(True, 0), (True, 1)]
    assert (chunk.values, chunk.keys, chunk.headers, chunk.size) == ([VALUE, b""], None, None, 74)
    assert before_s <= chunk.times_s[0] <= chunk.times_s[1] <= time.time()
    assert there.buffer.left_bytes == 1000 - 74


def test_a_key_decides_the_open_chunk() -> None:
    there = Open()
    pending = there.sender()("t", VALUE, keys=KEY)
    assert (there.keyed.values, there.keyed.keys, pending._index) == ([VALUE], [(KEY,)], 0)
    assert (there.keyed.size, there.buffer.left_bytes) == (51, 1000 - 51)


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
def test_the_core_places_keys_like_each_python_partitioner(partitioner: Partitioner) -> None:
    there = Open()
    open_chunks = {streamlet: Accumulator("t", streamlet, 0.0) for streamlet in range(7)}
    for chunk in open_chunks.values():
        chunk.keys = []
    there.chunks["t"] = 7, open_chunks
    sender = there.sender(chunk_bytes_max=1 << 20, partitioner=partitioner.name)
    there.buffer.left_bytes = 1 << 20
    for number in range(100):
        key = b"%d" % number * (number % 9 + 1)
        chunk = sender("t", VALUE, keys=key)._accumulator
        assert chunk is open_chunks[streamlet_of(key, 7, partitioner)]
    if partitioner.takes_empty:
        assert sender("t", VALUE, keys=b"")._accumulator is open_chunks[streamlet_of(b"", 7, partitioner)]
    else:
        with pytest.raises(Refused):
            sender("t", VALUE, keys=b"")


def test_an_unknown_partitioner_is_refused() -> None:
    with pytest.raises(LookupError, match="no partitioner murmur3"):
        Open().sender(partitioner="murmur3")


def test_a_record_of_a_later_epoch_goes_to_the_twin() -> None:
    there = Open()
    there.plain.epoch_end_s = there.keyed.epoch_end_s = time.time() - 1
    sender = there.sender()
    for arguments, named in ((("s", VALUE), {}), (("t", VALUE), {"keys": KEY})):
        with pytest.raises(Refused):
            sender(*arguments, **named)
    there.plain.epoch_end_s = time.time() + WAIT_S
    assert sender("s", VALUE)._accumulator is there.plain


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), {}),
        (("s",), {}),
        (("s",), {"value": VALUE}),
        (("s", VALUE, 1), {}),
        (("s", None), {}),
        (("s", bytearray(VALUE)), {}),
        (("s", VALUE), {"keys": KEY}),
        (("s", VALUE), {"headers": None}),
        (("t", VALUE), {}),
        (("t", VALUE), {"keys": [KEY]}),
        (("t", VALUE), {"keys": KEY, "streamlet": 0}),
        (("u", VALUE), {}),
        ((7, VALUE), {}),
        (([], VALUE), {}),
        (("s", b"v" * 468), {}),
        (("t", b"v" * 459), {"keys": KEY}),
    ],
)
def test_other_calls_go_to_the_twin_and_change_no_state(arguments: Any, named: Any) -> None:
    there, asked = Open(), []
    sender = there.sender(lambda *given, **by_name: asked.append((given, by_name)))
    assert sender(*arguments, **named) is None
    assert asked == [(arguments, named)]
    for chunk in (there.plain, there.keyed):
        assert (chunk.values, chunk.times_s, chunk.size) == ([], [], 0)
    assert there.buffer.left_bytes == 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda there: setattr(there.buffer, "left_bytes", 41),
        lambda there: setattr(there.plain, "size", 458),
        lambda there: setattr(there.plain, "keys", []),
        lambda there: setattr(there.plain, "headers", []),
        lambda there: there.plain.values.append(b""),
        lambda there: setattr(there.plain, "times_s", ()),
        lambda there: delattr(there.plain, "values"),
        lambda there: there.filling.update(s=object()),
        lambda there: there.filling.clear(),
    ],
)
def test_a_record_that_the_chunk_cannot_take_goes_to_the_twin(change: Any) -> None:
    there = Open()
    sender = there.sender()
    change(there)
    with pytest.raises(Refused):
        sender("s", VALUE)


@pytest.mark.parametrize("chunks", [{}, {"t": 1}, {"t": (2,)}, {"t": (0, {})}, {"t": (-1, {})}, {"t": ("x", {})}])
def test_a_key_without_an_open_chunk_goes_to_the_twin(chunks: Any) -> None:
    there = Open()
    sender = there.sender()
    there.chunks.clear()
    there.chunks.update(chunks)
    with pytest.raises(Refused):
        sender("t", VALUE, keys=KEY)


@pytest.mark.parametrize("accepted", [object, Buffer, 7])
def test_a_wrong_type_for_accepted_records_is_refused(accepted: Any) -> None:
    with pytest.raises(TypeError, match="is not the type of an accepted record"):
        Open().sender(accepted=accepted)


def test_calls_leak_no_references() -> None:
    there = Open()
    held = (VALUE, KEY, there.plain, there.keyed, there.buffer, Pending)
    sender = there.sender(chunk_bytes_max=1 << 30)

    def use() -> None:
        there.buffer.left_bytes = 100_000
        for _ in range(50):
            sender("s", VALUE)
            sender("t", VALUE, keys=KEY)
            with pytest.raises(Refused):
                sender("s", VALUE, keys=KEY)
        for chunk in (there.plain, there.keyed):
            chunk.values.clear()
            chunk.times_s.clear()
        assert there.keyed.keys is not None
        there.keyed.keys.clear()
        gc.collect()

    use()
    references = [sys.getrefcount(each) for each in held]
    use()
    assert [sys.getrefcount(each) for each in held] == references


async def test_a_producer_uses_the_core_send_and_its_records_are_delivered(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    assert vars(producer)["send"] == producer.send
    await producer.prepare("s")
    pending = [producer.send("s", b"%d" % number) for number in range(3)]
    assert [each._index for each in pending] == [0, 1, 2]
    assert producer._buffer.left_bytes == producer._buffer.bytes_max - 3 * 33
    async with asyncio.timeout(WAIT_S):
        await producer.flush()
        assert [(await each).record for each in pending] == [0, 1, 2]
    assert cluster.values() == [b"0", b"1", b"2"]


def test_the_sender_and_its_owner_are_garbage_collected() -> None:
    class Owner:
        def send(self, *_: Any) -> None:
            """Never called."""

    owner = Owner()
    owner.made = Open().sender(owner.send)  # type: ignore[attr-defined]
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("has_clock", [False, True])
@pytest.mark.parametrize("has_serializer", [False, True])
async def test_clock_and_serializer_decide_which_send_a_producer_has(
    cluster: FakeCluster, *, has_clock: bool, has_serializer: bool
) -> None:
    serialization = Serialization(lambda value, _: value.encode(), None, None) if has_serializer else None
    clock = FakeClock() if has_clock else None
    async with Producer(cluster, ProducerSettings(), clock, serialization=serialization) as producer:  # type: ignore[arg-type]
        assert (producer.send_bytes == producer._records.send) is has_clock
        assert (type(producer.send_bytes) is type(Open().sender())) is not has_clock
        assert (producer.send == producer.send_bytes) is not has_serializer
        await producer.prepare("s")
        async with asyncio.timeout(WAIT_S):
            for send in (producer.send, Producer.send.__get__(producer)):  # the class's method does the same
                await send("s", "text" if has_serializer else b"text")
    assert cluster.values() == [b"text", b"text"]


async def test_an_unknown_argument_is_reported_in_the_producers_name(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    producer: Any = make_producer(cluster)
    with pytest.raises(TypeError, match=r"^Producer\.send\(\) got an unexpected keyword argument 'key'"):
        producer.send("s", b"value", key=b"a key")
