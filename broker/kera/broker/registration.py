"""The broker's tie to the coordinator: registration, heartbeats, and what is kept of it on disk.

The data directory holds the id that the coordinator gave, and the cluster it belongs to, twice: in ``broker.json`` and
in ``broker.copy.json``, each with a checksum. Either is enough, and a damaged one is written anew. A lock on the
directory keeps two brokers from sharing one identity. What else is in there is the log's (``kera.broker.log_engine``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

from kera.core.errors import KeraError, PathNotWritable, StaleEpoch, StartError, Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import Method, RequestT, ResponseT, call
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.registration")

FORMAT = 2
"""Of the data directory. 1 had no log, and ``broker.json`` without a checksum."""
IDENTITY_NAMES = ("broker.json", "broker.copy.json")
LOCK_NAME = "lock"
CALL_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 0.2


class CoordinatorUnreachable(StartError):
    """The coordinator did not answer within the time that was given for the start."""

    code = "coordinator_unreachable"


class WrongCluster(StartError):
    """The data directory belongs to a broker of another cluster."""

    code = "wrong_cluster"


class Identity(NamedTuple):
    """Who a broker is, as one file says."""

    format: int
    broker_id: int
    cluster_id: str

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """What the file says; None when there is none.

        Raises ``OSError``, ``ValueError`` when it is damaged, and `StartError` when a newer version has written it.
        """
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        match content:
            case {"format": 1, "broker_id": int(broker_id), "cluster_id": str(cluster_id), **rest} if not rest:
                return cls(1, broker_id, cluster_id)
            case {"crc32c": checksum} if checksum != _checksum(content):
                raise ValueError("it does not match its checksum")
            case {"format": int(found), "crc32c": _} if found > FORMAT:
                raise StartError(f"{path} has format {found}, this version knows {FORMAT}; use a newer version")
            case {"format": 2, "broker_id": int(broker_id), "cluster_id": str(cluster_id), "crc32c": _}:
                return cls(2, broker_id, cluster_id)
        raise ValueError("it names no broker and cluster")

    def to_bytes(self) -> bytes:
        """What is in the file."""
        content = self._asdict()
        return json.dumps(content | {"crc32c": _checksum(content)}).encode()


def _checksum(content: dict[str, Any]) -> str:
    """Over everything but itself, however it is written; the same for all formats from 2 on."""
    covered = {name: value for name, value in content.items() if name != "crc32c"}
    return f"{crc32c(json.dumps(covered, sort_keys=True, separators=(',', ':')).encode()):08x}"


class DataDirectory:
    """Owner of the broker's data directory; raises `PathNotWritable` or `StartError` when it cannot be that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = [path / name for name in IDENTITY_NAMES]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PathNotWritable(
                f"cannot write data directory {path}: {error.strerror}; choose another --data-dir", path=str(path)
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StartError(f"another broker uses data directory {path}; choose another --data-dir") from error

    def load(self) -> tuple[int, str]:
        """Broker id and cluster id; (0, "") for a broker that was never registered.

        One of the two files is enough: the other one is written anew when it is damaged or gone. Raises `StartError`
        when that leaves none, or when a newer version has written one.
        """
        identities: list[Identity | None] = []
        damaged: dict[Path, str] = {}
        for path in self._files:
            try:
                identities.append(Identity.read(path))
            except (OSError, ValueError) as error:
                damaged[path] = str(error)
        found = next(filter(None, identities), None)
        if found is None:
            for path, reason in damaged.items():
                raise StartError(f"cannot read {path}: {reason}; restore it, or remove it to join anew")
            if any((self.path / "log" / "segments").glob("*/*")):
                raise StartError(  # joining as a new broker would drop all of it
                    f"{self.path} has the log of a broker, and no broker.json that says of which;"
                    " restore that file, or move the log away to join anew",
                    path=str(self.path),
                )
            return 0, ""
        for path, reason in damaged.items():
            log.error("a file is damaged; it is written anew from its copy", path=str(path), reason=reason)
        if found.format == FORMAT:
            self.store(found.broker_id, found.cluster_id)
        return found.broker_id, found.cluster_id

    def store(self, broker_id: int, cluster_id: str) -> None:
        """Remember who this broker is; durable when it returns. Raises `PathNotWritable`."""
        data = Identity(FORMAT, broker_id, cluster_id).to_bytes()
        for path in self._files:
            try:
                self._replace(path, data)
            except OSError as error:
                raise PathNotWritable(f"cannot write {path}: {error.strerror}", path=str(path)) from error

    def _replace(self, path: Path, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if path.read_bytes() == data:
                return  # as at almost every start: a full disk is no reason to fail it
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # the new name is in there
        finally:
            os.close(directory)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


class Registration:
    """One launch of a broker, as the coordinator knows it."""

    def __init__(self, coordinator: str, directory: DataDirectory) -> None:
        self._address = coordinator
        self._directory = directory
        self._channel = GrpcChannel(coordinator)
        self._launch_id = uuid.uuid4().hex
        self.broker_id = 0
        self.broker_epoch = 0
        self.heartbeat_interval_s = 1.0

    async def register(self, info: common_pb2.BrokerInfo, timeout_s: float) -> list[common_pb2.StreamInfo]:
        """Make this launch known; returns the streams with streamlets that it owns.

        Waits up to `timeout_s` for a coordinator that cannot be reached, then raises `CoordinatorUnreachable`.
        """
        info.broker_id, cluster_id = self._directory.load()
        if cluster_id:
            await self._check_cluster(cluster_id, timeout_s)
        request = coordinator_pb2.RegisterBrokerRequest(broker=info, launch_id=self._launch_id)
        answer = await self._ask(api.REGISTER_BROKER, request, timeout_s)
        self._directory.store(answer.broker_id, answer.cluster_id)
        self.broker_id, self.broker_epoch = answer.broker_id, answer.broker_epoch
        self.heartbeat_interval_s = answer.heartbeat_interval_ms / 1000
        return list(answer.streams)

    async def _check_cluster(self, cluster_id: str, timeout_s: float) -> None:
        """Raise `WrongCluster`, before anything is registered: elsewhere that would fence the broker with our id."""
        answer = await self._ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest(), timeout_s)
        if answer.cluster_id != cluster_id:
            raise WrongCluster(
                f"data directory {self._directory.path} belongs to cluster {cluster_id},"
                f" the coordinator at {self._address} to {answer.cluster_id};"
                " name the right one with --coordinator, or choose another --data-dir",
                path=str(self._directory.path),
            )

    async def _ask(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                return await call(self._channel, method, request, timeout_s=CALL_TIMEOUT_S)
            except (Unavailable, Uncertain) as error:
                if loop.time() >= deadline:
                    raise CoordinatorUnreachable(
                        f"no coordinator at {self._address} within {timeout_s:g} s;"
                        " start one (kera coordinator), or name another with --coordinator",
                        address=self._address,
                    ) from error
                log.info("waiting for the coordinator", address=self._address)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def keep_alive(self) -> None:
        """Send heartbeats for ever. Raises `StaleEpoch` when a newer launch has taken over: this one must end."""
        request = coordinator_pb2.HeartbeatRequest(broker_id=self.broker_id, broker_epoch=self.broker_epoch)
        reachable = True
        while True:
            await asyncio.sleep(self.heartbeat_interval_s)
            try:
                await call(self._channel, api.HEARTBEAT, request, timeout_s=CALL_TIMEOUT_S)
            except StaleEpoch:
                log.error("a newer launch of this broker has taken over", broker_id=self.broker_id)
                raise
            except KeraError as error:
                # Whatever ails the coordinator: what is in our memory is there only as long as we are.
                if reachable:
                    log.warning("heartbeat failed; serving on", address=self._address, error=str(error))
                reachable = False
            else:
                if not reachable:
                    log.info("coordinator is back", address=self._address)
                reachable = True

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()
