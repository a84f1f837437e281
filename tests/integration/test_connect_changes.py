"""All changes of a real table as a stream, by logical decoding: the table can be rebuilt despite kills at any
moment.
"""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any, Self

import adbc_driver_manager
import pytest

from kera.client.sync import Client
from kera.local.cluster import RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.connect_support import client, cluster, copy, copying, has, records, table  # noqa: F401 - fixtures
from tests.integration.postgres import Postgres


def changes_of(postgres: Postgres, name: str, **more: str) -> str:
    return postgres.url(name, changes="logical", **more)


def values(client: Client, stream: str) -> list[dict[str, Any] | None]:
    """The values of a stream of one streamlet, in order."""
    return [None if each.value is None else json.loads(each.value) for each in records(client, stream).get(0, [])]


def rebuilt(client: Client, stream: str) -> dict[str, Any]:
    """The table as its stream of changes gives it, by key: all changes of a key are in one streamlet, in order."""
    whole: dict[str, Any] = {}
    for changes in records(client, stream).values():
        rows: dict[str, Any] = {}
        for record in changes:
            if record.value is None:  # a tombstone
                continue
            change = json.loads(record.value)
            if change["op"] == "t":
                rows.clear()
            elif change["op"] == "d":
                rows.pop(record.key.decode(), None)
            else:
                rows[record.key.decode()] = change["after"]
        whole |= rows
    return whole


def in_table(postgres: Postgres, name: str) -> dict[str, Any]:
    return {key: json.loads(row) for key, row in postgres.rows(f"SELECT id::text, row_to_json(t)::text FROM {name} t")}


def test_each_change_has_its_kind_rows_key_and_time(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run(
        "CREATE TABLE said (id int PRIMARY KEY, body text, price numeric(6, 2), twice int GENERATED ALWAYS AS (id * 2)"
        " STORED)",
        "INSERT INTO said VALUES (1, 'one', 1.5), (2, 'two', NULL)",
    )
    arguments = (changes_of(postgres, "said", tombstones="true"), "kera:said")
    code, said = copy(*arguments, "--create")
    assert code == 0, said
    assert "replication slot kera_postgres_said_changes_to_said" in said
    postgres.run(
        "UPDATE said SET price = 2 WHERE id = 1",
        "DELETE FROM said WHERE id = 2",
        "UPDATE said SET id = 3 WHERE id = 1",
        "ALTER TABLE said ADD COLUMN more text",
        "ALTER TABLE said REPLICA IDENTITY FULL",
        "UPDATE said SET more = 'x'",
        "TRUNCATE said",
    )

    code, said = copy(*arguments)

    assert code == 0, said
    found = values(client, "said")
    assert [each and (each["op"], each["before"], each["after"]) for each in found] == [
        ("r", None, {"id": 1, "body": "one", "price": 1.50}),
        ("r", None, {"id": 2, "body": "two", "price": None}),
        ("u", None, {"id": 1, "body": "one", "price": 2.00}),
        ("d", {"id": 2}, None),
        None,
        ("d", {"id": 1}, None),
        None,
        ("c", None, {"id": 3, "body": "one", "price": 2.00}),
        (
            "u",
            {"id": 3, "body": "one", "price": 2.00, "more": None},
            {"id": 3, "body": "one", "price": 2.00, "more": "x"},
        ),
        ("t", None, None),
    ]
    keys = [record.keys for record in records(client, "said")[0]]
    assert keys == [(b"1",), (b"2",), (b"1",), (b"2",), (b"2",), (b"1",), (b"1",), (b"3",), (b"3",), ()]
    moments = [(each["lsn"], each["ts_ms"]) for each in found if each is not None]
    assert moments == sorted(moments)


def test_changes_copied_as_columns_have_the_columns_of_the_table(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run(
        "CREATE TABLE typed (a int, b text, tags int[], PRIMARY KEY (a, b))",
        "INSERT INTO typed VALUES (1, 'x', '{1,2}'), (2, 'y', NULL)",
    )
    arguments = (changes_of(postgres, "typed", values="columns"), "kera:typed")
    code, said = copy(*arguments, "--create", "--key", "a")
    assert code == 0, said
    postgres.run("UPDATE typed SET tags = '{3}' WHERE a = 2", "DELETE FROM typed WHERE a = 1")

    code, said = copy(*arguments)

    assert code == 0, said
    rows = [(row["op"], row["a"], row["b"], row["tags"]) for row in table(client, "typed").to_pylist()]
    assert rows == [
        ("r", 1, "x", [1, 2]),
        ("r", 2, "y", None),
        ("u", 2, "y", [3]),
        ("d", 1, "x", None),
    ]
    postgres.run("ALTER TABLE typed ADD COLUMN c int", "UPDATE typed SET c = 1")
    code, said = copy(*arguments)
    assert code == 1
    assert "column 'c'" in said


def test_a_large_value_missing_from_the_log_is_looked_up_and_never_null(
    postgres: Postgres, client: Client, copy: Any
) -> None:
    postgres.run(
        "CREATE TABLE large (id int PRIMARY KEY, body text, n int)",
        "ALTER TABLE large ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO large SELECT n, repeat(n::text, 9000), 0 FROM generate_series(1, 2) n",
    )
    arguments = (changes_of(postgres, "large"), "kera:large")
    assert copy(*arguments, "--create")[0] == 0
    postgres.run("UPDATE large SET n = 1", "DELETE FROM large WHERE id = 2")

    code, said = copy(*arguments)

    assert code == 0, said
    assert "REPLICA IDENTITY FULL logs them" in said
    updates = [each["after"] for each in values(client, "large") if each and each["op"] == "u"]
    assert updates == [{"id": 1, "body": "1" * 9000, "n": 1}, {"id": 2, "n": 1}]


def test_rows_and_changes_during_the_start_are_copied_once_each(
    postgres: Postgres, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    postgres.run("CREATE TABLE meanwhile (id int PRIMARY KEY, n int)", "INSERT INTO meanwhile VALUES (1, 0)")
    client.admin.create_stream("meanwhile")
    arguments = ("--follow", changes_of(postgres, "meanwhile"), "kera:meanwhile")
    with postgres.connect() as other, other.cursor() as cursor:
        cursor.execute("INSERT INTO meanwhile VALUES (2, 0)")
        with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as follower:
            # Either the slot or the snapshot waits for the transaction: its row comes once in both cases.
            postgres.waits_for("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%meanwhile%'", 1)
            postgres.run("UPDATE meanwhile SET n = n + 1")
            other.commit()
            postgres.run("UPDATE meanwhile SET n = n + 1")
            follower.event("began")
            last = {"1": {"id": 1, "n": 2}, "2": {"id": 2, "n": 1}}
            while rebuilt(client, "meanwhile") != last:
                pass
            assert follower.terminate() == 143

    seen = [(each["after"]["id"], each["after"]["n"]) for each in values(client, "meanwhile") if each]
    assert len(seen) == len(set(seen)), "no version of a row twice"


class Writer:
    """Changes rows of a table in a thread, also while PostgreSQL is restarted."""

    def __init__(self, postgres: Postgres, name: str, seed: int) -> None:
        self._postgres = postgres
        self._name = name
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.transactions = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _statement(self) -> str:
        key, value = self._chance.randrange(2000), self._chance.randrange(1 << 30)
        return self._chance.choice(
            (
                f"INSERT INTO {self._name} VALUES ({key}, {value}) ON CONFLICT (id) DO UPDATE SET n = {value}",
                f"UPDATE {self._name} SET n = {value} WHERE id BETWEEN {key} AND {key + 20}",
                f"DELETE FROM {self._name} WHERE id = {key}",
                f"UPDATE {self._name} SET id = {-value} WHERE id = {key}",
            )
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._postgres.run(*(self._statement() for _ in range(self._chance.randrange(1, 30))))
                self.transactions += 1
            except adbc_driver_manager.Error:
                self._stopping.wait(0.05)


def _copied_up_to(postgres: Postgres, name: str, client: Client, stream: str, mark: int) -> None:
    """Make a change, and wait until the stream has it."""
    postgres.run(f"INSERT INTO {name} VALUES ({mark}, 0)")
    while str(mark) not in rebuilt(client, stream):
        pass


def test_a_table_is_rebuilt_after_kills_of_the_copy_and_of_postgresql(
    postgres: Postgres, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    postgres.run(
        "CREATE TABLE rebuilt (id int PRIMARY KEY, n bigint)",
        "INSERT INTO rebuilt SELECT n, 0 FROM generate_series(1, 2000) n",
    )
    client.admin.create_stream("rebuilt", streamlets=2, durability="persisted")
    arguments = ("--follow", changes_of(postgres, "rebuilt"), "kera:rebuilt")
    with Writer(postgres, "rebuilt", 1):
        with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as copier:
            copier.event("progress")
            has(client, "rebuilt", 2100)
            copier.kill()
        with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as copier:
            copier.event("progress")
            postgres.kill()
            copier.event("failing")
            postgres.start()
            copier.event("resumed")
    with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as copier:
        _copied_up_to(postgres, "rebuilt", client, "rebuilt", 1_000_000)
        assert copier.terminate() == 143

    assert rebuilt(client, "rebuilt") == in_table(postgres, "rebuilt")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_table_is_rebuilt_after_many_kills_of_everything(
    postgres: Postgres, client: Client, cluster: RunningCluster, tmp_path: Path
) -> None:
    postgres.run(
        "CREATE TABLE many_kills (id int PRIMARY KEY, n bigint)",
        "INSERT INTO many_kills SELECT n, 0 FROM generate_series(1, 2000) n",
    )
    client.admin.create_stream("many-kills", streamlets=2, durability="persisted")
    arguments = ("--follow", changes_of(postgres, "many_kills"), "kera:many-kills")
    chance = random.Random(2)
    with Writer(postgres, "many_kills", 3) as writer:
        for _ in range(20):
            with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as copier:
                copier.event("began")
                _some_transactions(writer, chance.randrange(1, 20))
                copier.kill()
        with copying(cluster.bootstrap, *arguments, log=tmp_path / "log") as copier:
            copier.event("progress")
            for number in range(20):
                postgres.kill()
                postgres.start()
                _some_transactions(writer, chance.randrange(1, 20))
                if number % 5 == 0:
                    cluster.kill(f"broker-{number % 2 + 1}")
                    cluster.restart(f"broker-{number % 2 + 1}")
            _copied_up_to(postgres, "many_kills", client, "many-kills", 1_000_000)
    code, said = _to_the_end(cluster, arguments[1:])
    assert code == 0, said
    assert rebuilt(client, "many-kills") == in_table(postgres, "many_kills")


def _to_the_end(cluster: RunningCluster, arguments: tuple[str, ...]) -> tuple[int, str]:
    done = run_kera("connect", "copy", "--bootstrap", cluster.bootstrap, *arguments)
    return done.returncode, done.stderr.decode()


def _some_transactions(writer: Writer, count: int) -> None:
    until = writer.transactions + count
    while writer.transactions < until:
        threading.Event().wait(0.01)


def test_the_slot_advances_past_copied_changes_and_other_tables(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run("CREATE TABLE moves (id int PRIMARY KEY)", "CREATE TABLE moves_not (id int)")
    arguments = (changes_of(postgres, "moves", slot="kera_moves"), "kera:moves")
    slot = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 'kera_moves'"
    assert copy(*arguments, "--create")[0] == 0
    (first,) = postgres.rows(slot)
    postgres.run("INSERT INTO moves VALUES (1)")
    assert copy(*arguments)[0] == 0
    (second,) = postgres.rows(slot)
    postgres.run("INSERT INTO moves_not SELECT generate_series(1, 1000)")
    assert copy(*arguments)[0] == 0
    (third,) = postgres.rows(slot)

    assert first != second != third
    assert len(values(client, "moves")) == 1


@pytest.mark.slow
def test_errors_of_a_copy_of_changes_say_what_is_wrong(postgres: Postgres, cluster: RunningCluster, copy: Any) -> None:
    postgres.run(
        "CREATE TABLE no_key (a int)",
        "CREATE TABLE no_identity (a int PRIMARY KEY)",
        "ALTER TABLE no_identity REPLICA IDENTITY NOTHING",
        "CREATE VIEW no_table AS SELECT 1 AS a",
        "CREATE TABLE its_op (op int PRIMARY KEY)",
        "CREATE TABLE gone (id int PRIMARY KEY)",
    )
    for name, more, text in (
        ("nowhere", {}, "there is no table 'nowhere'"),
        ("no_key", {}, "no primary key"),
        ("no_identity", {}, "REPLICA IDENTITY DEFAULT, or FULL"),
        ("no_table", {}, "only tables have changes"),
        ("its_op", {"values": "columns"}, "column 'op' of its own"),
        ("gone", {"publication": "nobodys"}, 'CREATE PUBLICATION "nobodys"'),
    ):
        code, said = copy(changes_of(postgres, name, **more), "kera:x", "--create")
        assert code == 1, name
        assert text in said
        assert len([line for line in said.splitlines() if line.startswith("kera: error")]) == 1
    assert postgres.rows("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%to_x_%'") == [(0,)]

    arguments = (changes_of(postgres, "gone"), "kera:gone")
    assert copy(*arguments, "--create", "--name", "gone")[0] == 0
    ((slot,),) = postgres.rows("SELECT slot_name::text FROM pg_replication_slots WHERE slot_name LIKE 'kera_gone_%'")
    forgot = run_kera("connect", "forget", "gone", "--yes", "--bootstrap", cluster.bootstrap).stdout.decode()
    assert f"SELECT pg_drop_replication_slot('{slot}')" in forgot
    assert f"DROP PUBLICATION {slot}" in forgot
    assert copy(*arguments, "--name", "gone")[0] == 0
    postgres.run(f"SELECT pg_drop_replication_slot('{slot}')")
    code, said = copy(*arguments, "--name", "gone")
    assert code == 1
    assert "there is no replication slot" in said


@pytest.mark.slow
def test_a_copy_that_starts_over_in_its_stream_clears_the_earlier_rows(
    postgres: Postgres, client: Client, cluster: RunningCluster, copy: Any
) -> None:
    postgres.run(
        "CREATE TABLE anew (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "INSERT INTO anew SELECT generate_series(1, 20), 0",
    )
    client.admin.create_stream("anew", streamlets=2)
    arguments = (changes_of(postgres, "anew", slot="kera_anew"), "kera:anew", "--name", "anew")
    assert copy(*arguments)[0] == 0
    postgres.run("SELECT pg_drop_replication_slot('kera_anew')", "DELETE FROM anew WHERE id > 3")
    code, said = copy(*arguments)
    assert code == 1
    assert "there is no replication slot kera_anew any more" in said
    assert run_kera("connect", "forget", "anew", "--yes", "--bootstrap", cluster.bootstrap).returncode == 0

    code, said = copy(*arguments)

    assert code == 0, said
    assert "begins with a record op t in every streamlet" in said
    assert sorted(rebuilt(client, "anew")) == ["1", "2", "3"]
    columns = (changes_of(postgres, "anew", values="columns"), "kera:anew-columns", "--create")
    assert copy(*columns)[0] == 0
    assert copy(*columns, "--name", "again")[0] == 0
    assert table(client, "anew-columns").column("op").to_pylist() == ["r", "r", "r", "t", "r", "r", "r"]


@pytest.mark.slow
def test_a_copy_does_not_take_the_slot_of_another_copy(postgres: Postgres, copy: Any) -> None:
    postgres.run("CREATE TABLE sharing (id int PRIMARY KEY)")
    arguments = (changes_of(postgres, "sharing", slot="kera_shared"), "kera:sharing", "--create")
    assert copy(*arguments)[0] == 0
    publications = postgres.rows("SELECT pubname::text FROM pg_publication")

    code, said = copy(*arguments, "--name", "second")

    assert code == 1
    assert "replication slot kera_shared exists, and this copy has not begun with it" in said
    assert postgres.rows("SELECT pubname::text FROM pg_publication") == publications, "a failed start leaves none"
    assert copy(*arguments)[0] == 0


@pytest.mark.slow
def test_dropping_a_table_ends_its_copy(postgres: Postgres, cluster: RunningCluster, copy: Any, tmp_path: Path) -> None:
    postgres.run("CREATE TABLE dropped (id int PRIMARY KEY)", "INSERT INTO dropped VALUES (1)")
    arguments = (changes_of(postgres, "dropped"), "kera:dropped", "--create")
    with copying(cluster.bootstrap, *arguments, "--follow", log=tmp_path / "log") as follower:
        follower.event("progress")
        postgres.run("DROP TABLE dropped", "CREATE TABLE dropped (id int PRIMARY KEY)")
        code, said = follower.wait()
    assert code == 1
    assert "the table that was copied was dropped or renamed" in said

    code, said = copy(*arguments)

    assert code == 1
    assert "the table that was copied was dropped or renamed" in said


def test_a_role_that_may_not_create_a_publication_learns_which_rights_it_lacks(postgres: Postgres, copy: Any) -> None:
    postgres.run(
        "CREATE ROLE reader LOGIN REPLICATION",
        "CREATE TABLE rights (id int PRIMARY KEY)",
        "ALTER TABLE rights OWNER TO reader",
    )
    url = changes_of(postgres, "rights").replace("//kera@", "//reader@")

    code, said = copy(url, "kera:rights", "--create")

    assert code == 1
    assert "has to own the table and to have CREATE on the database" in said
    assert "publication=" in said


def test_a_copy_from_latest_has_only_later_changes(postgres: Postgres, client: Client, copy: Any) -> None:
    postgres.run("CREATE TABLE latest (id int PRIMARY KEY)", "INSERT INTO latest VALUES (1)")
    arguments = (changes_of(postgres, "latest"), "kera:latest")
    assert copy(*arguments, "--create", "--from", "latest")[0] == 0
    postgres.run("INSERT INTO latest VALUES (2)")
    assert copy(*arguments)[0] == 0

    assert [each and each["after"] for each in values(client, "latest")] == [{"id": 2}]
