"""`kera top`: rates, slow members and their reasons, rows on the screen, and documents computed from samples."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.cli.top._details import details
from kera.cli.top._document import document, tables
from kera.cli.top._rates import quantile_s, rate, seconds_between, stream_rates
from kera.cli.top._rows import EpochEntry
from kera.cli.top._sample import Trouble, Two
from kera.cli.top._snapshot import snapshot
from kera.cli.top._text import count_text, ms_text, size_text
from kera.cli.top._views import BY_NAME, VIEWS, Order, shown
from kera.client import ConsumerGroupSummary
from kera.client.admin.daemons import DaemonFigures, StreamFigures
from kera.client.diagnosis.findings import ok, problem, warning
from tests.unit.cli.top_support import (
    NOW_US,
    SECOND_US,
    backup,
    broker,
    cluster,
    constraint,
    counted,
    entry,
    figures,
    group,
    looks,
    member,
    sample,
    stream,
    two,
    with_figure,
)

RECORDS = "kera_broker_records_appended_total"


# -- rates ---------------------------------------------------------------------------------------------------------


def test_a_rate_uses_the_clock_of_the_daemon() -> None:
    assert rate(two(figures(10, records_appended=100), figures(12, records_appended=300)), RECORDS) == 100


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, figures(1, records_appended=5)),
        (figures(1, records_appended=5), figures(1, records_appended=7)),
        (figures(2, records_appended=5), figures(1, records_appended=7)),
        (figures(10, "a", records_appended=5), figures(11, "b", records_appended=7)),
    ],
    ids=["first", "same moment", "backwards", "started again"],
)
def test_answers_that_are_not_consecutive_give_no_rate(before: DaemonFigures | None, now: DaemonFigures) -> None:
    assert rate(two(before, now), RECORDS) is None
    assert stream_rates(two(before, now)) == {}
    assert quantile_s(two(before, now), "kera_broker_append_seconds", 0.99) is None


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 1 << 62), st.integers(0, 1 << 62), st.booleans())
def test_a_rate_is_never_negative(began_s: float, ended_s: float, before: int, now: int, same: bool) -> None:
    made = two(figures(began_s, records_appended=before), figures(ended_s, "a" if same else "b", records_appended=now))
    found = rate(made, RECORDS)
    assert (found is None) == (seconds_between(made) is None)
    assert found is None or found >= 0


def test_a_counter_that_starts_again_counts_from_zero() -> None:
    """As when a broker gives a stream away and gets it again."""
    made = two(figures(1, streams={7: counted(100)}), figures(3, streams={7: counted(10), 8: counted(4)}))
    assert {key: found.records for key, found in stream_rates(made).items()} == {7: 5, 8: 2}


def test_a_counter_that_a_daemon_lacks_has_the_rate_zero() -> None:
    assert rate(two(figures(1), figures(2)), RECORDS) == 0


def test_quantiles_cover_only_the_time_between_two_answers() -> None:
    name = "kera_broker_append_seconds"

    def counts(uptime_s: float, *counts: float) -> DaemonFigures:
        found = figures(uptime_s)
        for bound, count in zip(("0.001", "0.01", "+Inf"), counts, strict=True):
            found = with_figure(found, f"{name}_bucket", count, "answered", "later", "le", bound)
        return with_figure(found, f"{name}_bucket", 1e9, "odd", "one")

    old = counts(1, 1000, 1000, 1000)
    assert quantile_s(two(old, counts(2, 1000, 1000, 1000)), name, 0.99) is None
    assert quantile_s(two(old, counts(2, 1099, 1100, 1100)), name, 0.99) == 0.001
    assert quantile_s(two(old, counts(2, 1050, 1100, 1100)), name, 0.99) == 0.01
    assert quantile_s(two(old, counts(2, 1000, 1000, 1100)), name, 0.99) == 0.01  # the last bucket has no upper bound


# -- brokers, backups, streams -------------------------------------------------------------------------------------


def test_the_figures_of_brokers_are_added_up() -> None:
    found = snapshot(
        sample(
            cluster=cluster(brokers=2),
            figures={
                "broker 1": two(
                    figures(1, records_appended=0, bytes_appended=0, bytes_read=0, push_bytes=0),
                    figures(2, records_appended=10, bytes_appended=1000, bytes_read=5, push_bytes=6),
                ),
                "broker 2": two(None, figures(9, records_appended=32, bytes_appended=500)),
            },
        )
    )

    first, second = found.brokers
    assert (first.records_in_per_s, first.bytes_in_per_s, first.bytes_out_per_s) == (10, 1000, 11)
    assert (second.records_in_per_s, second.records_in) == (None, 32)
    assert (found.totals.records_in_per_s, found.totals.records_in, found.totals.bytes_in) == (10, 42, 1500)
    assert found.health == "unknown"


def test_a_silent_broker_is_shown_with_its_last_figures_and_the_time_of_silence() -> None:
    trouble = Trouble("no answer within 3 s", NOW_US - 5 * SECOND_US)
    found = snapshot(
        sample(
            figures={"broker 1": two(figures(1, records_appended=0), figures(2, records_appended=10))},
            troubles={"broker 1": trouble},
            streams=[stream(7, "orders", 1)],
        )
    )

    (row,) = found.brokers
    assert (row.state, row.records_in, row.records_in_per_s, row.since_us) == ("no answer", 10, None, trouble.since_us)
    assert "no answer within 3 s" in row.why[0]
    assert found.streams[0].state == "no answer"
    assert found.totals.records_in_per_s is None


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "not asked"),
        ({"alive": False}, "lost"),
        ({"alive": False, "restarting": True}, "restarting"),
        ({"restarting": True}, "stopping"),
    ],
)
def test_members_without_figures_have_the_state_that_the_coordinator_reports(
    fields: dict[str, bool], state: str
) -> None:
    known = dataclasses.replace(cluster(), brokers=[broker(1, **fields)], backups=[backup(1, **fields)])
    found = snapshot(sample(cluster=known))
    assert (found.brokers[0].state, found.backups[0].state) == (state, state)
    assert (found.brokers[0].bytes_in_per_s, found.backups[0].bytes_in_per_s) == (None, None)


def test_a_slow_broker_is_shown_with_all_reasons() -> None:
    before, now = figures(1, chunks_refused=0), figures(2, chunks_refused=3)
    for name, value, *labels in (
        ("kera_broker_replication_lag_ms", 2500),
        ("kera_broker_replication_lag_bytes", 4 << 20),
        ("kera_broker_disk_failing", 1),
        ("kera_broker_virtual_segments_deficient", 2),
        ("kera_processor_seconds_total", 0.97, "of", "loop"),
        ("kera_broker_append_seconds_bucket", 100, "le", "1.0"),
        ("kera_broker_backup_answer_ms", 120, "backup", "1"),
        ("kera_broker_backup_answer_ms", 480, "backup", "2"),
    ):
        now = with_figure(now, str(name), float(value), *map(str, labels))
    found = snapshot(
        sample(figures={"broker 1": two(before, now)}, findings=[warning("broker 1", "its clock is off", "set it")])
    )

    assert list(found.brokers[0].why) == [
        "its disk takes no data",
        "its backups are 2.5 s behind, 4 MiB",
        "waits for backup 2, which takes 480 ms to answer",
        "its event loop is busy for 97% of the time",
        "one write in a hundred takes 1 s or longer",
        "2 virtual segments with too few replicas",
        "refuses 3 chunks/s",
        "its clock is off",
    ]
    assert found.health == "degraded"


def test_brokers_name_the_slow_backup_and_the_backup_names_the_slowest_waiting_broker() -> None:
    known = dataclasses.replace(cluster(), brokers=[broker(1), broker(2)], backups=[backup(1), backup(2)])
    answers = {"broker 1": {"1": 3, "2": 700}, "broker 2": {"1": 4, "2": 900}}
    told = {name: figures(2) for name in answers}
    for name, by_backup in answers.items():
        for backup_id, ms in by_backup.items():
            told[name] = with_figure(told[name], "kera_broker_backup_answer_ms", ms, "backup", backup_id)
    found = snapshot(sample(cluster=known, figures={name: two(figures(1), now) for name, now in told.items()}))

    assert [list(row.why) for row in found.brokers] == [
        ["waits for backup 2, which takes 700 ms to answer"],
        ["waits for backup 2, which takes 900 ms to answer"],
    ]
    assert [list(row.why) for row in found.backups] == [[], ["broker 2 waits 900 ms for an answer; look at its disk"]]


def test_a_stream_sums_up_its_brokers_and_names_the_lost_ones() -> None:
    known = dataclasses.replace(cluster(), brokers=[broker(1), broker(2), broker(3, alive=False)])
    found = snapshot(
        sample(
            cluster=known,
            streams=[stream(7, "orders", 1, 1, 2), stream(8, "gone", 3), stream(9, "far", 1)],
            figures={
                "broker 1": two(
                    figures(1, streams={7: counted(0), 9: counted(0)}),
                    figures(2, streams={7: counted(10, 100), 9: counted(0, lag_ms=1500)}),
                ),
                "broker 2": two(figures(1, streams={7: counted(5)}), figures(3, streams={7: counted(15, 60)})),
                "broker 3": two(figures(1, streams={8: counted(1)}), figures(2, streams={8: counted(9)})),
            },
        )
    )

    orders, gone, far = found.streams
    assert (orders.records_in_per_s, orders.records_in, orders.bytes_in, orders.state) == (15, 25, 160, "ok")
    assert [(part.broker_id, part.streamlets, part.records_in_per_s) for part in orders.parts] == [
        (1, 2, 10),
        (2, 1, 5),
    ]
    assert (gone.state, gone.records_in_per_s) == ("no owner", None)
    assert gone.why == ("broker 3, which has 1 streamlet, is not alive",)
    assert (far.state, far.why) == ("lag", ("backups are 1.5 s behind",))


def test_a_stream_names_the_entry_that_holds_up_its_epochs() -> None:
    def settled(lag_ms: int, held_up_ms: int, *entry: int) -> StreamFigures:
        streamlet, number = entry
        return counted(0)._replace(epoch_lag_ms=lag_ms, epochs_held_up_ms=held_up_ms, epoch_entry=(streamlet, number))

    now = {1: settled(900, 0, 0, 1), 2: settled(1200, 0, 2, 0), 3: counted(0), 4: settled(10**10, 0, 0, 0)}
    found = snapshot(
        sample(
            cluster=cluster(brokers=2),
            streams=[stream(1, "fine", 1, 2), stream(2, "late", 1, 2), stream(3, "none", 1), stream(4, "history", 1)],
            figures={
                "broker 1": two(None, figures(2, streams=now)),
                "broker 2": two(
                    None, figures(2, streams={1: settled(1000, 0, 1, 0), 2: settled(61_000, 60_000, 3, 1)})
                ),
            },
        )
    )

    fine, late, none, history = found.streams
    assert (fine.epoch_lag_ms, fine.epochs_held_up_ms, fine.state) == (1000, 0, "ok")
    assert fine.epoch_entry == EpochEntry(2, 1, 0)
    assert (late.state, late.why) == ("held up", ("epochs wait for streamlet 3 at broker 2, which is 61 s behind",))
    assert (none.epoch_lag_ms, none.epochs_held_up_ms, none.epoch_entry) == (None, None, None)
    assert (history.state, history.epochs_held_up_ms) == ("ok", 0), "its times are not now"
    assert "waits for entry 1 of streamlet 3 at broker 2, 61 s behind" in details(BY_NAME["streams"], "late", found)
    assert "next epoch" not in details(BY_NAME["streams"], "none", found)
    assert document(found)["streams"][1]["epoch_entry"] == {"broker_id": 2, "streamlet": 3, "entry": 1}
    (line,) = [line for line in tables(found, "late").splitlines() if line.startswith("late")]
    assert "61 s" in line


def test_refused_parts_are_named_in_notes() -> None:
    refused = Trouble("user:eve may not describe the cluster", NOW_US, refused=True)
    found = snapshot(
        sample(
            cluster=None,
            cluster_trouble=refused,
            troubles={"broker 1": refused},
            groups_trouble=refused,
            findings_trouble=refused,
            streams=[stream(7, "mine", 1)],
        )
    )

    assert [row.name for row in found.streams] == ["mine"]
    assert [note.partition(":")[0] for note in found.notes] == [
        "you may not see brokers and backups",
        "you may not see figures of daemons",
        "you may not see consumer groups",
        "you may not see findings",
    ]
    assert found.health == "unknown"


def test_a_lost_coordinator_is_noted_and_its_last_answer_stays_on_the_screen() -> None:
    lost = Trouble("connection refused", NOW_US)
    found = snapshot(sample(cluster_trouble=lost, streams_trouble=lost))
    assert found.health == "broken"
    (note,) = found.notes
    assert note.startswith("no coordinator answers since ")
    assert note.endswith("connection refused; what is shown was last heard before that")
    assert len(found.brokers) == 1


# -- groups --------------------------------------------------------------------------------------------------------


def test_a_group_shows_its_lag_and_the_growth_of_its_lag() -> None:
    found = snapshot(
        sample(
            groups=[group("g", streams=("s", "t"))],
            lags={
                "g": looks(
                    "g",
                    [entry("s", 30, age_s=12), entry("t", 10, age_s=2)],
                    [entry("s", 20), entry("t", 0)],
                    (member(500),),
                    (member(200),),
                )
            },
        )
    )

    (row,) = found.groups
    assert (row.lag_records, row.lag_bytes, row.behind_ms, row.lag_per_s, row.bytes_per_s) == (40, 400, 12_000, 20, 300)
    assert (row.kind, row.state) == ("consumers", "behind")
    assert row.why == ("more comes than it reads: 20 records/s",)
    assert [(each.stream, each.lag_records) for each in row.of_streams] == [("s", 30), ("t", 10)]
    assert found.totals.group_lag_records == 40


def test_a_group_that_does_not_read_shows_the_reason() -> None:
    lags = {
        "stuck": looks("stuck", [entry("s", 1)], members=(member(busy_ms=40_000),)),
        "silent": looks("silent", [entry("s", 0)], members=(member(silent_ms=6000),)),
        "dark": looks("dark", [entry("s", None)]),
        "spark-kera-source-1": looks("spark-kera-source-1", [entry("s", 7, age_s=60)]),
        "named": looks("named", [entry("s", 0)]),
    }
    groups = [
        *(group(name) for name in ("stuck", "silent", "dark")),
        *(group(name, 0, 60_000) for name in ("spark-kera-source-1", "named", "unseen")),
    ]
    found = {row.name: row for row in snapshot(sample(groups=groups, lags=lags)).groups}

    assert found["stuck"].state == "stuck"
    assert found["stuck"].why == ("host:1 has been at one batch for 40 s",)
    assert found["silent"].why == ("host:1 has been silent for 6 s",)
    assert (found["dark"].state, found["dark"].lag_records) == ("unknown", None)
    assert found["dark"].why == ("brokers do not report its progress in s",)
    query = found["spark-kera-source-1"]
    assert (query.kind, query.state, query.why) == ("spark", "behind", ("no reads for 60 s",))
    assert (found["named"].kind, found["named"].state) == ("cursor", "idle")
    assert snapshot(sample(groups=[ConsumerGroupSummary("made-up", ("s",), 0, unnamed=True)])).groups[0].kind == "spark"
    assert (found["unseen"].state, found["unseen"].lag_records) == ("unknown", None)


# -- rows on the screen --------------------------------------------------------------------------------------------


def busy(count: int) -> DaemonFigures:
    return figures(2, streams={number: counted(number) for number in range(1, count + 1)})


def many(count: int) -> dict[str, Two]:
    return {"broker 1": two(figures(1), busy(count))}


def test_rows_are_sorted_filtered_and_limited() -> None:
    found = snapshot(
        sample(streams=[stream(number, f"s{number:05}", 1) for number in range(1, 1001)], figures=many(999))
    )
    view = BY_NAME["streams"]

    first = shown(view, found, Order.of(view))
    assert (len(first.rows), first.rows[0].name, first.text) == (200, "s00999", "first 200 of 1000")
    turned = shown(view, found, Order.of(view)._replace(reverse=True), 3)
    assert [row.name for row in turned.rows] == ["s00001", "s00002", "s00003"]
    filtered = shown(view, found, Order(0, filter="S0001"))
    assert [row.name for row in filtered.rows] == [f"s{number:05}" for number in range(10, 20)]
    assert filtered.text == "10 of 1000"
    assert shown(view, found, Order(2), 1000).rows[-1].name == "s01000"  # its rate is unknown
    assert shown(view, found, Order(2, reverse=True), 1000).rows[-1].name == "s01000"
    assert shown(view, found, Order(0, filter="nothing like it")).rows == []


@pytest.mark.parametrize("view", VIEWS, ids=[view.name for view in VIEWS])
def test_every_column_can_sort_the_rows_and_has_a_text(view: object) -> None:
    found = snapshot(
        sample(
            cluster=cluster(2, 2),
            streams=[stream(1, "a", 1), stream(2, "b", 2)],
            figures=many(1),
            groups=[group("g"), group("h", 0, 5)],
            lags={"g": looks("g", [entry("s", 3)])},
            findings=[ok("disks", "well"), problem("broker 1", "not well", "mend it")],
            constraints=[constraint("c"), constraint("d", "unknown", 0)],
        )
    )
    for each in VIEWS:
        if each is not view:
            continue
        for number, column in enumerate(each.columns):
            rows = shown(each, found, Order(number)).rows
            assert len(rows) == 2
            assert all(isinstance(column.text(row), str) for row in rows)
        for row in each.rows(found):
            assert details(each, each.key(row), found).strip()
        assert details(each, "who", found).endswith("who is not there any more")


def test_a_document_has_the_figures_of_the_views_and_is_valid_json() -> None:
    found = snapshot(
        sample(
            streams=[stream(1, "a", 1)], figures=many(1), groups=[group("g")], findings=[warning("disks", "full", "x")]
        )
    )
    made = json.loads(json.dumps(document(found), allow_nan=False))
    assert made["streams"][0]["records_in"] == 1
    assert made["streams"][0]["records_in_per_s"] == 1.0
    assert made["findings"] == [{"severity": "warning", "subject": "disks", "text": "full", "advice": "x"}]
    assert "GROUP" in tables(found)
    assert "disks" in tables(found)


def test_tables_show_the_number_of_omitted_rows() -> None:
    found = snapshot(sample(streams=[stream(number, f"s{number}", 1) for number in range(30)]))
    assert "and 28 more: --rows, or --json" in tables(found, rows_max=2)
    assert "s7" not in tables(found, "s2", rows_max=30)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.25, "0.2"), (7, "7"), (12.6, "13"), (999.96, "1.0k"), (-2370, "-2.4k"), (4.5e6, "4.5M")],
)
def test_counts_are_short(value: float | None, text: str) -> None:
    assert count_text(value) == text


def test_sizes_and_spans_are_short() -> None:
    assert [size_text(value) for value in (None, 0.4, 1024, 1.5e6)] == ["-", "0 B", "1 KiB", "1.4 MiB"]
    assert [ms_text(value) for value in (None, 0.25, 766, 5590)] == ["-", "0.25 ms", "766 ms", "5.59 s"]
