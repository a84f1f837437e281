"""The secret of a cluster is replaced under load, without losing a record or a daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.core.access.credentials import of_daemon
from kera.core.errors import AuthenticationFailed, Uncertain
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.v1 import backup_pb2, daemon_pb2
from tests.integration.secured_cluster import SECRET, Secured
from tests.integration.support import until

pytestmark = pytest.mark.timeout(180)
NEW = "another secret that all daemons have"
STREAM = "orders"
OVER_TCP = b'"transport": "tcp"'


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """Brokers and backups that reach each other over TCP, as on several hosts."""
    with contextlib.ExitStack() as stack:
        made = Secured(tmp_path, stack, brokers=2, backups=2)
        for name in ("backup-1", "backup-2"):
            Path(made.cluster.ready[name]["frames_unix_path"]).unlink()
        for name in ("broker-1", "broker-2"):
            made.cluster.restart(name)
        yield made


async def is_known(secured: Secured, name: str, secret: str) -> bool:
    """Whether a daemon accepts a secret."""
    address = secured.cluster.ready[name]["grpc_address"]
    channel = GrpcChannel(address, tls=secured.tls, introduction=of_daemon(secret))
    try:
        while True:
            with contextlib.suppress(Uncertain):  # the daemon forgot the secret just during the call
                await call(channel, api.DESCRIBE_DAEMON, daemon_pb2.DescribeDaemonRequest(), timeout_s=10)
                return True
    except AuthenticationFailed:
        return False
    finally:
        await channel.close()


@pytest.mark.parametrize(
    "together", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["together", "one after the other"]
)
async def test_the_cluster_secret_is_replaced_while_records_are_written(secured: Secured, together: bool) -> None:
    """`together`: all hosts get the new file at once."""
    cluster = secured.cluster
    kinds = list(secured.secrets)
    steps = [kinds] if together else [[kind] for kind in kinds]
    log = [cluster.log_dir / f"{name}.log" for name in ("broker-1", "broker-2")]
    await until(lambda: all(OVER_TCP in path.read_bytes() for path in log))
    await secured.make_user("admin")
    stranger = await FrameChannel.connect_tcp(
        cluster.ready["backup-1"]["frames_address"], timeout_s=10, tls=secured.tls, introduction=of_daemon(SECRET)
    )
    replicas = backup_pb2.ListReplicasRequest(broker_id=1)
    await call(stranger, api.LIST_REPLICAS, replicas, timeout_s=10)
    acknowledged = 0
    ended = asyncio.Event()
    async with await secured.client("admin") as client:
        await client.admin.create_stream(STREAM, streamlets=4, replication=1)

        async def write() -> None:
            nonlocal acknowledged
            async with client.producer() as producer:
                await producer.prepare(STREAM)
                while not ended.is_set():
                    await producer.send(STREAM, b"%d" % acknowledged)
                    acknowledged += 1

        async def goes_on() -> None:
            more = acknowledged + 50
            await until(lambda: acknowledged >= more or writing.done())
            assert not writing.done(), writing.exception()

        writing = asyncio.create_task(write())
        await goes_on()
        names = list(cluster.ready)
        for secrets, known, unknown in ((f"{NEW}\n{SECRET}\n", [SECRET, NEW], []), (f"{NEW}\n", [NEW], [SECRET])):
            for step in steps:
                for kind in step:
                    secured.secrets[kind].write_text(secrets)
                for name in (each for each in names if each.startswith(tuple(step))):
                    while not all([await is_known(secured, name, secret) for secret in known]):
                        await goes_on()
                    while any([await is_known(secured, name, secret) for secret in unknown]):
                        await goes_on()
                await goes_on()
        await until(lambda: stranger.closed)  # it authenticated with the removed secret
        assert await client.admin.recoveries() == []
        cluster.restart("broker-1")  # it has never had the old secret
        await goes_on()
        ended.set()
        await writing
        described = await client.admin.describe_cluster()
        assert all(each.alive for each in described.brokers)
        assert all(each.alive for each in described.backups)
        read = [
            value
            async for chunk in client.consumer(STREAM, start="earliest", end="latest").batches()
            for value in chunk.batch["value"].to_pylist()
        ]
    assert sorted(read, key=int) == [b"%d" % number for number in range(acknowledged)]
