"""`kera.connect.files`: places in files, round trips of rows, and whole targets."""

from __future__ import annotations

import asyncio
import datetime
import errno
import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kera.connect.endpoints import FilesEnd, parse_end
from kera.connect.errors import CopyElsewhere, CopyMismatch, Refused, SourceChanged
from kera.connect.files import sink as sinks
from kera.connect.files.places import Spot, check_order
from kera.connect.files.sink import STATE, FilesSink
from kera.connect.files.source import PART, FilesSource
from kera.connect.pieces import Piece, Progress, Span
from kera.core.errors import DiskFull, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.examples import first_quick

ROWS = pa.record_batch(
    {
        "id": pa.array(range(50), pa.int64()),
        "name": [None if n % 5 == 0 else "" if n % 5 == 1 else f'a "{n}",\nNA' for n in range(50)],
        "at": pa.array([1_700_000_000_000_000 + n for n in range(50)], pa.timestamp("us", tz="UTC")),
        "share": [n / 7 for n in range(50)],
    }
)
RECORDS = pa.RecordBatch.from_pylist(
    [
        {
            "timestamp": datetime.datetime(2026, 1, 1, 12, 0, 0, n, tzinfo=datetime.UTC),
            "keys": None if n % 3 == 0 else [b"k%d" % n],
            "value": None if n % 7 == 0 else b"v\n%d" % n,
            "headers": None,
        }
        for n in range(20)
    ],
    DEFAULT_SCHEMA,
)


PIECE_BYTES = 256


def record(**columns: Any) -> pa.RecordBatch:
    whole = {"timestamp": datetime.datetime.now(datetime.UTC), "keys": None, "value": None, "headers": None, **columns}
    return pa.RecordBatch.from_pylist([whole], DEFAULT_SCHEMA)


def given(schema: pa.Schema) -> Any:
    """The parts of a source that a target uses."""
    return SimpleNamespace(shown="stream s", identity="stream s", schema=schema)


def files(end: str, kind: str | None = None) -> FilesEnd:
    found = parse_end(end, file_format=kind)
    assert isinstance(found, FilesEnd)
    return found


async def written(path: str, batches: Sequence[pa.RecordBatch], kind: str | None = None, **options: Any) -> Progress:
    """Copy the batches as pieces; return the progress at the start."""
    sink = FilesSink(files(path, kind), **options)
    try:
        begun = await sink.open(given(batches[0].schema))
        for number, rows in enumerate(batches):
            await sink.put([Piece("0", number, number + 1, rows)])
        await sink.finish(complete=True)
    finally:
        await sink.close()
    return begun


def names_in(path: str | Path) -> list[str]:
    return sorted(each.name for each in Path(path).iterdir())


async def read(
    path: str, schema: pa.Schema | None, place: Any = None, kind: str | None = None
) -> tuple[Any, list[Piece]]:
    source = FilesSource(files(path, kind), schema)
    try:
        await source.open()
        pieces = [piece async for piece in source.read({} if place is None else {PART: place}, PIECE_BYTES)]
        if pieces:
            spans = [Span(piece.part, piece.start, piece.end, piece.rows.num_rows) for piece in pieces]
            again = await source.again(spans)
            if source.schema is not DEFAULT_SCHEMA or kind == "parquet":  # lines without a time get the current one
                assert [each and each.to_pylist() for each in again] == [piece.rows.to_pylist() for piece in pieces]
    finally:
        await source.close()
    return source.schema, pieces


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
async def test_rows_survive_writing_and_reading(tmp_path: Path, kind: str) -> None:
    path = f"{tmp_path}/rows.{kind}"
    await written(path, [ROWS.slice(0, 20), ROWS.slice(20)])

    _, pieces = await read(path, ROWS.schema)

    assert pa.Table.from_batches([piece.rows for piece in pieces]).equals(pa.Table.from_batches([ROWS]))
    assert names_in(tmp_path) == [f"rows.{kind}"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
async def test_records_survive_writing_and_reading(tmp_path: Path, kind: str) -> None:
    path = f"{tmp_path}/records.{kind}"
    await written(path, [RECORDS])

    schema, pieces = await read(path, DEFAULT_SCHEMA)

    assert schema is DEFAULT_SCHEMA
    rows = pa.Table.from_batches([piece.rows for piece in pieces]).to_pylist()
    assert [(row["timestamp"], row["value"], row["keys"] or None) for row in rows] == [
        (row["timestamp"], row["value"], row["keys"]) for row in RECORDS.to_pylist()
    ]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
async def test_headers_with_repeated_names_survive_writing_and_reading(tmp_path: Path, kind: str) -> None:
    headers = [("h", b"x"), ("none", None), ("h", b""), ("", b"\xff"), ("\xfc", b"\0")]
    await written(f"{tmp_path}/headers.{kind}", [record(headers=headers)])

    _, pieces = await read(f"{tmp_path}/headers.{kind}", DEFAULT_SCHEMA)

    assert [row["headers"] for piece in pieces for row in piece.rows.to_pylist()] == [headers]


@pytest.mark.parametrize("first", first_quick(range(5), 1))
@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
async def test_reading_can_resume_after_any_piece(
    tmp_path: Path, kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth piece from the first one on."""
    monkeypatch.setattr("kera.connect.files.reading.ROWS_MAX", 7)
    monkeypatch.setattr("kera.connect.files.reading.BLOCK_BYTES", 256)
    for number in range(3):
        await written(f"{tmp_path}/{number}.{kind}", [ROWS])
    pattern = f"{tmp_path}/*.{kind}"
    _, pieces = await read(pattern, ROWS.schema)
    assert len(pieces) > 5
    assert pieces[0].start == [0, f"{tmp_path}/0.{kind}", 0, Path(f"{tmp_path}/0.{kind}").stat().st_size, 0, ""]

    for number, piece in list(enumerate(pieces))[first::5]:
        _, rest = await read(pattern, ROWS.schema, piece.end)
        expected = [row for each in pieces[number + 1 :] for row in each.rows.to_pylist()]
        assert [row for each in rest for row in each.rows.to_pylist()] == expected


async def test_columns_are_inferred_from_a_file(tmp_path: Path) -> None:
    Path(tmp_path, "x.csv").write_text('n,t\n1,NA\n2,\n3,""\n')
    schema, (piece,) = await read(f"{tmp_path}/x.csv", None)
    assert schema == pa.schema([("n", pa.int64()), ("t", pa.string())])
    assert piece.rows.to_pylist() == [{"n": 1, "t": "NA"}, {"n": 2, "t": None}, {"n": 3, "t": ""}]

    Path(tmp_path, "x.jsonl").write_text('{"a": 1, "b": [1.5]}\n\n{"a": 2}')
    schema, pieces = await read(f"{tmp_path}/x.jsonl", None)
    rows = [row for piece in pieces for row in piece.rows.to_pylist()]
    assert rows == [{"a": 1, "b": [1.5]}, {"a": 2, "b": None}]

    Path(tmp_path, "r.jsonl").write_text('{"key": "k", "value": "v", "offset": 3}\n')
    schema, (piece,) = await read(f"{tmp_path}/r.jsonl", None)
    assert schema is DEFAULT_SCHEMA
    assert piece.rows.column("value").to_pylist() == [b"v"]

    dictionary = pa.table(
        {"d": pa.array(["x", "x"]).dictionary_encode(), "big": pa.array(["y", "y"], pa.large_string())}
    )
    pq.write_table(dictionary, tmp_path / "d.parquet")
    schema, _ = await read(f"{tmp_path}/d.parquet", None)
    assert schema.types == [pa.string(), pa.string()]


async def test_parquet_files_with_other_types_are_converted_without_loss_or_refused(tmp_path: Path) -> None:
    none = pa.table({"n": pa.array([], pa.int64()), "t": pa.array([], pa.string())})
    pq.write_table(none, tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"n": pa.array([1], pa.int32()), "t": pa.array(["x"]).dictionary_encode()}), tmp_path / "b.parquet"
    )
    pq.write_table(pa.table({"t": pa.nulls(1), "n": pa.array([2], pa.uint32())}), tmp_path / "c.parquet")
    _, pieces = await read(f"{tmp_path}/*.parquet", None, kind="parquet")
    rows = [row for piece in pieces for row in piece.rows.to_pylist()]
    assert rows == [{"n": 1, "t": "x"}, {"n": 2, "t": None}]

    pq.write_table(pa.table({"n": [1.5], "t": ["x"]}), tmp_path / "d.parquet")
    with pytest.raises(SchemaMismatch, match=r"d\.parquet: column 'n' is int64 in the stream, and double in the file"):
        await read(f"{tmp_path}/*.parquet", None, kind="parquet")


@pytest.mark.parametrize(
    ("unit", "value", "column", "said"),
    [
        ("us", 253_402_300_799_000_000, "us", None),
        (
            "us",
            253_402_300_799_000_000,
            "ns",
            r"column 'v' of row 2 .* 253402300799000000 us since 1970.*timestamp\[us\]",
        ),
        ("us", -62_135_596_800_000_000, None, r"column 'v' of row 2 .* -62135596800000000 us"),
        ("ns", 1_700_000_000_123_456_789, "ns", None),
        ("ns", 1_700_000_000_123_456_789, "us", r"column 'v' of row 2 has a time of 1700000000123456789 ns.*\[ns\]"),
        ("ns", 1_700_000_000_123_456_000, "us", None),
    ],
)
async def test_times_of_int96_are_read_exactly_or_refused(
    tmp_path: Path, unit: str, value: int, column: str | None, said: str | None
) -> None:
    times = pa.array([0, value, None], pa.int64()).cast(pa.timestamp(unit))
    pq.write_table(pa.table({"v": times}), tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    schema = None if column is None else pa.schema([("v", pa.timestamp(column))])
    if said is not None:
        with pytest.raises(SchemaMismatch, match=said):
            await read(f"{tmp_path}/x.parquet", schema)
        return
    _, (piece,) = await read(f"{tmp_path}/x.parquet", schema)
    assert piece.rows.column("v").cast(pa.timestamp("ns") if unit == "ns" else pa.timestamp("us")).equals(times)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.csv", "id,share\n1,2\nabc,3\n", r"x\.csv: column 'id'.*'abc'"),
        ("x.csv", "id,color\n1,red\n", r"x\.csv: has a column 'color'"),
        ("x.csv", "id,share\n1\n", r"x\.csv: .*Expected 2 columns, got 1"),
        ("x.jsonl", '{"id": 1}\n{"id": "abc"}\n', r"x\.jsonl: line 2: column 'id' is the text \"abc\", not an integer"),
        ("x.jsonl", '{"id": 1, "color": "red"}\n', r"x\.jsonl: .*color"),
        ("x.jsonl", '{"id": 1', r"x\.jsonl"),
        ("x.parquet", "no parquet", r"x\.parquet"),
    ],
)
async def test_an_invalid_file_is_refused_with_its_name_and_the_problem(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    Path(tmp_path, name).write_text(text)
    with pytest.raises(SchemaMismatch, match=said):
        await read(f"{tmp_path}/{name}", ROWS.schema)


@pytest.mark.parametrize(
    ("path", "said"),
    [("none.csv", "no file"), ("none/*.csv", "no file"), ("none/", "no directory"), ("", "is a directory; write")],
)
async def test_missing_files_are_refused(tmp_path: Path, path: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        await read(f"{tmp_path}/{path}".removesuffix("/") + "/" * path.endswith("/"), None, kind="csv")


@pytest.mark.parametrize(
    ("name", "text"), [("e.jsonl", ""), ("e.jsonl", "[1]\n"), ("e.csv", ""), ("e.csv", "a,a\n1,2\n")]
)
async def test_a_file_without_columns_is_refused(tmp_path: Path, name: str, text: str) -> None:
    Path(tmp_path, name).write_text(text)
    with pytest.raises(SchemaMismatch, match=name):
        await read(f"{tmp_path}/{name}", None)


def test_new_or_changed_files_before_the_copied_place_are_refused() -> None:
    spot = Spot(1, "b", 10, 100, 7)
    check_order(["a", "b", "c"], [7, 150, 1], spot)
    check_order(["a", "b"], [8, 100], spot._replace(before=None))  # a place of an earlier version
    with pytest.raises(SourceChanged, match="there were 1 others, and now there are 2"):
        check_order(["a", "aa", "b"], [7, 1, 100], spot)
    with pytest.raises(SourceChanged, match="b is gone"):
        check_order(["a"], [7], spot)
    with pytest.raises(SourceChanged, match="the files before b had 7 bytes when they were copied, and have 8 now"):
        check_order(["a", "b"], [8, 100], spot)


async def test_a_copy_into_a_directory_adds_files_and_resumes(tmp_path: Path) -> None:
    out = f"{tmp_path}/out/"
    assert (await written(out, [ROWS] * 4, "csv", file_bytes=3000)).places == {}
    names = [each for each in names_in(out) if not each.startswith(".")]
    assert names == ["part-00000.csv", "part-00001.csv"]

    begun = await written(out, [ROWS], "csv", file_bytes=3000)
    assert begun == Progress({"0": 4}, 200)
    assert "part-00002.csv" in names_in(out)


@pytest.mark.parametrize("step", ["list", "name"])
async def test_a_directory_is_consistent_wherever_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Ended(BaseException):
        pass

    done = 0
    rename = Path.rename

    def ends(self: Path, target: Path) -> Path:
        nonlocal done
        done += 1
        if done == {"list": 3, "name": 4}[step]:
            raise Ended
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", ends)
    monkeypatch.setattr(FilesSink, "_close", lambda sink: sink._lock.close())  # it leaves all files as they are
    with pytest.raises(Ended):
        await written(f"{tmp_path}/out/", [ROWS] * 2, "csv", file_bytes=1)
    monkeypatch.undo()

    begun = await written(f"{tmp_path}/out/", [ROWS.slice(0, 1)], "csv", file_bytes=1)

    assert begun == Progress({"0": 1 if step == "list" else 2}, 50 if step == "list" else 100)
    left = [each for each in names_in(tmp_path / "out") if not each.startswith(".")]
    assert left == [f"part-0000{number}.csv" for number in range(2 if step == "list" else 3)]
    assert not [each for each in names_in(tmp_path / "out") if each.endswith(".tmp")]


async def test_a_single_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = f"{tmp_path}/x.parquet"
    sink = FilesSink(files(path))
    await sink.open(given(ROWS.schema))
    await sink.put([Piece("0", 0, 1, ROWS)])
    assert not Path(path).exists()
    for _ in range(2):
        with pytest.raises(CopyElsewhere, match="another process"):
            await written(path, [ROWS])
    await sink.finish(complete=False)
    await sink.close()
    assert names_in(tmp_path) == []

    await written(path, [ROWS])
    with pytest.raises(Refused, match="exists"):
        await written(path, [ROWS])


async def test_a_lock_file_that_was_just_removed_is_created_and_locked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[str] = []

    def late(file: Any, how: int) -> None:
        if not removed:
            removed.append(file.name)
            Path(file.name).unlink()
        flock(file, how)

    monkeypatch.setattr("kera.connect.files.sink.fcntl.flock", late)
    sink = FilesSink(files(f"{tmp_path}/x.csv"))
    await sink.open(given(ROWS.schema))
    with pytest.raises(CopyElsewhere):
        await written(f"{tmp_path}/x.csv", [ROWS])
    await sink.close()


async def test_a_file_that_another_copy_has_just_finished_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    monkeypatch.setattr("kera.connect.files.sink.fcntl.flock", lambda *_: path.write_text("whole"))
    with pytest.raises(Refused, match="exists"):
        await written(str(path), [ROWS])
    assert (path.read_text(), names_in(tmp_path)) == ("whole", ["x.csv"])


async def test_a_directory_with_other_contents_is_refused(tmp_path: Path) -> None:
    await written(f"{tmp_path}/a/", [ROWS], "csv")
    with pytest.raises(CopyMismatch, match="another directory"):
        await written(f"{tmp_path}/a/", [ROWS], "jsonl")
    Path(tmp_path, "b").mkdir()
    Path(tmp_path, "b", "mine.txt").touch()
    with pytest.raises(Refused, match=r"mine\.txt"):
        await written(f"{tmp_path}/b/", [ROWS], "csv")
    Path(tmp_path, "a", STATE).write_text("{")
    with pytest.raises(CopyMismatch, match="damaged"):
        await written(f"{tmp_path}/a/", [ROWS], "csv")
    Path(tmp_path, "a", STATE).write_text(json.dumps({"version": 99}))
    with pytest.raises(CopyMismatch, match="another program"):
        await written(f"{tmp_path}/a/", [ROWS], "csv")


async def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kera.connect.files.sink.os.fsync", full)
    with pytest.raises(DiskFull, match="no room"):
        await written(f"{tmp_path}/x.csv", [ROWS])
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("rows", "kind", "said"),
    [
        (pa.record_batch({"b": [b"\xff"]}), "csv", "'b' is not UTF-8 text"),
        (pa.record_batch({"l": [[1]]}), "csv", "'l' is list"),
        (pa.record_batch({"n": pa.array([1, None])}), "csv", "'n' as its only column has no value"),
        (record(headers=[("h", b"x")]), "csv", "headers"),
        (record(keys=[b"a", b"b"]), "csv", "several keys"),
    ],
)
async def test_values_that_csv_cannot_hold_are_refused(
    tmp_path: Path, rows: pa.RecordBatch, kind: str, said: str
) -> None:
    with pytest.raises(SchemaMismatch, match=said):
        await written(f"{tmp_path}/x.{kind}", [rows])
    assert names_in(tmp_path) == []


async def test_a_following_copy_finishes_a_file_that_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FILE_S", 0.0)
    sink = FilesSink(files(f"{tmp_path}/out/", "jsonl"))
    await sink.open(given(ROWS.schema))
    await sink.put([Piece("0", 0, 1, ROWS)])
    while not Path(tmp_path, "out", "part-00000.jsonl").exists():
        await asyncio.sleep(0.01)
    await sink.close()


async def test_a_failed_commit_of_the_last_file_fails_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FILE_S", -1.0)
    sink = FilesSink(files(f"{tmp_path}/out/", "jsonl"))
    await sink.open(given(ROWS.schema))
    await sink.put([Piece("0", 0, 1, ROWS)])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kera.connect.files.sink.os.fsync", full)
    await sink._worker.call(sink._commit_old)
    monkeypatch.undo()
    with pytest.raises(DiskFull):
        await sink.finish(complete=True)
    await sink.close()
