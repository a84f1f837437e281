import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
from structlog.testing import capture_logs

from kera.coordinator.health import watch_metadata
from kera.coordinator.store.data_dir import DataDir, DataDirInUse
from kera.coordinator.store.lmdb_store import LOCK_BYTES, LmdbStore, RestoreInterrupted
from kera.coordinator.store.metadata import (
    MetadataDamaged,
    MetadataStoreFailed,
    MetadataStoreFull,
    StoredRecord,
    UnknownFormat,
    VersionConflict,
    Write,
)
from kera.core.base.health import Health, State
from kera.core.errors import DiskFull, PathNotWritable, StartError, Unavailable

MIB = 1 << 20


def open_store(path: Path, bytes_max: int = 4 * MIB, committing: ThreadPoolExecutor | None = None) -> LmdbStore:
    return LmdbStore(path, bytes_max=bytes_max, committing=committing)


def damage(path: Path, content: int) -> None:
    """Replace the metadata file by this one byte."""
    (path / "metadata").mkdir(exist_ok=True)
    (path / "metadata" / "data.mdb").write_bytes(bytes([content]))


@contextmanager
def limited_files(bytes_max: int) -> Iterator[None]:
    """A full disk: no file can become larger than `bytes_max`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_records_and_versions_outlast_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "directory")
    await store.write(Write("a", b"1", 0))
    await store.write(Write("a", b"2", 1))
    await store.close()

    store = open_store(tmp_path / "new" / "directory")
    assert await store.list("") == {"a": StoredRecord(b"2", 2)}
    await store.close()


@pytest.mark.parametrize("before", [None, 0o600])
async def test_only_the_owner_can_read_and_write_metadata_files(tmp_path: Path, before: int | None) -> None:
    if before is not None:  # the mode that an earlier version left
        await open_store(tmp_path).close()
        (tmp_path / "metadata").chmod(before)
    await open_store(tmp_path).close()

    assert (tmp_path / "metadata").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "metadata").iterdir()} == {0o600}


async def test_the_error_of_a_directory_in_use_names_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    with pytest.raises(DataDirInUse, match=rf"process {os.getpid()}\) uses data directory {tmp_path}"):
        open_store(tmp_path)

    await store.close()
    await open_store(tmp_path).close()


def test_a_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PathNotWritable, match="choose another --data-dir") as error:
        open_store(tmp_path / "file" / "data")

    assert error.value.attributes == {"path": str(tmp_path / "file" / "data")}


async def test_metadata_of_another_format_are_refused_and_the_directory_is_released(tmp_path: Path) -> None:
    await open_store(tmp_path).close()
    with (
        lmdb.open(str(tmp_path / "metadata"), max_dbs=2) as environment,
        environment.begin(db=environment.open_db(b"store"), write=True) as transaction,
    ):
        transaction.put(b"format", b"2")

    with pytest.raises(UnknownFormat, match="has format 2, this version knows 1"):
        open_store(tmp_path)

    DataDir(tmp_path).close()


@pytest.mark.parametrize("content", [b"", b"x" * 100_000, bytes(8192)], ids=["empty", "text", "zeros"])
def test_damaged_metadata_are_left_alone_and_the_error_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "metadata" / "data.mdb"
    file.parent.mkdir()
    file.write_bytes(content)

    with pytest.raises(MetadataDamaged) as error:
        open_store(tmp_path)

    assert error.value.attributes["path"] == str(file)
    for part in (f"{file} is damaged: ", f"--data-dir {tmp_path} --force", f"remove {file.parent} if"):
        assert part in error.value.message
    assert file.read_bytes() == content
    DataDir(tmp_path).close()


async def test_replacing_damaged_metadata_sets_them_aside(tmp_path: Path) -> None:
    for number in range(2):
        damage(tmp_path, number)
        store = LmdbStore(tmp_path, bytes_max=4 * MIB, replace_damaged=True)
        assert await store.list("") == {}
        await store.write(Write("a", b"1", 0))
        await store.close()

    assert [(tmp_path / name / "data.mdb").read_bytes() for name in ("metadata.damaged", "metadata.damaged-2")] == [
        b"\0",
        b"\1",
    ]
    store = LmdbStore(tmp_path, bytes_max=4 * MIB, replace_damaged=True)
    assert list(await store.list("")) == ["a"]
    await store.close()
    assert {each.name for each in tmp_path.iterdir()} == {"lock", "metadata", "metadata.damaged", "metadata.damaged-2"}


async def test_damaged_metadata_stay_when_no_write_replaces_them(tmp_path: Path) -> None:
    """Otherwise a coordinator would find an empty store and begin a new cluster."""
    damage(tmp_path, 7)
    store = LmdbStore(tmp_path, bytes_max=4 * MIB, replace_damaged=True)
    with pytest.raises(VersionConflict):
        await store.write(Write("a", b"1", 1))
    await store.close()

    assert {each.name for each in tmp_path.iterdir()} == {"lock", "metadata"}
    with pytest.raises(MetadataDamaged):
        open_store(tmp_path)

    with limited_files(4096), pytest.raises(StartError, match="cannot use metadata"):
        LmdbStore(tmp_path, bytes_max=4 * MIB, replace_damaged=True)
    assert [each.read_bytes() for each in (tmp_path / "metadata").iterdir()] == [b"\7"]


@pytest.mark.parametrize("empty", [True, False], ids=["an empty database", "nothing"])
@pytest.mark.parametrize("replace_damaged", [True, False])
async def test_after_an_interrupted_restore_the_store_opens_only_for_a_copy(
    tmp_path: Path, empty: bool, replace_damaged: bool
) -> None:
    if empty:
        await open_store(tmp_path).close()
    (tmp_path / "metadata.damaged").mkdir()
    before = {path.name for path in tmp_path.rglob("*")} | {"lock"}

    for _ in range(2):
        with pytest.raises(RestoreInterrupted, match=f"Repeat kera cluster restore FILE --data-dir {tmp_path}, or "):
            open_store(tmp_path)
        assert {path.name for path in tmp_path.rglob("*")} == before
    store = LmdbStore(tmp_path, bytes_max=4 * MIB, for_copy=True, replace_damaged=replace_damaged)
    await store.close()  # a restore that wrote no copy
    with pytest.raises(RestoreInterrupted):
        open_store(tmp_path)
    store = LmdbStore(tmp_path, bytes_max=4 * MIB, for_copy=True, replace_damaged=replace_damaged)
    await store.write(Write("a", b"1", 0))
    await store.close()

    store = open_store(tmp_path)
    assert list(await store.list("")) == ["a"]
    await store.close()


async def test_the_lock_file_of_lmdb_is_allocated_before_it_is_mapped(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    lock = (tmp_path / "metadata" / "lock.mdb").stat()
    assert lock.st_size == LOCK_BYTES
    assert lock.st_blocks * 512 >= LOCK_BYTES
    await store.close()


async def test_a_first_start_without_disk_space_leaves_no_damaged_metadata(tmp_path: Path) -> None:
    for bytes_max in (4096, LOCK_BYTES):  # too small for the lock file; for the first commit
        with limited_files(bytes_max), pytest.raises(StartError, match="cannot use metadata"):
            open_store(tmp_path)
        assert not (tmp_path / "metadata" / "data.mdb").exists()

    await open_store(tmp_path).close()


async def test_a_full_store_refuses_a_write_and_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, MIB)
    await store.write(Write("a", b"1", 0))

    with pytest.raises(MetadataStoreFull, match="raise metadata_bytes_max"):
        await store.write(Write("a", b"2", 1), Write("b", b"x" * 900_000, 0), Write("c", b"x" * 900_000, 0))

    assert await store.list("") == {"a": StoredRecord(b"1", 1)}
    await store.write(Write("a", b"2", 1))
    await store.close()

    larger = open_store(tmp_path, 4 * MIB)
    await larger.write(Write("b", b"x" * 900_000, 0), Write("c", b"x" * 900_000, 0))
    await larger.close()


async def test_a_full_disk_refuses_a_write_with_a_warning_and_the_store_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.write(Write("a", b"1", 0))
    health = Health()
    watch_metadata(health, store)
    limit_bytes = (tmp_path / "metadata" / "data.mdb").stat().st_size + 100_000
    with limited_files(limit_bytes), capture_logs() as lines:
        for _ in range(2):
            with pytest.raises(DiskFull, match="no room for metadata"):
                await store.write(Write("a", b"2", 1), Write("b", b"x" * 300_000, 0))
        assert await store.list("") == {"a": StoredRecord(b"1", 1)}
        assert health.checks()[-1].state is State.WARNING
        assert f"metadata cannot be written in {tmp_path}/metadata: " in health.checks()[-1].text
        await store.write(Write("a", b"2", 1))
    assert health.checks()[-1].state is State.OK
    assert [line["event"] for line in lines] == ["cannot write metadata", "metadata can be written again"]

    await store.write(Write("b", b"x" * 300_000, 0))
    assert list(await store.list("")) == ["a", "b"]
    await store.close()


async def test_errors_of_lmdb_become_metadata_store_failed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store._environment.close()

    for failing in (store.write(Write("a", b"1", 0)), store.get("a"), store.list("")):
        with pytest.raises(MetadataStoreFailed):
            await failing
    await store.close()


async def test_closing_a_store_waits_for_a_queued_write_whose_caller_gave_up(tmp_path: Path) -> None:
    committing, may_end = ThreadPoolExecutor(1), threading.Event()
    committing.submit(may_end.wait)
    store = open_store(tmp_path, committing=committing)
    writing = asyncio.create_task(store.write(Write("a", b"1", 0)))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    closing = asyncio.create_task(store.close())
    for _ in range(10):
        await asyncio.sleep(0)
    still_open = not closing.done()
    may_end.set()
    await closing

    assert still_open
    store = open_store(tmp_path)
    assert await store.list("") == {"a": StoredRecord(b"1", 1)}
    await store.close()


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_file_replaced_or_removed_while_open_is_not_written(tmp_path: Path, *, replaced: bool) -> None:
    """The file has no name any more, so the commit would be lost with the process."""
    store = LmdbStore(tmp_path, bytes_max=1 << 20)
    await store.write(Write("a", b"1", 0))
    file, aside = tmp_path / "metadata" / "data.mdb", tmp_path / "aside"
    file.rename(aside)
    if replaced:
        file.write_bytes(aside.read_bytes())
    health = Health()
    watch_metadata(health, store)
    check = next(each for each in health.checks() if each.name == "metadata")
    assert check.state is State.WARNING
    assert f"{file} was removed or replaced while the coordinator runs" in check.text

    with pytest.raises(Unavailable, match="put that back with kera cluster restore FILE"):
        await store.write(Write("a", b"2", 1))
    assert await store.get("a") == StoredRecord(b"1", 1)

    aside.replace(file)
    await store.write(Write("a", b"2", 1))
    assert store.problem == ""
    await store.close()
    again = LmdbStore(tmp_path, bytes_max=1 << 20)
    assert await again.get("a") == StoredRecord(b"2", 2)
    await again.close()
