"""`kera.cli.stream`: admin calls for flags, and output. The tests against a cluster are in tests/integration."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.client import EARLIEST, Position
from kera.client.types import StreamDescription
from tests.unit.cli.fake_client import FakeClient
from tests.unit.client.support import description

END = Position(1, 2, 640)


def truncated(_: str, to: Any) -> dict[int, list[Position]]:
    starts: dict[int, list[Position]] = {0: [END, END], 1: [END, END]} if to == "latest" else to
    return starts


@pytest.fixture
def client() -> Iterator[FakeClient]:
    made = FakeClient(bounds={})
    has(made, description(name="orders", streamlets=2, entries=2))
    made.answers |= {"alter_stream": None, "truncate_stream": truncated}
    with made.answering():
        yield made


def has(client: FakeClient, stream: StreamDescription) -> None:
    """Have the cluster contain this stream."""
    client.looks |= {"describe": stream, "list_streams": [stream]}
    client.answers["create_stream"] = stream


def run(*arguments: str) -> None:
    assert run_app(app, ["stream", *arguments]) == 0


def test_create_passes_the_retention_options(client: FakeClient) -> None:
    consumer_groups = ("--retention-consumer-group", "loader", "--retention-consumer-group", "audit")
    run("create", "orders")
    run(
        "create",
        "orders",
        "--retention-ms",
        "60000",
        "--retention-bytes",
        "1GiB",
        *consumer_groups,
        "--retention-consumed",
    )

    assert [
        {field: value for field, value in arguments.items() if field.startswith("retention_")}
        for _, _, arguments in client.asked
    ] == [
        {"retention_ms": 0, "retention_bytes": 0, "retention_consumer_groups": [], "retention_consumed": False},
        {
            "retention_ms": 60_000,
            "retention_bytes": 1 << 30,
            "retention_consumer_groups": ["loader", "audit"],
            "retention_consumed": True,
        },
    ]


def test_create_passes_replication_and_leaves_it_open_by_default(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    run("create", "orders")
    assert capsys.readouterr().out == "created orders: id 7, 2 streamlets on broker 3\n"
    has(client, description(name="orders", streamlets=2, replication=2))
    run("create", "orders", "--replication", "2", "--virtual-logs", "4", "--durability", "leader")

    assert capsys.readouterr().out == "created orders: id 7, 2 streamlets on broker 3, copies on 2 backups\n"
    assert [
        tuple(arguments[field] for field in ("replication", "virtual_logs", "durability"))
        for _, _, arguments in client.asked
    ] == [(None, 1, None), (2, 4, "leader")]
    assert not client.options["patient"]  # a user at a terminal soon gets the error that there are too few backups


def test_descriptions_and_lists_show_replication(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    run("describe", "orders")
    assert "replication  none" in capsys.readouterr().out.splitlines()
    has(client, description(name="orders", replication=2, virtual_logs=1))
    run("describe", "orders")
    assert "replication  on 2 backups, through 1 virtual log on each broker" in capsys.readouterr().out.splitlines()

    assert "priority" not in capsys.readouterr().out
    has(client, description(name="orders", replication=2, virtual_logs=1, memory_priority=2, replication_priority=1))
    run("describe", "orders")
    assert "priority     memory 2, replication 1" in capsys.readouterr().out.splitlines()

    run("list")
    heading, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert row[heading.index("BACKUPS")] == "2"
    run("list", "--json")
    config = json.loads(capsys.readouterr().out)[0]["config"]
    assert (config["replication"], config["virtual_logs"]) == (2, 1)


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (["--virtual-logs", "3"], {"virtual_logs": 3}),
        (["--memory-priority", "0"], {"memory_priority": 0}),
        (["--replication-priority", "9"], {"replication_priority": 9}),
        (["--durability", "persisted"], {"durability": "persisted"}),
        (["--retention-ms", "0", "--retention-bytes", "0"], {"retention_ms": 0, "retention_bytes": 0}),
        (["--retention-bytes", "8MiB"], {"retention_bytes": 8 << 20}),
        (["--retention-consumer-group", "a"], {"retention_consumer_groups": ["a"]}),
        (["--no-retention-consumer-groups"], {"retention_consumer_groups": []}),
        (["--retention-consumed"], {"retention_consumed": True}),
        (["--no-retention-consumed"], {"retention_consumed": False}),
        (
            ["--add-column", "tip:float64", "--add-column", "at:timestamp[us, UTC]"],
            {"add_columns": pa.schema([("tip", pa.float64()), ("at", pa.timestamp("us", tz="UTC"))])},
        ),
    ],
)
def test_alter_changes_only_the_given_options(
    client: FakeClient, flags: list[str], changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run("alter", "orders", *flags)
    ((method, stream, given),) = client.asked
    assert (method, stream) == ("alter_stream", "orders")
    assert {field: value for field, value in given.items() if value is not None} == changes
    assert capsys.readouterr().out == "altered orders\n"


def test_truncate_all_deletes_all_records_of_a_stream(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    run("truncate", "orders", "--all", "--yes")
    assert client.asked == [("truncate_stream", "orders", "latest")]
    assert capsys.readouterr().out.splitlines() == [
        "STREAMLET  ENTRY  START (GROUP/SEGMENT+OFFSET)",
        "        0      0  1/2+640",
        "        0      1  1/2+640",
        "        1      0  1/2+640",
        "        1      1  1/2+640",
    ]


@pytest.mark.parametrize(("flags", "entries"), [([], [END]), (["--entry", "1"], [EARLIEST, END])])
def test_truncate_to_a_position_deletes_the_oldest_records_of_entries(
    client: FakeClient, flags: list[str], entries: list[Position]
) -> None:
    run("truncate", "orders", "--streamlet", "1", *flags, "--to", "1/2+640", "--yes")
    assert client.asked == [("truncate_stream", "orders", {1: entries})]


@pytest.mark.parametrize(
    ("ahead_ms", "told"), [(3_600_000, "times at most 60 min ahead of the clock"), (0, "any times")]
)
def test_a_description_shows_the_accepted_timestamps(
    client: FakeClient, capsys: pytest.CaptureFixture[str], ahead_ms: int, told: str
) -> None:
    has(client, description(name="orders", epoch_ms=1000, epoch_grace_ms=500, timestamp_ahead_max_ms=ahead_ms))
    run("describe", "orders")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("epochs"))
    assert line.endswith(f"of 1 s, closed by the clock after 500 ms, {told}")


def test_a_description_shows_retention_if_there_is_any(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    run("describe", "orders")
    assert "retention" not in capsys.readouterr().out

    has(
        client,
        description(
            name="orders",
            retention_ms=60_000,
            retention_bytes=3 << 20,
            retention_consumer_groups=["loader", "audit"],
            retention_consumed=True,
        ),
    )
    run("describe", "orders")
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("retention     older than 60000 ms")
    assert lines[first + 1 : first + 4] == [
        "              beyond 3 MiB per streamlet",
        "              read by all consumer groups",
        "held back by  loader, audit",
    ]

    run("describe", "orders", "--json")
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["retention_ms"], config["retention_bytes"]) == (60_000, 3 << 20)
    assert (config["retention_consumer_groups"], config["retention_consumed"]) == (["loader", "audit"], True)
