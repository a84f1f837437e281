"""A cluster changes its authority under load, by files as Kubernetes mounts them: all files change at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kera.client import Client, ClientSettings
from kera.core.base.address import split_address
from kera.core.security.issuing import Authority, Issued
from kera.local.cluster import LocalCluster

pytestmark = pytest.mark.timeout(180)
HOST = "127.0.0.1"
WAIT_S = 30.0
BURST = 50
FILES = ("ca.pem", "host.pem", "host-key.pem", "client.pem", "client-key.pem")


class Mount:
    """Files that are links into a directory, which is itself a link that is replaced."""

    def __init__(self, directory: Path) -> None:
        self._versions = directory / "versions"
        self._versions.mkdir()
        self.path = directory / "mount"
        self.path.mkdir()

    def have(self, authorities: list[Authority], host: Issued, client: Issued) -> None:
        """Replace all files at once."""
        version = self._versions / str(len(list(self._versions.iterdir())))
        version.mkdir()
        contents = [
            b"".join(each.path.read_bytes() for each in authorities),
            *(path.read_bytes() for one in (host, client) for path in (one.cert, one.key)),
        ]
        for name, content in zip(FILES, contents, strict=True):
            (version / name).write_bytes(content)
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        new = self.path / "..new"
        new.symlink_to(version)
        new.replace(self.path / "..data")

    def settings(self, name: str) -> dict[str, Any]:
        paths = [self.path / file for file in ("ca.pem", f"{name}.pem", f"{name}-key.pem")]
        return dict(zip(("tls_ca", "tls_cert", "tls_key"), paths, strict=True))


def changes(cluster: Any, daemon: str) -> int:
    """How often a daemon has loaded new files."""
    lines = (cluster.log_dir / f"{daemon}.log").read_text().splitlines()
    return sum(json.loads(line)["event"] == "certificates have changed" for line in lines if line.startswith("{"))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def connected(address: str, mount: Mount) -> Iterator[ssl.SSLSocket]:
    """A connection that stays open throughout."""
    context = ssl.create_default_context(cafile=str(mount.path / "ca.pem"))
    context.load_cert_chain(mount.path / "client.pem", mount.path / "client-key.pem")
    with (
        socket.create_connection(split_address(address), WAIT_S) as sock,
        context.wrap_socket(sock, server_hostname=HOST) as wrapped,
    ):
        yield wrapped


class Load:
    """A producer and a consumer of a stream, over one transport."""

    def __init__(self, bootstrap: str, mount: Mount, transport: Literal["tcp", "grpc"]) -> None:
        self._bootstrap = bootstrap
        self._settings = ClientSettings(transport=transport, **mount.settings("client"))
        self._stream = f"rotated-{transport}"
        self.acknowledged: set[bytes] = set()
        self.read: set[bytes] = set()
        self.ending = False

    async def run(self) -> None:
        async with await Client.connect(self._bootstrap, self._settings) as client:
            await client.admin.create_stream(self._stream, replication=1)
            async with asyncio.TaskGroup() as tasks:
                consuming = tasks.create_task(self._consume(client))
                await self._produce(client)
                await eventually(lambda: self.read >= self.acknowledged)
                consuming.cancel()

    async def _produce(self, client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(self._stream)
            while not self.ending:
                first = len(self.acknowledged)
                values = [b"%d" % number for number in range(first, first + BURST)]
                await asyncio.gather(*(producer.send(self._stream, value) for value in values))
                self.acknowledged.update(values)
                await asyncio.sleep(0.01)

    async def _consume(self, client: Client) -> None:
        async with client.group_consumer("rotating", self._stream) as consumer:
            async for record in consumer:
                self.read.add(record.value or b"")


@pytest.mark.slow
async def test_changing_the_authority_loses_no_record_and_drops_no_connection(tmp_path: Path) -> None:
    old, _ = Authority.open_or_make(tmp_path / "old")
    new, _ = Authority.open_or_make(tmp_path / "new")
    before, after = ([each.issue(HOST), each.issue("alice", client=True)] for each in (old, new))
    mount = Mount(tmp_path)
    mount.have([old], *before)
    daemon = {**mount.settings("host"), "tls_client_auth": "required"}
    cluster = LocalCluster(
        brokers=2,
        backups=1,
        replication=1,
        arena_bytes=64 << 20,
        backup_memory_bytes=64 << 20,
        segment_bytes=1 << 20,
        coordinator_settings=daemon,
        broker_settings=daemon,
        backup_settings=daemon,
    )
    async with cluster:
        loads = [Load(cluster.bootstrap, mount, "tcp"), Load(cluster.bootstrap, mount, "grpc")]
        with contextlib.ExitStack() as kept:
            sockets = [
                kept.enter_context(connected(ready["frames_address"], mount))
                for name, ready in cluster.ready.items()
                if name != "coordinator"
            ]
            async with asyncio.TaskGroup() as tasks:
                for load in loads:
                    tasks.create_task(load.run())
                await eventually(lambda: all(load.read for load in loads))
                stages = [([old, new], before), ([old, new], after), ([new], after)]
                for number, (authorities, certificates) in enumerate(stages, 1):
                    mount.have(authorities, *certificates)
                    await eventually(lambda n=number: all(changes(cluster, name) >= n for name in cluster.ready))  # type: ignore[misc]
                    counts = [len(load.acknowledged) for load in loads]
                    await eventually(
                        lambda counts=counts: all(  # type: ignore[misc]
                            len(load.acknowledged) > count for load, count in zip(loads, counts, strict=True)
                        )
                    )
                for load in loads:
                    load.ending = True
            for each in sockets:
                each.setblocking(False)
                with pytest.raises(ssl.SSLWantReadError):
                    each.recv(1)
        async with await Client.connect(cluster.bootstrap, ClientSettings(**mount.settings("client"))) as client:
            assert len(await client.admin.list_streams()) == len(loads)
    for load in loads:
        assert load.read >= load.acknowledged
        assert len(load.acknowledged) > BURST
