"""The pages of latency constraints."""

from __future__ import annotations

import dataclasses

import pytest

from kera.client import Latency, LatencyConstraint, LatencyDescription, LatencyHop
from kera.console.pages.latency import WIDTH, bars
from kera.console.web.words import microseconds
from kera.core.errors import NotAllowed, UnknownLatencyConstraint
from tests.unit.console.conftest import MakeBrowser


def hop(stream: str, name: str, mean_us: int, group: str = "", *, violates: bool = False) -> LatencyHop:
    return LatencyHop(stream, name, group, 100, mean_us, mean_us * 2, mean_us * 3, 7, mean_us, 0, violates=violates)


HOPS = (
    hop("clicks", "gather", 100_000),
    hop("clicks", "send", 10_000),
    hop("clicks", "work", 200_000, "enrich", violates=True),
    dataclasses.replace(hop("visits", "gather", 0), chunks=0),
    hop("visits", "send", 90_000),
)
FOUND = LatencyDescription(
    LatencyConstraint("checkout", ("clicks", "group:enrich", "visits"), 300.0, 15_000, "mean"),
    "violated",
    "the mean is <400 ms>",
    400_000,
    800_000,
    0,
    3,
    HOPS,
    worst_hop=HOPS[2],
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> list[LatencyDescription]:
    """The existing constraints; a fake cluster has none."""
    found = [FOUND, dataclasses.replace(FOUND, constraint=dataclasses.replace(FOUND.constraint, name="other"), hops=())]

    async def constraints(_: Latency) -> list[LatencyDescription]:
        return [dataclasses.replace(each, hops=()) for each in found]

    async def describe(_: Latency, name: str) -> LatencyDescription:
        for each in found:
            if each.constraint.name == name:
                return each
        raise UnknownLatencyConstraint(f"there is no latency constraint {name!r}", name=name)

    monkeypatch.setattr(Latency, "constraints", constraints)
    monkeypatch.setattr(Latency, "describe", describe)
    return found


def test_each_hop_begins_at_the_end_of_the_previous_one() -> None:
    found = bars(HOPS, 300_000, by_p99=False)
    clicks, visits = found.lanes
    assert (clicks.stream, clicks.took_us, visits.took_us) == ("clicks", 310_000, 90_000)
    assert [piece.x for piece in clicks.pieces] == [0.0, 150.0, 165.0]
    assert visits.pieces[0].x == visits.pieces[1].x == 465.0
    assert visits.pieces[1].x + visits.pieces[1].width == pytest.approx(WIDTH)
    assert found.limit_x == pytest.approx(WIDTH * 0.75)
    assert bars(HOPS, 300_000, by_p99=True).lanes[0].took_us == 620_000
    assert bars(HOPS[3:4], 300_000, by_p99=False).lanes[0].pieces[0].width == 0
    assert bars((), 300_000, by_p99=False).lanes == []


@pytest.mark.parametrize(
    ("time_us", "text"), [(0, "0 ms"), (120, "0.12 ms"), (4_200, "4.2 ms"), (130_000, "130 ms"), (2_500_000, "2.5 s")]
)
def test_short_times_have_more_digits(time_us: int, text: str) -> None:
    assert microseconds(time_us) == text


async def test_a_constraint_shows_the_clock_error_and_overridden_lingers(
    console: MakeBrowser, known: list[LatencyDescription]
) -> None:
    browser = await console()
    text = (await browser.get("/latency/constraint?name=checkout")).text
    assert "known to within" not in text
    assert "linger_ms" not in text
    own = dataclasses.replace(HOPS[0], own_linger_us=500_000)
    over = dataclasses.replace(hop("clicks", "hand-over", 1, "enrich"), clock_error_us=400)
    known[0] = dataclasses.replace(FOUND, hops=(own, over))
    text = (await browser.get("/latency/constraint?name=checkout")).text
    assert "Clocks of writers and readers are known to within 0.40 ms" in text
    assert "A producer of clicks has a <code>linger_ms</code> of its own, 500 ms" in text


async def test_constraints_are_listed_and_found_by_their_path(console: MakeBrowser) -> None:
    browser = await console()
    text = (await browser.get("/latency")).text
    assert "2 constraints" in text
    assert 'href="/latency/constraint?name=checkout"' in text
    assert 'href="/streams/visits"' in text
    assert 'href="/group?name=enrich"' in text
    assert "violated" in text
    assert "work of clicks to enrich, 200 ms" in text
    assert "other" not in (await browser.get("/latency?q=check")).text.partition("<tbody>")[2]
    assert "no constraint has “orders”" in (await browser.get("/latency?q=orders")).text
    assert 'aria-current="page">Latency' in text


async def test_an_empty_list_of_constraints_shows_the_command_that_creates_one(
    console: MakeBrowser, known: list[LatencyDescription]
) -> None:
    known.clear()
    assert "kera latency create" in (await (await console()).get("/latency")).text


async def test_a_constraint_is_drawn_against_its_limit(console: MakeBrowser) -> None:
    browser = await console()
    answer = await browser.get("/latency/constraint?name=checkout")
    assert answer.status == 200
    assert "the mean is &lt;400 ms&gt;" in answer.text
    assert '<rect class="hop work" x="165.0" width="300.0"' in answer.text
    assert 'class="limit" x1="450.0"' in answer.text
    assert answer.text.count("too long") == 1
    assert "nothing was measured" in answer.text
    assert "style=" not in answer.text
    other = await browser.get("/latency/constraint?name=other")
    assert (other.status, "Hops" in other.text) == (200, True)


async def test_a_missing_invalid_or_forbidden_constraint_is_an_error_page(
    console: MakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = await console()
    answer = await browser.get("/latency/constraint?name=gone")
    assert (answer.status, "There is no such latency constraint" in answer.text) == (404, True)
    assert (await browser.get("/latency/constraint")).status == 400
    assert (await browser.get("/latency/constraint?name=" + "x" * 300)).status == 400

    async def denied(_: Latency) -> list[LatencyDescription]:
        raise NotAllowed("user:alice may not", principal="user:alice", operation="describe", resource="stream:clicks")

    monkeypatch.setattr(Latency, "constraints", denied)
    assert (await (await console()).get("/latency")).status == 403
