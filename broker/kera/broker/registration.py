"""The broker's tie to the coordinator: its identity on disk, its registration, its heartbeats.

The files are ``broker.json`` and ``broker.copy.json``, see ``kera.core.data_dir``; what else is in the data directory
is the log's (``kera.broker.log_engine``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kera.core import data_dir, registration
from kera.core.data_dir import FORMAT, LOCK_NAME
from kera.core.registration import CoordinatorUnreachable, WrongCluster
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2

__all__ = [
    "FORMAT",
    "IDENTITY_NAMES",
    "LOCK_NAME",
    "CoordinatorUnreachable",
    "DataDirectory",
    "Identity",
    "Registration",
    "WrongCluster",
]

OnBackups = Callable[[list[common_pb2.BackupInfo]], None]


class Identity(data_dir.Identity):
    """Which broker, of which cluster."""

    role: ClassVar[str] = "broker"
    formats: ClassVar[frozenset[int]] = frozenset({1, FORMAT})


IDENTITY_NAMES = Identity.names()


class DataDirectory(data_dir.DataDirectory):
    """Owner of the broker's data directory."""

    identity: ClassVar[type[data_dir.Identity]] = Identity
    data_pattern: ClassVar[str | None] = "log/segments/*/*"


class Registration(registration.Registration):
    """One launch of a broker, as the coordinator knows it."""

    def __init__(self, coordinator: str, directory: DataDirectory, on_backups: OnBackups = lambda _: None) -> None:
        """`on_backups` gets all backups there are, alive or not, with each answer of the coordinator."""
        super().__init__(coordinator, directory)
        self._on_backups = on_backups
        self.broker_id = 0
        self.broker_epoch = 0

    async def register(self, info: common_pb2.BrokerInfo, timeout_s: float) -> list[common_pb2.StreamInfo]:
        """Make this launch known; returns the streams with streamlets that it owns.

        Waits up to `timeout_s` for a coordinator that cannot be reached, then raises `CoordinatorUnreachable`.
        """
        info.broker_id = await self.identify(timeout_s)
        request = coordinator_pb2.RegisterBrokerRequest(broker=info, launch_id=self.launch_id)
        answer = await self.ask(api.REGISTER_BROKER, request, timeout_s)
        self.remember(answer.broker_id, answer.cluster_id, answer.heartbeat_interval_ms)
        self.broker_id, self.broker_epoch = answer.broker_id, answer.broker_epoch
        self._on_backups(list(answer.backups))
        return list(answer.streams)

    async def keep_alive(self) -> None:
        """Send heartbeats for ever. Raises `StaleEpoch` when a newer launch has taken over: this one must end."""
        request = coordinator_pb2.HeartbeatRequest(broker_id=self.broker_id, broker_epoch=self.broker_epoch)
        await self.beat(api.HEARTBEAT, lambda: request, lambda answer: self._on_backups(list(answer.backups)))
