"""The admin's calls as messages, and answers as values. Tests against a real coordinator are in tests/integration."""

import re
from typing import Any

import pytest

from kera.client.admin.admin import Admin
from kera.client.admin.control import BrokerLoad, DrainStatus, StreamletMove
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.connections import Connections
from kera.client.settings import ClientSettings
from kera.client.types import BackupDescription, StreamDescription
from kera.core.errors import InvalidArgument, ProtocolError, Unavailable
from kera.core.rpc import Method, api
from kera.core.runtime import MACHINE
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.client.support import description, stream_info


class Asked:
    """A cluster that notes the requests to the coordinator."""

    runtime = MACHINE

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def ask(self, _: Method[Any, Any], message: Any) -> None:
        self.requests.append(message)

    async def stream(self, name: str) -> StreamDescription:
        return description(name=name)

    def forget(self, _: str) -> None:
        pass


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def admin(asked: Asked) -> Admin:
    return Admin(asked)  # type: ignore[arg-type]


async def test_a_stream_without_options_leaves_replication_and_durability_to_the_cluster(
    admin: Admin, asked: Asked
) -> None:
    await admin.create_stream("s")

    (request,) = asked.requests
    assert not request.config.HasField("replication")
    assert request.config.durability == common_pb2.DURABILITY_UNSPECIFIED
    assert request.config.virtual_logs == 1


@pytest.mark.parametrize("replication", [0, 2])
async def test_a_stream_is_created_with_the_given_replication(admin: Admin, asked: Asked, replication: int) -> None:
    await admin.create_stream("s", replication=replication, virtual_logs=3, durability="persisted")

    config = asked.requests[0].config
    assert config.HasField("replication")
    assert (config.replication, config.virtual_logs) == (replication, 3)
    assert config.durability == common_pb2.DURABILITY_PERSISTED


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {}),
        ({"virtual_logs": 4}, {"virtual_logs": 4}),
        ({"durability": "persisted"}, {"durability": common_pb2.DURABILITY_PERSISTED}),
        ({"brokers": 0}, {"brokers": 0}),  # 0 is all of them; absent, the stream stays where it is
        ({"memory_priority": 0, "replication_priority": 3}, {"memory_priority": 0, "replication_priority": 3}),
        ({"retention_ms": 0, "retention_consumed": False}, {"retention_ms": 0, "retention_consumed": False}),
        ({"retention_bytes": 7}, {"retention_bytes": 7}),
        (
            {"retention_consumer_groups": ["a"]},
            {"retention_consumer_groups": coordinator_pb2.ConsumerGroupNames(names=["a"])},
        ),
        ({"retention_consumer_groups": []}, {"retention_consumer_groups": coordinator_pb2.ConsumerGroupNames()}),
    ],
)
async def test_an_alteration_carries_only_the_given_options(
    admin: Admin, asked: Asked, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    await admin.alter_stream("s", **changes)
    assert asked.requests == [coordinator_pb2.AlterStreamRequest(name="s", **fields)]


async def test_a_text_as_list_of_consumer_groups_is_refused(admin: Admin, asked: Asked) -> None:
    with pytest.raises(InvalidArgument, match=r"such as \['billing'\]"):
        await admin.alter_stream("s", retention_consumer_groups="billing")
    with pytest.raises(InvalidArgument, match="retention_consumer_groups"):
        await admin.create_stream("s", retention_consumer_groups="billing")
    assert asked.requests == []


async def test_the_error_names_a_number_or_durability_out_of_range(admin: Admin, asked: Asked) -> None:
    for wrong in ({"replication": -1}, {"virtual_logs": 1 << 32}, {"retention_bytes": 1 << 63}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            await admin.create_stream("s", **wrong)  # type: ignore[arg-type]
    for level in ("eternal", "unspecified"):
        with pytest.raises(InvalidArgument, match="is not one of leader, replicated, persisted"):
            await admin.create_stream("s", durability=level)
        with pytest.raises(InvalidArgument, match="is not one of leader, replicated, persisted"):
            await admin.alter_stream("s", durability=level)
    with pytest.raises(InvalidArgument, match="virtual_logs"):
        await admin.alter_stream("s", virtual_logs=-1)
    assert asked.requests == []


def test_a_described_stream_has_its_replication_and_virtual_logs() -> None:
    config = StreamDescription.from_message(stream_info(replication=2, virtual_logs=3)).config
    assert (config.replication, config.virtual_logs) == (2, 3)
    plain = StreamDescription.from_message(stream_info()).config
    assert (plain.replication, plain.virtual_logs) == (0, 1)


async def test_a_described_cluster_has_its_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    backup = common_pb2.BackupInfo(
        backup_id=2,
        backup_epoch=5,
        node_id="node",
        rack="r1",
        grpc_address="h:1",
        frames_address="h:2",
        frames_unix_path="/x",
        segment_bytes=8,
        memory_bytes=100,
        disk_bytes=1000,
        free_memory_bytes=60,
        free_disk_bytes=900,
        alive=True,
    )

    async def ask(_: Cluster, method: Method[Any, Any], __: Any) -> Any:
        assert method is api.DESCRIBE_CLUSTER
        return coordinator_pb2.DescribeClusterResponse(cluster_id="c", backups=[backup])

    monkeypatch.setattr(Cluster, "ask", ask)

    found = await Cluster("127.0.0.1:1", ClientSettings()).describe()

    assert (found.cluster_id, found.brokers) == ("c", [])
    assert found.backups == [BackupDescription(2, "node", "r1", "h:1", "h:2", "/x", 8, 100, 1000, 60, 900, alive=True)]


async def test_streams_are_listed_over_several_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]

    async def ask(_: Cluster, method: Method[Any, Any], message: Any) -> Any:
        assert method is api.LIST_STREAMS
        left = [name for name in names if name > message.after]
        streams = [common_pb2.StreamInfo(name=name) for name in left[:1]]
        return coordinator_pb2.ListStreamsResponse(streams=streams, more=len(left) > 1)

    monkeypatch.setattr(Cluster, "ask", ask)
    assert [stream.name for stream in await Cluster("127.0.0.1:1", ClientSettings()).all_streams()] == names


# --- the control plane -------------------------------------------------------------------------------------------


class Answering(Asked):
    """A cluster whose coordinator gives this answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    async def ask(self, _: Method[Any, Any], message: Any) -> Any:
        self.requests.append(message)
        return self.answer

    @property
    def admin(self) -> Admin:
        return Admin(self)  # type: ignore[arg-type]


async def test_moving_a_streamlet_asks_the_coordinator_and_returns_the_stall() -> None:
    cluster = Answering(coordinator_pb2.MoveStreamletResponse(stall_us=7))

    moved = await cluster.admin.move_streamlet("s", 1, 2)

    assert (moved.stream.name, moved.stall_us) == ("s", 7)
    assert cluster.requests == [coordinator_pb2.MoveStreamletRequest(stream="s", streamlet_id=1, broker_id=2)]
    with pytest.raises(InvalidArgument, match="streamlet_id"):
        await cluster.admin.move_streamlet("s", -1, 2)


async def test_rebalancing_returns_moves_failures_and_loads() -> None:
    move = coordinator_pb2.Move(stream="s", streamlet_id=1, from_broker_id=2, to_broker_id=3, reason="busy")
    failed = coordinator_pb2.Move(stream="t", error=common_pb2.Error(code="unavailable", message="away"))
    load = coordinator_pb2.BrokerLoad(
        broker_id=2, bytes_per_s=10, streamlets=4, bytes_per_s_after=5, streamlets_after=3
    )
    cluster = Answering(coordinator_pb2.RebalanceResponse(moves=[move, failed], loads=[load]))

    found = await cluster.admin.rebalance(dry_run=True)

    assert cluster.requests == [coordinator_pb2.RebalanceRequest(dry_run=True)]
    assert found.moves == [StreamletMove("s", 1, 2, 3, "busy"), StreamletMove("t", 0, 0, 0, "", "away")]
    assert found.loads == [BrokerLoad(2, 10, 4, 5, 3)]


async def test_members_are_drained_and_taken_back() -> None:
    answer = coordinator_pb2.DrainResponse(
        streamlets_owned=1, streamlets_held=2, replicas=3, reasons=["a", "b"], draining=True
    )
    cluster = Answering(answer)

    assert await cluster.admin.drain_broker(4) == DrainStatus(False, 1, 2, 3, ["a", "b"])
    await cluster.admin.drain_backup(5, undo=True)

    assert cluster.requests == [
        coordinator_pb2.DrainRequest(broker_id=4),
        coordinator_pb2.DrainRequest(backup_id=5, undo=True),
    ]


@pytest.mark.parametrize("noun", ["broker", "backup"])
@pytest.mark.parametrize("verb", ["drain", "forget"])
async def test_draining_or_forgetting_member_0_is_refused(verb: str, noun: str) -> None:
    cluster = Answering(coordinator_pb2.DrainResponse())

    with pytest.raises(InvalidArgument, match=f"there is no {noun} 0") as error:
        await getattr(cluster.admin, f"{verb}_{noun}")(0)

    assert error.value.attributes == {f"{noun}_id": 0}
    assert cluster.requests == []


async def test_a_described_recovery_has_all_of_its_fields() -> None:
    info = coordinator_pb2.RecoveryInfo(
        broker_id=1,
        before_epoch=2,
        cause="dead",
        phase=coordinator_pb2.RECOVERY_PHASE_TAKING_OVER,
        waits_for=["w"],
        owner_ids=[3],
    )
    numbers = [field.name for field in info.DESCRIPTOR.fields if field.name.endswith(("_us", "_lost"))]
    numbers += [field.name for field in info.DESCRIPTOR.fields if field.name.startswith(("bytes_", "streamlets_"))]
    for number, name in enumerate(numbers, 10):
        setattr(info, name, number)

    (found,) = await Answering(coordinator_pb2.ListRecoveriesResponse(recoveries=[info])).admin.recoveries()

    assert (found.broker_id, found.before_epoch, found.cause, found.phase) == (1, 2, "dead", "taking_over")
    assert (found.waits_for, found.owner_ids) == (["w"], [3])
    assert [getattr(found, name) for name in numbers] == list(range(10, 10 + len(numbers)))


async def test_an_unknown_recovery_phase_is_shown_as_a_number() -> None:
    info = coordinator_pb2.RecoveryInfo(phase=99)  # type: ignore[arg-type]

    (found,) = await Answering(coordinator_pb2.ListRecoveriesResponse(recoveries=[info])).admin.recoveries()

    assert found.phase == "phase 99"


@pytest.mark.parametrize("path", ["x" * 5_000, "a\0b"], ids=["too-long", "no-text"])
async def test_an_impossible_unix_socket_path_counts_as_not_offered(path: str) -> None:
    settings = ClientSettings(transport="unix")
    connections = Connections("here", settings, report_again_s=1.0, report=lambda *_: None)
    broker = common_pb2.BrokerInfo(broker_id=1, node_id="here", frames_unix_path=path)
    with pytest.raises(Unavailable, match="does not offer transport unix"):
        await connections.channel(StreamDescription.from_message(stream_info(), [broker]), 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schemas": []}, "stream 's' was described without a schema"),
        ({"assignments": []}, "stream 's' was described without all of its streamlets"),
        ({"config": common_pb2.StreamConfig(streamlets=1 << 31)}, "without all of its streamlets"),
        ({"config": common_pb2.StreamConfig(streamlets=0)}, "stream 's' was described without any streamlets"),
        ({"config": common_pb2.StreamConfig(streamlets=1, codec=7)}, "codec 7 is not known; is the peer newer?"),  # type: ignore[arg-type]
        ({"config": common_pb2.StreamConfig(streamlets=1, durability=8)}, "durability 8 is not known"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_stream_description_is_a_protocol_error(changes: dict[str, Any], text: str) -> None:
    info = stream_info()
    for name, value in changes.items():
        info.ClearField(name)  # type: ignore[arg-type]
        info.MergeFrom(common_pb2.StreamInfo(**{name: value}))

    with pytest.raises(ProtocolError, match=re.escape(text)):
        StreamDescription.from_message(info)
