"""A cluster that tests use one after the other: after any kills, stops or drains, the next test finds it whole.

Tests share the processes. Streams and consumer groups belong to one test: they are deleted before the next one. A
cluster that cannot be made whole, because a test failed in the middle of something, is replaced by a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kera.client import Client, ClientSettings
from kera.client.types import BackupDescription, BrokerDescription
from kera.core.errors import KeraError
from kera.local.cluster import LocalCluster, RunningCluster
from kera.local.running import run_in_thread

WHOLE_S = 30.0
"""The time that a cluster may take until it is whole."""
FINISHED = ("done", "cancelled")


class SharedCluster:
    """A cluster with the methods of `LocalCluster`, on an event loop of its own: a test's loop ends with the test."""

    def __init__(self, make: Callable[[], LocalCluster]) -> None:
        """`make` gives a cluster that has not been started."""
        self._make = make
        self._stack = contextlib.ExitStack()
        self._running: RunningCluster | None = None
        self._paused: set[str] = set()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        self._running = self._stack.enter_context(run_in_thread(self._make()))

    def _stop(self) -> None:
        ready = self.ready
        self._stack.close()
        self._paused.clear()
        for each in ready.values():  # the file of a killed broker
            if "arena_path" in each:
                Path(each["arena_path"]).unlink(missing_ok=True)

    @property
    def _cluster(self) -> RunningCluster:
        assert self._running is not None
        return self._running

    @property
    def bootstrap(self) -> str:
        """The coordinators' addresses."""
        return self._cluster.bootstrap

    @property
    def processes(self) -> dict[str, int]:
        """Name to process id of the running daemons."""
        return self._cluster.processes

    @property
    def ready(self) -> dict[str, dict[str, Any]]:
        """Name to ready line of all daemons."""
        return self._cluster.ready

    @property
    def log_dir(self) -> Path:
        """The directory of the daemons' logs."""
        return self._cluster.log_dir

    async def kill(self, name: str) -> None:
        """See `LocalCluster.kill`."""
        await asyncio.to_thread(self._cluster.kill, name)

    async def pause(self, name: str) -> None:
        """See `LocalCluster.pause`."""
        self._paused.add(name)
        await asyncio.to_thread(self._cluster.pause, name)

    async def resume(self, name: str) -> None:
        """See `LocalCluster.resume`."""
        self._paused.discard(name)
        await asyncio.to_thread(self._cluster.resume, name)

    async def restart(self, name: str) -> None:
        """See `LocalCluster.restart`; without settings, since the next test expects the usual daemon."""
        await asyncio.to_thread(self._cluster.restart, name)

    async def make_whole(self) -> None:
        """Make every daemon run, without remains of an earlier test; otherwise start a new cluster."""
        try:
            async with asyncio.timeout(WHOLE_S):
                for name in sorted(self._paused):
                    await self.resume(name)
                while not await self._is_whole():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            await asyncio.to_thread(self._stop)
            await asyncio.to_thread(self._start)

    async def _is_whole(self) -> bool:
        """Whether the cluster is whole; starts what is missing."""
        gone = self.ready.keys() - self.processes.keys()
        await asyncio.gather(*(self.restart(name) for name in gone))
        try:
            return await self._is_as_new()
        except KeraError:  # no leader yet, or a daemon has just died
            return False

    async def _is_as_new(self) -> bool:
        """Whether all members live and nothing is under way; removes the remains of tests."""
        async with await Client.connect(self.bootstrap, ClientSettings.load(request_timeout_ms=3_000)) as client:
            admin = client.admin
            known = await admin.describe_cluster()
            members: list[BrokerDescription | BackupDescription] = [*known.brokers, *known.backups]
            if not all(each.alive and not each.restarting for each in members):
                return False
            for stream in await admin.list_streams():
                await admin.delete_stream(stream.name)
            for group in await admin.consumer_groups():
                await admin.delete_consumer_group(group.consumer_group)
            for broker in known.brokers:
                if broker.draining:
                    await admin.drain_broker(broker.broker_id, undo=True)
            for backup in known.backups:
                if backup.draining:
                    await admin.drain_backup(backup.backup_id, undo=True)
            return all(each.phase in FINISHED for each in await admin.recoveries())
