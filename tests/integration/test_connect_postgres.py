"""``kera connect copy`` between a real PostgreSQL and real brokers: each row once, despite kills at any moment."""

from __future__ import annotations

import datetime
import decimal
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client.sync import Client
from kera.local.cluster import RunningCluster
from tests.integration.connect_support import client, cluster, copy, copying, has, killed_again_and_again, table  # noqa: F401 - fixtures
from tests.integration.postgres import Postgres

ROWS = 200_000
KILLS = pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.slow)])


def test_a_table_is_copied_to_a_stream_and_back_to_a_table(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run(
        "CREATE TABLE whole (id bigint PRIMARY KEY, amount numeric(10, 2), who uuid, what jsonb, at timestamptz,"
        " day date, clock time, local timestamp, small smallint, middle int, share real, part double precision,"
        " raw bytea, ok boolean, several int[], span interval, name varchar(9))",
        "INSERT INTO whole SELECT n, n / 4.0, gen_random_uuid(), jsonb_build_object('n', n), to_timestamp(n),"
        " '2026-01-02', '12:34:56.789', '2026-01-02 03:04:05', n % 100, n, n / 2.0, n / 3.0, '\\x00ff', n % 2 = 0,"
        " ARRAY[n, n + 1], '1 day 2 hours', CASE WHEN n % 3 = 0 THEN NULL ELSE 'n' || n END"
        " FROM generate_series(1, 1000) n",
    )

    code, said = copy(postgres.url("whole"), "kera:whole-table", "--create", "--key", "id", "--time", "at")

    assert code == 0, said
    stored = table(client, "whole-table").sort_by("id")
    assert stored.num_rows == 1000
    row = stored.slice(4, 1).to_pylist()[0]
    assert (row["id"], row["amount"], row["name"], row["several"]) == (5, "1.25", "n5", [5, 6])
    assert row["at"] == datetime.datetime.fromtimestamp(5, datetime.UTC)
    postgres.run("CREATE TABLE again (LIKE whole)")
    code, said = copy("kera:whole-table", postgres.url("again"))
    assert code == 0, said
    assert postgres.rows("SELECT count(*) FROM (TABLE whole EXCEPT TABLE again) x") == [(0,)]
    assert postgres.rows("SELECT count(*) FROM again") == [(1000,)]
    code, said = copy("kera:whole-table", postgres.url("made"), "--create")
    assert code == 0, said
    assert postgres.rows("SELECT sum(id)::bigint, max(amount) FROM made") == [(500_500, "99.75")]


def test_added_rows_are_copied_the_next_time(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run(
        "CREATE TABLE added (a int, b text, PRIMARY KEY (a, b))",
        "INSERT INTO added VALUES (1, 'x'), (1, 'y''\\'), (2, 'a')",
    )
    assert copy(postgres.url("added"), "kera:added", "--create")[0] == 0
    postgres.run("INSERT INTO added VALUES (2, 'b'), (3, '')")

    code, said = copy(postgres.url("added"), "kera:added")

    assert code == 0, said
    assert "goes on after 3 records" in said
    rows = [(row["a"], row["b"]) for row in table(client, "added").to_pylist()]
    assert rows == [(1, "x"), (1, "y'\\"), (2, "a"), (2, "b"), (3, "")]


def test_a_row_of_an_open_transaction_is_not_skipped(
    postgres: Postgres, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    postgres.run("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    with postgres.connect() as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO late VALUES (2)")
        postgres.run("INSERT INTO late VALUES (3)")
        code, said = copy(postgres.url("late", settle="1"), "kera:late", "--create")
        assert code == 1
        assert "a transaction has been under way for 1 s" in said
        with copying(
            cluster.bootstrap, "--follow", postgres.url("late"), "kera:late", log=tmp_path / "log"
        ) as follower:
            follower.event("began")
            connection.commit()
            has(client, "late", 3)
            assert follower.terminate() == 143

    assert [row["id"] for row in table(client, "late").to_pylist()] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "query"])
def test_a_row_of_an_open_transaction_is_not_skipped_though_an_older_one_ended(
    postgres: Postgres, client: Client, copy: Any, kind: str
) -> None:
    name = f"young_{kind}"
    url = postgres.url(name, settle="1")
    if kind == "query":
        url = url.replace(f"table={name}", f"query=TABLE+{name}&key=id")
    postgres.run(f"CREATE TABLE {name} (id int PRIMARY KEY)", f"CREATE TABLE {name}_other (id int)")
    with postgres.connect() as older, postgres.connect() as younger:
        with older.cursor() as one, younger.cursor() as other:
            one.execute(f"INSERT INTO {name}_other VALUES (1)")
            other.execute(f"INSERT INTO {name} VALUES (2)")
            one.execute(f"INSERT INTO {name} VALUES (3)")
        older.commit()
        code, said = copy(url, f"kera:{name}", "--create")
        assert code == 1
        assert "a transaction has been under way for 1 s" in said
        younger.commit()
        code, said = copy(url, f"kera:{name}")

    assert code == 0, said
    assert [row["id"] for row in table(client, name).to_pylist()] == [2, 3]


def test_a_copy_does_not_wait_for_transactions_that_did_not_write_the_table(
    postgres: Postgres, client: Client, copy: Any
) -> None:
    postgres.run("CREATE TABLE alone (id int PRIMARY KEY)", "INSERT INTO alone VALUES (1)")
    postgres.run("CREATE TABLE elsewhere (id int)")
    with postgres.connect() as other, other.cursor() as cursor:
        cursor.execute("INSERT INTO elsewhere VALUES (1)")
        cursor.execute("SELECT * FROM alone")

        code, said = copy(postgres.url("alone", settle="1"), "kera:alone", "--create")

    assert code == 0, said
    assert table(client, "alone").num_rows == 1


@KILLS
def test_a_copy_from_a_table_with_kills_at_any_moment_has_each_row_once(
    postgres: Postgres, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path, kills: int
) -> None:
    name, rows = f"killed_{kills}", ROWS if kills > 2 else ROWS // 4
    postgres.run(
        f"CREATE TABLE {name} (id int PRIMARY KEY, text text)",
        f"INSERT INTO {name} SELECT n, repeat('x', 50) FROM generate_series(1, {rows}) n",
    )
    client.admin.create_stream(name, schema=pa.schema([("id", pa.int32()), ("text", pa.string())]))
    arguments = (postgres.url(name), f"kera:{name}")
    killed_again_and_again(cluster.bootstrap, *arguments, log=tmp_path / "log", times=kills, seed=5)

    code, said = copy(*arguments)

    assert code == 0, said
    assert table(client, name).column("id").to_pylist() == list(range(1, rows + 1))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 20])
def test_a_copy_of_changing_rows_has_the_last_version_of_each_despite_kills(
    postgres: Postgres, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path, kills: int
) -> None:
    name = f"updated_{kills}"
    postgres.run(
        f"CREATE TABLE {name} (id int PRIMARY KEY, changed bigint NOT NULL, UNIQUE (changed, id))",
        f"CREATE SEQUENCE {name}_changes START 1000000",
        f"INSERT INTO {name} SELECT n, n FROM generate_series(1, 50000) n",
    )
    arguments = (postgres.url(name, key="changed,id"), f"kera:{name}")
    notes: list[str] = []
    for number in range(kills):
        with copying(cluster.bootstrap, *arguments, "--create", "--key", "id", log=tmp_path / "log") as copier:
            notes += copier.event("began")["notes"]
            if number % 2 == 0:
                copier.event("progress")
            copier.kill()
        # Rows of every window change, also of the window that was being copied.
        postgres.run(f"UPDATE {name} SET changed = nextval('{name}_changes') WHERE id % 20 = {number % 20}")

    code, said = copy(*arguments)

    assert code == 0, said
    assert "have changed since they were being copied" in said + "".join(notes)
    last: dict[int, int] = {}
    for row in table(client, name).sort_by("changed").to_pylist():
        last[row["id"]] = row["changed"]
    assert last == dict(postgres.rows(f"SELECT id, changed FROM {name}"))


@pytest.mark.parametrize(
    ("cast", "kills"), [(False, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 5), (True, 5)))]
)
def test_a_copy_into_a_table_with_kills_at_any_moment_has_each_row_once(
    postgres: Postgres, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path, cast: bool, kills: int
) -> None:
    name = f"killed_in_{cast}_{kills}".lower()
    client.admin.create_stream(name, streamlets=2, schema=pa.schema([("id", pa.int64())]), key_column="id")
    postgres.run(f"CREATE TABLE {name} (id {'int' if cast else 'bigint'})")
    stopping = threading.Event()

    def go_on() -> None:
        count = 0
        with client.producer() as producer:
            while not stopping.is_set() and count < ROWS:
                producer.send_batch(name, pa.record_batch({"id": pa.array(range(count, count + 500), pa.int64())}))
                count += 500
                stopping.wait(0.01)

    filling = threading.Thread(target=go_on)
    filling.start()
    arguments = (f"kera:{name}", postgres.url(name))
    try:
        killed_again_and_again(cluster.bootstrap, "--follow", *arguments, log=tmp_path / "log", times=kills, seed=6)
    finally:
        stopping.set()
        filling.join()

    code, said = copy(*arguments)

    assert code == 0, said
    count = table(client, name).num_rows
    assert count > 500
    assert postgres.rows(f"SELECT count(*), count(DISTINCT id), max(id)::bigint FROM {name}") == [
        (count, count, count - 1)
    ]


def test_a_paused_copy_into_a_table_that_was_replaced_ends_and_duplicates_nothing(
    postgres: Postgres, client: Client, cluster: RunningCluster, copy: Any, tmp_path: Path
) -> None:
    client.admin.create_stream("asleep-table", schema=pa.schema([("id", pa.int64())]))
    postgres.run("CREATE TABLE asleep (id bigint)")
    arguments = ("kera:asleep-table", postgres.url("asleep"))

    def send(first: int) -> None:
        with client.producer() as producer:
            producer.send_batch("asleep-table", pa.record_batch({"id": pa.array(range(first, first + 10), pa.int64())}))

    send(0)
    with copying(cluster.bootstrap, "--follow", *arguments, log=tmp_path / "log") as sleeper:
        sleeper.event("progress")
        sleeper.pause()
        send(10)
        assert copy(*arguments)[0] == 0
        sleeper.resume()
        send(20)
        code, said = sleeper.wait()
        assert code == 1
        assert "another process runs this copy" in said

    assert copy(*arguments)[0] == 0
    assert postgres.rows("SELECT count(*), count(DISTINCT id) FROM asleep") == [(30, 30)]


def test_untyped_records_are_copied_into_a_table_with_columns_for_their_parts(
    postgres: Postgres, client: Client, copy: Any
) -> None:
    client.admin.create_stream("plain-out")
    with client.producer() as producer:
        producer.send(
            "plain-out",
            b"\x00one",
            keys=b"k",
            headers=[("h", "ü".encode()), ("none", None), ("h", b"\xff")],
            timestamp_us=5_000_000,
        )
        producer.send("plain-out", None)

    code, said = copy("kera:plain-out", postgres.url("plain"), "--create")

    assert code == 0, said
    found = postgres.rows(
        "SELECT key, value, headers, extract(epoch FROM timestamp)::int FROM plain ORDER BY timestamp"
    )
    assert found[0] == (b"k", b"\x00one", '[["h", "ü"], ["none", null], ["h", {"base64": "/w=="}]]', 5)
    assert found[1][:3] == (None, None, None)


@pytest.mark.parametrize(
    "kind", ["numeric", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bigint", "text", "timestamptz"))]
)
def test_rows_are_copied_in_the_order_of_the_key_and_not_of_its_text(
    postgres: Postgres, client: Client, copy: Any, kind: str
) -> None:
    name = f"ordered_{kind}"
    value = "to_timestamp(n::bigint * 100000000)" if kind == "timestamptz" else f"n::{kind}"
    postgres.run(
        f"CREATE TABLE {name} (id {kind} PRIMARY KEY, n int)",
        f"INSERT INTO {name} SELECT {value}, n FROM generate_series(1, 120) n",
    )

    code, said = copy(postgres.url(name), f"kera:{name}", "--create")

    assert code == 0, said
    numbers = table(client, name).column("n").to_pylist()
    assert numbers == (sorted(range(1, 121), key=str) if kind == "text" else list(range(1, 121)))


def test_a_decimal_column_takes_numerics_but_no_nan(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run("CREATE TABLE prices (id int PRIMARY KEY, price numeric)", "INSERT INTO prices VALUES (1, 1.25)")
    client.admin.create_stream("prices", schema=pa.schema([("id", pa.int32()), ("price", pa.decimal128(10, 2))]))
    assert copy(postgres.url("prices"), "kera:prices")[0] == 0
    assert table(client, "prices").column("price").to_pylist() == [decimal.Decimal("1.25")]
    postgres.run("INSERT INTO prices VALUES (2, 'NaN')")
    code, said = copy(postgres.url("prices"), "kera:prices")
    assert code == 1
    assert "column 'price' of the row with key 2 has 'NaN', which does not fit decimal" in said


def test_errors_of_a_copy_say_what_is_wrong_with_the_table(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run(
        "CREATE TABLE keyless (a int, b int UNIQUE)",
        "INSERT INTO keyless VALUES (1, 1), (1, 2)",
        "CREATE TABLE narrow (id smallint, extra int NOT NULL)",
        "CREATE TABLE small (id smallint)",
        "CREATE TABLE words (id int PRIMARY KEY, word text)",
        "INSERT INTO words VALUES (1, 'x')",
    )
    client.admin.create_stream("numbers", schema=pa.schema([("id", pa.int64())]))
    client.admin.create_stream("odd", schema=pa.schema([("s", pa.struct([("x", pa.int64())]))]))
    with client.producer() as producer:
        producer.send_batch("numbers", pa.record_batch({"id": pa.array([1, 100_000], pa.int64())}))
    for arguments, text in (
        ((postgres.url("nowhere"), "kera:x", "--create"), "there is no table 'nowhere'"),
        ((postgres.url("keyless"), "kera:x", "--create"), "no primary key"),
        ((postgres.url("keyless", key="a"), "kera:x", "--create"), "several rows"),
        ((postgres.url("keyless", key="b"), "kera:x", "--create"), "several rows"),
        ((postgres.url("words"), "kera:numbers"), "no column 'word'"),
        ((postgres.url("words", database="nobody"), "kera:x", "--create"), 'database "nobody" does not exist'),
        ((postgres.url("words").replace("table=words", "query=SELEC&key=a"), "kera:x", "--create"), "syntax error"),
        (
            (postgres.url("words").replace("table=words", "query=TABLE+keyless&key=a"), "kera:x", "--create"),
            "two rows have the same key (a)",
        ),
        (("kera:numbers", postgres.url("nowhere")), "there is no table nowhere"),
        (("kera:numbers", postgres.url("narrow")), "needs column 'extra'"),
        (("kera:numbers", postgres.url("words", key="id")), "takes no query, key, settle or changes"),
        (("kera:numbers", postgres.url("small")), "column 'id' is smallint there"),
        (("kera:odd", postgres.url("odd"), "--create"), "column 's' is struct"),
    ):
        code, said = copy(*arguments)
        assert code in (1, 2), arguments
        assert text in said, said
        assert "Traceback" not in said
        error = [line for line in said.splitlines() if line.startswith("kera: error")]
        assert len(error) == 1
    assert postgres.rows("SELECT count(*) FROM small") == [(0,)]


def test_table_and_column_names_with_quotes_are_escaped(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run('CREATE TABLE "a""; DROP" ("x""y" int PRIMARY KEY)', 'INSERT INTO "a""; DROP" VALUES (1)')

    code, said = copy(postgres.url("a%22%3B%20DROP"), "kera:hostile", "--create")

    assert code == 0, said
    assert table(client, "hostile").to_pylist() == [{'x"y': 1}]


def test_the_error_for_an_unreachable_server_hides_the_password(
    copy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hush-hush")
    code, said = copy(f"postgresql://me@/db?host={tmp_path}&table=t", "kera:x", "--create")
    assert code == 1
    assert "PostgreSQL cannot be reached" in said
    assert "hush" not in said
