"""`kera group`: what is printed. Against real daemons it is in tests/integration/test_group_consumer.py."""

import contextlib
import datetime
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kera.cli._client import connecting_by
from kera.cli._durations import format_ms, parse_duration_ms
from kera.cli._run import UsageError, run_app
from kera.cli.app import app
from kera.client import (
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    ConsumerLag,
    EntryProgress,
    LeasedGroup,
    MemberDescription,
    Position,
)
from kera.core.errors import InvalidArgument

MEMBER = MemberDescription(
    "0123456789abcdef",
    "host/7",
    (LeasedGroup("clicks", 0, 0, 3),),
    silent_ms=120,
    busy_ms=4500,
    bytes_consumed=1 << 20,
    session_timeout_ms=10_000,
    progress_timeout_ms=300_000,
)
DAY_MS = 86_400_000


def entries() -> tuple[EntryProgress, ...]:
    """The first is a week behind, by the clock of whoever asks now."""
    week_ago_us = time.time_ns() // 1000 - 7 * 1000 * DAY_MS
    return (
        EntryProgress("clicks", 0, 0, Position(3, 1, 640), 2, MEMBER.member_id, ConsumerLag(10, 2048, week_ago_us)),
        EntryProgress("clicks", 1, 0, Position(0, 0, 0), 0, "", None),
    )


class FakeClient:
    """A client, and its admin, of a cluster with one consumer group."""

    def __init__(self) -> None:
        self.admin = self
        self.known = [ConsumerGroupSummary("loader", ("clicks",), 1)]
        self.done: list[Any] = []

    async def consumer_groups(self) -> list[ConsumerGroupSummary]:
        return self.known

    async def describe_consumer_group(self, name: str) -> ConsumerGroupDescription:
        return ConsumerGroupDescription(name, (MEMBER,), entries())

    async def reset_consumer_group(self, *arguments: Any, force: bool) -> None:
        self.done.append((*arguments, force))

    async def delete_consumer_group(self, name: str, *, idle_ms: int = 0) -> None:
        if name == "used-again":
            raise InvalidArgument("consumer group 'used-again' was used 3 s ago")
        self.done.append((name, idle_ms) if idle_ms else name)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    made = FakeClient()

    @contextlib.asynccontextmanager
    async def connected(_: str, **__: Any) -> AsyncIterator[FakeClient]:
        yield made

    with connecting_by(connected):
        yield made


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines() if line]


def test_groups_are_listed(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["group", "list"]) == 0
    assert lines(capsys) == [["GROUP", "CONSUMERS", "IDLE", "EXPIRES", "STREAMS"], ["loader", "1", "-", "-", "clicks"]]
    assert run_app(app, ["group", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "consumer_group": "loader",
            "streams": ["clicks"],
            "members": 1,
            "idle_ms": 0,
            "unnamed": False,
            "expires_in_ms": None,
        }
    ]
    client.known = [ConsumerGroupSummary("q-1", ("clicks",), 0, 3 * DAY_MS, unnamed=True, expires_in_ms=4 * DAY_MS)]
    assert run_app(app, ["group", "list"]) == 0
    assert lines(capsys)[1] == ["q-1", "0", "3", "d", "in", "4", "d", "clicks"]
    client.known = []
    assert run_app(app, ["group", "list"]) == 0
    assert capsys.readouterr() == ("", "no groups\n")


@pytest.mark.usefixtures("client")
def test_a_group_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["group", "describe", "loader"]) == 0
    heading, _, member, _, first, second, total = lines(capsys)
    assert heading == ["loader:", "1", "consumer"]
    assert member == ["01234567", "host/7", "1", "120", "ms", "ago", "4.5", "s", "1", "MiB"]
    assert first == ["clicks", "0", "0", "3/1/640", "2", "01234567", "10", "2", "KiB", "7", "d"]
    assert second == ["clicks", "1", "0", "start", "0", "-", "?", "?", "?"]
    assert " ".join(total).startswith("lag: 10 records, 2 KiB, 7 d; unknown for 1 more entries: their brokers")


@pytest.mark.usefixtures("client")
def test_a_group_is_described_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["group", "describe", "loader", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"][0]["held"] == [{"stream": "clicks", "streamlet": 0, "entry": 0, "group_id": 3}]
    assert found["entries"][0]["cursor"] == [3, 1, 640]
    assert [entry["member_id"] for entry in found["entries"]] == [MEMBER.member_id, ""]
    assert found["entries"][0]["lag"]["behind_ms"] // DAY_MS == 7
    assert found["entries"][1]["lag"] is None


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("2026-01-31T12:00:00Z", datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)),
    ],
)
def test_a_group_is_reset(client: FakeClient, where: str, expected: Any) -> None:
    assert run_app(app, ["group", "reset", "loader", "clicks", "--to", where, "--yes", "--force"]) == 0
    assert client.done == [("loader", "clicks", expected, True)]


def test_a_time_without_a_zone_is_a_local_one(client: FakeClient) -> None:
    assert run_app(app, ["group", "reset", "loader", "clicks", "--to", "2026-01-31T12:00", "--yes"]) == 0
    assert client.done[0][2] == datetime.datetime(2026, 1, 31, 12).astimezone()


def test_a_place_that_makes_no_sense_is_refused(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["group", "reset", "loader", "clicks", "--to", "tomorrow", "--yes"]) == 2
    assert "neither earliest nor latest nor a time" in capsys.readouterr().err
    assert not client.done


def test_a_group_is_deleted(client: FakeClient) -> None:
    assert run_app(app, ["group", "delete", "loader", "--yes"]) == 0
    assert client.done == ["loader"]


def test_groups_that_nobody_has_used_for_long_are_deleted(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.known = [
        ConsumerGroupSummary("used", ("clicks",), 1, 0),
        ConsumerGroupSummary("young", ("clicks",), 0, 6 * DAY_MS),
        ConsumerGroupSummary("old", ("clicks",), 0, 7 * DAY_MS),
        ConsumerGroupSummary("used-again", (), 0, 8 * DAY_MS),
    ]
    assert run_app(app, ["group", "delete", "--idle", "7d", "--dry-run"]) == 0
    assert [line[0] for line in lines(capsys)] == ["GROUP", "old", "used-again"]
    assert not client.done
    assert run_app(app, ["group", "delete", "--idle", "7d", "--yes"]) == 0
    assert client.done == [("old", 7 * DAY_MS)]
    said = capsys.readouterr()
    assert said.out.endswith("deleted 1 group\n")
    assert said.err == "kept used-again: consumer group 'used-again' was used 3 s ago\n"
    assert run_app(app, ["group", "delete", "--idle", "2w", "--yes"]) == 0
    assert capsys.readouterr() == ("", "no group has been idle for 14 d\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["loader", "--idle", "7d"], ["--idle", "soon"], ["--idle", "0s"], ["--idle", "-1d"], ["loader", "--dry-run"]],
)
def test_a_deletion_that_could_mean_anything_is_refused(client: FakeClient, arguments: list[str]) -> None:
    assert run_app(app, ["group", "delete", "--yes", *arguments]) == 2
    assert not client.done


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("7d", 7 * 86_400_000),
        ("1.5 h", 5_400_000),
        (" 30min ", 1_800_000),
        ("30m", 1_800_000),
        ("90s", 90_000),
        ("5ms", 5),
    ],
)
def test_spans_of_time_are_read(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["0.5ms", "0.0001s"])
def test_a_span_of_less_than_a_millisecond_is_not_taken_for_none(text: str) -> None:
    with pytest.raises(UsageError, match="less than a millisecond"):
        parse_duration_ms(text, name="--epoch")


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (7, "7 ms"),
        (1500, "1.5 s"),
        (119_000, "119 s"),
        (180_000, "3 min"),
        (9_000_000, "2.5 h"),
        (345_600_000, "4 d"),
        (438_855_450_692, "5079 d"),
    ],
)
def test_spans_of_time_are_for_people(milliseconds: int, text: str) -> None:
    assert format_ms(milliseconds) == text
