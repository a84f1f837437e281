"""Push: invalid messages are refused, and the end of a connection frees everything that its reader held."""

import pytest

from kera.core.errors import ProtocolError
from kera.core.push import PushKind
from kera.v1 import push_pb2
from tests.unit.broker.push_support import PushNode, Reader, lane
from tests.unit.broker.support import CHUNK_BYTES


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (PushKind.HELLO, b"", "HELLO"),
        (PushKind.RUNS, bytes(64), "RUNS"),
        (PushKind.END, b"", "END"),
        (PushKind.SUBSCRIBE, b"\xff", "PushSubscribe"),
        (PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=[lane(1)]).SerializeToString(), "lane 1 is in use"),
        (PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=[lane(2), lane(2)]).SerializeToString(), "lane 2 is in use"),
        (PushKind.SUBSCRIBE, push_pb2.PushSubscribe(consumer_group="x" * 257).SerializeToString(), "too long"),
        (PushKind.CANCEL, bytes(5), "length"),
        (PushKind.RELEASE, bytes(5), "length"),
        (PushKind.RELEASE, b"\x01\x00\x00\x00", "slot 1 is not leased"),
        (PushKind.RELEASE, bytes(8), "slot 0 is not leased"),
        (PushKind.RELEASE, b"\xff\xff\xff\xff", "is not leased"),
        (PushKind.TAKEN, bytes(7), "length"),
        (PushKind.TAKEN, (CHUNK_BYTES + 1).to_bytes(8, "little"), "has taken 1025 bytes of 1024"),
    ],
)
def test_an_invalid_message_is_refused_and_the_lost_connection_frees_everything(
    node: PushNode, reader: Reader, kind: PushKind, body: bytes, said: str
) -> None:
    node.append(1)
    reader.subscribe(lane())
    node.run()
    assert node.engine.arena.slot(0).leases == 1
    with pytest.raises(ProtocolError, match=said):
        reader.say(kind, body)
    reader.connection.lost()

    assert node.engine.arena.leased_slots == 0
    assert node.streamlet().entries[0].waiters == set()
    assert (node.totals.connections, node.totals.subscriptions) == (0, 0)


def test_the_lease_of_another_reader_cannot_be_released(node: PushNode, reader: Reader) -> None:
    node.append(1)
    reader.subscribe(lane())
    node.run()
    with pytest.raises(ProtocolError, match="not leased"):
        Reader(node).release(reader.runs[0].slot)

    assert node.engine.arena.slot(reader.runs[0].slot).leases == 1
