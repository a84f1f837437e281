"""The verdicts of the programs of chaos see a loss, a repeat and what is out of order: what cannot fail proves nothing.

What reads logs and readers of `tests.integration.control_support` is tested beside it, and so is `latency_truth`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from kera.cli.check._options import Options
from kera.cli.check._run import Outcome
from kera.client import Delivery, EntryId, Position
from tests.chaos import access, hostile
from tests.chaos.__main__ import PROGRAMS, main, program_of
from tests.chaos.checked import judge
from tests.chaos.control import Turn, check_no_recovery, check_stall
from tests.chaos.crowd import LINES_MAX, MEMORY_MAX, Row, Taken
from tests.chaos.epochs import Query, compare
from tests.chaos.latency import check_records
from tests.chaos.latency_client import KEYS
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


def test_a_program_that_kept_its_promise_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(good) == 0
    assert "PASSED: all is well: rounds 3" in capsys.readouterr().out


def test_a_program_says_all_that_is_wrong_the_logs_and_how_to_do_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(bad, "--rounds", "7", "--kinds", "b", "--seed", "5") == 1
    said = capsys.readouterr().out
    assert "FAILED in round 2: Wrong('record 1 is lost')" in said
    assert "record 2 is lost" in said
    assert "the last words" in said
    assert 'again: make chaos RUN="it --rounds 7 --kinds b --seed 5"' in said
    assert "PASSED" not in said


def test_the_folder_of_a_cluster_goes_when_its_rounds_have_ended_well_and_only_then(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert ended(bad, "--keep", str(kept)) == 1
    assert (kept / "cluster-1" / "broker.log").exists()
    run = Program("", "", good, rounds=1).run_of(tmp_path)
    with run.cluster_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_a_seed_does_the_same_again_and_each_kind_comes_before_one_comes_again(tmp_path: Path) -> None:
    program = Program("", "", good, rounds=9, kinds=("a", "b", "c"))
    one, other = (program.run_of(tmp_path, "--seed", "3").kinds() for _ in range(2))
    assert one == other
    assert all(sorted(one[at : at + 3]) == ["a", "b", "c"] for at in range(0, 9, 3))


async def test_a_short_form_has_the_options_of_the_long_one_and_raises_what_is_wrong(tmp_path: Path) -> None:
    run = await Program("", "", good, rounds=9, kinds=("a", "b", "c")).short(tmp_path, rounds=4, kinds=["a", "c"])
    assert (run.seen["rounds"], run.arguments.kinds) == (4, ["a", "c"])
    with pytest.raises(ExceptionGroup):
        await Program("", "", bad).short(tmp_path)


@pytest.mark.parametrize("name", [name for name, entry in PROGRAMS.items() if "Spark" not in entry.text])
def test_every_program_of_the_list_is_there(name: str) -> None:
    assert program_of(name).run_of(Path(), "--seed", "1").arguments.seed == 1


def test_a_name_that_is_no_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "no program nothing" in capsys.readouterr().err
    assert main([]) == 0
    assert all(name in capsys.readouterr().out for name in ["kill"])


# -- kill, control, restart, network, silence: the load and the verdict of `kera check` ------------------------------


def outcome(**found: Any) -> Outcome:
    stream: Any = SimpleNamespace(name="s")
    return Outcome(Options(1.0), "", stream, **{"sent": 9, "acknowledged": 9, **found})


def test_a_check_that_kept_everything_passes() -> None:
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
def test_a_check_that_found_something_fails(found: dict[str, Any]) -> None:
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


def test_a_network_that_heals_and_is_of_no_use_for_too_long_fails() -> None:
    slow = (0.1, SILENT_S + 1, ())
    Done(Break(("client", "broker"), "cut", ("clients",), ("broker-1",), 1.0), *slow).check()
    with pytest.raises(Wrong, match="more than 2 s"):
        Done(cut_off(BROKER, 1.0), *slow).check()
    with pytest.raises(Wrong, match="more than 60 s"):
        Done(Break(("client", "broker"), "cut", ("clients",), ("broker-1",), 1.0), GOES_ON_S + 1, 0.1, ()).check()


# -- replicas ----------------------------------------------------------------------------------------------------------


def recovered(stored: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, **told: Any) -> None:
    """Compare what backups have, as ordinals and numbers, with acknowledged records 0 to 3."""
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
    """Has no bytes for whatever it is asked for."""

    def __getitem__(self, _: object) -> bytes:
        return b""


def test_backups_that_have_every_acknowledged_record_once_in_its_place_pass(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Compare a stream, of which streamlet 0 has these ordinals and numbers, with three acknowledged records."""
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


async def test_a_log_with_hostile_chunks_that_has_all_that_was_acknowledged_passes(
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


async def test_a_consumer_that_skips_hostile_chunks_and_is_given_other_records_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Wrong, match="a consumer"):
        await looked_at(monkeypatch, [(0, 0), (1, 1), (2, 2)], consumed=2)


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


async def test_a_record_behind_the_marker_of_somebody_who_was_refused_fails() -> None:
    await written(b"u1:0", b"u1:1", b"marker:1", b"u2:0")
    with pytest.raises(Wrong, match="u1 has written"):
        await written(b"u1:0", b"marker:1", b"u1:1")


async def ruled(way: str, *, users: Sequence[Any], rules: Sequence[str] = (), tokens: Sequence[Any] = ()) -> None:
    async def given(found: Sequence[Any]) -> list[Any]:
        return list(found)

    there = SimpleNamespace(users=lambda: given(users), rules=lambda _: given(rules), tokens=lambda: given(tokens))
    chaos: Any = SimpleNamespace(_client=SimpleNamespace(access=there))
    await access.Chaos._check_rules(chaos, "u1", way)


async def test_what_was_revoked_and_is_there_again_fails() -> None:
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


def test_an_attack_that_others_notice_or_that_costs_too_much_fails() -> None:
    none = Taken(0, 0, 0)

    def row(errors: Counter[str], most: Taken) -> Row:
        return Row("idle", "", "", errors, Counter(), {"broker-1": (none, most, none)})

    assert row(Counter(), Taken(MEMORY_MAX, 9, LINES_MAX)).wrong == []
    assert row(Counter(refused=1), none).wrong == ["1 times refused"]
    assert len(row(Counter(), Taken(MEMORY_MAX + 1, 9, LINES_MAX + 1)).wrong) == 2


# -- push, columnar, spark, epochs ----------------------------------------------------------------------------------


def told(*chunks: tuple[int, int]) -> None:
    """A consumer of streamlet 0 tells of chunks: number of the first record, and how many."""
    followed = Followed("")
    for first, count in chunks:
        followed._take({"streamlet": 0, "first": first, "count": count, "next": (1, 1, 0), "pushed": True})


def test_a_consumer_that_goes_on_where_it_was_killed_passes_and_one_that_skips_or_repeats_fails() -> None:
    told((0, 3), (6, 1), (8, 2))
    for second in (4, 8):  # once more, and one left out
        with pytest.raises(Wrong, match="was due"):
            told((0, 3), (second, 1))


def test_rounds_that_have_shown_nothing_of_shared_memory_fail() -> None:
    check_shown(Counter({"pushed": 5, "chunks": 6, "changed": 1}), frozen=1)
    with pytest.raises(Wrong, match="used again"):
        check_shown(Counter({"pushed": 5, "chunks": 6}), frozen=1)
    with pytest.raises(Wrong, match="pulled"):
        check_shown(Counter({"pushed": 2, "chunks": 6}), frozen=0)


def rows(*records: tuple[int, int]) -> pa.Table:
    """Offsets and numbers of streamlet 0."""
    return pa.table(
        {
            "streamlet": [0] * len(records),
            "offset": [offset for offset, _ in records],
            "value": [value_of(number) for _, number in records],
        }
    )


def test_a_query_that_reads_each_record_once_passes_and_one_that_loses_repeats_or_spoils_one_fails() -> None:
    due = {0: 0, 1: 0}
    check(rows((0, 0), (1, 2)), due)
    check(rows((2, 4)), due)
    assert due == {0: 3, 1: 0}
    for wrong in (rows((0, 0), (2, 4)), rows((0, 0), (0, 0)), rows((0, 2), (1, 0))):
        with pytest.raises(AssertionError):
            check(wrong, {0: 0, 1: 0})
    with pytest.raises(AssertionError, match="other bytes"):
        check(pa.table({"streamlet": [0], "offset": [0], "value": [value_of(0)[:-1] + b"?"]}), {0: 0, 1: 0})


def test_numbers_that_come_out_never_or_twice_fail() -> None:
    check_once(3, Counter([0, 1, 2]))
    for found, why in (([0, 2], "missing: \\[1\\]"), ([0, 1, 1, 2], "\\{1: 2\\}"), ([0, 1, 2, 3], "4 came out")):
        with pytest.raises(Wrong, match=why):
            check_once(3, Counter(found))


def test_micro_batches_that_differ_fail(tmp_path: Path) -> None:
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
    """Closes nothing."""

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
