"""A coordinator whose answers to brokers and backups, over gRPC, a test chooses."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from kera.core.errors import KeraError, StaleEpoch
from kera.core.rpc import Call, Reply, Service, api
from kera.core.rpc.grpc_server import GrpcServer
from kera.v1 import common_pb2, coordinator_pb2

BROKER_ID = 3
BACKUP_ID = 5
EPOCH = 12


class FakeCoordinator:
    """Remembers all requests; answers each call with the next error until the errors are used up."""

    def __init__(self, cluster_id: str = "cluster", streams: Iterable[common_pb2.StreamInfo] = ()) -> None:
        self.cluster_id = cluster_id
        self.streams = streams
        self.address = ""
        self.backups: list[common_pb2.BackupInfo] = []
        """Sent to brokers."""
        self.lease_ms = self.coordinator_epoch = 0
        """Likewise."""
        self.fences: coordinator_pb2.ProducerFences | None = None
        """Likewise."""
        self.reports: list[coordinator_pb2.HeartbeatRequest] = []
        self.registered: list[coordinator_pb2.RegisterBrokerRequest] = []
        self.registered_backups: list[coordinator_pb2.RegisterBackupRequest] = []
        self.heartbeats: list[tuple[int, int]] = []
        self.backup_heartbeats: list[coordinator_pb2.BackupHeartbeatRequest] = []
        self.registration_errors: list[Exception] = []
        self.heartbeat_errors: list[Exception | None] = []
        self.restarts: list[coordinator_pb2.PrepareRestartRequest] = []
        self.before_restart_answer: Callable[[], Awaitable[None]] | None = None
        self.others_go_on = False
        """Sent to backups that restart."""

    def service(self) -> Service:
        return {
            api.DESCRIBE_CLUSTER: self._describe,
            api.REGISTER_BROKER: self._register,
            api.HEARTBEAT: self._heartbeat,
            api.REGISTER_BACKUP: self._register_backup,
            api.BACKUP_HEARTBEAT: self._backup_heartbeat,
            api.PREPARE_RESTART: self._prepare_restart,
        }

    def _describe(self, _call: Call[Any]) -> Reply[Any]:
        return Reply(coordinator_pb2.DescribeClusterResponse(cluster_id=self.cluster_id))

    def _register(self, call: Call[Any]) -> Reply[Any]:
        self.registered.append(call.message)
        if self.registration_errors:
            raise self.registration_errors.pop(0)
        for assignment in (each for stream in self.streams for each in stream.assignments):
            assignment.broker_epoch = EPOCH
        answer = coordinator_pb2.RegisterBrokerResponse(
            cluster_id=self.cluster_id,
            broker_id=BROKER_ID,
            broker_epoch=EPOCH,
            heartbeat_interval_ms=5,
            streams=self.streams,
            backups=self.backups,
            lease_ms=self.lease_ms,
            coordinator_epoch=self.coordinator_epoch,
            fences=self.fences,
        )
        return Reply(answer)

    def _register_backup(self, call: Call[Any]) -> Reply[Any]:
        self.registered_backups.append(call.message)
        if self.registration_errors:
            raise self.registration_errors.pop(0)
        answer = coordinator_pb2.RegisterBackupResponse(
            cluster_id=self.cluster_id, backup_id=BACKUP_ID, backup_epoch=EPOCH, heartbeat_interval_ms=5
        )
        return Reply(answer)

    def _heartbeat(self, call: Call[Any]) -> Reply[Any]:
        self.heartbeats.append((call.message.broker_id, call.message.broker_epoch))
        self.reports.append(call.message)
        self._raise_heartbeat_error()
        return Reply(
            coordinator_pb2.HeartbeatResponse(
                backups=self.backups,
                lease_ms=self.lease_ms,
                coordinator_epoch=self.coordinator_epoch,
                fences=self.fences,
            )
        )

    async def _prepare_restart(self, call: Call[Any]) -> Reply[Any]:
        self.restarts.append(call.message)
        if self.before_restart_answer is not None:
            await self.before_restart_answer()
        return Reply(coordinator_pb2.PrepareRestartResponse(others_go_on=self.others_go_on, grace_ms=1000))

    def _backup_heartbeat(self, call: Call[Any]) -> Reply[Any]:
        self.backup_heartbeats.append(call.message)
        self._raise_heartbeat_error()
        return Reply(coordinator_pb2.BackupHeartbeatResponse())

    def _raise_heartbeat_error(self) -> None:
        error = self.heartbeat_errors.pop(0) if self.heartbeat_errors else None
        if error is not None:
            raise error

    def fence(self, *before: KeraError | None) -> None:
        """Answer the next heartbeats with `before`, and the one after them with `stale_epoch`."""
        self.heartbeat_errors = [*before, StaleEpoch("a newer launch")]


@asynccontextmanager
async def serving(coordinator: FakeCoordinator, port: int = 0) -> AsyncIterator[FakeCoordinator]:
    """Serve on `port`, by default any free one."""
    server = GrpcServer([coordinator.service()])
    coordinator.address = f"127.0.0.1:{await server.listen('127.0.0.1', port)}"
    try:
        yield coordinator
    finally:
        await server.close(grace_s=0)
