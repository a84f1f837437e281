"""Latency constraints in `kera top`: rows, details, documents. The tests of the screen are in test_top_app."""

import dataclasses
import json
from typing import Any

import pytest

from kera.cli.top._details import WIDTH, details
from kera.cli.top._document import document, tables
from kera.cli.top._rows import Snapshot
from kera.cli.top._sample import Trouble
from kera.cli.top._snapshot import snapshot
from kera.cli.top._views import BY_NAME, Order, shown
from tests.unit.cli.top_support import NOW_US, constraint, hop, sample

LATENCY = BY_NAME["latency"]
HOPS = (
    hop("clicks", "gather", 20_000, allowed_us=21_000, advised_us=20_000),
    hop("clicks", "send", 1_000),
    hop("clicks", "replicate", 0, chunks=0),
    hop("clicks", "hand-over", 2_000, "enrich"),
    hop("clicks", "prefetch", 500, "enrich"),
    hop("clicks", "work", 600_000, "enrich", violates=True),
    hop("visits", "send", 25_000),
)
LATE_WHY = ("the mean is 648.5 ms, most beyond its part is work",)
LATE = constraint("late", "violated", 648_500, reason=LATE_WHY[0], violations=3, hops=HOPS)


def seen(*found: Any, in_full: tuple[Any, ...] = (), **fields: Any) -> Snapshot:
    listed = [dataclasses.replace(each, hops=()) for each in found]
    return snapshot(sample(constraints=listed, hops={each.constraint.name: each for each in in_full}, **fields))


def cells(found: Snapshot) -> list[list[str]]:
    rows = shown(LATENCY, found, Order.of(LATENCY)).rows
    return [[column.text(row) for column in LATENCY.columns] for row in rows]


def test_constraints_are_sorted_by_used_share_of_the_limit_with_unmeasured_ones_last() -> None:
    quiet, by_p99 = constraint("quiet", "unknown", 0), constraint("tail", statistic="p99", mean_us=15_000)
    assert cells(seen(quiet, by_p99, constraint("on-time"), LATE)) == [
        ["late", "violated", "648 ms", "1.30 s", "300 ms", "216%", "3", "work of clicks to enrich 648 ms", *LATE_WHY],
        ["on-time", "held", "150 ms", "300 ms", "300 ms", "50%", "0", "work of clicks to enrich 150 ms", ""],
        ["tail", "held", "15.0 ms", "30.0 ms", "p99 300 ms", "10%", "0", "work of clicks to enrich 30.0 ms", ""],
        ["quiet", "unknown", "-", "-", "300 ms", "-", "0", "-", ""],
    ]


def test_a_filter_matches_names_states_and_paths() -> None:
    found = seen(LATE, constraint("on-time"))
    for wanted, names in (("LATE", ["late"]), ("held", ["on-time"]), ("enrich", ["late", "on-time"]), ("x", [])):
        assert [row.name for row in shown(LATENCY, found, Order(0, filter=wanted)).rows] == names


def test_the_details_of_a_constraint_have_a_bar_and_all_hops_within_the_width() -> None:
    text = details(LATENCY, "late", seen(LATE, in_full=(LATE,)))
    assert text.startswith("latency constraint late: violated\n\n! the mean is 648.5 ms")
    assert "limit       300 ms, for the mean over 15 s" in text
    assert "took        mean 648 ms, p99 1.30 s at most; 216% of it" in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    (work,) = [line for line in lines if "work" in line and line.startswith("clicks")]
    assert " ".join(work.split()) == "clicks work enrich 600 ms 1.20 s 7: 1.80 s 600 ms - !"
    (bar,) = [line for line in lines if line.startswith("clicks  gg")]
    assert "wwwwwwwwww" in bar


def test_the_details_of_an_unmeasured_constraint_have_dashes_and_no_bar() -> None:
    quiet = constraint("quiet", "unknown", 0, hops=(hop("clicks", "gather", 0, chunks=0),))
    assert "its hops come with the next refresh" in details(LATENCY, "quiet", seen(quiet))
    text = details(LATENCY, "quiet", seen(quiet, in_full=(quiet,)))
    assert "took        mean -, p99 - at most; - of it" in text
    assert "gggg" not in text
    assert details(LATENCY, "gone", seen()) == "latency constraint gone is not there any more"


def test_the_details_of_an_infeasible_constraint_show_its_least_limit() -> None:
    text = details(LATENCY, "c", seen(constraint("c", "infeasible", least_limit_us=900_000)))
    assert "least limit  900 ms" in text


def test_a_document_has_all_constraints_and_the_hops_that_were_read() -> None:
    made = json.loads(json.dumps(document(seen(constraint("on-time"), LATE, in_full=(LATE,))), allow_nan=False))
    on_time, late = made["constraints"]
    assert (on_time["state"], on_time["used"], on_time["hops"], on_time["worst_hop"]["hop"]) == (
        *("held", 0.5, None, "work"),
    )
    assert (late["violations"], len(late["hops"]), late["path"]) == (3, 7, ["clicks", "group:enrich", "visits"])
    assert (made["totals"]["constraints"], made["totals"]["constraints_not_held"]) == (2, 1)


def test_a_thousand_constraints_are_sorted_and_a_few_are_printed() -> None:
    found = seen(*(constraint(f"c{number:04}", mean_us=number) for number in range(1, 1001)))
    first = shown(LATENCY, found, Order.of(LATENCY))
    assert (first.rows[0].name, first.text) == ("c1000", "first 200 of 1000")
    text = tables(found, "c09", 5)
    assert "and 95 more: --rows, or --json" in text
    assert "c0999" in text
    assert "c1000" not in text


@pytest.mark.parametrize("refused", [True, False])
def test_a_note_says_why_constraints_are_not_shown(refused: bool) -> None:
    (note,) = seen(constraints_trouble=Trouble("a reason", NOW_US, refused=refused)).notes
    assert note.startswith("you may not see latency constraints" if refused else "latency constraints are not reported")
