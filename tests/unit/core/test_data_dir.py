"""The owner of a data directory, as the error names it to a daemon that cannot use the directory."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kera.backup import registration as backup
from kera.backup.log_file import LogFile
from kera.broker import registration as broker
from kera.broker.storage.index import SegmentIndex
from kera.coordinator.store.data_dir import DataDir, DataDirInUse
from kera.coordinator.store.lmdb_store import LmdbStore
from kera.core.base.own_directory import LOCK_NAME
from kera.core.data_dir import DataDirectory
from kera.core.errors import StartError
from kera.local.directory import ClusterDirectory

KINDS: dict[str, type[DataDirectory]] = {"broker": broker.BrokerDirectory, "backup": backup.BackupDirectory}
ME = rf"\(process {os.getpid()}\)"


@pytest.fixture
def tmp_path(in_memory: Path) -> Path:
    return in_memory


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_the_error_names_the_kind_of_the_holder(tmp_path: Path, first: str, second: str) -> None:
    holder = KINDS[first](tmp_path)
    which = f"another {first}" if first == second else f"a {first}"
    with pytest.raises(StartError, match=rf"^{which} {ME} uses data directory .*choose another --data-dir"):
        KINDS[second](tmp_path)
    holder.close()
    KINDS[second](tmp_path).close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_kind_of_the_holder_for_coordinators_too(tmp_path: Path, kind: str) -> None:
    coordinator = DataDir(tmp_path)
    with pytest.raises(StartError, match=rf"^a coordinator {ME} uses data directory"):
        KINDS[kind](tmp_path)
    coordinator.close()
    holder = KINDS[kind](tmp_path)
    with pytest.raises(DataDirInUse, match=rf"^a {kind} {ME} uses data directory"):
        DataDir(tmp_path)
    holder.close()


@pytest.mark.parametrize("written", [b"", b"\xff\xfe", b"what is this?", b"broker x", b"broker 2147483647"])
def test_a_holder_without_a_valid_note_is_another_process(tmp_path: Path, written: bytes) -> None:
    holder = KINDS["broker"](tmp_path)
    (tmp_path / LOCK_NAME).write_bytes(written)
    with pytest.raises(StartError, match=r"^another process uses data directory"):
        KINDS["backup"](tmp_path)
    holder.close()


# -- directories of other daemons -----------------------------------------------------------------------------------


def coordinator_of(path: Path) -> None:
    asyncio.run(LmdbStore(path, bytes_max=1 << 20).close())


def coordinator_whose_restore_was_interrupted_of(path: Path) -> None:
    coordinator_of(path)
    (path / "metadata").rename(path / "metadata.damaged")


def broker_of(path: Path) -> None:
    owner = broker.BrokerDirectory(path)
    owner.store(3, "cluster")
    owner.close()


def broker_that_never_joined_of(path: Path) -> None:
    broker.BrokerDirectory(path).close()
    SegmentIndex.open(path / "log" / "index").close()


def backup_of(path: Path) -> None:
    owner = backup.BackupDirectory(path)
    owner.store(4, "cluster")
    owner.close()


def backup_that_never_joined_of(path: Path) -> None:
    backup.BackupDirectory(path).close()
    LogFile(path / "log").close()


def log_dir_of_a_backup(path: Path) -> None:
    LogFile(path).close()


FOREIGN = [
    (coordinator_of, "coordinator", "a coordinator"),
    (coordinator_whose_restore_was_interrupted_of, "coordinator", "a coordinator"),
    (broker_of, "broker", "broker 3"),
    (broker_that_never_joined_of, "broker", "a broker"),
    (backup_of, "backup", "backup 4"),
    (backup_that_never_joined_of, "backup", "a backup"),
    (log_dir_of_a_backup, "backup", "a backup"),
]


def open_as(role: str, path: Path) -> None:
    (DataDir if role == "coordinator" else KINDS[role])(path).close()


@pytest.mark.parametrize("role", ["coordinator", *KINDS])
@pytest.mark.parametrize(("make", "of", "owner"), FOREIGN)
def test_a_directory_of_another_kind_of_daemon_is_refused_unchanged(
    tmp_path: Path, make: Callable[[Path], None], of: str, owner: str, role: str
) -> None:
    make(tmp_path)
    if role == of:
        open_as(role, tmp_path)
        return
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK_NAME}
    for _ in range(2):  # the first attempt does not make the directory ours
        with pytest.raises(StartError) as refused:
            open_as(role, tmp_path)
        assert refused.value.message == (
            f"{tmp_path} has the data of {owner}, and a {role} needs a directory of its own; choose another --data-dir"
        )
    assert before == {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != LOCK_NAME
    }
    open_as(of, tmp_path)


def test_a_broker_and_a_backup_may_go_on_sharing_a_directory(tmp_path: Path) -> None:
    broker_of(tmp_path)
    for name in backup.BackupIdentity.names():
        (tmp_path / name).write_bytes(b"{}")
    for role in KINDS:
        open_as(role, tmp_path)
    with pytest.raises(StartError, match="has the data of broker 3"):
        open_as("coordinator", tmp_path)


@pytest.mark.parametrize("named", [False, True], ids=["default", "log-dirs"])
def test_swapped_logs_of_a_broker_and_a_backup_are_refused_unchanged(tmp_path: Path, *, named: bool) -> None:
    homes = {"broker": tmp_path / "broker", "backup": tmp_path / "backup"}
    broker_of(homes["broker"])
    SegmentIndex.open(homes["broker"] / "log" / "index").close()
    backup_of(homes["backup"])
    LogFile(homes["backup"] / "log").close()
    (homes["broker"] / "log").rename(tmp_path / "between")
    (homes["backup"] / "log").rename(homes["broker"] / "log")
    (tmp_path / "between").rename(homes["backup"] / "log")

    for role, other in (("broker", "backup"), ("backup", "broker")):
        with pytest.raises(StartError, match=f"{homes[role]}/log has the log of a {other}, .* put each back"):
            KINDS[role](homes[role], besides=[homes[role] / "log"] if named and role == "backup" else ())
    assert [path.name for path in (homes["broker"] / "log").iterdir()] == ["replicas.log"]


def test_a_database_of_another_kind_of_daemon_is_refused_unchanged(tmp_path: Path) -> None:
    """A broker's index and a coordinator's metadata are both LMDB."""
    coordinator_of(tmp_path / "coordinator")
    SegmentIndex.open(tmp_path / "index").commit([], {"next_physical_id": 1})
    metadata, index = tmp_path / "coordinator" / "metadata", tmp_path / "index"
    files = {path: (path / "data.mdb").read_bytes() for path in (metadata, index)}

    with pytest.raises(StartError, match=f"^{metadata} has a database that is not the index of a broker, .*put each"):
        SegmentIndex.open_checked(metadata)
    assert (metadata / "data.mdb").read_bytes() == files[metadata]
    (metadata / "data.mdb").write_bytes(files[index])
    with pytest.raises(StartError, match=f"^{metadata} has a database that is not a coordinator's, .*put each"):
        coordinator_of(tmp_path / "coordinator")
    assert (metadata / "data.mdb").read_bytes() == files[index]


def test_a_damaged_identity_still_marks_its_directory(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_bytes(b"[]")
    with pytest.raises(StartError, match="has the data of a broker, and a backup needs"):
        open_as("backup", tmp_path)


@pytest.mark.parametrize(("make", "owner"), [(make, owner) for make, _, owner in FOREIGN])
def test_a_cluster_directory_is_refused_within_a_daemons_directory(
    tmp_path: Path, make: Callable[[Path], None], owner: str
) -> None:
    make(tmp_path / "daemon")
    with pytest.raises(StartError, match=f"/daemon has the data of {owner}; choose the directory that holds"):
        ClusterDirectory.open(tmp_path / "daemon")
    assert not (tmp_path / "daemon" / ".lock").exists()
    ClusterDirectory.open(tmp_path).release()


# -- directories that lie in each other ----------------------------------------------------------------------------


OPEN: dict[str, Callable[[Path], DataDirectory | DataDir]] = {"coordinator": DataDir, **KINDS}
TRACES_OF = {"coordinator": coordinator_of, "broker": broker_of, "backup": backup_of}


def files_in(path: Path) -> set[Path]:
    return {each.relative_to(path) for each in path.rglob("*")}


@pytest.mark.parametrize("inner", OPEN)
@pytest.mark.parametrize("outer", OPEN)
def test_no_daemon_starts_within_the_directory_of_a_running_one(tmp_path: Path, outer: str, inner: str) -> None:
    holder = OPEN[outer](tmp_path / "outer")
    before = files_in(tmp_path)
    with pytest.raises(StartError) as refused:
        OPEN[inner](tmp_path / "outer" / "some" / "inner")

    assert refused.value.message == (
        f"{tmp_path}/outer belongs to a {outer} (process {os.getpid()}), and {tmp_path}/outer/some/inner lies in it:"
        " directories of daemons must not lie in each other; choose another --data-dir"
    )
    assert files_in(tmp_path) == before
    holder.close()


@pytest.mark.parametrize("inner", OPEN)
@pytest.mark.parametrize("outer", OPEN)
def test_no_daemon_starts_around_the_directory_of_a_running_one(tmp_path: Path, outer: str, inner: str) -> None:
    holder = OPEN[inner](tmp_path / "outer" / "some" / "inner")
    for _ in range(2):  # the first attempt does not make the directory ours
        with pytest.raises(StartError) as refused:
            OPEN[outer](tmp_path / "outer")

        assert refused.value.message == (
            f"{tmp_path}/outer/some/inner belongs to a {inner} (process {os.getpid()}), and it lies in"
            f" {tmp_path}/outer: directories of daemons must not lie in each other; choose another --data-dir"
        )
    holder.close()


@pytest.mark.parametrize(("first", "owner"), [("coordinator", "a coordinator"), ("broker", "broker 3")])
def test_no_daemon_starts_within_or_around_the_data_of_a_stopped_one(tmp_path: Path, first: str, owner: str) -> None:
    TRACES_OF[first](tmp_path / "outer" / "inner")
    with pytest.raises(StartError, match=rf"/outer/inner belongs to {owner}, and it lies in .*/outer:"):
        KINDS["backup"](tmp_path / "outer")
    with pytest.raises(StartError, match=rf"/outer/inner belongs to {owner}, and .*/outer/inner/deeper lies in it:"):
        KINDS["backup"](tmp_path / "outer" / "inner" / "deeper")
    (tmp_path / "link").symlink_to(tmp_path / "outer" / "inner")
    with pytest.raises(StartError, match=rf"/outer/inner belongs to {owner}, and .*/outer/inner/deeper lies in it:"):
        KINDS["backup"](tmp_path / "link" / "deeper")


def test_a_daemon_starts_with_a_copy_of_its_data_in_its_directory(tmp_path: Path) -> None:
    broker_of(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "data" / "copy")

    open_as("broker", tmp_path / "data")
    with pytest.raises(StartError, match=r"/data belongs to broker 3, and .*/data/copy lies in it:"):
        open_as("broker", tmp_path / "data" / "copy")


def test_foreign_files_within_or_around_a_directory_do_not_prevent_a_start(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "data" / "more"):
        (path / "log" / "index").mkdir(parents=True)  # no lock there
        (path / "metadata").mkdir()
        (path / "metadata" / "data.mdb").touch()
    (tmp_path / "data" / "lock").write_text("7\n")  # no process holds it
    TRACES_OF["broker"](tmp_path / "data" / "broker")
    open_as("backup", tmp_path / "data" / "backup")


# -- disks of a backup ---------------------------------------------------------------------------------------------


def test_the_disks_of_a_backup_may_nest_in_its_directory_and_each_other(tmp_path: Path) -> None:
    disks = [tmp_path / "data" / "disk", tmp_path / "other", tmp_path / "other" / "disk"]
    for _ in range(2):
        owner = backup.BackupDirectory(tmp_path / "data", besides=disks)
        files = [LogFile(each) for each in disks]
        owner.store(4, "cluster")
        owner.close()
        for file in files:
            file.close()
    backup.BackupDirectory(tmp_path / "data", besides=disks[:1]).close()  # the other disks are its own from before
    backup.BackupDirectory(tmp_path / "other" / "disk" / "data", besides=disks[1:]).close()


@pytest.mark.parametrize("disk", ["", "disk", "log/disk"])
def test_a_disk_within_the_directory_of_another_daemon_is_refused(tmp_path: Path, disk: str) -> None:
    holder = KINDS["broker"](tmp_path / "broker")
    SegmentIndex.open(tmp_path / "broker" / "log" / "index").close()
    for user in (rf"a broker {ME}", "a broker"):
        with pytest.raises(StartError, match=f"^{tmp_path}/broker belongs to {user}, and .*choose another --log-dirs$"):
            backup.BackupDirectory(tmp_path / "backup", besides=[tmp_path / "broker" / disk])
        if user != "a broker":
            holder.close()
    assert not (tmp_path / "broker" / "disk").exists()


def test_a_disk_around_the_directory_of_another_daemon_is_refused(tmp_path: Path) -> None:
    holder = KINDS["broker"](tmp_path / "disk" / "broker")
    with pytest.raises(StartError, match=rf"/disk/broker belongs to a broker {ME}, and .*/disk: .*another --log-dirs$"):
        backup.BackupDirectory(tmp_path / "backup", besides=[tmp_path / "disk"])
    holder.close()


@pytest.mark.parametrize("below", ["broker", ""])
def test_no_daemon_starts_within_or_around_a_disk_in_use(tmp_path: Path, below: str) -> None:
    disk = LogFile(tmp_path / "disks" / "disk")
    path = tmp_path / "disks" / "disk" / "broker" if below else tmp_path / "disks"
    with pytest.raises(StartError, match=r"/disks/disk belongs to a backup, and .*choose another --data-dir$"):
        KINDS["broker"](path)
    disk.close()
    KINDS["broker"](path).close()  # the disk may have been given up
