import asyncio
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from kera.coordinator.store.data_dir import DataDir, DataDirInUse
from kera.coordinator.store.lmdb_store import LmdbStore
from kera.coordinator.store.metadata import MetadataStoreFailed, MetadataStoreFull, StoredRecord, UnknownFormat, Write
from kera.core.errors import DiskFull, PathNotWritable, StartError

MIB = 1 << 20


def open_store(path: Path, bytes_max: int = 4 * MIB, committing: ThreadPoolExecutor | None = None) -> LmdbStore:
    return LmdbStore(path, bytes_max=bytes_max, committing=committing)


async def test_records_and_versions_are_there_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "directory")
    await store.write(Write("a", b"1", 0))
    await store.write(Write("a", b"2", 1))
    await store.close()

    store = open_store(tmp_path / "new" / "directory")
    assert await store.list("") == {"a": StoredRecord(b"2", 2)}
    await store.close()


@pytest.mark.parametrize("before", [None, 0o600])
async def test_metadata_are_their_owners_alone_who_needs_no_rights(tmp_path: Path, before: int | None) -> None:
    if before is not None:  # as an earlier version has left it
        await open_store(tmp_path).close()
        (tmp_path / "metadata").chmod(before)
    await open_store(tmp_path).close()

    assert (tmp_path / "metadata").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "metadata").iterdir()} == {0o600}


async def test_a_directory_in_use_is_refused_and_names_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    with pytest.raises(DataDirInUse, match=rf"process {os.getpid()}\) uses data directory {tmp_path}"):
        open_store(tmp_path)

    await store.close()
    await open_store(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PathNotWritable, match="choose another --data-dir") as error:
        open_store(tmp_path / "file" / "data")

    assert error.value.attributes == {"path": str(tmp_path / "file" / "data")}


async def test_metadata_of_another_format_is_refused_and_the_directory_let_go(tmp_path: Path) -> None:
    await open_store(tmp_path).close()
    with (
        lmdb.open(str(tmp_path / "metadata"), max_dbs=2) as environment,
        environment.begin(db=environment.open_db(b"store"), write=True) as transaction,
    ):
        transaction.put(b"format", b"2")

    with pytest.raises(UnknownFormat, match="has format 2, this version knows 1"):
        open_store(tmp_path)

    DataDir(tmp_path).close()


def test_a_file_that_is_no_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "data.mdb").write_bytes(b"x" * 100_000)

    with pytest.raises(StartError, match="cannot use metadata in"):
        open_store(tmp_path)

    DataDir(tmp_path).close()


async def test_a_full_store_refuses_the_write_says_why_and_goes_on(tmp_path: Path) -> None:
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


async def test_a_disk_without_room_refuses_the_write_says_so_and_the_store_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.write(Write("a", b"1", 0))
    limit_bytes = (tmp_path / "metadata" / "data.mdb").stat().st_size + 100_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(DiskFull, match="no room for metadata"):
                await store.write(Write("a", b"2", 1), Write("b", b"x" * 300_000, 0))
        assert await store.list("") == {"a": StoredRecord(b"1", 1)}
        await store.write(Write("a", b"2", 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    await store.write(Write("b", b"x" * 300_000, 0))
    assert list(await store.list("")) == ["a", "b"]
    await store.close()


async def test_an_error_of_lmdb_does_not_come_out_as_such(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store._environment.close()

    for failing in (store.write(Write("a", b"1", 0)), store.get("a"), store.list("")):
        with pytest.raises(MetadataStoreFailed):
            await failing
    await store.close()


async def test_a_store_closes_when_the_commit_that_has_begun_is_done(tmp_path: Path) -> None:
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


async def test_a_write_whose_caller_gives_up_is_carried_out_though_others_are_before_it(tmp_path: Path) -> None:
    committing, may_go_on = ThreadPoolExecutor(1), threading.Event()
    committing.submit(may_go_on.wait)
    store = open_store(tmp_path, committing=committing)
    writing = [asyncio.create_task(store.write(Write(f"{number}", b"", 0))) for number in range(100)]
    await asyncio.sleep(0)
    for task in writing:
        task.cancel()
    await asyncio.wait(writing)
    may_go_on.set()
    await store.close()

    store = open_store(tmp_path)
    assert len(await store.list("")) == len(writing)
    await store.close()
