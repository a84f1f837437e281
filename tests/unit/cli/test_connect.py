"""`kera.cli.connect`: options, and reports on the progress of a copy."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from kera.cli._partitioner import PARTITIONER_OPTION, PartitionerChoice
from kera.cli.connect import _telling
from kera.cli.connect._telling import Bar, JsonLines, Lines, Teller, teller
from kera.client.producing.encoding.partitioner import PARTITIONERS
from kera.client.settings import PartitionerName
from kera.connect.pieces import Progress
from kera.connect.planning.rates import Rates


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time, as a list of one element."""
    clock = [0.0]
    monkeypatch.setattr(_telling.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    return clock


def tell(telling: Teller, clock: list[float], how: str = "done") -> None:
    """A copy of 30 s."""
    rates = Rates(0.0, 3000)
    with telling:
        telling.began("mine", Progress({"0": 5}, 1200), ["mind the gap"])
        for second in range(1, 31):
            clock[0] = float(second)
            rates.add(100, 10_000, clock[0])
            telling.going(rates)
        telling.ended(rates, how)


def test_programs_get_the_progress_as_one_json_line_per_second(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    tell(JsonLines(), now)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"event": "began", "name": "mine", "records_before": 1200, "notes": ["mind the gap"]}
    assert [line["event"] for line in lines[1:]] == ["progress"] * 30 + ["done"]
    assert lines[-1]["records"] == 3000
    assert lines[-1]["records_per_s"] == 100
    assert lines[5]["left"] == 2500


def test_a_log_gets_a_progress_line_every_ten_seconds(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    tell(Lines(), now, "stopped")

    assert capsys.readouterr().err.splitlines() == [
        "note: mind the gap",
        "copy mine goes on after 1,200 records",
        "1,000 records, 100 records/s, 0.0 MB/s, 2,000 left, 0:20",
        "2,000 records, 100 records/s, 0.0 MB/s, 1,000 left, 0:10",
        "3,000 records, 100 records/s, 0.0 MB/s",
        "stopped: 3,000 records, 100 records/s, 0.0 MB/s",
    ]


def test_a_terminal_gets_a_bar_and_a_final_line(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    tell(Bar(), now)

    said = capsys.readouterr().err
    assert "copy mine goes on after 1,200 records" in said
    assert said.rstrip().endswith("done: 3,000 records, 100 records/s, 0.0 MB/s")


def test_the_form_of_progress_depends_on_the_json_option_and_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(teller(as_json=True), JsonLines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert type(teller(as_json=False)) is Lines
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert isinstance(teller(as_json=False), Bar)


def test_a_copy_that_has_not_begun_can_be_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    Lines().ended(None, "stopped")
    assert capsys.readouterr().err == "stopped\n"


# --- where keys go -----------------------------------------------------------------------------------------


def test_the_command_line_has_the_partitioners_that_producers_have() -> None:
    assert [*PartitionerChoice] == [*get_args(PartitionerName)] == [*PARTITIONERS]
    assert all(name in PARTITIONER_OPTION.help for name in PARTITIONERS)
