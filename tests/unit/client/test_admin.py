"""The admin's calls as messages, and answers as values; a real coordinator has them in tests/integration."""

from typing import Any

import pytest

from kera.client.admin import Admin
from kera.client.cluster import Cluster
from kera.client.settings import ClientSettings
from kera.client.types import BackupDescription, StreamDescription
from kera.core.errors import InvalidArgument
from kera.core.rpc import Method, api
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.client.support import description, stream_info


class Asked:
    """A cluster that notes what the coordinator is asked."""

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


async def test_a_stream_that_says_nothing_leaves_replication_and_level_to_the_cluster(
    admin: Admin, asked: Asked
) -> None:
    await admin.create_stream("s")

    (request,) = asked.requests
    assert not request.config.HasField("replication")
    assert request.config.durability == common_pb2.DURABILITY_UNSPECIFIED
    assert request.config.virtual_logs == 1


@pytest.mark.parametrize("replication", [0, 2])
async def test_a_stream_is_created_with_the_replication_that_is_given(
    admin: Admin, asked: Asked, replication: int
) -> None:
    await admin.create_stream("s", replication=replication, virtual_logs=3, durability="persisted")

    config = asked.requests[0].config
    assert config.HasField("replication")
    assert (config.replication, config.virtual_logs) == (replication, 3)
    assert config.durability == common_pb2.DURABILITY_PERSISTED


async def test_an_alteration_sets_virtual_logs_if_they_are_given(admin: Admin, asked: Asked) -> None:
    await admin.alter_stream("s", virtual_logs=4)
    await admin.alter_stream("s", durability="replicated")

    first, second = asked.requests
    assert first == coordinator_pb2.AlterStreamRequest(name="s", virtual_logs=4)
    assert second == coordinator_pb2.AlterStreamRequest(name="s", durability=common_pb2.DURABILITY_REPLICATED)


async def test_numbers_and_levels_that_no_message_takes_are_named(admin: Admin, asked: Asked) -> None:
    for wrong in ({"replication": -1}, {"virtual_logs": 1 << 32}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            await admin.create_stream("s", **wrong)  # type: ignore[arg-type]
    for level in ("eternal", "unspecified"):
        with pytest.raises(InvalidArgument, match="is none of leader, replicated, persisted"):
            await admin.create_stream("s", durability=level)
    with pytest.raises(InvalidArgument, match="virtual_logs"):
        await admin.alter_stream("s", virtual_logs=-1)
    assert asked.requests == []


def test_a_described_stream_has_its_replication() -> None:
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
