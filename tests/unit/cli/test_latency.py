"""Output of `kera latency`. The tests against real daemons are in tests/integration/test_latency_constraints.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kera.cli import _latency_text, latency
from kera.cli._latency_text import BAR_CHARS, bars, in_ms
from kera.cli._run import run_app
from kera.cli.app import app
from kera.client import LatencyConstraint, LatencyDescription, LatencyHop
from kera.core.errors import UnknownLatencyConstraint
from tests.unit.cli.fake_client import FakeClient

CONSTRAINT = LatencyConstraint("checkout", ("clicks", "group:enrich", "visits"), 300.0, 15_000, "mean")
PATH = ", ".join(CONSTRAINT.path)


def hop(stream: str, name: str, mean_us: int, group: str = "", **fields: Any) -> LatencyHop:
    made = LatencyHop(stream, name, group, 100, mean_us, mean_us * 2, mean_us * 3, 7, mean_us, 0, violates=False)
    return dataclasses.replace(made, **fields)


HOPS = (
    hop("clicks", "gather", 130_000, allowed_us=131_000, advised_us=130_000),
    hop("clicks", "send", 1_000),
    hop("clicks", "replicate", 4_000),
    hop("clicks", "hand-over", 20_000, "enrich"),
    hop("clicks", "prefetch", 50, "enrich"),
    hop("clicks", "work", 200_000, "enrich", allowed_us=2_000, violates=True),
    hop("visits", "gather", 0, chunks=0),
    hop("visits", "send", 25_000),
    hop("visits", "replicate", 3_000),
)
VIOLATED = LatencyDescription(
    CONSTRAINT,
    "violated",
    "the mean is 383.1 ms",
    383_050,
    766_100,
    0,
    3,
    HOPS,
    created_by="user:alice",
    worst_hop=HOPS[5],
)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    """A client of a cluster with one latency constraint, which the third description no longer finds."""
    gone = UnknownLatencyConstraint("there is no latency constraint 'checkout'", name="checkout")
    made = FakeClient(constraints=[dataclasses.replace(VIOLATED, hops=())], describe=iter([VIOLATED, VIOLATED, gone]))
    made.answers = {"create": CONSTRAINT, "alter": CONSTRAINT, "delete": None}
    with made.answering():
        yield made


def test_a_description_shows_the_clock_error_and_overridden_lingers() -> None:
    assert "clocks" not in _latency_text.described(VIOLATED)
    own = hop("clicks", "gather", 1, own_linger_us=500_000)
    over = [hop(stream, "hand-over", 1, "enrich", clock_error_us=400) for stream in ("clicks", "visits")]
    text = _latency_text.described(dataclasses.replace(VIOLATED, hops=(own, *over)))
    assert "clocks      known to within 0.80 ms, the error of hand-over times\n" in text
    assert "own linger  a producer of clicks sets linger_ms 500 itself, which overrides the advice\n" in text


def test_create_parses_the_path_the_limit_and_the_window(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["latency", "create", "checkout", "--path", "clicks,group:enrich , visits", "--limit", "300ms"]
    assert run_app(app, command) == 0
    assert run_app(app, [*command, "--window", "1min", "--p99"]) == 0
    mean, p99 = client.asked
    assert mean == (
        "create",
        "checkout",
        {"path": list(CONSTRAINT.path), "limit_ms": 300, "window_ms": 15_000, "statistic": "mean"},
    )
    assert (p99[-1]["window_ms"], p99[-1]["statistic"]) == (60_000, "p99")
    told = capsys.readouterr().out.splitlines()[0]
    assert told == "checkout: clicks, group:enrich, visits within 300 ms, for the mean over 15 s"


def test_alter_changes_only_the_named_options(client: FakeClient) -> None:
    assert run_app(app, ["latency", "alter", "checkout", "--limit", "2s", "--p99"]) == 0
    assert run_app(app, ["latency", "alter", "checkout", "--path", "clicks", "--mean"]) == 0
    assert [given for *_, given in client.asked] == [
        {"path": None, "limit_ms": 2000, "window_ms": None, "statistic": "p99"},
        {"path": ["clicks"], "limit_ms": None, "window_ms": None, "statistic": "mean"},
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "c", "--path", "a,,b", "--limit", "1s"], "--path: 'a,,b' has a comma without an element beside it"),
        (["create", "c", "--path", "", "--limit", "1s"], "--path: ''"),
        (
            ["create", "c", "--path", "a", "--limit", "300"],
            "'300' is not a duration; write 7d, 12h, 30min, 90s or 250ms",
        ),
        (["create", "c", "--path", "a", "--limit", "0ms"], "--limit: '0ms' is not a time: the minimum is 1 ms"),
        (["create", "c", "--path", "a", "--limit", "2h"], "--limit: '2h' is not from 1 ms to 60 min"),
        (["alter", "c", "--limit", "9e99d"], "--limit: '9e99d' is"),
        (["alter", "c", "--window", "500ms"], "--window: '500ms' is not from 1 s to 60 min"),
        (["create", "c", "--path", "a", "--limit", "1s", "--window", "x"], "--window: 'x' is not a duration"),
        (["alter", "c"], "say what changes: --path, --limit"),
        (["alter", "c", "--p99", "--mean"], "give either --p99 or --mean"),
        (["describe", "c", "--interval", "1s"], "--interval needs --watch"),
        (["describe", "c", "--watch", "--interval", "0s"], "--interval: '0s' is not a time"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(
    client: FakeClient, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run_app(app, ["latency", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert client.asked == []


def test_constraints_are_listed(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["latency", "list"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "CONSTRAINT",
        "STATE",
        "TOOK",
        "LIMIT",
        "OF",
        "WINDOW",
        "VIOLATIONS",
        *("WORST", "HOP", "PATH"),
    ]
    assert "  work of clicks to enrich 200 ms  clicks, group:enrich" in row
    assert row.split(maxsplit=9)[:9] == ["checkout", "violated", "383", "ms", "300", "ms", "mean", "15", "s"]
    assert run_app(app, ["latency", "list", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["name"], told["limit_ms"], told["violations"], "hops" in told) == ("checkout", 300.0, 3, False)
    client.looks["constraints"] = []
    assert run_app(app, ["latency", "list"]) == 0
    assert capsys.readouterr().err == "no latency constraints\n"


def test_delete_needs_yes(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["latency", "delete", "checkout"]) == 2
    assert client.asked == []
    assert run_app(app, ["latency", "delete", "checkout", "--yes"]) == 0
    assert client.asked == [("delete", "checkout")]
    assert capsys.readouterr().out == "deleted checkout\n"


@pytest.mark.usefixtures("client")
def test_a_constraint_is_described_with_a_bar_for_each_stream(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["latency", "describe", "checkout"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[3] == "took        mean 383 ms, p99 766 ms at most; 8 of 9 hops measured"
    assert told[4] == "state       violated: the mean is 383.1 ms"
    assert told[7:10] == [
        "clicks  " + "g" * 20 + "shhh" + "w" * 32 + " " * 8 + "355 ms",
        "visits  " + " " * 56 + "ssss   28.0 ms",
        "limit   " + "-" * 46 + "|" + " " * 17 + "300 ms",
    ]
    rows = [line.split() for line in told if line.startswith("clicks") and "work" in line]
    assert rows[-1][:3] == ["clicks", "work", "enrich"]
    assert rows[-1][-3:] == ["<-", "too", "long"]


def test_bars_are_to_scale_and_each_begins_at_the_end_of_the_previous_one() -> None:
    clicks, visits, limit, legend = bars(HOPS, 300_000, by_p99=False)
    scale = BAR_CHARS / 383_050
    assert clicks.count("w") == round(355_050 * scale) - round(155_050 * scale)
    begin = len("clicks  ")
    assert visits[begin:].index("s") == round(355_050 * scale)
    assert limit.index("|") == begin + round(300_000 * scale) - 1
    assert clicks.rstrip().endswith("355 ms")
    assert legend.split()[:2] == ["g", "gather"]
    quick = [hop("clicks", "send", 10)]
    assert next(bars(quick, 300_000, by_p99=False)).split() == ["clicks", "0.01", "ms"]


@pytest.mark.usefixtures("client")
def test_json_and_yaml_documents_have_the_whole_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["latency", "describe", "checkout", "--output", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["state"], told["hops"][5]["violates"]) == (list(CONSTRAINT.path), "violated", True)
    assert run_app(app, ["latency", "describe", "checkout", "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == told


def test_a_description_without_measurements_has_no_bar(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    client.looks["describe"] = LatencyDescription(CONSTRAINT, "broken", "stream 'clicks' is not there", 0, 0, 0, 0, ())
    assert run_app(app, ["latency", "describe", "checkout"]) == 0
    told = capsys.readouterr().out
    assert "broken: stream 'clicks' is not there" in told
    assert "|" not in told


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(("output", "separator"), [("table", "\n\n"), ("json", "\n"), ("yaml", "---\n")])
def test_watch_repeats_the_description_until_an_error(
    capsys: pytest.CaptureFixture[str], output: str, separator: str
) -> None:
    command = ["latency", "describe", "checkout", "--watch", "--interval", "1ms", "--output", output]
    assert run_app(app, command) == 1  # the constraint is gone at last
    told = capsys.readouterr()
    assert "no latency constraint 'checkout'" in told.err
    if output == "json":
        assert [json.loads(line)["name"] for line in told.out.splitlines()] == ["checkout", "checkout"]
    elif output == "yaml":
        assert [each["name"] for each in yaml.safe_load_all(told.out)] == ["checkout", "checkout"]
    else:
        assert told.out.count("constraint  checkout") == 2
    assert separator in told.out
    assert latency.CLEAR not in told.out


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0, "0 ms"), (50, "0.05 ms"), (4_240, "4.2 ms"), (130_400, "130 ms"), (4_500_000, "4.50 s")],
)
def test_times_have_few_digits(time_us: int, text: str) -> None:
    assert in_ms(time_us) == text
    assert _latency_text.in_ms(61_000_000) == "61 s"
