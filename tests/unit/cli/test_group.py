"""Output of `kera group`. The tests against real daemons are in tests/integration/test_group_consumer.py."""

import datetime
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kera.cli._durations import parse_duration_ms
from kera.cli._run import UsageError, run_app
from kera.cli.app import app
from kera.cli.group.resets import HEADING
from kera.client import (
    ConsumerGroupDescription,
    ConsumerGroupSummary,
    ConsumerLag,
    CursorChange,
    EntryProgress,
    LeasedGroup,
    MemberDescription,
    Position,
    ResetPlan,
    ShiftBy,
    ToOffset,
)
from kera.core.base.spans import format_ms
from kera.core.errors import InvalidArgument
from tests.unit.cli.fake_client import FakeClient

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
    """Two entries; by the clock of the caller, the first is a week behind."""
    week_ago_us = time.time_ns() // 1000 - 7 * 1000 * DAY_MS
    return (
        EntryProgress("clicks", 0, 0, Position(3, 1, 640), 2, MEMBER.member_id, ConsumerLag(10, 2048, week_ago_us)),
        EntryProgress("clicks", 1, 0, Position(0, 0, 0), 0, "", None),
    )


PLAN = ResetPlan(
    "loader",
    "clicks",
    7,
    (
        CursorChange(0, 0, Position(3, 1, 640), 60, Position(2, 1, 0), 40, 20, 0),
        CursorChange(1, 0, None, None, Position(4, 1, 0), 9, 0, 9, "offset 12 is beyond the end, 9"),
    ),
)


def deleted(name: str, **_: Any) -> None:
    if name == "used-again":
        raise InvalidArgument("consumer group 'used-again' was used 3 s ago")


@pytest.fixture
def client() -> Iterator[FakeClient]:
    """A client of a cluster with one consumer group."""
    made = FakeClient(
        consumer_groups=[ConsumerGroupSummary("loader", ("clicks",), 1)],
        describe_consumer_group=lambda name: ConsumerGroupDescription(name, (MEMBER,), entries()),
    )
    made.answers = {"plan_reset": PLAN, "reset_consumer_group": None, "delete_consumer_group": deleted}
    with made.answering():
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
    client.looks["consumer_groups"] = [
        ConsumerGroupSummary("q-1", ("clicks",), 0, 3 * DAY_MS, unnamed=True, expires_in_ms=4 * DAY_MS)
    ]
    assert run_app(app, ["group", "list"]) == 0
    assert lines(capsys)[1] == ["q-1", "0", "3", "d", "in", "4", "d", "clicks"]
    client.looks["consumer_groups"] = []
    assert run_app(app, ["group", "list"]) == 0
    assert capsys.readouterr() == ("", "no groups\n")


def test_internal_groups_are_listed_only_with_internal(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    client.looks["consumer_groups"] = [ConsumerGroupSummary(name, ("clicks",), 0) for name in ("_audit", "loader")]

    assert run_app(app, ["group", "list"]) == 0
    assert [line[0] for line in lines(capsys)] == ["GROUP", "loader"]
    assert run_app(app, ["group", "list", "--internal", "--json"]) == 0
    assert [each["consumer_group"] for each in json.loads(capsys.readouterr().out)] == ["_audit", "loader"]


@pytest.mark.usefixtures("client")
def test_a_group_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["group", "describe", "loader"]) == 0
    heading, _, member, _, first, second, total = lines(capsys)
    assert heading == ["loader:", "1", "consumer"]
    assert member == ["01234567", "host/7", "1", "120", "ms", "ago", "4.5", "s", "1", "MiB"]
    assert first == ["clicks", "0", "0", "60", "40", "3/1/640", "2", "01234567", "10", "2", "KiB", "7", "d"]
    assert second == ["clicks", "1", "0", "?", "9", "start", "0", "-", "?", "?", "?"]
    assert " ".join(total).startswith("lag: 10 records, 2 KiB, 7 d; unknown for 1 more entries: their brokers")


@pytest.mark.usefixtures("client")
def test_a_group_is_described_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["group", "describe", "loader", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"][0]["held"] == [{"stream": "clicks", "streamlet": 0, "entry": 0, "group_id": 3}]
    assert found["entries"][0]["cursor"] == [3, 1, 640]
    assert [(entry["offset"], entry["end_offset"]) for entry in found["entries"]] == [(60, 40), (None, 9)]
    assert [entry["member_id"] for entry in found["entries"]] == [MEMBER.member_id, ""]
    assert found["entries"][0]["lag"]["behind_ms"] // DAY_MS == 7
    assert found["entries"][1]["lag"] is None


@pytest.mark.parametrize(
    ("where", "expected", "told"),
    [
        (["--to", "earliest"], "earliest", "to earliest"),
        (["--to", "latest"], "latest", "to latest"),
        (
            ["--to", "2026-01-31T12:00:00Z"],
            datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC),
            "to 2026-01-31T12:00:00Z",
        ),
        (["--to-offset", "40"], ToOffset(40), "to offset 40"),
        (["--shift-by", "-20"], ShiftBy(-20), "by -20 records"),
        (["--shift-by", "+1"], ShiftBy(1), "by 1 record"),
    ],
)
def test_a_group_is_reset(
    client: FakeClient, capsys: pytest.CaptureFixture[str], where: list[str], expected: Any, told: str
) -> None:
    assert run_app(app, ["group", "reset", "loader", "clicks", *where, "--yes", "--force", "--streamlet", "1"]) == 0
    assert client.asked == [
        ("plan_reset", "loader", "clicks", expected, {"streamlets": [1]}),
        ("reset_consumer_group", "loader", "clicks", PLAN, {"force": True, "streamlets": [1]}),
    ]
    heading, first, second, *rest = capsys.readouterr().out.splitlines()
    assert heading.split() == [word for column in HEADING for word in column.split()]
    assert [first.split(), second.split()] == [
        ["clicks", "0", "0", "60", "40", "20", "0"],
        ["clicks", "1", "0", "-", "9", "0", "9"],
    ]
    assert rest == [
        "",
        "clicks, streamlet 1, entry 0: offset 12 is beyond the end, 9",
        "20 records will be read again, 9 records skipped",
        f"reset group loader {told} in clicks",
    ]


def test_a_dry_run_of_a_reset_shows_the_changes_and_makes_none(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The preview covers all streams that the group has read, and asks no question."""
    assert run_app(app, ["group", "reset", "loader", "--all-streams", "--to-offset", "40", "--dry-run", "--json"]) == 0
    assert [call[:3] for call in client.asked] == [("plan_reset", "loader", "clicks")]
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "stream": "clicks",
        "streamlet": 0,
        "entry": 0,
        "old_offset": 60,
        "new_offset": 40,
        "old_cursor": [3, 1, 640],
        "new_cursor": [2, 1, 0],
        "records_again": 20,
        "records_skipped": 0,
        "note": "",
    }
    assert (second["old_offset"], second["old_cursor"]) == (None, None)


def test_a_time_without_a_zone_is_local(client: FakeClient) -> None:
    assert run_app(app, ["group", "reset", "loader", "clicks", "--to", "2026-01-31T12:00", "--yes"]) == 0
    assert client.asked[0][3] == datetime.datetime(2026, 1, 31, 12).astimezone()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["clicks", "--to", "tomorrow"], "neither earliest nor latest nor a time"),
        (["clicks"], "give one of --to, --to-offset and --shift-by"),
        (["clicks", "--to", "latest", "--shift-by", "3"], "give one of"),
        (["--to", "latest"], "either a stream or --all-streams"),
        (["clicks", "--all-streams", "--to", "latest"], "either a stream or --all-streams"),
        (["--all-streams", "--streamlet", "1", "--to", "latest"], "mutually exclusive"),
    ],
)
def test_a_reset_with_invalid_arguments_is_refused(
    client: FakeClient, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert run_app(app, ["group", "reset", "loader", *arguments, "--yes"]) == 2
    assert told in capsys.readouterr().err
    assert not client.asked


@pytest.mark.parametrize(
    "arguments", [["reset", "loader", "clicks", "--to", "latest"], ["delete", "loader"], ["delete", "--idle", "1ms"]]
)
def test_a_confirmation_without_a_terminal_needs_yes(
    client: FakeClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    client.looks["consumer_groups"] = [ConsumerGroupSummary("old", ("clicks",), 0, 7 * DAY_MS)]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run_app(app, ["group", *arguments]) == 2
    assert "needs --yes when standard input is not a terminal" in capsys.readouterr().err
    assert {call[0] for call in client.asked} <= {"plan_reset"}


def test_a_group_is_deleted(client: FakeClient) -> None:
    assert run_app(app, ["group", "delete", "loader", "--yes"]) == 0
    assert client.asked == [("delete_consumer_group", "loader")]


def test_delete_idle_deletes_groups_that_are_idle_for_that_time(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.looks["consumer_groups"] = [
        ConsumerGroupSummary("used", ("clicks",), 1, 0),
        ConsumerGroupSummary("young", ("clicks",), 0, 6 * DAY_MS),
        ConsumerGroupSummary("old", ("clicks",), 0, 7 * DAY_MS),
        ConsumerGroupSummary("used-again", (), 0, 8 * DAY_MS),
    ]
    assert run_app(app, ["group", "delete", "--idle", "7d", "--dry-run"]) == 0
    assert [line[0] for line in lines(capsys)] == ["GROUP", "old", "used-again"]
    assert not client.asked
    assert run_app(app, ["group", "delete", "--idle", "7d", "--yes"]) == 0
    idle = {"idle_ms": 7 * DAY_MS}
    assert client.asked == [("delete_consumer_group", name, idle) for name in ("old", "used-again")]
    said = capsys.readouterr()
    assert said.out.endswith("deleted 1 group\n")
    assert said.err == "kept used-again: consumer group 'used-again' was used 3 s ago\n"
    assert run_app(app, ["group", "delete", "--idle", "2w", "--yes"]) == 0
    assert capsys.readouterr() == ("", "no group has been idle for 14 d\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["loader", "--idle", "7d"], ["--idle", "soon"], ["--idle", "0s"], ["--idle", "-1d"], ["loader", "--dry-run"]],
)
def test_an_ambiguous_or_invalid_deletion_is_refused(client: FakeClient, arguments: list[str]) -> None:
    assert run_app(app, ["group", "delete", "--yes", *arguments]) == 2
    assert not client.asked


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
def test_durations_are_parsed(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["0.5ms", "0.0001s"])
def test_a_duration_below_a_millisecond_is_refused(text: str) -> None:
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
def test_durations_are_formatted_with_a_suitable_unit(milliseconds: int, text: str) -> None:
    assert format_ms(milliseconds) == text
