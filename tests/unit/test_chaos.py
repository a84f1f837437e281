"""The verdicts of the chaos programs find a loss, a repeat and a wrong order: a check that cannot fail proves nothing.

The functions of `tests.integration.control_support` have their tests beside them, and so has `latency_truth`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from kera.cli.check._options import Options
from kera.cli.check._run import Outcome
from kera.client import Delivery, EntryId, Position
from kera.core.errors import Unavailable
from tests.chaos import access, control, hostile, spark
from tests.chaos.__main__ import PROGRAMS, main, program_of
from tests.chaos.checked import judge
from tests.chaos.control import Turn, check_no_recovery, check_stall
from tests.chaos.crowd import ASKED, LINES_MAX, MEMORY_MAX, Row, Taken
from tests.chaos.epochs import Query, compare
from tests.chaos.latency import LATENCY, ConstrainedPath, check_records
from tests.chaos.latency_client import KEYS, SLOT_S, Slot
from tests.chaos.latency_truth import Look
from tests.chaos.partitions import BROKER, GOES_ON_S, SILENT_S, Break, Done, cut_off
from tests.chaos.push import Followed, check_shown
from tests.chaos.running import Program, Run, carry_out
from tests.chaos.spark import check_once
from tests.chaos.spark_session import check
from tests.chaos.verdict import Wrong
from tests.integration import replication_support
from tests.integration.support import value_of

ENTRY = EntryId(1, 0, 0)


def delivery(ordinal: int, entry: EntryId = ENTRY) -> Delivery:
    return Delivery("s", entry, Position(1, 1, ordinal), ordinal, 1, "replicated", duplicate=False)


# -- the frame -------------------------------------------------------------------------------------------------------


def ended(work: Callable[[Run], Awaitable[None]], *words: str) -> int:
    return carry_out("it", Program("", "all is well", work, rounds=3, kinds=("a", "b")), words)


async def good(run: Run) -> None:
    for kind in run.kinds():
        run.tell(kind)


async def bad(run: Run) -> None:
    run.tell("a")
    with run.cluster_folder() as folder:
        (folder / "broker.log").write_text("the last words")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lose(1))
            tasks.create_task(lose(2))


async def lose(number: int) -> None:
    raise Wrong(f"record {number} is lost")


def test_a_successful_program_reports_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(good) == 0
    assert "PASSED: all is well: rounds 3" in capsys.readouterr().out


def test_a_failed_program_reports_all_errors_the_logs_and_the_command_to_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(bad, "--rounds", "7", "--kinds", "b", "--seed", "5") == 1
    said = capsys.readouterr().out
    assert "FAILED in round 2: Wrong('record 1 is lost')" in said
    assert "record 2 is lost" in said
    assert "the last words" in said
    assert 'again: make chaos RUN="it --rounds 7 --kinds b --seed 5"' in said
    assert "PASSED" not in said


def test_a_failed_program_without_rounds_names_no_round_and_quotes_its_kinds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work(_: Run) -> None:
        await lose(1)

    program = Program("", "", work, kinds=("idle, frames", "idle, gRPC"), seeded=False)
    assert carry_out("it", program, ["--kinds", "idle, frames"]) == 1
    said = capsys.readouterr().out
    assert """again: make chaos RUN="it --kinds 'idle, frames'\"""" in said
    assert "FAILED: Wrong" in said


@pytest.mark.parametrize("rounds", ["0", "-1"])
def test_a_run_without_rounds_is_refused(rounds: str) -> None:
    with pytest.raises(SystemExit):
        ended(good, "--rounds", rounds)


def test_the_folder_of_a_cluster_is_removed_only_after_success(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert ended(bad, "--keep", str(kept)) == 1
    assert (kept / "cluster-1" / "broker.log").exists()
    run = Program("", "", good, rounds=1).run_of(tmp_path)
    with run.cluster_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_a_seed_determines_the_kinds_and_each_kind_comes_before_any_repeats(tmp_path: Path) -> None:
    program = Program("", "", good, rounds=9, kinds=("a", "b", "c"))
    one, other = (program.run_of(tmp_path, "--seed", "3").kinds() for _ in range(2))
    assert one == other
    assert all(sorted(one[at : at + 3]) == ["a", "b", "c"] for at in range(0, 9, 3))


async def test_a_short_run_takes_options_and_raises_its_errors(tmp_path: Path) -> None:
    run = await Program("", "", good, rounds=9, kinds=("a", "b", "c")).short(tmp_path, rounds=4, kinds=["a", "c"])
    assert (run.seen["rounds"], run.arguments.kinds) == (4, ["a", "c"])
    with pytest.raises(ExceptionGroup):
        await Program("", "", bad).short(tmp_path)


@pytest.mark.parametrize("name", [name for name, entry in PROGRAMS.items() if "Spark" not in entry.text])
def test_every_listed_program_exists(name: str) -> None:
    assert program_of(name).run_of(Path()).arguments.seed >= 0


def test_an_unknown_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "no program nothing" in capsys.readouterr().err
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in PROGRAMS)


# -- kill, control, restart, network, silence: the load and the verdict of `kera check` ------------------------------


def outcome(**found: Any) -> Outcome:
    stream: Any = SimpleNamespace(name="s")
    return Outcome(Options(1.0), "", stream, **{"sent": 9, "acknowledged": 9, **found})


def test_a_check_without_findings_passes() -> None:
    judge("s", outcome())


@pytest.mark.parametrize(
    "found",
    [
        {"counts": {"lost": 1}, "lines": ["record 4 is lost"]},
        {"counts": {"twice": 1}, "lines": ["record 4 is there twice"]},
        {"counts": {"order": 1}, "lines": ["record 4 is behind record 5"]},
        {"impossible": "nothing was acknowledged"},
        {"acknowledged": 8},
    ],
)
def test_a_check_with_findings_or_missing_acknowledgements_fails(found: dict[str, Any]) -> None:
    with pytest.raises(Wrong):
        judge("s", outcome(**found))


def test_a_recovery_after_a_planned_restart_fails() -> None:
    check_no_recovery("broker-1", [])
    with pytest.raises(Wrong, match="broker-1"):
        check_no_recovery("broker-1", ["of broker 1"])


def test_a_producer_that_waited_too_long_in_a_restart_fails() -> None:
    turns = [Turn("broker-1", 1, 1, 0.2, 0.3), Turn("broker-2", 1, 1, 0.4, 0.5)]
    check_stall(turns, 0)
    check_stall(turns, 401)
    with pytest.raises(Wrong, match="broker-2"):
        check_stall(turns, 399)


def test_a_network_that_is_unusable_for_too_long_after_healing_fails() -> None:
    slow = (0.1, SILENT_S + 1, ())
    Done(Break(("client", "broker"), "cut", ("clients",), ("broker-1",), 1.0), *slow).check()
    with pytest.raises(Wrong, match="more than 2 s"):
        Done(cut_off(BROKER, 1.0), *slow).check()
    with pytest.raises(Wrong, match="more than 60 s"):
        Done(Break(("client", "broker"), "cut", ("clients",), ("broker-1",), 1.0), GOES_ON_S + 1, 0.1, ()).check()


def cluster_of(*names: str, **methods: Any) -> Any:
    ready = {name: {"broker_id": name.partition("-")[2]} for name in names}
    return SimpleNamespace(ready=ready, processes=dict.fromkeys(names, 1), **methods)


async def test_a_frozen_backup_that_stops_the_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FREEZE_S", 0.0)
    done: list[str] = []

    async def note(what: str) -> None:
        done.append(what)

    cluster = cluster_of("backup-1", pause=lambda _: note("pause"), resume=lambda _: note("resume"))
    chaos = control.Chaos(cluster, random.Random(1), replication=1)
    chaos._loads = {"s": cast(Any, SimpleNamespace(goes_on=lambda: note("goes on")))}
    await chaos.frozen_backup()
    assert done == ["pause", "goes on", "resume"]
    chaos._loads = {"s": cast(Any, SimpleNamespace(goes_on=asyncio.Event().wait))}
    monkeypatch.setattr(control, "ROUND_TIMEOUT_S", 0.01)
    with pytest.raises(Wrong, match="not all goes on"):
        await chaos.frozen_backup()
    assert done[3:] == ["pause", "resume"]


@pytest.mark.parametrize("seed", range(9))
async def test_a_round_of_moves_moves_streamlets_of_its_broker_and_fails_without_a_move(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {"a": 1, "b": 2}
    moved: list[tuple[str, int, int]] = []

    async def describe(stream: str) -> Any:
        return SimpleNamespace(assignments={0: SimpleNamespace(broker_id=owners[stream])})

    async def move(*what: Any) -> None:
        moved.append(what)

    async def refuse(*_: object) -> None:
        raise Unavailable("not now")

    chaos = control.Chaos(cluster_of("broker-1", "broker-2", "broker-3"), random.Random(seed), replication=1)
    chaos._loads = cast(Any, owners)
    chaos._client = cast(Any, SimpleNamespace(admin=SimpleNamespace(describe_stream=describe, move_streamlet=move)))
    async with chaos._moving() as (source, target):
        stream, streamlet, to = moved[0]
        assert (source, target, streamlet) == (f"broker-{owners[stream]}", f"broker-{to}", 0)
    assert chaos.moves == len(moved) > 0
    monkeypatch.setattr(chaos._client.admin, "move_streamlet", refuse)
    monkeypatch.setattr(control, "ROUND_TIMEOUT_S", 0.01)
    with pytest.raises(ExceptionGroup) as found:
        async with chaos._moving():
            pass
    assert "no streamlet of broker" in str(found.value.exceptions[0])


# -- replicas ----------------------------------------------------------------------------------------------------------


def recovered(stored: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, **told: Any) -> None:
    """Compare the chunks of backups, as ordinals and numbers, with acknowledged records 0 to 3."""
    chunks: Any = [
        (SimpleNamespace(stream_id=1, streamlet_id=0, entry=0, group_id=1, segment_id=1, first_record=ordinal), number)
        for ordinal, number in stored
    ]
    monkeypatch.setattr(replication_support, "address_of", lambda _: (1, 0, 0))
    monkeypatch.setattr(replication_support, "read_header", lambda _: SimpleNamespace(payload_bytes=0))
    batches = iter([pa.record_batch({"value": [value_of(number)]}) for _, number in chunks])
    monkeypatch.setattr(replication_support, "open_payload", lambda *_: next(batches))
    result = dict.fromkeys(("conflicts", "gaps", "unread", "disagreeing", "backups_failed"), ())
    found: Any = SimpleNamespace(
        result=SimpleNamespace(**{**result, **told}),
        chunks=lambda: iter([(chunk, chunk.first_record) for chunk, _ in chunks]),
        data=SimpleNamespace(),
    )
    monkeypatch.setattr(found, "data", Anything(), raising=False)
    load: Any = SimpleNamespace(
        stream=SimpleNamespace(stream_id=1, schema=None, name="s"),
        acknowledged=[(number, delivery(number)) for number in range(4)],
    )
    replication_support.check_recovered(found, [load])


class Anything:
    """Has empty bytes for every index."""

    def __getitem__(self, _: object) -> bytes:
        return b""


def test_backups_with_every_acknowledged_record_once_in_its_place_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    recovered([(0, 0), (1, 1), (2, 2), (3, 3)], monkeypatch)


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ([(0, 0), (1, 1), (2, 2)], "not there"),
        ([(0, 0), (1, 1), (2, 2), (3, 3), (3, 3)], "there twice"),
        ([(0, 0), (1, 1), (2, 2), (3, 3), (4, 3)], "is at ordinals"),
        ([(0, 0), (1, 2), (2, 1), (3, 3)], "another record there"),
    ],
)
def test_backups_that_lack_repeat_or_swap_a_record_fail(
    stored: list[tuple[int, int]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Wrong, match=why):
        recovered(stored, monkeypatch)


def test_backups_that_contradict_each_other_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Wrong, match="disagreeing"):
        recovered([(0, 0), (1, 1), (2, 2), (3, 3)], monkeypatch, disagreeing=["one"])


# -- hostile -----------------------------------------------------------------------------------------------------------


async def looked_at(
    monkeypatch: pytest.MonkeyPatch, stored: Sequence[tuple[int, int]], consumed: int | None = None
) -> None:
    """Compare a stream whose streamlet 0 has these ordinals and numbers with three acknowledged records."""
    acknowledged = [[delivery(at) for at in range(3)], [], []]
    writer: Any = SimpleNamespace(number=0, deliveries=acknowledged)

    async def read_entry(_: Any, __: Any, ___: str, which: hostile.EntryKey) -> list[Any]:
        if which != (0, 0):
            return []
        return [
            hostile.Stored(Position(1, 1, ordinal), chunk(ordinal), value_of(number * hostile.STREAMLETS))
            for ordinal, number in stored
        ]

    def chunk(ordinal: int) -> Any:
        return SimpleNamespace(first_record=ordinal, record_count=1)

    async def count(*_: Any) -> int:
        return len(stored) if consumed is None else consumed

    async def describe(_: str) -> Any:
        return None

    monkeypatch.setattr(hostile, "read_entry", read_entry)
    monkeypatch.setattr(hostile, "_ordinary", lambda _, __, data, ___: [data])
    monkeypatch.setattr(hostile, "_consumed", count)
    client: Any = SimpleNamespace(describe=describe)
    channels: Any = None
    await hostile.check_stream(client, channels, "s", [writer])


async def test_a_log_with_hostile_chunks_and_all_acknowledged_records_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await looked_at(monkeypatch, [(0, 0), (1, 1), (2, 2)])


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ([(0, 0), (1, 1)], "3 were acknowledged, 2 are there"),
        ([(0, 0), (1, 1), (2, 1)], "2 was due"),
        ([(0, 0), (1, 2), (2, 1)], "1 was due"),
        ([(0, 0), (1, 1), (3, 2)], "ordinal 3"),
    ],
)
async def test_a_log_with_hostile_chunks_that_lacks_or_repeats_a_record_fails(
    monkeypatch: pytest.MonkeyPatch, stored: list[tuple[int, int]], why: str
) -> None:
    with pytest.raises(Wrong, match=why):
        await looked_at(monkeypatch, stored)


async def test_a_consumer_that_reads_too_few_records_beside_hostile_chunks_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Wrong, match="a consumer"):
        await looked_at(monkeypatch, [(0, 0), (1, 1), (2, 2)], consumed=2)


def test_rounds_with_missing_or_misplaced_hostile_chunks_fail() -> None:
    def row(
        *, in_log: bool = True, acknowledged: int = 9, sent: int = 5, taken: int = 4, empty: int = 1
    ) -> hostile.Row:
        seen = hostile.Seen(empty=empty)
        return hostile.Row("kill", in_log, 1, "replicated", acknowledged, sent, taken, seen, (1.0,))

    row().check()
    row(in_log=False, empty=0).check()
    for wrong in (
        row(acknowledged=0),
        row(sent=0, taken=0),
        row(taken=0),
        row(taken=5),
        row(empty=0),
        row(in_log=False),
    ):
        with pytest.raises(Wrong, match="nothing of hostile chunks"):
            wrong.check()


# -- access, crowd -----------------------------------------------------------------------------------------------------


class Log:
    """A client whose streams have these values."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values

    def consumer(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(batches=self._batches)

    async def _batches(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(batch=pa.record_batch({"value": list(self._values)}))


async def written(*values: bytes) -> None:
    chaos: Any = SimpleNamespace(_client=Log(values))
    await access.Chaos._check_log(chaos, "u1", b"marker:1")


async def test_a_record_of_a_refused_user_after_the_marker_fails() -> None:
    await written(b"u1:0", b"u1:1", b"marker:1", b"u2:0")
    with pytest.raises(Wrong, match="u1 has written"):
        await written(b"u1:0", b"marker:1", b"u1:1")


async def ruled(way: str, *, users: Sequence[Any], rules: Sequence[str] = (), tokens: Sequence[Any] = ()) -> None:
    async def given(found: Sequence[Any]) -> list[Any]:
        return list(found)

    there = SimpleNamespace(users=lambda: given(users), rules=lambda _: given(rules), tokens=lambda: given(tokens))
    chaos: Any = SimpleNamespace(_client=SimpleNamespace(access=there))
    await access.Chaos._check_rules(chaos, "u1", way)


async def test_revoked_rights_that_are_back_fail() -> None:
    plain, with_role = SimpleNamespace(name="u1", roles=[]), SimpleNamespace(name="u1", roles=["writers"])
    await ruled("right", users=[plain])
    await ruled("role", users=[plain])
    await ruled("user", users=[], rules=["read"])
    await ruled("token", users=[plain], rules=["read"])
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("right", {"users": [plain], "rules": ["read"]}),
        ("role", {"users": [with_role]}),
        ("user", {"users": [plain], "rules": ["read"]}),
        ("token", {"users": [plain], "rules": ["read"], "tokens": [SimpleNamespace(owner="u1")]}),
        ("password", {"users": [plain]}),
    ]
    for way, found in wrong:
        with pytest.raises(Wrong):
            await ruled(way, **found)


class Tried:
    """A user with these refused operations, and with these values seen at its end."""

    def __init__(self, refused: Sequence[str] = ("write", "read"), seen: Sequence[bytes] = (), read: int = 99) -> None:
        self.written, self.read = 99, read
        self.refused, self.failed = Counter[str](), Counter[str]()
        self.seen = set[bytes]()
        self._tries, self._at_last = refused, seen

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async def goes_on() -> None:
            while True:
                self.refused.update(self._tries)
                await asyncio.sleep(0)

        task = asyncio.create_task(goes_on())
        try:
            yield
        finally:
            task.cancel()
        self.seen.update(self._at_last)


async def test_a_user_that_reads_the_marker_or_does_not_try_or_cannot_go_on_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def done(*_: object) -> None:
        pass

    chaos: Any = SimpleNamespace(bootstrap="", _run=Program("", "", good).run_of(tmp_path))
    chaos._client = SimpleNamespace(access=SimpleNamespace(delete_user=done, revoke=done))
    chaos._producer = SimpleNamespace(send=done)
    chaos._make = chaos._take = chaos._check_rules = chaos._check_log = chaos._goes_on = done

    async def refused(user: Tried) -> None:
        monkeypatch.setattr(access, "User", lambda *_: user)
        await access.Chaos.round(chaos, 1)

    monkeypatch.setattr(access, "REVOKED_S", 0.0)
    await refused(Tried())
    with pytest.raises(Wrong, match="has read"):
        await refused(Tried(seen=[b"marker:1"]))
    await access.Chaos._goes_on(chaos, "u1", "token")
    monkeypatch.setattr(access, "ROUND_S_MAX", 0.01)
    for one in ("write", "read"):
        with pytest.raises(Wrong, match="not refused both"):
            await refused(Tried([one]))
    monkeypatch.setattr(access, "User", lambda *_: Tried(read=0))
    with pytest.raises(Wrong, match="does not go on"):
        await access.Chaos._goes_on(chaos, "u1", "token")


def test_an_attack_that_disturbs_others_reaches_no_server_or_costs_too_much_fails() -> None:
    none = Taken(0, 0, 0)
    answered = {**{what: {"p99": 1.0} for what in ASKED}, "errors": []}

    def wrong(did: dict[str, int], most: Taken = none, **meanwhile: Any) -> list[str]:
        row = Row(
            "idle", (answered, {**answered, **meanwhile}, answered), Counter(did), {"broker-1": (none, most, none)}
        )
        assert str(row)
        return row.wrong

    there = {"connected": 1}
    assert wrong(there, Taken(MEMORY_MAX, 9, LINES_MAX)) == []
    assert wrong(there, errors=["refused"]) == ["1 times refused"]
    assert wrong(there, read={}) == ["no read was answered meanwhile"]
    assert wrong({"FileNotFoundError": 5}) == ["it has reached nobody: {'FileNotFoundError': 5}"]
    assert wrong({"guessed": 5, "let in": 1}) == ["1 times somebody was let in"]
    assert len(wrong(there, Taken(MEMORY_MAX + 1, 9, LINES_MAX + 1))) == 2


# -- push, columnar, spark, epochs ----------------------------------------------------------------------------------


def told(*chunks: tuple[int, int]) -> None:
    """A consumer of streamlet 0 reports chunks: number of the first record, and record count."""
    followed = Followed("")
    for first, count in chunks:
        followed._take({"streamlet": 0, "first": first, "count": count, "next": (1, 1, 0), "pushed": True})


def test_a_killed_consumer_must_resume_without_skips_or_repeats() -> None:
    told((0, 3), (6, 1), (8, 2))
    for second in (4, 8):  # one repeated, and one skipped
        with pytest.raises(Wrong, match="was due"):
            told((0, 3), (second, 1))


def test_rounds_that_do_not_exercise_shared_memory_fail() -> None:
    check_shown(Counter({"pushed": 5, "chunks": 6, "changed": 1}), frozen=1)
    with pytest.raises(Wrong, match="used again"):
        check_shown(Counter({"pushed": 5, "chunks": 6}), frozen=1)
    with pytest.raises(Wrong, match="pulled"):
        check_shown(Counter({"pushed": 2, "chunks": 6}), frozen=0)
    with pytest.raises(Wrong, match="nothing was pushed"):
        check_shown(Counter(), frozen=0)


def rows(*records: tuple[int, int]) -> pa.Table:
    """Offsets and numbers of streamlet 0."""
    return pa.table(
        {
            "streamlet": [0] * len(records),
            "offset": [offset for offset, _ in records],
            "value": [value_of(number) for _, number in records],
        }
    )


def test_a_query_that_loses_repeats_or_spoils_a_record_fails() -> None:
    due = {0: 0, 1: 0}
    check(rows((0, 0), (1, 2)), due)
    check(rows((2, 4)), due)
    assert due == {0: 3, 1: 0}
    for wrong in (rows((0, 0), (2, 4)), rows((0, 0), (0, 0)), rows((0, 2), (1, 0))):
        with pytest.raises(AssertionError):
            check(wrong, {0: 0, 1: 0})
    with pytest.raises(AssertionError, match="other bytes"):
        check(pa.table({"streamlet": [0], "offset": [0], "value": [value_of(0)[:-1] + b"?"]}), {0: 0, 1: 0})


def test_missing_repeated_or_extra_numbers_fail() -> None:
    check_once(3, Counter([0, 1, 2]))
    for found, why in (([0, 2], "missing: \\[1\\]"), ([0, 1, 1, 2], "\\{1: 2\\}"), ([0, 1, 2, 3], "4 came out")):
        with pytest.raises(Wrong, match=why):
            check_once(3, Counter(found))


async def test_the_spark_worker_to_kill_is_one_that_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "PAUSE_S", 0.0)
    listed, killed = iter([[], [7], [8]]), list[int]()

    def kill(pid: int, _: int) -> None:
        if pid == 7:
            raise ProcessLookupError
        killed.append(pid)

    job, cluster = spark.Job([], tmp_path / "log"), cast(Any, None)
    monkeypatch.setattr(job, "workers", lambda: next(listed))
    monkeypatch.setattr("tests.chaos.spark.os.kill", kill)
    await spark.kill("worker", cluster, job, random.Random(1))
    assert killed == [8]


def test_different_micro_batches_fail(tmp_path: Path) -> None:
    same = {0: {"7": (2, "aa")}, 1: {"8": (3, "bb")}}
    assert compare({"live": same, "killed": same}, 2) == 5
    for other in ({0: {"7": (2, "aa")}}, {**same, 1: {"8": (3, "cc")}}, {**same, 1: {"8": (4, "bb")}}):
        with pytest.raises(Wrong, match="killed"):
            compare({"live": same, "killed": other}, 2)
    query = Query("killed", "", tmp_path)
    batches = tmp_path / "killed" / "batches"
    batches.mkdir()
    (batches / "0.json").write_text('{"7": [2, "aa"]}')
    assert query.batches() == {0: {"7": (2, "aa")}}
    (batches / "0.wrong").write_text('{"7": [1, "aa"]}')
    with pytest.raises(Wrong, match="run again"):
        query.batches()


# -- latency -----------------------------------------------------------------------------------------------------------


class Keyed(Log):
    """A client whose stream has these records, by key and number."""

    def __init__(self, *records: tuple[int, int]) -> None:
        from tests.chaos.latency_client import _HEAD

        super().__init__([_HEAD.pack(key, number, 0) for key, number in records])

    def consumer(self, *_: object, **__: object) -> Any:
        return Reading(super().consumer())


class Reading:
    """A context of a consumer that does not close it."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    async def __aenter__(self) -> Any:
        return self._consumer

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_a_path_that_loses_repeats_or_reorders_a_record_is_found() -> None:
    assert KEYS > 1

    async def wrong(*records: tuple[int, int]) -> list[str]:
        client: Any = Keyed(*records)
        return await check_records(client, "a", 3)

    assert await wrong((0, 0), (1, 0), (0, 1)) == []
    assert await wrong((0, 0), (1, 0)) != []
    assert await wrong((0, 0), (1, 0), (0, 0), (0, 1)) != []
    assert await wrong((0, 1), (1, 0), (0, 0)) != []


async def looked(tmp_path: Path, *, until_s: float = 15.0, every: int = 1, records: int = 100) -> list[str]:
    """The errors of a part of 15 s that is looked at until `until_s`, with `records` per slot."""
    path = ConstrainedPath(cast(Any, None), cast(Any, None), LATENCY.run_of(tmp_path))
    path._rate = 4.0 * records or 400.0
    at_s = time.monotonic() - 16.0
    for number in range(round((at_s - 20) / SLOT_S), round((at_s + 17) / SLOT_S)):
        path.truth.add("writer", asdict(Slot(number, sent=records, acknowledged=records)))
        chunks = Slot(number, records=records, runs=4, runs_us=400_000, chunks=4, chunks_us=400_000)
        path.truth.add("worker", asdict(chunks))
    for number in range(0, round(until_s / SLOT_S), every):
        path._looks.add(Look(at_s + number * SLOT_S, "held", 200_000, "", 3_000, 9))
    await path._part("load", at_s)
    return path.wrong


async def test_a_constraint_without_looks_and_a_part_without_load_are_found(tmp_path: Path) -> None:
    assert await looked(tmp_path) == []
    assert await looked(tmp_path, until_s=0.0) == ["load: nobody has looked at the constraint for 15.0 s"]
    assert await looked(tmp_path, until_s=10.0) == ["load: nobody has looked at the constraint for 5.2 s"]
    assert await looked(tmp_path, every=9) == ["load: nobody has looked at the constraint for 2.2 s"]
    assert await looked(tmp_path, records=0) == ["load: no record came through in its last window"]
