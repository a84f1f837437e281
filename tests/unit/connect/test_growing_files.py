"""`kera.connect.files`: files that grow, end in the middle of a record, or are replaced."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.connect.endpoints import FilesEnd
from kera.connect.errors import Refused, SourceChanged
from kera.connect.files import text as texts
from kera.connect.files.source import PART, FilesSource
from kera.connect.files.text import Position, TextFile, has_writer
from kera.connect.pieces import Piece, Span
from kera.core.errors import SchemaMismatch

SCHEMA = pa.schema([("n", pa.int64()), ("t", pa.string())])


class Copy:
    """Copies files repeatedly; each run starts where the previous one ended."""

    def __init__(self, path: Path | str, kind: str) -> None:
        self.numbers: list[int] = []
        self.notes: list[str] = []
        self.place: Any = None
        self._end = FilesEnd(str(path), kind, many="*" in str(path))

    async def run(self) -> list[int]:
        """Copy; return all numbers copied so far."""
        async with self.source() as source:
            try:
                async for piece in source.read({} if self.place is None else {PART: self.place}, 1 << 20):
                    self.take(piece)
            finally:
                self.notes = source.notes
        return self.numbers

    @asynccontextmanager
    async def source(self, *, follow: bool = False) -> AsyncIterator[FilesSource]:
        source = FilesSource(self._end, SCHEMA, follow=follow)
        try:
            await source.open()
            yield source
        finally:
            await source.close()

    def take(self, piece: Piece) -> None:
        self.numbers += piece.rows.column("n").to_pylist()
        self.place = piece.end


async def test_a_last_line_without_a_newline_is_a_record_unless_the_file_has_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}')
    copy = Copy(path, "jsonl")

    assert await copy.run() == [1, 2]
    with path.open("a") as file:
        file.write('\n{"n": 3}\n')
    assert await copy.run() == [1, 2, 3]


async def test_a_last_line_waits_while_its_writer_has_the_file_open(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    copy = Copy(path, "csv")
    with path.open("w") as file:
        file.write('n,t\n1,one\n2,"two\n')
        file.flush()
        assert has_writer(str(path))
        assert await copy.run() == [1]
        assert f"{path}: its last record has no end yet, and a process has the file open for writing" in copy.notes[0]
        file.write('more"')
    assert not has_writer(str(path))
    assert await copy.run() == [1, 2]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("x.csv", "n,t\n1,one\n2,tw", "o\n"), ("x.jsonl", '{"n": 1}\n{"n": 2}', ', {"n": 3}\n')],
)
async def test_a_copied_record_that_gets_longer_is_an_error(tmp_path: Path, name: str, before: str, after: str) -> None:
    path = tmp_path / name
    path.write_text(before)
    copy = Copy(path, path.suffix.removeprefix("."))
    assert await copy.run() == [1, 2]
    with path.open("a") as file:
        file.write(after)

    with pytest.raises(SourceChanged, match=rf"{name}: .* ended at byte {len(before)}, without a newline, and goes on"):
        await copy.run()
    assert copy.numbers == [1, 2]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"n": 1}\n{"n": 2'),
        ("x.jsonl", '{"n": 1}\n{"t": "é"}'.encode()[:-3]),
        ("x.csv", b'n,t\n1,one\n2,"two\n'),
        ("x.jsonl.gz", gzip.compress(b'{"n": 1}\n', mtime=0) + gzip.compress(b'{"n": 2}\n', mtime=0)[:-1]),
    ],
)
async def test_a_file_that_ends_inside_a_record_is_copied_up_to_an_error(
    tmp_path: Path, name: str, data: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    copy = Copy(path, name.split(".")[1])

    with pytest.raises(SchemaMismatch, match=r"its last (record|compressed frame) is not complete"):
        await copy.run()

    assert copy.numbers[:1] == [1]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"n": 1}\n', r"18 bytes of it were copied, and it has 9 now"),
        ('{"n": 7}\n{"n": 8}\n{"n": 9}\n', r"the text before byte 18 is not the one that was copied"),
    ],
)
async def test_a_truncated_or_replaced_file_is_an_error_with_its_name_and_a_remedy(
    tmp_path: Path, ending: str, text: str, said: str
) -> None:
    path = tmp_path / f"x.jsonl{ending}"
    as_written = gzip.compress if ending else bytes
    path.write_bytes(as_written(b'{"n": 1}\n{"n": 2}\n'))
    copy = Copy(path, "jsonl")
    assert await copy.run() == [1, 2]
    other = tmp_path / "other"
    other.write_bytes(as_written(text.encode()))
    other.rename(path)

    with pytest.raises(SourceChanged, match=rf"{path}: {said}: put the file back .* after kera connect forget"):
        await copy.run()


async def test_a_copy_goes_on_in_a_longer_file_with_the_same_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,t\n1,\n")
    copy = Copy(path, "csv")
    await copy.run()
    other = tmp_path / "other"
    other.write_text("n,t\n1,\n2,\n")
    other.rename(path)
    assert await copy.run() == [1, 2]


async def test_an_earlier_file_that_grows_is_an_error(tmp_path: Path) -> None:
    for name in "ab":
        Path(tmp_path, f"{name}.jsonl").write_text('{"n": 1}\n')
    copy = Copy(f"{tmp_path}/*.jsonl", "jsonl")
    await copy.run()
    with Path(tmp_path, "a.jsonl").open("a") as file:
        file.write('{"n": 2}\n')

    with pytest.raises(SourceChanged, match=r"files before .*b\.jsonl had 9 bytes .* have 18 now"):
        await copy.run()


async def test_files_after_one_that_is_being_written_wait_for_it(tmp_path: Path) -> None:
    Path(tmp_path, "b.jsonl").write_text('{"n": 2}\n')
    copy = Copy(f"{tmp_path}/*.jsonl", "jsonl")
    with Path(tmp_path, "a.jsonl").open("w") as file:
        file.write('{"n": ')
        file.flush()
        with pytest.raises(Refused, match=r"a\.jsonl: its last record has no end yet"):
            await copy.run()
        file.write("1}")
    assert await copy.run() == [1, 2]


def test_a_file_truncated_or_rewritten_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n' * 100)
    blocks = TextFile(str(path), texts.JsonRecords()).blocks(Position(0), 95)
    next(blocks)
    path.write_text('{"n": 2}\n' * 100)
    with pytest.raises(SourceChanged, match="truncated or rewritten while it was read"):
        list(blocks)

    blocks = TextFile(str(path), texts.JsonRecords()).blocks(Position(0), 95)
    next(blocks)
    os.truncate(path, 0)
    with pytest.raises(SourceChanged, match="truncated or rewritten while it was read"):
        list(blocks)


async def test_places_of_earlier_versions_that_count_csv_rows_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,t\n" + "".join(f'{n},"a\nb"\n' for n in range(10)))
    copy = Copy(path, "csv")
    copy.place = [0, str(path), 4, 99]

    assert await copy.run() == [4, 5, 6, 7, 8, 9]
    async with copy.source() as source:
        (rows,) = await source.again([Span(PART, [0, str(path), 2, 99], [0, str(path), 5, 99], 3)])
    assert rows is not None
    assert rows.column("n").to_pylist() == [2, 3, 4]


async def test_a_following_copy_takes_new_lines_and_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"n": 1}\n{"n": 2')
    copy = Copy(f"{tmp_path}/*.jsonl", "jsonl")
    came = asyncio.Event()

    async def follow() -> None:
        async with copy.source(follow=True) as source:
            async for piece in source.read({}, 1 << 20):
                copy.take(piece)
                came.set()

    async def until(numbers: list[int]) -> None:
        while copy.numbers != numbers:
            await asyncio.wait_for(came.wait(), 30)
            came.clear()

    following = asyncio.create_task(follow())
    await until([1])
    with first.open("a") as file:
        file.write('2}\n{"n": 3}')
    await until([1, 22])
    second.write_text('{"n": 4}\n')
    await until([1, 22, 3, 4])
    second.write_text("")
    with pytest.raises(SourceChanged, match=r"b\.jsonl: (9 bytes of it were copied|it was truncated)"):
        await asyncio.wait_for(following, 30)


async def test_a_rewritten_parquet_file_is_an_error(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    table = pa.table({"n": pa.array([1, 2], pa.int64()), "t": ["a", "b"]})
    pq.write_table(table, path)
    copy = Copy(path, "parquet")
    assert await copy.run() == [1, 2]
    assert await copy.run() == [1, 2]
    size = path.stat().st_size
    pq.write_table(pa.table({"n": pa.array([3, 4], pa.int64()), "t": ["a", "b"]}), path)
    assert path.stat().st_size == size

    with pytest.raises(SourceChanged, match="is another file than the one with 2 copied rows"):
        await copy.run()
