"""The screen of `kera top` as a user operates it with keys."""

import asyncio
import contextlib
import dataclasses
import os
import queue
import select
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from textual.widgets import DataTable, Static

from kera.cli import top
from kera.cli._run import run_app
from kera.cli.app import app as command_line
from kera.cli.top._app import Details, Help, Options, Top
from kera.cli.top._input import TolerantDriver
from kera.cli.top._sample import Sample, Trouble
from kera.client.diagnosis.findings import problem
from tests.unit.cli.top_support import (
    NOW_US,
    cluster,
    constraint,
    counted,
    entry,
    figures,
    group,
    hop,
    looks,
    sample,
    stream,
    two,
)

pytestmark = pytest.mark.timeout(60)
NAMES = ["alpha", "beta", "gamma[red]"]


def seen(**fields: Any) -> Sample:
    """Streams with 1, 2 and 3 records per second."""
    return sample(
        **{
            "cluster": cluster(2, 1),
            "streams": [stream(number, name, 1) for number, name in enumerate(NAMES, 1)],
            "figures": {
                "broker 1": two(
                    figures(1, records_appended=0),
                    figures(2, records_appended=6, streams={number: counted(number) for number in (1, 2, 3)}),
                )
            },
            "groups": [group("readers")],
            "lags": {"readers": looks("readers", [entry("beta", 30, age_s=20)])},
            "findings": [problem("broker 2", "is lost", "start it")],
            **fields,
        }
    )


class Collected:
    """Stands for a `Collector`: its sample is set by the test."""

    def __init__(self, found: Sample) -> None:
        self.found = found
        self.asked = 0
        self.wanted_group = self.wanted_constraint = ""

    async def sample(self) -> Sample:
        self.asked += 1
        return self.found


class Screen:
    """The view, with its contents as text."""

    def __init__(self, app: Top, pilot: Any, collected: Collected) -> None:
        self.app = app
        self.collected = collected
        self._pilot = pilot

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)
        await self._pilot.pause()

    async def see(self, found: Sample) -> None:
        self.collected.found = found
        await self.app.look()
        await self._pilot.pause()

    def text(self, name: str) -> str:
        screen = self.app.screen if isinstance(self.app.screen, Details) else self.app.screen_stack[0]
        return str(screen.query_one(f"#{name}", Static).content)

    def column(self, number: int = 0) -> list[str]:
        table = self.app.screen_stack[0].query_one(DataTable)
        return [str(table.get_row_at(row)[number]) for row in range(table.row_count)]


@asynccontextmanager
async def running(found: Sample | None = None, view: str = "brokers", wanted: str = "") -> AsyncIterator[Screen]:
    collected = Collected(found or seen())
    app = Top(cast("Any", collected), Options(3600, view, wanted), collected.found)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        yield Screen(app, pilot, collected)


async def test_keys_switch_between_the_views() -> None:
    async with running() as screen:
        assert screen.column() == ["1", "2"]
        await screen.press("3")
        assert screen.column() == ["gamma[red]", "beta", "alpha"]
        assert "[3 Streams]" in screen.text("tabs")
        await screen.press("tab")
        assert screen.column() == ["readers"]
        assert "no reads" not in screen.text("why")
        await screen.press("tab", "tab", "tab")
        assert screen.column() == ["1", "2"]
        await screen.press("shift+tab", "shift+tab")
        assert screen.column() == ["problem"]
        assert "start it" in screen.text("why")


async def test_keys_choose_the_column_to_sort_by_and_reverse_the_order() -> None:
    async with running(view="streams") as screen:
        await screen.press("r")
        assert screen.column() == ["alpha", "beta", "gamma[red]"]
        await screen.press("<", "<")
        assert screen.column() == ["alpha", "beta", "gamma[red]"]
        await screen.press("r")
        assert screen.column() == ["gamma[red]", "beta", "alpha"]


async def test_a_filter_is_typed_kept_and_removed() -> None:
    async with running(view="streams") as screen:
        await screen.press("slash", "b", "e", "q")  # q is part of the filter, too
        assert screen.column() == []
        await screen.press("backspace", "enter")
        assert screen.column() == ["beta"]
        assert 'filter "be"' in screen.text("tabs")
        await screen.press("escape")
        assert len(screen.column()) == 3
    async with running(view="streams", wanted="gam") as screen:
        assert screen.column() == ["gamma[red]"]


async def test_a_filter_being_typed_stays_with_its_view() -> None:
    async with running(view="streams") as screen:
        await screen.press("slash", "b", "e")
        await screen.press("tab", "z")  # z must not reach the input field
        assert screen.column() == ["readers"]
        assert "filter" not in screen.text("tabs")
        await screen.press("shift+tab")
        assert screen.column() == ["beta"]


async def test_an_open_row_is_refreshed_and_can_be_closed() -> None:
    async with running(view="streams") as screen:
        await screen.press("down", "enter")
        assert isinstance(screen.app.screen, Details)
        assert "stream beta" in screen.text("details")
        assert "readers" in screen.text("details")
        await screen.press("3")  # this key has an effect only on the tables
        await screen.see(seen(streams=[stream(1, "alpha", 1)]))
        assert screen.text("details") == "stream beta is not there any more"
        await screen.press("escape")
        assert screen.column() == ["alpha"]

        await screen.press("4", "enter")
        await screen.see(seen())
        assert screen.collected.wanted_group == "readers"


async def test_the_selected_row_stays_selected_when_the_order_changes() -> None:
    async with running(view="streams") as screen:
        await screen.press("down", "down")  # alpha, the slowest
        faster = two(figures(1), figures(2, streams={1: counted(9), 2: counted(2), 3: counted(3)}))
        await screen.see(seen(figures={"broker 1": faster}))
        assert screen.column()[0] == "alpha"
        await screen.press("enter")
        assert "stream alpha" in screen.text("details")


async def test_keys_work_while_the_view_is_paused() -> None:
    async with running() as screen:
        await screen.press("p")
        assert "paused" in screen.text("heading")
        await screen.press("3")
        assert len(screen.column()) == 3
        await screen.press("space", "minus", "plus")
        assert "every 3600 s" not in screen.text("heading")
        assert "paused" not in screen.text("heading")


async def test_any_key_closes_the_help_and_q_quits() -> None:
    async with running() as screen:
        await screen.press("question_mark")
        assert isinstance(screen.app.screen, Help)
        await screen.press("x")
        assert len(screen.app.screen_stack) == 1
        await screen.press("q")
        while screen.app.is_running:
            await asyncio.sleep(0)


async def test_an_opened_latency_constraint_shows_its_hops_at_once() -> None:
    """The hops do not wait for the next refresh, which is an hour away."""
    late = constraint("late", "violated", 600_000, reason="the mean is 600 ms")
    async with running(seen(constraints=[constraint("on-time"), late]), view="latency") as screen:
        assert screen.column() == ["late", "on-time"]
        assert "the mean is 600 ms" in screen.text("why")
        in_full = dataclasses.replace(late, hops=(hop("clicks", "work", 600_000, "enrich"),))
        screen.collected.found = seen(constraints=[late], hops={"late": in_full})
        await screen.press("enter")
        async with asyncio.timeout(30):
            while "wwww" not in screen.text("details"):
                await asyncio.sleep(0)
        assert screen.collected.wanted_constraint == "late"
        await screen.press("escape")
        await screen.see(seen(constraints=[]))
        assert screen.collected.wanted_constraint == ""


async def test_problems_of_the_view_itself_are_shown_above_the_table() -> None:
    async with running() as screen:
        await screen.see(seen(cluster_trouble=Trouble("connection refused", NOW_US)))
        assert "no coordinator answers" in screen.text("notes")
        assert screen.column() == ["1", "2"]
        await screen.see(seen())
        assert screen.text("notes") == ""


async def test_an_empty_first_sample_leaves_all_views_empty() -> None:
    nothing = Sample(1.0, NOW_US, cluster_trouble=Trouble("may not", NOW_US, refused=True))
    async with running(nothing) as screen:
        for key in "123456":
            await screen.press(key, "enter", "down")
            assert screen.column() == []


async def test_a_table_has_200_of_a_thousand_streams_and_a_filter_finds_others() -> None:
    count = 1_000
    rates = two(figures(1), figures(2, streams={number: counted(number) for number in range(1, count + 1)}))
    found = seen(
        streams=[stream(number, f"s{number:05}", 1) for number in range(1, count + 1)], figures={"broker 1": rates}
    )
    async with running(found, view="streams") as screen:
        assert screen.column()[0] == "s01000"
        assert len(screen.column()) == 200
        await screen.press("slash", *"s00042", "enter")
        assert screen.column() == ["s00042"]


async def test_a_cancellation_that_textual_swallows_still_ends_the_view_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()

    class Swallows:
        """Swallows cancellation, as Textual does."""

        def __init__(self, *_: object) -> None:
            pass

        async def run_async(self) -> None:
            begun.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    @asynccontextmanager
    async def collecting(*_: object, **__: object) -> AsyncIterator[None]:
        yield

    async def first(*_: object) -> None:
        pass

    monkeypatch.setattr("kera.cli.top._app.Top", Swallows)
    monkeypatch.setattr(top, "_collecting", collecting)
    monkeypatch.setattr(top, "_first", first)
    live = asyncio.create_task(top._live("here", Options(1, "brokers", ""), internal=False))
    await begun.wait()
    live.cancel()
    with pytest.raises(asyncio.CancelledError):
        await live


# -- the command ---------------------------------------------------------------------------------------------------


def test_top_without_a_terminal_suggests_json_or_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(command_line, ["top"]) == 2
    assert "needs a terminal; without one, --json or --once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--interval", "0"], "--interval: 0 is not from 0.2 to 3600"),
        (["--interval", "-1"], "--interval: -1 is not"),
        (["--interval", "nan"], "--interval: nan is not"),
        (["--interval", "1e9"], "--interval: 1e+09 is not"),
        (["--view", "partitions"], "--view: there is no 'partitions'; there are brokers, backups"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(command_line, ["top", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_top_without_textual_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "textual.app", None)
    monkeypatch.delitem(sys.modules, "kera.cli.top._app")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run_app(command_line, ["top"]) == 1
    assert "pip install 'kera[top]'" in capsys.readouterr().err


def test_input_that_is_not_utf_8_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a terminal with another encoding. Later keys count."""
    reads, writes = os.pipe()
    keys: queue.Queue[str] = queue.Queue()
    driver = TolerantDriver.__new__(TolerantDriver)
    driver._debug, driver.fileno, driver.exit_event = False, reads, threading.Event()
    monkeypatch.setattr(driver, "process_message", lambda event: keys.put(event.key))
    thread = threading.Thread(target=driver.run_input_thread)
    thread.start()
    try:
        for typed, key in ((b"a", "a"), (b"\xff", ""), (b"q\xe4q", ""), (b"z", "z")):
            os.write(writes, typed)
            while select.select([reads], [], [], 0)[0]:
                pass  # wait until the driver has read it; the time-out of the test bounds the wait
            assert not key or keys.get(timeout=30) == key
    finally:
        driver.exit_event.set()
        thread.join()
        os.close(reads)
        os.close(writes)
    assert keys.empty()
