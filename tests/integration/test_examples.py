"""The examples that need no Spark: their output matches an independent computation without streams."""

from __future__ import annotations

import asyncio
import runpy
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client
from kera.local.cluster import RunningCluster

pytestmark = pytest.mark.timeout(180)
EXAMPLES = Path(__file__).parents[2] / "examples"


async def streams(cluster: RunningCluster) -> list[str]:
    async with await Client.connect(cluster.bootstrap) as client:
        return [each.name for each in await client.admin.list_streams()]


@pytest.fixture
def run(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The globals of an example after it has ended and its streams are gone."""

    def run(name: str) -> dict[str, Any]:
        before = asyncio.run(streams(cluster))
        monkeypatch.setattr(sys, "argv", [name, "--bootstrap", cluster.bootstrap])
        made = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert asyncio.run(streams(cluster)) == before
        return made

    return run


@pytest.mark.slow
def test_both_readers_of_top_routes_report_the_most_frequent_routes(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run("top_routes")
    output = capsys.readouterr().out
    assert output.count("45 epochs with 6000 rides, 0 of them late") == 2
    assert "the ten have changed 351 times" in output
    assert "from 151.164 to 165.165: 214\n" in output
    assert "the other reader tells the same\ndigest of all changes: 47f00ec4af24f5af\n" in output

    by_depot = [(row["dropped_off"], depot, row) for depot, rows in enumerate(made["made_up_rides"]()) for row in rows]
    routes = []
    for at, _, row in sorted(by_depot, key=lambda each: each[:2]):
        start = made["cell"](row["from_latitude"], row["from_longitude"])
        stop = made["cell"](row["to_latitude"], row["to_longitude"])
        routes += [(at, (start, stop))] if start and stop else []
    assert 5000 < len(routes) < 6000, "some places are not in the grid"
    times = [at for at, _ in routes]
    expected, before = [], list[Any]()
    for now in sorted({at for at, _, _ in by_depot}):
        begin, end = bisect_left(times, now - made["WINDOW"]), bisect_right(times, now)
        window = [route for _, route in routes[begin:end]]
        counts, latest = Counter(window), {route: number for number, route in enumerate(window)}
        ten = sorted(counts, key=lambda route: (-counts[route], -latest[route]))[:10]
        if ten != before:
            told = (f"from {x}.{y} to {to_x}.{to_y}: {counts[(x, y), (to_x, to_y)]}" for (x, y), (to_x, to_y) in ten)
            expected.append(f"{now:%H:%M:%S} {', '.join(told)}")
            before = ten
    assert made["live"] == expected


def test_sessions_are_found_over_both_streams(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("click_sessions")
    output = capsys.readouterr().out
    assert "10:43-10:50 bob  [web] home search [app] tea [web] jam\n" in output
    assert output.endswith("the other reader finds the same\n")

    of_users: dict[str, list[Any]] = {}
    for click in made["made_up_clicks"]():
        of_users.setdefault(click.user, []).append(click)
    expected = []
    for clicks in of_users.values():
        begins = [at for at, click in enumerate(clicks) if not at or click.at - clicks[at - 1].at > made["GAP"]]
        expected += [clicks[at:to] for at, to in zip(begins, [*begins[1:], None], strict=True)]
    expected.sort(key=lambda session: session[-1].at)
    assert len(made["found"]) == len(expected) > 8
    for line, session in zip(made["found"], expected, strict=True):
        assert line.startswith(f"{session[0].at:%H:%M}-{session[-1].at:%H:%M} {session[0].user}")
        assert [word for word in line.split()[2:] if word[0] != "["] == [click.page for click in session]
