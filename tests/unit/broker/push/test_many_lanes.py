"""Many push lanes: they are begun, pushed to and ended in slices, so that they do not block the event loop."""

import pytest

from kera.broker.serving.limits import PushLimits
from kera.broker.serving.push import PushConnection
from kera.core.errors import ProtocolError
from kera.core.push import PushKind
from kera.v1 import push_pb2
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import CHUNK_BYTES

MANY = 40


few_steps = pytest.mark.parametrize(
    "limits", [PushLimits(steps_at_once=4, flush_subscriptions_max=4)], ids=["four in a round of the loop"]
)


def rounds_until_idle(node: PushNode, reader: Reader) -> int:
    rounds = 0
    while reader.connection.busy:
        rounds += 1
        node.loop.round()
    return rounds


@few_steps
def test_many_lanes_begin_push_and_end_in_slices_and_in_order(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(*(lane(number) for number in range(1, MANY + 1)))
    assert reader.connection.busy
    assert node.totals.subscriptions == 4
    reader.cancel(*range(1, MANY + 1))
    assert reader.ends == {}, "what was asked for first is done first"
    assert rounds_until_idle(node, reader) >= 2 * MANY // 4 - 2
    assert sorted(reader.ends) == list(range(1, MANY + 1))
    assert node.totals.subscriptions == 0

    fit = node.push.window_bytes_max // CHUNK_BYTES
    reader.subscribe(*(lane(number) for number in range(101, 101 + fit)))
    while len(reader.runs) < fit:
        before = len(reader.runs)
        assert node.loop.round()
        assert len(reader.runs) - before <= 4


@few_steps
def test_a_lost_connection_drops_its_lanes_in_slices_and_its_leases_at_once(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(*(lane(number) for number in range(1, MANY + 1)))
    node.run()
    assert node.engine.arena.leased_slots == 1
    reader.connection.lost()
    assert node.engine.arena.leased_slots == 0
    assert node.totals.subscriptions == MANY - 4
    assert node.loop.round()
    assert node.totals.subscriptions == MANY - 8
    node.run()
    assert node.totals.subscriptions == 0
    assert all(not entry.waiters and not entry.readers for entry in node.streamlet().entries)


@few_steps
def test_a_protocol_error_in_a_later_slice_is_reported_with_that_slice(node: PushNode) -> None:
    failed: list[ProtocolError] = []
    idle: list[bool] = []
    connection = PushConnection(node.push, lambda _: None, on_idle=lambda: idle.append(True), on_failed=failed.append)
    lanes = [lane(number) for number in (*range(1, 11), 1)]
    connection.received(PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=lanes).SerializeToString())
    assert (connection.busy, failed) == (True, [])
    node.run()
    assert [str(error) for error in failed] == ["lane 1 is in use"]
    assert not connection.busy
    assert idle == []
    connection.received(PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=map(lane, range(21, 31))).SerializeToString())
    node.run()
    assert idle == [True]
