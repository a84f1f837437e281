"""The coordinator's calls to backups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kera.coordinator.cluster.peers import Peers
from kera.core.rpc import api
from kera.core.runtime import MACHINE, OpenChannel
from kera.v1 import backup_pb2, common_pb2


class BackupCalls(Protocol):
    """The coordinator's calls to backups. Each call takes bounded time, and may be repeated.

    All raise `Unavailable`, `Uncertain` or the backup's error.
    """

    async def fence(self, backup: common_pb2.BackupInfo, broker_id: int, before_epoch: int) -> None:
        """Have `backup` refuse launches of a broker before an epoch, forever."""
        ...

    async def free(
        self, backup: common_pb2.BackupInfo, broker_id: int, broker_epoch: int, *, before_epoch: int
    ) -> None:
        """Have `backup` delete all replicas of launches of a broker before an epoch, below which it has fenced the
        broker.

        `broker_epoch` is the broker's present one.
        """
        ...

    async def count_replicas(self, backup: common_pb2.BackupInfo, broker_ids: Iterable[int]) -> int:
        """Return how many replicas `backup` has of the data that these brokers wrote."""
        ...


class GrpcBackupCalls:
    """See `BackupCalls`; over the backups' open interface."""

    def __init__(self, *, timeout_ms: int, channel: OpenChannel = MACHINE.channel) -> None:
        self._peers = Peers(timeout_ms=timeout_ms, channel=channel)

    async def fence(self, backup: common_pb2.BackupInfo, broker_id: int, before_epoch: int) -> None:
        """See `BackupCalls.fence`."""
        request = backup_pb2.FenceBrokerRequest(broker_id=broker_id, broker_epoch=before_epoch)
        await self._peers.call(backup.grpc_address, api.FENCE_BROKER, request)

    async def free(
        self, backup: common_pb2.BackupInfo, broker_id: int, broker_epoch: int, *, before_epoch: int
    ) -> None:
        """See `BackupCalls.free`."""
        request = backup_pb2.FreeReplicasRequest(
            broker_id=broker_id, broker_epoch=broker_epoch, before_epoch=before_epoch
        )
        await self._peers.call(backup.grpc_address, api.FREE_REPLICAS, request)

    async def count_replicas(self, backup: common_pb2.BackupInfo, broker_ids: Iterable[int]) -> int:
        """See `BackupCalls.count_replicas`."""
        count = 0
        for broker_id in broker_ids:
            after, complete = 0, False
            while not complete:
                request = backup_pb2.ListReplicasRequest(broker_id=broker_id, after_virtual_segment_id=after)
                answer = await self._peers.call(backup.grpc_address, api.LIST_REPLICAS, request)
                count += len(answer.replicas)
                complete = answer.complete or not answer.replicas
                after = answer.replicas[-1].virtual_segment_id if answer.replicas else after
        return count

    async def close(self) -> None:
        """Close the connections."""
        await self._peers.close()
