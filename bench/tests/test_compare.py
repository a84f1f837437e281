"""The parts of bench/compare that need no server: workloads, pace, histograms, rounds of workers, figures, reports."""

import base64
import contextlib
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from bench.compare import chart, figures, report
from bench.compare.contestant import REGISTRY, Command, Failed, Role
from bench.compare.figures import Entry, Spread, entries, merged
from bench.compare.kera import SEGMENT_BYTES, Kera, KeraMemory, memory_bytes
from bench.compare.processes import Process
from bench.compare.rounds import OTHERS, Stage, losses, run_workload
from bench.compare.worker import (
    BURST_MAX,
    EARLY_NS_MAX,
    Result,
    Schedule,
    Task,
    Worker,
    due_of,
    early_ns,
    make_keys,
    make_values,
    paced,
    stamped,
)
from bench.compare.workload import FOLDER, BadWorkload, Workload, find, load, names
from kera.cli.bench._latency import Latencies


def workload(**fields: Any) -> Workload:
    return Workload(**{"name": "some", "title": "Some", "record_bytes": 100, "seconds": 1} | fields)


# -- workloads -------------------------------------------------------------------------------------------------


def test_long_workloads_are_valid_and_do_not_run_by_default() -> None:
    paths = sorted((FOLDER / "long").glob("*.toml"))
    assert len(paths) >= 2
    assert [load(path).seconds for path in paths] == [60] * len(paths)
    assert not {path.stem for path in paths} & set(names())


def test_workloads_with_many_streamlets_have_room_for_their_open_segments() -> None:
    paths = sorted((FOLDER / "streamlets").glob("*.toml"))
    assert [each.name for each in find([str(FOLDER / "streamlets")])] == [path.stem for path in paths]
    assert len(paths) == 8
    assert not {path.stem for path in paths} & set(names())
    for each in map(load, paths):
        of_kera = {"segment_bytes": SEGMENT_BYTES, "arena_bytes": memory_bytes(each)} | each.settings.get("kera", {})
        assert each.streamlets * of_kera["segment_bytes"] <= of_kera["arena_bytes"] / 2


def test_a_worker_with_an_invalid_answer_has_failed(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", "print('2026 retrying')"], {})
    process = Process(Task(role="produce", index=0, workload=workload()), command, tmp_path / "log")
    with pytest.raises(Failed, match="2026 retrying"):
        process.answer(60)
    process.end()


def test_all_files_are_workloads_with_the_files_name() -> None:
    assert len(names()) >= 10
    assert [each.name for each in find(names())] == names()


def test_kera_with_a_disk_supports_all_workloads() -> None:
    assert [Kera().supports(each) for each in find(names())] == [None] * len(names())


def test_kera_without_a_disk_does_not_support_persisted_workloads() -> None:
    assert KeraMemory().supports(workload(durability="persisted")) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"durability": "replicated"},
        {"backlog_bytes": "1MB"},
        {"backlog_bytes": "1MB", "consumers": 1, "rate": 10},
        {"consumers": 3, "streamlets": 2},
        {"record_bytes": 4},
        {"clients": 2, "rate": 10},
        {"clients": 2, "send": "record"},
        {"unknown": 1},
    ],
)
def test_an_inconsistent_workload_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        workload(**fields)


def test_the_error_names_a_file_that_is_no_workload(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("seconds = 'many'\n")
    with pytest.raises(BadWorkload, match=r"odd\.toml"):
        load(path)
    with pytest.raises(BadWorkload, match="nobody"):
        find(["nobody"])


def test_a_workload_can_have_settings_for_one_contestant(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('title = "x"\nrecord_bytes = 10\nseconds = 2\n[settings.kera.stream]\nvirtual_logs = 4\n')
    assert load(path).settings == {"kera": {"stream": {"virtual_logs": 4}}}


def test_the_kind_of_a_workload_is_what_it_measures() -> None:
    assert workload().kind == "throughput"
    assert workload(rate=5).kind == "latency"
    assert workload(backlog_bytes="1MB", consumers=1).kind == "backlog"
    for each in (workload(), workload(rate=5), workload(backlog_bytes="1MB", consumers=1)):
        assert figures.kind_of(each.model_dump(mode="json")) == each.kind


def test_shortening_a_workload_never_makes_it_longer() -> None:
    shorter = workload(seconds=2, warm_up_seconds=0.25).shorter(3, 1)
    assert (shorter.seconds, shorter.warm_up_seconds) == (2, 0.25)


def test_kera_has_memory_for_a_backlog_and_for_each_partition() -> None:
    assert memory_bytes(workload(backlog_bytes="4GB", consumers=1)) >= 4 * 10**9
    assert memory_bytes(workload(streamlets=1024)) >= 1024 * 2 * 8 * 2**20


# -- tasks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streams", "streamlets", "producers", "consumers"), [(1, 4, 2, 3), (5, 2, 2, 4), (2, 1, 3, 2)]
)
def test_workers_share_all_partitions(streams: int, streamlets: int, producers: int, consumers: int) -> None:
    some = workload(streams=streams, streamlets=streamlets, producers=producers, consumers=consumers)
    every = [(stream, each) for stream in range(streams) for each in range(streamlets)]
    read = [each for index in range(consumers) for each in Task(role="consume", index=index, workload=some).partitions]
    assert sorted(read) == every
    written = {
        each for index in range(producers) for each in Task(role="produce", index=index, workload=some).partitions
    }
    assert written == set(every)


def test_producers_share_rate_and_backlog() -> None:
    tasks = [Task(role="produce", index=index, workload=workload(rate=100, producers=4)) for index in range(4)]
    assert sum(task.rate for task in tasks) == 100
    backlog = workload(backlog_bytes="1001", record_bytes=10, consumers=1, producers=3)
    assert [Task(role="produce", index=index, workload=backlog).records_max for index in range(3)] == [34, 33, 33]


# -- records ---------------------------------------------------------------------------------------------------


def test_values_have_their_length_and_differ() -> None:
    values = make_values(101, 50)
    assert {len(value) for value in values} == {101}
    assert len(set(values)) == 50


def test_a_stamped_value_contains_its_due_time() -> None:
    assert due_of(stamped(1 << 40, b"rest")) == due_of(memoryview(stamped(1 << 40, b""))) == 1 << 40


def test_zipf_keys_prefer_the_first_and_random_keys_are_even() -> None:
    assert make_keys(workload(), 10) is None
    zipf = make_keys(workload(keys="zipf", key_count=1000), 20_000, seed=1) or []
    even = make_keys(workload(keys="random", key_count=1000), 20_000, seed=1) or []
    assert zipf.count(b"key-%08d" % 0) > 5 * zipf.count(b"key-%08d" % 9) > 0
    assert max(map(even.count, set(even))) < 100


# -- histograms ------------------------------------------------------------------------------------------------


def test_merged_histograms_equal_the_histogram_of_all_times() -> None:
    rng = random.Random(1)
    times = [int(rng.lognormvariate(13, 1)) for _ in range(3000)]
    whole, parts = Latencies(), Latencies()
    for time_ns in times:
        whole.add(time_ns)
    for begin in range(0, 3000, 1000):
        part = Latencies()
        for time_ns in times[begin : begin + 1000]:
            part.add(time_ns)
        parts.add_encoded(part.encode())
    assert parts.count == 3000
    for percentile in (50, 90, 99, 99.9, 100):
        assert parts.ms(percentile) == whole.ms(percentile)
    assert whole.ms(50) == pytest.approx(sorted(times)[1500] / 1e6, rel=0.002)
    assert whole.ms(100) == pytest.approx(max(times) / 1e6, rel=0.002)


def test_times_out_of_range_count_as_the_nearest_valid_time() -> None:
    found = Latencies()
    found.add(0)
    found.add(-5)
    found.add(10**15, 2)
    assert found.count == 4
    assert found.ms(100) == pytest.approx(3.6e6, rel=0.002)


def test_latencies_are_returned_once_and_count_each_record() -> None:
    worker = Worker(Task(role="consume", index=0, workload=workload(rate=5, consumers=1)))
    worker.end_ns = 10
    worker.arrived(5, 5_000_005, 3)
    worker.arrived(10, 20)  # due after the counted time
    found = Latencies()
    found.add_encoded(*worker.take_latencies().values())
    assert found.count == 3
    assert found.ms(50) == pytest.approx(5, rel=0.002)
    assert worker.take_latencies() == {}


# -- pace ------------------------------------------------------------------------------------------------------


class FakeTime:
    """A clock that moves when a task sleeps, or when the test moves it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.slept: list[int] = []

    def now(self) -> int:
        return self.now_ns

    async def sleep_until(self, due_ns: int) -> None:
        self.slept.append(due_ns)
        self.now_ns = max(self.now_ns, due_ns)


async def test_records_are_sent_when_they_are_due() -> None:
    time, late = FakeTime(), list[int]()
    sent = [
        (due, time.now_ns) async for due in paced(Schedule(50, 10**9 + 50, 4), time.sleep_until, late.append, time.now)
    ]
    assert sent == [(50 + each, 50 + each) for each in range(0, 10**9, 250_000_000)]
    assert late == [0] * 4


async def test_records_delayed_by_a_stall_are_sent_later_with_their_due_times() -> None:
    time, late, due_times = FakeTime(), list[int](), list[int]()
    async for due_ns in paced(Schedule(0, 10**9, 1000), time.sleep_until, late.append, time.now):
        due_times.append(due_ns)
        if len(due_times) == 101:
            time.now_ns += 500_000_000
    assert due_times == list(range(0, 10**9, 1_000_000))  # none is left out: the average rate is kept
    assert max(late) == 499_000_000
    assert late[-1] == 0
    # While it was behind, others had their turn after each burst.
    turns = [due_ns // 1_000_000 for due_ns in time.slept]
    assert max(after - before for before, after in pairwise(turns)) == BURST_MAX


def test_a_pacer_spends_at_most_a_tenth_of_its_time_on_waking_early() -> None:
    assert early_ns(10) == EARLY_NS_MAX
    assert early_ns(100_000) == 1000


def test_the_due_times_of_producers_alternate() -> None:
    some = workload(producers=2, rate=1000, seconds=0.04)
    workers = [Worker(Task(role="produce", index=index, workload=some)) for index in range(2)]
    for worker in workers:
        worker.end_ns = 40_000_000
    due_times = [list(worker._schedule(records=10)) for worker in workers]
    assert due_times == [[0, 20_000_000], [10_000_000, 30_000_000]]


# -- lost and repeated records --------------------------------------------------------------------------------


def produced(sent: int, acknowledged: int) -> Result:
    return Result(records=0, bytes=0, start_ns=0, end_ns=1, sent=sent, acknowledged=acknowledged)


def consumed(seen: int) -> Result:
    return Result(records=0, bytes=0, start_ns=0, end_ns=1, seen=seen)


def test_losses_and_repeats_are_reported() -> None:
    assert losses([produced(5, 5), produced(3, 3)], [consumed(8)], stalled=False) == []
    assert "8 records were sent, and 7 acknowledged" in losses([produced(8, 7)], [], stalled=False)
    assert "1 records were seen more than once" in losses([produced(8, 8)], [consumed(9)], stalled=False)
    assert "3 of 8 records were never seen" in losses([produced(8, 8)], [consumed(5)], stalled=True)
    assert losses([produced(8, 8)], [consumed(5)], stalled=False) == []  # the consumers are only slow


# -- rounds of real workers, without a server ------------------------------------------------------------------

WORKER = """
import sys, time
from bench.compare.worker import run, due_of, stamped
pipe = "{pipe}"
def produce(worker):
    worker.begin_blocking()
    with open(pipe, "wb", buffering=0) as out:
        for due_ns in worker.due_blocking():
            out.write(stamped(due_ns, b"rest"))
            worker.sent()
            if worker.task.settings["lose"] and worker._sent % 10 == 0:
                continue
            worker.acknowledged(1, due_ns)
def consume(worker):
    worker.begin_blocking()
    with open(pipe, "rb", buffering=0) as source:
        while not worker.stopped.is_set():
            if value := source.read(12):
                worker.seen(1)
                worker.arrived(due_of(value), time.monotonic_ns())
            else:
                time.sleep(0.01)
sys.exit(run(produce, consume))
"""


class Piped:
    """A file between producer and consumer in place of servers."""

    def __init__(self, folder: Path, *, lose: bool = False) -> None:
        self._pipe = folder / "records"
        self._lose = lose
        self.prepared: list[int] = []

    def processes(self) -> dict[str, int]:
        return {}

    def prepare(self, number: int) -> None:
        self._pipe.write_bytes(b"")
        self.prepared.append(number)

    def worker(self, _role: Role, _index: int) -> Command:
        return Command([sys.executable, "-c", WORKER.format(pipe=self._pipe)], {"lose": self._lose})


def test_a_round_counts_the_records_that_were_due_in_its_time(tmp_path: Path) -> None:
    some = workload(rate=200, consumers=1, seconds=0.5, warm_up_seconds=0.2, record_bytes=12)
    played = Stage(Piped(tmp_path), tmp_path).play(some, 3)
    assert played["errors"] == []
    assert played["produced"]["seconds"] == 0.5
    entry = Entry("some", record([played | {"number": 3}]), some.model_dump(mode="json"))
    for name in ("ack", "end_to_end"):
        found = entry.histogram(name)
        assert found is not None
        assert found.count == 100  # without those of the warm-up
    assert set(played["cpu_s"]) == {"producer-0", "consumer-0"}
    assert played["memory"]["producer-0"]["peak"] > 1 << 20


def test_a_round_with_lost_records_has_failed(tmp_path: Path) -> None:
    some = workload(rate=200, seconds=0.3, warm_up_seconds=0, record_bytes=12)
    played = Stage(Piped(tmp_path, lose=True), tmp_path).play(some, 1)
    assert any("acknowledged" in error for error in played["errors"])


def test_a_failing_workers_message_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    class Broken(Piped):
        def worker(self, _role: Role, _index: int) -> Command:
            return Command([sys.executable, "-c", "raise SystemExit('no luck today')"])

    with pytest.raises(Failed, match="no luck today"):
        Stage(Broken(tmp_path), tmp_path).play(workload(), 1)


def test_an_unavailable_contestant_is_recorded_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "nobody", "bench.compare.nobody:Nobody")
    recorded = run_workload(workload(), ["nobody"], 1, tmp_path)
    assert "cannot be imported" in recorded["contestants"]["nobody"]["reason"]
    assert recorded["contestants"]["nobody"]["rounds"] == []


class Clumsy:
    """A contestant whose servers run, but not for long."""

    name, title = "clumsy", "Clumsy"

    def missing(self) -> None: ...

    def versions(self) -> dict[str, str]:
        return {}

    def supports(self, _workload: Workload) -> None: ...

    def durability(self, _workload: Workload) -> str:
        return ""

    @contextlib.contextmanager
    def start(self, _workload: Workload, folder: Path) -> Iterator[Piped]:
        running = Piped(folder)
        yield running
        raise OSError(f"prepared {running.prepared}, and would not stop")


def test_a_contestant_that_fails_or_does_not_stop_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_self: Piped, _role: Role, _index: int) -> Command:
        raise ValueError("lost its way")

    monkeypatch.setattr(Piped, "worker", broken)
    monkeypatch.setitem(REGISTRY, "clumsy", f"{__name__}:Clumsy")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or SimpleNamespace(Clumsy=Clumsy))
    record = run_workload(workload(), ["clumsy"], 5, tmp_path)["contestants"]["clumsy"]
    assert record["reason"] == "2 rounds failed, the last one with: ValueError: lost its way"
    assert [each["number"] for each in record["rounds"]] == [1]
    assert "prepared [0, 1], and would not stop" in capsys.readouterr().err


# -- figures ---------------------------------------------------------------------------------------------------


def encoded(*times_ms: float) -> str:
    found = Latencies()
    for time_ms in times_ms:
        found.add(int(time_ms * 1e6))
    return found.encode()


def played(mb: float, *, ack_ms: float = 1.0, **fields: Any) -> dict[str, Any]:
    counted = {"records": mb * 1e4, "bytes": mb * 1e6, "seconds": 2.0}
    return {
        "number": 1,
        "servers": ["broker-1"],
        "produced": counted,
        "consumed": None,
        "behind": 0,
        "latencies": {"ack": encoded(*[ack_ms] * 99, 10 * ack_ms)},
        OTHERS: 0.01,
        "cpu_s": {"broker-1": mb / 1000, "producer-0": mb / 2000, "producer-1": mb / 2000},
        "memory": {
            "broker-1": {"peak": 2 << 20, "shared": 1 << 20},
            "producer-0": {"peak": 3 << 20, "shared": 0},
            "producer-1": {"peak": 4 << 20, "shared": 0},
        },
        "load": 0.5,
        "errors": [],
    } | fields


def record(rounds: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"title": "Some", "versions": {"some": "1.0"}, "durability": "acks=1", "reason": None}
    return base | {"rounds": rounds} | fields


def recorded(contestants: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"workload": workload(**fields).model_dump(mode="json"), "contestants": contestants}


def results(*workloads: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    machine = {
        "cores": 2,
        "cpu": "Some CPU",
        "memory_bytes": 8 << 30,
        "file_system": "ext4",
        "kernel": "6",
        "python": "3",
        "load": 0.1,
    }
    run = {"time": "2026-01-02T03:04:05+0000", "machine": machine, "rounds": 2, "quick": quick}
    return {"format": report.FORMAT, "runs": [run], "workloads": list(workloads)}


def test_a_ratio_is_of_medians_with_the_extreme_rounds_as_bounds() -> None:
    assert Spread((2, 4, 6)).over(Spread((1, 2, 4))) == (2, 0.5, 6)
    assert Spread((1,)).over(Spread((0, 1))) is None


def test_an_entry_has_figures_for_each_process() -> None:
    entry = Entry("some", record([played(200), played(400), played(300)]), workload().model_dump(mode="json"))
    assert entry.mb_per_s("produced") == Spread((100, 200, 150))
    assert entry.mb_per_s("consumed") is None
    assert entry.processes == ["broker-1", "producers"]
    assert entry.cpu("broker-1") == Spread((1, 1, 1))  # seconds per GB
    assert entry.cpu("producers") == Spread((1, 1, 1))
    assert entry.total(entry.memory_bytes, entry.clients) == 7 << 20
    assert entry.shared_bytes("broker-1") == Spread((1 << 20,) * 3)
    p50 = entry.latency_ms("ack", 50)
    assert p50 is not None
    assert p50.median == pytest.approx(1, rel=0.002)


def test_processor_time_at_a_rate_is_a_part_of_a_core() -> None:
    entry = Entry("some", record([played(200)]), workload(rate=100).model_dump(mode="json"))
    assert entry.cpu("broker-1") == Spread((0.1,))


def test_failed_rounds_have_no_figures() -> None:
    failed = {"number": 2, "errors": ["lost"]}
    entry = Entry("some", record([played(200), failed]), workload().model_dump(mode="json"))
    assert entry.mb_per_s("produced") == Spread((100,))
    assert entry.failures == ["round 2: lost"]


def test_kera_comes_first() -> None:
    found = entries(recorded({"kafka": record([]), "kera": record([])}))
    assert [entry.name for entry in found] == ["kera", "kafka"]


def test_runs_are_merged() -> None:
    first = results(recorded({"kera": record([played(200)]), "nats": record([], reason="not here")}))
    second = results(
        recorded({"kera": record([played(300)]), "nats": record([played(100)])}), recorded({}, name="more")
    )
    both = merged([first, second])
    assert [each["workload"]["name"] for each in both["workloads"]] == ["some", "more"]
    contestants = both["workloads"][0]["contestants"]
    assert len(contestants["kera"]["rounds"]) == 2
    assert contestants["nats"]["reason"] is None
    assert len(both["runs"]) == 2


def test_runs_with_different_workloads_of_one_name_are_not_merged() -> None:
    with pytest.raises(ValueError, match="some"):
        merged([results(recorded({})), results(recorded({}, record_bytes=50))])


# -- reports ---------------------------------------------------------------------------------------------------


def test_a_report_shows_the_results_and_why_others_were_not_run(tmp_path: Path) -> None:
    contestants = {
        "kera": record([played(400), played(600)], title="KerA"),
        "kafka": record([played(100), played(200)], title="Kafka 4"),
        "nats": record([], title="NATS", reason="there is no nats-server"),
        "redis": record([{"number": 1, "errors": ["5 records were lost"]}], title="Redis"),
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(recorded(contestants), quick=True)))
    assert report.main([str(path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| KerA | 250 (200–300) | 2.5 (2–3) | – |" in text
    assert "| Kafka 4 | 75 (50–100) | 0.75 (0.5–1) | 3.33 (2–6) |" in text
    assert "NATS was not run: there is no nats-server" in text
    assert "Redis, round 1: 5 records were lost" in text
    assert "Quick" in text
    assert "(some.png)" in text
    assert (tmp_path / "some.png").stat().st_size > 10_000


def test_a_report_of_latencies_has_percentiles_and_curves(tmp_path: Path) -> None:
    contestants = {
        "kera": record([played(1, ack_ms=1)], title="KerA"),
        "kafka": record([played(1, ack_ms=4)], title="Kafka 4"),
    }
    report.write(results(recorded(contestants, rate=100)), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| Kafka 4 | 4 | 4 | 4 | 40 | 40 | 0.25 (0.25–0.25) | 0.25 (0.25–0.25) |" in text
    assert "part of a core" in text


def test_a_workload_without_results_has_no_plot(tmp_path: Path) -> None:
    report.write(results(recorded({"nats": record([], title="NATS", reason="not here")})), tmp_path)
    assert "NATS was not run: not here" in (tmp_path / "report.md").read_text()
    assert list(tmp_path.glob("*.png")) == []


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format"):
        report.write(results() | {"format": 99}, tmp_path)


def test_histograms_are_recorded_as_text() -> None:
    assert base64.b64decode(encoded(1))


# -- the chart -------------------------------------------------------------------------------------------------


def recorded_run(day: int, **changes: Any) -> dict[str, Any]:
    """A run of all charted workloads, in which KerA writes most and Redis has the lowest latency."""
    contestants: dict[str, Any] = {}
    for place, name in enumerate(chart.NAMES):
        times = Latencies()
        times.add(1_000_000 * (9 - place), 10)
        played = {
            "errors": [],
            "produced": {"bytes": 10**8 * (9 - place), "records": 1, "seconds": 1.0},
            "latencies": {"ack": times.encode(), "end_to_end": times.encode()},
        }
        contestants[name] = {"title": name, "versions": {}, "durability": "", "reason": None, "rounds": [played]}
    machine = {"cores": 2, "cpu": "<a model>"}
    return {
        "runs": [{"time": f"2026-11-{day}T00:00:00", "rounds": 1, "quick": False, "machine": machine} | changes],
        "workloads": [{"workload": {"name": name}, "contestants": contestants} for name in sorted(chart.WANTED)],
    }


def test_the_chart_has_every_contestant_with_losses_and_wins() -> None:
    texts = re.findall(r"<text( class=\"best\")?[^>]*>([^<]*)<", chart.draw(recorded_run(22)))
    assert [words for _, words in texts].count("Kafka") == 6
    assert [words for best, words in texts if best] == ["900"] * 3 + ["5, 5"] * 3
    assert any("(&lt;a model&gt;)" in words for _, words in texts)


def test_the_chart_names_a_contestant_that_did_not_take_part() -> None:
    run = recorded_run(22)
    run["workloads"][0]["contestants"]["nats"]["rounds"] = []
    assert "did not take part" in chart.draw(run)


def test_the_chart_shows_failed_rounds() -> None:
    run = recorded_run(22)
    lost = {"number": 2, "errors": ["5 records were lost"]}
    contestants = run["workloads"][2]["contestants"]
    contestants["rabbitmq"]["rounds"].append(lost)
    contestants["nats"]["rounds"] = [lost]
    texts = re.findall(r">([^<]*)</text>", chart.draw(run))
    assert {"700, rounds failed", "rounds failed"} <= set(texts)


def test_the_chart_shows_the_latest_complete_run(tmp_path: Path) -> None:
    runs = [recorded_run(22), recorded_run(23), recorded_run(24, quick=True), recorded_run(25)]
    del runs[3]["workloads"][0]
    assert chart.latest(tmp_path) is None
    for number, run in enumerate(runs):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "results.json").write_text(json.dumps(run))
    assert chart.latest(tmp_path) == runs[1]


def test_the_chart_of_the_readme_shows_the_latest_recorded_run() -> None:
    recorded = chart.latest(FOLDER.parent / "results")
    assert recorded is not None
    assert chart.OUT.read_text(encoding="utf-8") == chart.draw(recorded)
