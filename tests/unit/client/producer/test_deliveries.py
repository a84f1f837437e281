"""A delivery works like a future: `done`, `result`, `exception`, `await` and callbacks."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kera.client.producing.open_chunks.accumulator import Accumulator
from kera.client.producing.outcomes.outcome import Outcome
from kera.client.sync.handover import Handover, Sent
from kera.core.errors import ClosedError, InvalidArgument
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import FakeCluster, until


class TestFutureLike:
    async def test_a_delivery_is_done_after_the_flush_and_calls_back_once(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=60_000)
        await producer.prepare("s")
        called: list[object] = []
        pending = producer.send("s", b"a")
        whole = await producer.send_batch("s", batch(b"b", b"c"))
        for each in (pending, whole):
            each.add_done_callback(called.append)
        later = producer.send("s", b"d")
        assert not later.done()
        with pytest.raises(asyncio.InvalidStateError):
            later.result()
        await give(producer.flush())
        await until(lambda: len(called) == 2)
        assert pending.done()
        assert whole.done()
        assert called == [pending, whole]
        assert (pending.result().record, pending.exception()) == (0, None)
        assert [each.record_count for each in whole.result()] == [2]
        later.add_done_callback(called.append)
        assert called == [pending, whole], "never from within the call"
        await until(lambda: called[-1] is later)

    async def test_a_failed_delivery_calls_back_and_a_callback_may_raise(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=60_000)
        await producer.prepare("s")
        pending, called = producer.send("s", b"a"), list[object]()
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        pending.add_done_callback(lambda _: 1 / 0)
        pending.add_done_callback(called.append)
        await producer.close(flush=False)
        await until(lambda: bool(called))
        assert isinstance(pending.exception(), ClosedError)
        with pytest.raises(ClosedError):
            pending.result()
        assert [type(error) for error in told] == [ZeroDivisionError]

    async def test_each_record_of_a_split_chunk_settles_with_its_own_part(self) -> None:
        outcomes = [Outcome(), Outcome()]
        accumulator = Accumulator("s", 0, 0.0)
        accumulator.delivered = outcomes[0]
        first, second = accumulator.append(b"a", 0.0, 1), accumulator.append(b"b", 0.0, 1)
        called: list[object] = []
        for each in (first, second):
            each.add_done_callback(called.append)
        accumulator.split([1, 1], outcomes)
        outcomes[0].settle(ClosedError("one"))
        await until(lambda: called == [first])
        assert (first.done(), second.done()) == (True, False)
        outcomes[1].settle(ClosedError("two"))
        await until(lambda: called == [first, second])


class _ThisLoop:
    """The loop of the test, in place of the client's thread."""

    call_soon = staticmethod(lambda call: asyncio.get_running_loop().call_soon(call))
    start = staticmethod(asyncio.create_task)

    def check_process(self) -> None:
        pass


async def test_a_callback_for_a_refused_record_may_raise_without_asyncio_too(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    producer = make_producer(cluster)
    await producer.prepare("s")
    handover = Handover(_ThisLoop(), producer)  # type: ignore[arg-type]

    def send(value: Any, on_delivery: Callable[..., object] | None = None) -> Sent[Any]:
        sent: Sent[Any] = Sent(handover, "s", value, None, 1, on_delivery)
        handover.put(sent)
        return sent

    send(7, lambda *_: 1 / 0)
    sent_next = send(b"a")
    with pytest.raises(InvalidArgument):
        await give(handover.flush())
    assert sent_next.result().record == 0
    assert len(told) == 1
    send(b"too late", lambda *_: 1 / 0)
    await give(handover.close(flush=False))
    with pytest.raises(ClosedError):
        producer.send("s", b"b")
    await until(lambda: len(told) == 2)
    assert [type(error) for error in told] == [ZeroDivisionError, ZeroDivisionError]
