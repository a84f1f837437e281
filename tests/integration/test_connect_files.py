"""``kera connect copy`` between files and real brokers: each row once, despite kills at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from kera.client.sync import Client
from kera.core.format.key_hashes import murmur2
from kera.local.cluster import RunningCluster
from tests.integration.connect_support import (  # noqa: F401 - fixtures
    client,
    cluster,
    copy,
    copying,
    has,
    killed_again_and_again,
    records,
    table,
)

ROWS = 300_000


def rides(count: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "place": pa.array([None if n % 9 == 0 else f"place {n % 100}" for n in numbers], pa.string()),
            "at": pa.array([1_700_000_000_000_000 + n for n in numbers], pa.timestamp("us", tz="UTC")),
        }
    )


def test_a_copy_keeps_the_partitioner_that_it_began_with(tmp_path: Path, client: Client, copy: Any) -> None:
    path = tmp_path / "placed.jsonl"
    path.write_text("".join(f'{{"key": "key-{number}", "value": "v"}}\n' for number in range(100)))
    made = ("--create", "--streamlets", "5", "--partitioner", "murmur2_random")

    code, said = copy(str(path), "kera:placed", *made)

    assert code == 0, said
    assert "note: records go where their keys say (partitioner murmur2_random)" in said
    for streamlet, stored in records(client, "placed").items():
        assert stored
        assert all((murmur2(record.key) & 0x7FFFFFFF) % 5 == streamlet for record in stored)
    code, said = copy(str(path), "kera:placed")
    assert code == 1
    assert "go on with --partitioner murmur2_random" in said
    assert copy(str(path), "kera:placed", *made)[0] == 0
    code, said = copy("kera:placed", str(tmp_path / "out.jsonl"), "--partitioner", "crc32c")
    assert code == 2
    assert "--partitioner has no effect: only a stream as the target takes it" in said


def test_parquet_files_are_copied_to_a_stream_and_back_to_a_file(tmp_path: Path, client: Client, copy: Any) -> None:
    for number in range(3):
        pq.write_table(rides(1000, 1000 * number), tmp_path / f"{number}.parquet")

    code, said = copy(
        *(f"{tmp_path}/*.parquet", "kera:rides", "--create", "--key", "id", "--time", "at", "--streamlets", "2")
    )

    assert code == 0, said
    assert "3,000 records" in said
    stream = client.describe("rides")
    assert (stream.key_column, stream.timestamp_column, stream.config.streamlets) == ("id", "at", 2)
    assert table(client, "rides").sort_by("id").equals(rides(3000))
    pq.write_table(rides(10, 3000), tmp_path / "3.parquet")
    assert copy(f"{tmp_path}/*.parquet", "kera:rides")[0] == 0
    assert table(client, "rides").num_rows == 3010
    assert copy("kera:rides", f"{tmp_path}/all.parquet")[0] == 0
    assert pq.read_table(tmp_path / "all.parquet").sort_by("id").equals(rides(3010))


@pytest.mark.parametrize(("kind", "kills"), [("csv", 2), pytest.param("jsonl", 4, marks=pytest.mark.slow)])
def test_an_import_with_kills_at_any_moment_has_each_row_once(
    tmp_path: Path, client: Client, cluster: RunningCluster, copy: Any, kind: str, kills: int
) -> None:
    name = f"imported-{kind}"
    client.admin.create_stream(name, streamlets=2, schema=rides(0).schema, key_column="id")
    pq.write_table(rides(ROWS), tmp_path / "all.parquet")
    if kind == "csv":
        pyarrow.csv.write_csv(rides(ROWS), tmp_path / "all.csv")
    else:
        rides(ROWS).to_pandas().to_json(tmp_path / "all.jsonl", orient="records", lines=True, date_format="iso")
    source = f"{tmp_path}/all.{kind}"
    killed_again_and_again(cluster.bootstrap, source, f"kera:{name}", log=tmp_path / "log", times=kills, seed=2)

    code, said = copy(source, f"kera:{name}")

    assert code == 0, said
    stored = table(client, name)
    assert stored.num_rows == ROWS
    assert stored.sort_by("id").column("id").equals(rides(ROWS).column("id"))


@pytest.mark.slow
def test_an_export_with_kills_at_any_moment_has_each_row_once(
    tmp_path: Path, client: Client, cluster: RunningCluster, copy: Any
) -> None:
    client.admin.create_stream("exported", streamlets=2, schema=rides(0).schema, key_column="id")
    with client.producer() as producer:
        producer.send_batch("exported", rides(ROWS))
    out = f"{tmp_path}/out/"
    arguments = ("kera:exported", out, "--format", "parquet", "--file-size", "100KB")
    killed_again_and_again(cluster.bootstrap, *arguments, log=tmp_path / "log", times=4, seed=3)
    with client.producer() as producer:
        producer.send_batch("exported", rides(10, ROWS))

    code, said = copy(*arguments)

    assert code == 0, said
    files = sorted(Path(out).glob("*.parquet"))
    assert len(files) > 3
    whole = pa.concat_tables([pq.read_table(each) for each in files]).sort_by("id")
    assert whole.equals(rides(ROWS + 10))


def test_a_following_export_has_the_records_so_far_when_it_is_terminated(
    tmp_path: Path, client: Client, cluster: RunningCluster
) -> None:
    client.admin.create_stream("followed-out")
    with copying(
        *(cluster.bootstrap, "--follow", "kera:followed-out", f"{tmp_path}/out/", "--format", "jsonl"),
        log=tmp_path / "log",
    ) as follower:
        follower.event("began")
        with client.producer() as producer:
            producer.send("followed-out", b"one", keys=b"k", headers={"h": b"x"})
        follower.event("progress")
        assert follower.terminate() == 143

    line = Path(tmp_path, "out", "part-00000.jsonl").read_text()
    assert '"key": "k", "value": "one", "headers": [["h", "x"]]' in line


def test_untyped_records_are_copied_to_a_file_and_back(tmp_path: Path, client: Client, copy: Any) -> None:
    client.admin.create_stream("plain")
    with client.producer() as producer:
        for number in range(100):
            producer.send("plain", b"\xff%d" % number, keys=b"k%d" % number, headers={"n": b"%d" % number})
    for kind in ("parquet", "jsonl"):
        assert copy("kera:plain", f"{tmp_path}/x.{kind}")[0] == 0
        code, said = copy(f"{tmp_path}/x.{kind}", f"kera:plain-{kind}", "--create")
        assert code == 0, said
        there, back = (records(client, each)[0] for each in ("plain", f"plain-{kind}"))
        assert [each._replace(stream="") for each in there] == [each._replace(stream="") for each in back]


def test_a_stream_is_copied_to_another_stream_by_the_address_of_its_cluster(
    client: Client, cluster: RunningCluster, copy: Any
) -> None:
    client.admin.create_stream("here", streamlets=3)
    with client.producer() as producer:
        for number in range(1000):
            producer.send("here", b"%d" % number, keys=b"k%d" % (number % 10))

    code, said = copy("kera:here", f"kera://{cluster.bootstrap}/there", "--create")

    assert code == 0, said
    one, other = records(client, "here"), records(client, "there")
    assert {n: [each.value for each in own] for n, own in one.items()} == {
        n: [each.value for each in own] for n, own in other.items()
    }


def test_a_created_stream_takes_the_key_and_time_columns_of_the_copied_one(client: Client, copy: Any) -> None:
    columns = pa.schema(
        [("id", pa.string()), ("zone", pa.string()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]
    )
    client.admin.create_stream("typed-from", schema=columns, key_column="id", timestamp_column="at")

    code, said = copy("kera:typed-from", "kera:typed-to", "--create")
    assert code == 0, said
    code, said = copy("kera:typed-from", "kera:typed-other", "--create", "--key", "zone")
    assert code == 0, said

    made, other = client.describe("typed-to"), client.describe("typed-other")
    assert (made.schema, made.key_column, made.timestamp_column) == (columns, "id", "at")
    assert (other.key_column, other.timestamp_column) == ("zone", "at")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.csv", "b.csv"], "one of the two has to be a stream"),
        (["kera:x", "kera:x"], "both source and target"),
        (["kera:x", "*.csv"], "one file, or a directory"),
        (["kera:x", "a.csv", "--follow"], "a single file appears when the copy ends"),
        (["a.csv", "kera:x", "--key", "k"], "with --create"),
        (["kera:x", "kera:y", "--format", "csv"], "neither end is one"),
        (["a.csv", "kera:x", "--name", "a b"], "not a copy's name"),
        (["none.csv", "kera:x", "--create"], "no file none.csv"),
        (["kera:no-such-stream", "x.csv"], "no-such-stream"),
        (["kera:x", "x.orc"], "parquet, csv or jsonl"),
        (["a.csv", "kera:x", "--file-size", "much"], "--file-size"),
    ],
)
def test_invalid_arguments_of_a_copy_get_one_line_that_says_why(arguments: list[str], said: str, copy: Any) -> None:
    code, told = copy(*arguments)
    assert code in (1, 2)
    assert told.startswith("kera: error: ")
    assert told.count("\n") == 1
    assert said in told


def test_columns_that_do_not_fit_are_named_before_anything_is_copied(tmp_path: Path, client: Client, copy: Any) -> None:
    client.admin.create_stream("narrow", schema=pa.schema([("id", pa.int32())]))
    client.admin.create_stream("columnless")
    pq.write_table(rides(10), tmp_path / "x.parquet")

    code, said = copy(f"{tmp_path}/x.parquet", "kera:narrow")
    assert code == 1
    assert "x.parquet: has a column 'place'" in said
    pq.write_table(rides(10).select(["id"]), tmp_path / "x.parquet")
    code, said = copy(f"{tmp_path}/x.parquet", "kera:narrow")
    assert code == 1
    assert "x.parquet: column 'id' is int32 in the stream, and int64 in the file" in said
    code, said = copy(f"{tmp_path}/x.parquet", "kera:columnless")
    assert code == 1
    assert "has a column 'id'" in said
    code, said = copy(f"{tmp_path}/x.parquet", "kera:made", "--create", "--key", "nope")
    assert code == 1
    assert "has no column 'nope'; it has id" in said


def test_a_missing_extra_is_reported_in_one_line(cluster: RunningCluster) -> None:
    program = (
        "import sys; sys.modules['confluent_kafka'] = None; from kera.cli.__main__ import main;"
        f"sys.exit(main(['connect', 'copy', 'kafka://h/t', 'kera:x', '--bootstrap', '{cluster.bootstrap}']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "kera: error: confluent_kafka is missing; install it with: pip install 'kera[kafka]'\n"


def test_a_copy_whose_stream_was_recreated_ends_and_says_so(tmp_path: Path, client: Client, copy: Any) -> None:
    pq.write_table(rides(10), tmp_path / "x.parquet")
    assert copy(f"{tmp_path}/x.parquet", "kera:again", "--create")[0] == 0
    client.admin.delete_stream("again")

    code, said = copy(f"{tmp_path}/x.parquet", "kera:again", "--create")

    assert code == 1
    assert "deleted and created again" in said
    assert "kera connect forget" in said


def test_a_copy_works_in_a_stream_that_others_write_to(tmp_path: Path, client: Client, copy: Any) -> None:
    pq.write_table(rides(1000), tmp_path / "x.parquet")
    client.admin.create_stream("shared", schema=rides(0).schema)
    with client.producer() as producer:
        producer.send_batch("shared", rides(5, 5000))
        assert copy(f"{tmp_path}/x.parquet", "kera:shared")[0] == 0
        producer.send_batch("shared", rides(5, 6000))
    has(client, "shared", 1010)
    assert copy(f"{tmp_path}/x.parquet", "kera:shared")[0] == 0
    assert table(client, "shared").num_rows == 1010


APPENDER = """
import os, pathlib, random, sys, time
parent = os.getppid()
path, kind, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance, count = random.Random(seed), 0
with open(path, "ab", buffering=0) as file:
    text = b"id,place\\n" if kind == "csv" else b""
    while not pathlib.Path(path + ".stop").exists() and os.getppid() == parent:
        for count in range(count + 1, count + 201):
            place = f"\u00e9 {count}"
            row = f'{count},"place\\n{place}"\\n' if kind == "csv" else f'{{"id": {count}, "place": "{place}"}}\\n'
            text += row.encode()
        cut = chance.randrange(len(text))
        file.write(text[:cut])
        text = text[cut:]
        time.sleep(0.01)
    file.write(text)
print(count)
"""
"""Appends rows, cut anywhere, until a stop file exists or its parent is gone; prints the number of rows."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_growing_file_is_followed_row_by_row_despite_kills(
    tmp_path: Path, client: Client, cluster: RunningCluster, kind: str
) -> None:
    name = f"appended-{kind}"
    schema = pa.schema([("id", pa.int64()), ("place", pa.string())])
    client.admin.create_stream(name, streamlets=2, schema=schema, key_column="id")
    path = tmp_path / f"x.{kind}"
    path.touch()
    arguments = ("--follow", str(path), f"kera:{name}")
    appending = subprocess.Popen([sys.executable, "-c", APPENDER, str(path), kind, "5"], stdout=subprocess.PIPE)
    try:
        killed_again_and_again(cluster.bootstrap, *arguments, log=tmp_path / "log", times=3, seed=5)
        with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as follower:
            follower.event("began")
            Path(f"{path}.stop").touch()
            rows = int(appending.communicate(timeout=60)[0])
            has(client, name, rows)
            assert follower.terminate() == 143
    finally:
        appending.kill()
        appending.wait()

    stored = table(client, name).sort_by("id")
    place = "place\né {}" if kind == "csv" else "é {}"
    assert stored.column("id").to_pylist() == list(range(1, rows + 1))
    assert stored.column("place").to_pylist() == [place.format(n) for n in range(1, rows + 1)]
