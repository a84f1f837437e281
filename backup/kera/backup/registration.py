"""The backup's connection to the coordinator: its identity on disk, its registration, its heartbeats.

The files are ``backup.json`` and ``backup.copy.json``, see ``kera.core.data_dir``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from kera.core import data_dir
from kera.core.rpc import api
from kera.core.runtime import MACHINE, Runtime
from kera.server import registration
from kera.v1 import common_pb2, coordinator_pb2


class BackupIdentity(data_dir.MemberIdentity):
    """The identity of a backup: its id and its cluster."""

    role: ClassVar[str] = "backup"


class BackupDirectory(data_dir.DataDirectory):
    """Owner of the backup's data directory. The replicas themselves name their backup (``kera.backup.restart``)."""

    identity: ClassVar[type[data_dir.MemberIdentity]] = BackupIdentity


class Free(NamedTuple):
    """The free room in a heartbeat."""

    memory_bytes: int
    disk_bytes: int


class BackupRegistration(registration.Registration):
    """The registration of one launch of a backup."""

    def __init__(
        self,
        coordinator: str,
        directory: data_dir.DataDirectory,
        chosen_id: int = 0,
        *,
        access_version: Callable[[], int] = lambda: 0,
        runtime: Runtime = MACHINE,
    ) -> None:
        """`access_version`: returns the version of the users and rules in force."""
        self._access_version = access_version
        super().__init__(coordinator, directory, chosen_id, runtime=runtime)
        self.backup_id = 0
        self.backup_epoch = 0
        self.cluster_id = ""

    async def register(self, info: common_pb2.BackupInfo, timeout_s: float) -> None:
        """Register this launch.

        Waits up to `timeout_s` for a coordinator that cannot be reached, then raises `CoordinatorUnreachable`.
        """
        info.backup_id = await self.identify(timeout_s)
        request = coordinator_pb2.RegisterBackupRequest(
            backup=info,
            launch_id=self.launch_id,
            chosen_id=self.id_is_chosen,
            directory_id=self.directory_id,
        )
        answer = await self.ask(api.REGISTER_BACKUP, request, timeout_s)
        self.remember(answer.backup_id, answer.cluster_id, answer.heartbeat_interval_ms)
        self.backup_id, self.backup_epoch = answer.backup_id, answer.backup_epoch
        self.cluster_id = answer.cluster_id

    async def leave(self) -> bool:
        """Ask that brokers go on at other backups; return whether they will."""
        answer = await self.announce(self._restart())
        return answer is not None and answer.others_go_on

    async def stops(self) -> None:
        """Announce that this launch accepts no more data, and is about to end in order to start again."""
        self.stopping = True
        await self.announce(self._restart(stopping=True))

    def _restart(self, *, stopping: bool = False) -> coordinator_pb2.PrepareRestartRequest:
        return coordinator_pb2.PrepareRestartRequest(
            backup_id=self.backup_id, epoch=self.backup_epoch, stopping=stopping
        )

    async def keep_alive(self, free: Callable[[], Free]) -> None:
        """Send heartbeats for ever. Raises `StaleEpoch` if a newer launch has taken over, so that this one must end."""

        def request() -> coordinator_pb2.BackupHeartbeatRequest:
            memory_bytes, disk_bytes = free()
            return coordinator_pb2.BackupHeartbeatRequest(
                backup_id=self.backup_id,
                backup_epoch=self.backup_epoch,
                free_memory_bytes=memory_bytes,
                free_disk_bytes=disk_bytes,
                access_version=self._access_version(),
            )

        await self.beat(api.BACKUP_HEARTBEAT, request)
