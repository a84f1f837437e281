"""A cluster whose daemons and clients have certificates becomes a secured one while it is used, daemon by daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings
from kera.core.errors import NotAllowed
from kera.core.security.issuing import Authority
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
HOST = "127.0.0.1"
STREAM = "orders"


class Certified:
    """A cluster that allows everything to every client with a certificate."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.authority, _ = Authority.open_or_make(directory / "certificates")
        one = self.authority.issue(HOST)
        files = {"tls_cert": one.cert, "tls_key": one.key, "tls_ca": self.authority.path}
        daemon: dict[str, Any] = {**files, "tls_client_auth": "required"}
        self.cluster: RunningCluster = stack.enter_context(
            LocalCluster.running(
                brokers=2,
                backups=2,
                replication=1,
                data_dir=directory / "data",
                arena_bytes=64 << 20,
                backup_memory_bytes=64 << 20,
                segment_bytes=1 << 20,
                coordinator_settings=daemon,
                broker_settings=daemon,
                backup_settings=daemon,
            )
        )

    async def client(self, name: str) -> Client:
        one = self.authority.issue(name, client=True)
        settings = ClientSettings(tls_ca=self.authority.path, tls_cert=one.cert, tls_key=one.key, transport="tcp")
        return await Client.connect(self.cluster.bootstrap, settings)


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[Certified]:
    with contextlib.ExitStack() as stack:
        yield Certified(tmp_path, stack)


async def test_existing_rules_apply_when_security_is_turned_on_under_load(certified: Certified) -> None:
    acknowledged = 0
    ended = asyncio.Event()
    async with (
        await certified.client("admin") as admin,
        await certified.client("alice") as alice,
        await certified.client("bob") as bob,
    ):
        await admin.admin.create_stream(STREAM, streamlets=4, replication=1)
        await admin.access.grant("user:admin", ["administer"], "cluster")
        await admin.access.grant("user:alice", ["read", "write"], f"stream:{STREAM}")
        await bob.admin.describe_stream(STREAM)

        async def write() -> None:
            nonlocal acknowledged
            async with alice.producer() as producer:
                await producer.prepare(STREAM)
                while not ended.is_set():
                    await producer.send(STREAM, b"%d" % acknowledged)
                    acknowledged += 1

        async def goes_on() -> None:
            more = acknowledged + 50
            await until(lambda: acknowledged >= more or writing.done(), 60)
            assert not writing.done(), writing.exception()

        writing = asyncio.create_task(write())
        await goes_on()
        for name in ("coordinator", "broker-1", "broker-2", "backup-1", "backup-2"):
            await asyncio.to_thread(certified.cluster.restart, name, security=True)
            await goes_on()
        ended.set()
        await writing
        assert (await admin.admin.describe_cluster()).security
        assert await bob.admin.list_streams() == []
        with pytest.raises(NotAllowed):
            await bob.admin.create_stream("another")
        read = [
            value
            async for chunk in alice.consumer(STREAM, start="earliest", end="latest").batches()
            for value in chunk.batch["value"].to_pylist()
        ]
    assert sorted(read, key=int) == [b"%d" % number for number in range(acknowledged)]
