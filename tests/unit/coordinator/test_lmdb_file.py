"""The check of LMDB files: it accepts the files that LMDB writes, and refuses damage that would end the process."""

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest

from kera.coordinator.store.lmdb_file import DamagedFile, check
from tests.examples import first_quick

PAGE_BYTES = mmap.PAGESIZE
RECORDS = 40
VALUE_BYTES = (0, 10, 500, 2000, 4000, 4081, 9000, 20_000)
"""Sizes of values: several on a page, one on a page, and values with overflow pages."""


@contextlib.contextmanager
def database(path: Path) -> Iterator[tuple[lmdb.Environment, list[Any]]]:
    """An environment in a directory, with two databases."""
    with lmdb.open(str(path), map_size=64 << 20, max_dbs=2, sync=False) as environment:
        yield environment, [environment.open_db(b"store"), environment.open_db(b"records")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with pages of all kinds, whose last page belongs to a tree."""
    with database(tmp_path) as (environment, databases), environment.begin(write=True, db=databases[1]) as transaction:
        for number in range(RECORDS):
            transaction.put(b"%03d" % number, bytes(VALUE_BYTES[number % len(VALUE_BYTES)]))
    return tmp_path / "data.mdb"


@pytest.mark.parametrize("seed", first_quick(range(5), 2))
def test_a_file_that_lmdb_writes_passes_the_check_after_each_commit(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    with database(tmp_path) as (environment, databases):
        check(tmp_path / "data.mdb")
        for _ in range(40):
            with environment.begin(write=True) as transaction:
                for _ in range(random.choice((1, 5, 50, 300))):
                    key, db = b"%d" % random.randrange(500) + b"x" * random.choice((0, 250)), random.choice(databases)
                    if random.random() < 0.45:
                        transaction.delete(key, db=db)
                    else:
                        transaction.put(key, bytes(random.choice(VALUE_BYTES)), db=db)
                if random.random() < 0.1:
                    transaction.drop(random.choice(databases), delete=False)
            check(tmp_path / "data.mdb")


def test_a_truncated_file_is_refused(file: Path) -> None:
    check(file)
    for size in range(file.stat().st_size - 1, -1, -1000):
        with file.open("r+b") as cut:
            cut.truncate(size)
        with pytest.raises(DamagedFile, match=f"it is cut off: it has {size} bytes"):
            check(file)


def test_a_file_with_an_overwritten_page_is_refused(file: Path) -> None:
    with database(file.parent) as (environment, databases), environment.begin() as transaction:
        found = [environment.stat(), transaction.stat(databases[1])]
        on_overflow_pages = sum(len(value) > PAGE_BYTES // 2 for _, value in transaction.cursor(databases[1]))
    right, random = file.read_bytes(), Random(1)
    refused = set()
    for page in range(len(right) // PAGE_BYTES):
        for wrong in (bytes(PAGE_BYTES), random.randbytes(PAGE_BYTES)):
            file.write_bytes(right[: page * PAGE_BYTES] + wrong + right[(page + 1) * PAGE_BYTES :])
            with contextlib.suppress(DamagedFile):
                check(file)
                continue
            refused.add(page)
    in_trees = sum(each["branch_pages"] + each["leaf_pages"] for each in found)
    assert {0, 1} < refused
    assert (
        len(refused) == 2 + in_trees + 1 + on_overflow_pages
    )  # 1 is the list of free pages; each large value begins on a page that no other shares


def test_the_check_of_random_damage_ends_or_raises_damaged_file(file: Path) -> None:
    right, random, refused = file.read_bytes(), Random(2), 0
    for _ in range(200):
        wrong = bytearray(right)
        for _ in range(random.randrange(1, 20)):  # in headers and in the offsets of nodes
            at = random.randrange(len(right) // PAGE_BYTES) * PAGE_BYTES + random.randrange(64)
            wrong[at] = random.randrange(256)
        file.write_bytes(wrong)
        try:
            check(file)
        except DamagedFile:
            refused += 1
    assert refused > 50


def test_a_file_of_another_lmdb_version_is_left_to_lmdb_to_refuse(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for page in range(2):
        struct.pack_into("@I", data, page * PAGE_BYTES + 20, 2)
    file.write_bytes(data)

    check(file)

    with pytest.raises(lmdb.Error, match=r"v2|VERSION"):
        lmdb.open(str(file.parent))
