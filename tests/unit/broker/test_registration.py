import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.producer_fences import ProducerFences
from kera.broker.registration import BrokerDirectory, BrokerIdentity, BrokerRegistration
from kera.core.base.clock import boottime_s
from kera.core.errors import (
    DiskFull,
    InternalError,
    InvalidArgument,
    KeraError,
    PathNotWritable,
    StaleEpoch,
    StartError,
    Unavailable,
    Uncertain,
    UnknownLaunch,
)
from kera.server.registration import CoordinatorUnreachable, RegistrationTiming, WrongCluster
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.fake_coordinator import BROKER_ID, EPOCH, FakeCoordinator, serving
from tests.unit.broker.support import stream_info

OpenDirectory = Callable[[Path], BrokerDirectory]


@pytest.fixture
def open_directory() -> Iterator[OpenDirectory]:
    opened = []

    def open_directory(path: Path) -> BrokerDirectory:
        opened.append(BrokerDirectory(path))
        return opened[-1]

    yield open_directory
    for directory in opened:
        directory.close()


@pytest.fixture
def tmp_path(root: Path) -> Path:
    """In memory: writes to a disk take most of the time of these tests."""
    return root


@pytest.fixture
def directory(tmp_path: Path, open_directory: OpenDirectory) -> BrokerDirectory:
    return open_directory(tmp_path / "a" / "broker")


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    async with serving(FakeCoordinator()) as coordinator:
        yield coordinator


@asynccontextmanager
async def registering(address: str, directory: BrokerDirectory) -> AsyncIterator[BrokerRegistration]:
    registration = BrokerRegistration(address, directory, timing=RegistrationTiming(retry_interval_s=0.01))
    try:
        yield registration
    finally:
        await registration.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def info() -> common_pb2.BrokerInfo:
    return common_pb2.BrokerInfo(grpc_address="here:1")


# --- the data directory ------------------------------------------------------------------------------------


def test_a_new_directory_is_made_and_has_no_identity(directory: BrokerDirectory) -> None:
    assert directory.path.is_dir()
    assert directory.load() == (0, "")


def test_an_identity_outlives_the_process(directory: BrokerDirectory) -> None:
    directory.store(1, "first")
    directory.store(4, "cluster")
    before = sorted(path.name for path in directory.path.iterdir())

    assert directory.load() == (4, "cluster")
    assert before == ["broker.copy.json", "broker.json", "lock"], "nothing is left of the writing"
    assert (directory.path / "broker.json").read_bytes() == (directory.path / "broker.copy.json").read_bytes()
    content = json.loads((directory.path / "broker.json").read_text())
    whose = {"broker_id": 4, "cluster_id": "cluster", "directory_id": directory.directory_id, "coordinator_epoch": 0}
    assert content | {"crc32c": ""} == {"format": 2, **whose, "crc32c": ""}


@pytest.mark.parametrize("name", ["broker.json", "broker.copy.json"])
@pytest.mark.parametrize("damage", ["gone", "flipped", "empty"])
def test_an_identity_survives_the_loss_of_one_of_its_files_and_has_two_again(
    directory: BrokerDirectory, name: str, damage: str
) -> None:
    directory.store(4, "cluster")
    path = directory.path / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else whole.replace(b": 4", b": 5"))

    assert directory.load() == (4, "cluster")
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"format": 3}', b'{"format": 2, "crc32c": 0}'])
def test_damage_to_one_identity_file_is_logged_and_to_both_stops_the_start(
    directory: BrokerDirectory, content: bytes
) -> None:
    directory.store(4, "cluster")
    broker, copy = directory.path / "broker.json", directory.path / "broker.copy.json"

    copy.write_bytes(content)
    with capture_logs() as lines:
        assert directory.load() == (4, "cluster")
    assert [line["path"] for line in lines if line["log_level"] == "error"] == [str(copy)]

    broker.write_bytes(content)
    copy.write_bytes(content)
    with pytest.raises(StartError, match="restore it, or remove it to join as a new daemon"):
        directory.load()


def test_the_first_of_two_different_identity_files_counts(directory: BrokerDirectory) -> None:
    directory.store(4, "old")
    copy = directory.path / "broker.copy.json"
    old = copy.read_bytes()
    directory.store(4, "new")
    copy.write_bytes(old)

    assert directory.load() == (4, "new")
    assert copy.read_bytes() == (directory.path / "broker.json").read_bytes()


def test_a_directory_of_the_previous_version_is_accepted(directory: BrokerDirectory) -> None:
    (directory.path / "broker.json").write_text('{"format": 1, "broker_id": 4, "cluster_id": "c"}')

    assert directory.load() == (4, "c")


def test_a_log_without_an_identity_stops_the_start(directory: BrokerDirectory) -> None:
    segments = directory.path / "log" / "segments" / "000000"
    segments.mkdir(parents=True)
    assert directory.load() == (0, "")

    (segments / "000000000001.segment").touch()

    with pytest.raises(StartError, match=r"the file broker\.json"):
        directory.load()


def test_storing_an_unchanged_identity_needs_no_room(directory: BrokerDirectory) -> None:
    directory.store(4, "cluster")
    (directory.path / "broker.tmp").mkdir()
    (directory.path / "broker.copy.tmp").mkdir()
    directory.store(4, "cluster")

    assert directory.load() == (4, "cluster")


def test_two_brokers_cannot_have_one_directory(tmp_path: Path, open_directory: OpenDirectory) -> None:
    first = BrokerDirectory(tmp_path)
    with pytest.raises(StartError, match="--data-dir") as raised:
        BrokerDirectory(tmp_path)
    first.close()

    assert str(tmp_path) in raised.value.message
    assert open_directory(tmp_path).load() == (0, "")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_the_error_for_a_directory_that_cannot_be_made_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathNotWritable, match="--data-dir") as raised:
        BrokerDirectory(tmp_path / name)

    assert raised.value.attributes == {"path": str(tmp_path / name)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "broker_id": 4}',
        b'{"format": 1, "cluster_id": "c"}',
        b'{"format": 1, "broker_id": "4", "cluster_id": "c"}',
        b'{"format": 1, "broker_id": 4, "cluster_id": null}',
        b'{"format": 2, "broker_id": 4, "cluster_id": "c"}',
        b'{"format": 2, "broker_id": 4, "cluster_id": "c", "crc32c": "00000000"}',
    ],
)
def test_an_invalid_identity_file_stops_the_start_and_is_named(directory: BrokerDirectory, content: bytes) -> None:
    (directory.path / "broker.json").write_bytes(content)
    with pytest.raises(StartError, match="remove it to join as a new daemon") as raised:
        directory.load()

    assert str(directory.path / "broker.json") in raised.value.message


@pytest.mark.parametrize("name", ["broker.json", "broker.copy.json"])
def test_a_file_of_a_newer_version_stops_the_start(directory: BrokerDirectory, name: str) -> None:
    directory.store(4, "cluster")
    (directory.path / name).write_bytes(BrokerIdentity(3, 4, "cluster").to_bytes())
    with pytest.raises(StartError, match="has format 3, this version knows 2"):
        directory.load()


def test_an_identity_that_cannot_be_stored_stops_the_start(directory: BrokerDirectory) -> None:
    (directory.path / "broker.tmp").mkdir()
    with pytest.raises(PathNotWritable) as raised:
        directory.store(4, "cluster")

    assert raised.value.attributes == {"path": str(directory.path / "broker.json")}


# --- registration ------------------------------------------------------------------------------------------


async def test_a_new_broker_gets_an_identity_and_keeps_it(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    coordinator.streams = [stream_info(7), stream_info(8)]
    async with registering(coordinator.address, directory) as registration:
        owned = await registration.register(info(), timeout_s=5)

    (request,) = coordinator.registered
    assert (request.broker.broker_id, request.broker.grpc_address) == (0, "here:1")
    assert request.launch_id
    assert [stream.stream_id for stream in owned] == [7, 8]
    assert (registration.broker_id, registration.broker_epoch) == (BROKER_ID, EPOCH)
    assert registration.heartbeat_interval_s == 0.005
    assert directory.load() == (BROKER_ID, "cluster")


async def test_a_restarted_broker_registers_with_its_id_and_a_new_launch_id(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    for _ in range(2):
        async with registering(coordinator.address, directory) as registration:
            await registration.register(info(), timeout_s=5)

    first, second = coordinator.registered
    assert second.broker.broker_id == BROKER_ID
    assert first.launch_id != second.launch_id


async def test_a_broker_of_another_cluster_is_refused_before_it_registers(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    directory.store(BROKER_ID, "other")
    async with registering(coordinator.address, directory) as registration:
        with pytest.raises(WrongCluster, match="belongs to cluster other") as raised:
            await registration.register(info(), timeout_s=5)

    assert isinstance(raised.value, StartError)
    assert raised.value.attributes == {"path": str(directory.path)}
    assert coordinator.registered == []
    assert directory.load() == (BROKER_ID, "other")


@pytest.mark.parametrize("error", [Unavailable("later"), Uncertain("perhaps")])
async def test_a_registration_with_an_unknown_outcome_is_repeated_by_the_same_launch(
    coordinator: FakeCoordinator, directory: BrokerDirectory, error: Exception
) -> None:
    coordinator.registration_errors = [error, error]
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5)

    first, *repeats = coordinator.registered
    assert [request.launch_id for request in repeats] == [first.launch_id] * 2


async def test_a_refused_registration_is_not_repeated(coordinator: FakeCoordinator, directory: BrokerDirectory) -> None:
    coordinator.registration_errors = [InvalidArgument("no such broker")]
    async with registering(coordinator.address, directory) as registration:
        with pytest.raises(InvalidArgument, match="no such broker"):
            await registration.register(info(), timeout_s=5)

    assert len(coordinator.registered) == 1
    assert directory.load() == (0, "")


@pytest.mark.parametrize("known", [False, True])
async def test_the_error_for_an_unreachable_coordinator_names_its_address(
    directory: BrokerDirectory, known: bool
) -> None:
    if known:
        directory.store(BROKER_ID, "cluster")
    address = f"127.0.0.1:{free_port()}"
    async with registering(address, directory) as registration:
        with pytest.raises(CoordinatorUnreachable, match="--coordinator") as raised:
            await registration.register(info(), timeout_s=0.05)

    assert isinstance(raised.value, StartError)
    assert raised.value.attributes == {"address": address}


async def test_a_broker_waits_for_a_coordinator_that_starts_later(
    directory: BrokerDirectory,
) -> None:
    port = free_port()
    async with registering(f"127.0.0.1:{port}", directory) as registration:
        with capture_logs() as lines:
            registered = asyncio.create_task(registration.register(info(), timeout_s=30))
            async with asyncio.timeout(30):
                while not lines:
                    await asyncio.sleep(0.001)
        assert [line["event"] for line in lines] == ["waiting for the coordinator"]
        async with serving(FakeCoordinator(), port):
            await registered

    assert registration.broker_id == BROKER_ID


# --- heartbeats --------------------------------------------------------------------------------------------


async def test_a_launch_unknown_to_the_coordinator_registers_again_with_its_epoch(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5, lost_memory=True)
        coordinator.fence(UnknownLaunch("it was restored"), None)
        with pytest.raises(StaleEpoch):
            await registration.keep_alive()

    first, again = coordinator.registered
    assert (again.broker.broker_id, again.broker.broker_epoch) == (BROKER_ID, EPOCH)
    assert (again.launch_id, again.broker.grpc_address, again.lost_memory) == (first.launch_id, "here:1", True)
    assert len(coordinator.heartbeats) == 3


async def test_a_launch_that_may_not_register_again_ends(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5)
        coordinator.fence(UnknownLaunch("it was restored"), None)
        coordinator.registration_errors = [InvalidArgument("its id was given to another one")]
        with pytest.raises(StaleEpoch, match="given to another one"):
            await registration.keep_alive()


@pytest.mark.parametrize(
    "error", [Unavailable("it catches up", catching_up=True), DiskFull("no room at /data")], ids=lambda one: one.code
)
async def test_a_start_waits_beyond_its_timeout_for_a_coordinator_that_is_not_ready(
    coordinator: FakeCoordinator, directory: BrokerDirectory, error: KeraError
) -> None:
    coordinator.registration_errors = [error] * 5
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=0.0)

    assert len(coordinator.registered) == 6


async def test_a_registration_carries_the_last_known_coordinator_epoch(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    coordinator.coordinator_epoch = 7
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5)
        coordinator.coordinator_epoch = 9
        coordinator.fence(None, None)
        with pytest.raises(StaleEpoch):
            await registration.keep_alive()
    stored = BrokerIdentity.read(directory.path / "broker.json")
    assert stored is not None
    assert stored.coordinator_epoch == 9
    directory.coordinator_epoch = 0  # so that it is read from the file
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5)

    assert [one.known_coordinator_epoch for one in coordinator.registered] == [0, 9]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "error", [None, Unavailable("away"), Uncertain("perhaps"), InternalError("its disk is full"), InvalidArgument("?")]
)
async def test_heartbeats_go_on_after_any_answer_until_a_newer_launch_takes_over(
    coordinator: FakeCoordinator, directory: BrokerDirectory, error: Any
) -> None:
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5)
        coordinator.fence(None, error, error, None)
        with pytest.raises(StaleEpoch):
            await registration.keep_alive()

    assert coordinator.heartbeats == [(BROKER_ID, EPOCH)] * 5


async def test_producer_fences_come_with_registration_and_heartbeats_that_report_the_version(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    noted = ProducerFences()
    coordinator.fences = coordinator_pb2.ProducerFences(version=7, producer_ids=[1, 2], first_epochs=[40, 50])
    registration = BrokerRegistration(coordinator.address, directory, fences=noted)
    await registration.register(info(), timeout_s=5)
    assert noted.first_epochs == {1: 40, 2: 50}

    # The next coordinator sends all fences again; an epoch earlier than the noted one has no effect.
    coordinator.fences = coordinator_pb2.ProducerFences(version=9, producer_ids=[2, 3], first_epochs=[45, 60])
    coordinator.fence(None, Unavailable("away"), None)
    with pytest.raises(StaleEpoch):
        await registration.keep_alive()
    await registration.close()

    assert noted.first_epochs == {1: 40, 2: 50, 3: 60}
    assert [report.fences_version for report in coordinator.reports] == [7, 9, 9, 9]


@pytest.mark.timeout(30)
async def test_the_list_of_backups_comes_with_the_registration_and_each_heartbeat(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    told: list[list[int]] = []

    def note(backups: list[common_pb2.BackupInfo]) -> None:
        told.append([backup.backup_id for backup in backups])
        if len(told) == 1:
            coordinator.backups = [common_pb2.BackupInfo(backup_id=backup_id) for backup_id in (1, 2)]

    coordinator.backups = [common_pb2.BackupInfo(backup_id=1)]
    registration = BrokerRegistration(coordinator.address, directory, note)
    await registration.register(info(), timeout_s=5)
    coordinator.fence(None, Unavailable("away"), None)
    with pytest.raises(StaleEpoch):
        await registration.keep_alive()
    await registration.close()

    assert told == [[1], [1, 2], [1, 2]]


@pytest.mark.timeout(30)
async def test_each_answer_renews_the_lease_from_the_time_of_its_request(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    lease, leader = Lease(), CoordinatorEpoch()
    assert lease.until_s == math.inf
    coordinator.lease_ms, coordinator.coordinator_epoch = 7_000_000, 3
    registration = BrokerRegistration(coordinator.address, directory, leader=leader, lease=lease)
    before_s = boottime_s()
    await registration.register(info(), timeout_s=5)
    first_s = lease.until_s
    assert leader.value == 3
    assert before_s + 7000 <= first_s == registration.last_sent_s + 7000 <= boottime_s() + 7000
    coordinator.coordinator_epoch = 4
    coordinator.fence(None, Unavailable("away"))
    with pytest.raises(StaleEpoch):
        await registration.keep_alive()
    await registration.close()

    assert first_s < lease.until_s == registration.last_sent_s + 7000
    assert leader.value == 4


async def test_a_coordinator_without_leases_sets_no_limit(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    lease = Lease()
    lease.renew(1.0, 1)
    registration = BrokerRegistration(coordinator.address, directory, lease=lease)
    await registration.register(info(), timeout_s=5)
    await registration.close()

    assert lease.until_s == math.inf


@pytest.mark.timeout(30)
async def test_a_requested_heartbeat_does_not_wait_for_the_interval(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    leader = CoordinatorEpoch()
    coordinator.coordinator_epoch = 3
    registration = BrokerRegistration(coordinator.address, directory, leader=leader)
    await registration.register(info(), timeout_s=5)
    registration.heartbeat_interval_s = 3600
    coordinator.coordinator_epoch = 4
    beating = asyncio.create_task(registration.keep_alive())

    await leader.confirm(4)

    beating.cancel()
    await registration.close()
    assert leader.value == 4


@pytest.mark.timeout(30)
@pytest.mark.parametrize("lost_memory", [False, True])
async def test_a_registration_says_whether_the_launch_has_lost_its_memory(
    coordinator: FakeCoordinator, directory: BrokerDirectory, lost_memory: bool
) -> None:
    async with registering(coordinator.address, directory) as registration:
        await registration.register(info(), timeout_s=5, lost_memory=lost_memory)

    assert [request.lost_memory for request in coordinator.registered] == [lost_memory]


@pytest.mark.timeout(30)
async def test_a_report_goes_with_each_heartbeat_and_receives_the_answers(
    coordinator: FakeCoordinator, directory: BrokerDirectory
) -> None:
    class Report(HeartbeatReport):
        def __init__(self) -> None:
            self.answers = 0

        def fill(self, request: coordinator_pb2.HeartbeatRequest) -> None:
            request.bytes_per_s = 100 + self.answers

        def answered(self, _: coordinator_pb2.HeartbeatResponse) -> None:
            self.answers += 1

    registration = BrokerRegistration(coordinator.address, directory, report=Report())
    await registration.register(info(), timeout_s=5)
    coordinator.fence(None, Unavailable("away"), None)
    with pytest.raises(StaleEpoch):
        await registration.keep_alive()
    await registration.close()

    assert [report.bytes_per_s for report in coordinator.reports] == [100, 101, 101, 102]


@pytest.mark.timeout(30)
async def test_heartbeats_go_on_after_the_coordinator_was_away(directory: BrokerDirectory) -> None:
    async with serving(FakeCoordinator()) as first:
        registration = BrokerRegistration(first.address, directory)
        await registration.register(info(), timeout_s=5)
        beating = asyncio.create_task(registration.keep_alive())
        while not first.heartbeats:
            await asyncio.sleep(0.001)
    second = FakeCoordinator()
    async with serving(second, int(first.address.rpartition(":")[2])):
        while len(second.heartbeats) < 2:
            await asyncio.sleep(0.001)
            assert not beating.done()
        second.fence()
        with pytest.raises(StaleEpoch):
            await beating
    await registration.close()
