"""`kera check` without a cluster: invalid options, commands, figures and verdicts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.cli.check._kills import Kill, Kills, moments
from kera.cli.check._options import Options
from kera.cli.check._report import EXIT_CODES, to_json, to_text
from kera.cli.check._run import SLICE_S, Outcome, while_running
from kera.cli.check._workload import Acknowledgements, MemoryReused, Shared
from kera.client import ChunkBatch, StreamConfig, StreamDescription
from kera.client.checking.findings import Violation
from kera.client.checking.numbers import VALUE_BYTES, Values
from kera.core.errors import Unavailable
from tests.unit.cli.fake_client import FakeClient

CONFIG = StreamConfig(streamlets=4, brokers=2, entries=1, group_segments=16, durability="replicated", codec="none")


class Stream:
    name = "checked"
    config = CONFIG
    typed = False
    stream_id = 7


STREAM = cast("StreamDescription", Stream())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--minutes", "1", "--seconds", "5"], "--minutes and --seconds are mutually exclusive"),
        (["--minutes", "0"], "--minutes must be above 0 and below 1e+09, and is 0"),
        (["--seconds", "-1"], "--seconds must be above 0 and below 1e+09, and is -1"),
        (["--seconds", "nan"], "--seconds must be above 0 and below 1e+09, and is nan"),
        (["--minutes", "inf"], "--minutes must be above 0 and below 1e+09, and is inf"),
        (["--seconds", "1e300"], "--seconds must be above 0 and below 1e+09, and is 1e+300"),
        (["--rate", "0"], "--rate must be above 0 and below 1e+09, and is 0"),
        (["--within", "0"], "--within must be above 0 and below 1e+09, and is 0"),
        (["--streamlets", "0"], "--streamlets must be from 1 to 16,384, and is 0"),
        (["--entries", "65"], "--entries must be from 1 to 64, and is 65"),
        (["--record-bytes", "27"], "--record-bytes must be from 28 to 1,048,576, and is 27"),
        (["--durability", "some"], "--durability: 'some' is not one of leader, replicated, persisted"),
        (
            ["--stream", "there", "--replication", "0"],
            "--replication is for a stream that the check makes; --stream names one that is there",
        ),
        (["--kill", " "], "--kill must not be empty"),
        (["--kill-every", "5"], "--kill-every needs --kill"),
        (["--kill", "true", "--kill-every", "0"], "--kill-every must be above 0 and below 1e+09, and is 0"),
        (
            ["--seconds", "20", "--kill", "true"],
            "no --kill would come: the load is on for 20 s, and --kill-every is 30",
        ),
        (
            ["--minutes", "6000", "--rate", "1000"],
            "that is 360,000,000 records, and a check takes 100,000,000: lower --rate, or the time",
        ),
        (
            ["--rate", "0.1", "--seconds", "10"],
            "that is 1 records for 2 producers: raise --rate, or the time",
        ),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["check", *arguments]) == 2
    assert capsys.readouterr().err == f"kera: error: {told}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("producers", "0"), ("readers", "-1"), ("members", "-1"), ("replication", "-1"), ("seconds", "ten")],
)
def test_options_with_invalid_numbers_are_refused(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["check", f"--{name}", value]) == 2
    assert f"--{name}" in capsys.readouterr().err


def test_an_unreachable_cluster_ends_the_check_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeClient().answering(Unavailable("nobody answers at h:1")):
        assert run_app(app, ["check"]) == 2
    assert capsys.readouterr().err == "kera: error: nobody answers at h:1\n"


def test_a_failure_of_the_check_itself_is_not_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeClient().answering(RuntimeError("a defect")):
        assert run_app(app, ["check"]) == 2
    assert capsys.readouterr().err.endswith("\nkera: error: the check itself has failed: RuntimeError('a defect')\n")


def test_time_during_which_the_check_was_suspended_does_not_count() -> None:
    """As after Ctrl-Z: all timers are due at once when the check goes on."""

    async def main() -> None:
        loop, stood_s = asyncio.get_running_loop(), 0.0
        real = loop.time
        loop.time = lambda: real() + stood_s  # type: ignore[method-assign]

        async def work(turns: int) -> None:
            nonlocal stood_s
            stood_s += 3600
            for _ in range(turns):
                await asyncio.sleep(SLICE_S)  # sleep: the work takes this time, whatever the clock says

        assert await while_running(work(1), 8 * SLICE_S)
        assert not await while_running(work(1000), 3 * SLICE_S)

    asyncio.run(main())


def of(stream: Any, next_record: int = 0) -> FakeClient:
    """A client of a cluster with a stream that cannot be checked."""
    bounds = {0: [SimpleNamespace(next_record=next_record)]}
    return FakeClient(describe_stream=stream, bounds=bounds)


def stream_with(**changed: Any) -> Any:
    return type("Changed", (Stream,), changed)()


@pytest.mark.parametrize(
    ("client", "told"),
    [
        (of(stream_with(typed=True)), "--stream: checked is typed; a check sends bytes"),
        (
            of(stream_with(config=StreamConfig(1, 1, 1, 1, "leader", "none", retention_ms=5))),
            "--stream: checked has retention rules, and removed records cannot be checked; use a stream without them",
        ),
        (of(STREAM, 7), "--stream: checked has, or had, 7 records; a check needs an empty one"),
    ],
)
def test_a_stream_that_cannot_be_checked_is_refused(
    client: FakeClient, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with client.answering():
        assert run_app(app, ["check", "--stream", "checked"]) == 2
    assert capsys.readouterr().err == f"kera: error: {told}\n"


# --- commands ------------------------------------------------------------------------------------------------


def test_commands_run_at_the_requested_rate_and_a_seed_repeats_their_times() -> None:
    options = Options(100.0, kill=("true",), kill_every_s=30.0, seed=3)
    times = list(moments(options))
    assert times == list(moments(options))
    assert [30 * number - 15 <= at <= 30 * number for number, at in enumerate(times, 1)] == [True] * 3
    assert list(moments(Options(100.0))) == []
    assert times != list(moments(Options(100.0, kill=("true",), kill_every_s=30.0, seed=4)))


async def run_commands(commands: Sequence[str], **options: Any) -> list[Kill]:
    begun_s = time.monotonic()
    kills = Kills(Options(kill=tuple(commands), **options), lambda: time.monotonic() - begun_s)
    await kills.run()
    return kills.done


@pytest.mark.timeout(30)
def test_commands_run_in_turn_and_their_output_is_kept() -> None:
    commands = ["echo one $KERA_CHECK_KILL", "echo two $KERA_CHECK_KILL >&2; exit 3"]
    done = asyncio.run(run_commands(commands, seconds=0.4, kill_every_s=0.1))
    assert [(kill.command, kill.exit_code, kill.output) for kill in done] == [
        (commands[0], 0, "one 1"),
        (commands[1], 3, "two 2"),
        (commands[0], 0, "one 3"),
    ]
    assert all(kill.ended_s is not None and kill.ended_s >= kill.begun_s for kill in done)


@pytest.mark.timeout(30)
def test_stop_lets_the_running_command_end_and_starts_no_other(tmp_path: Path) -> None:
    async def run() -> list[Kill]:
        command = f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/stopped ]; do :; done; echo well"
        kills = Kills(Options(0.9, kill=(command,), kill_every_s=0.2), lambda: 1.0)
        running = asyncio.create_task(kills.run())
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        kills.stop()
        (tmp_path / "stopped").touch()
        await running
        return kills.done

    (kill,) = asyncio.run(run())
    assert (kill.exit_code, kill.output) == (0, "well")


@pytest.mark.timeout(30)
def test_a_cancelled_command_is_killed_with_its_child_processes(tmp_path: Path) -> None:
    async def run() -> list[Kill]:
        kills = Kills(
            Options(0.3, kill=(f"sleep 600 & echo $! > {tmp_path}/pid; wait",), kill_every_s=0.2), lambda: 1.0
        )
        running = asyncio.create_task(kills.run())
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        return kills.done

    (kill,) = asyncio.run(run())
    assert kill.exit_code is None
    pid = int((tmp_path / "pid").read_text())
    while True:  # until the process is gone; the time-out of the test bounds the wait
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        os.sched_yield()


def test_the_longest_pause_is_measured_per_streamlet() -> None:
    pauses = acknowledged((1.0, 1.5, 3.0, 4.0, 4.5), (0, 1, 0, 1, 0))
    assert pauses.longest(4.5) == (2.5, 1.5, 1)
    assert pauses.longest(9.0) == (5.0, 4.0, 1), "one goes on"


def test_pauses_are_known_for_some_streamlets_for_all_and_for_a_period() -> None:
    pauses = acknowledged((1.0, 1.5, 3.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5, 8.5), (0, 1, 0, 1, 0))
    assert (pauses.pause_s({0}), pauses.pause_s({0, 1}), pauses.pause_s(None)) == (2.0, 2.5, 1.5)
    pauses.begin_period()
    assert pauses.pause_s(None) == 0
    assert pauses.pause_s({1}) == 4.5, "it had begun before the period"


def acknowledged(times_s: Sequence[float], streamlets: Sequence[int]) -> Acknowledgements:
    """The first times are those of acknowledgements; the others are those of questions."""
    times = iter(times_s)
    pauses = Acknowledgements(lambda: next(times))
    for streamlet in streamlets:
        pauses.note(streamlet)
    return pauses


def test_fewer_than_two_acknowledgements_make_no_pause() -> None:
    assert acknowledged((), ()).longest(9.0) == (0.0, 0.0, None)
    assert acknowledged((1.0,), (3,)).longest(1.0) == (0.0, 0.0, None)


# --- output --------------------------------------------------------------------------------------------------


def outcome(**changed: Any) -> Outcome:
    options = Options(60.0, seed=7, kill=("reboot",), kill_every_s=30.0)
    made = Outcome(
        options, "there:7400", STREAM, load_s=60.0, calm_s=0.5, sent=100, acknowledged=98, uncertain=2, pulling=1
    )
    made.kills = [Kill("reboot", 30.5, 31.0, 0, "done")]
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_a_passed_check_is_reported_with_its_figures() -> None:
    text = to_text(outcome(uncertain_stored=1, longest_pause_s=1.234, longest_pause_from_s=30.6, longest_pause_of=2))
    assert EXIT_CODES[outcome().verdict] == 0
    assert "records   100 sent: 98 acknowledged, 0 refused, 2 uncertain, of which 1 are there\n" in text
    pause = "1.23 s at most, in which streamlet 2 had no answer, from 30.6 s on"
    assert f"pause     {pause}\n" in text
    assert "commands  at 30.5 s: reboot: exit code 0 after 500 ms\n            done" in text
    assert text.splitlines()[-1].startswith("kept: 98 acknowledged records are there, once,")


def test_a_violation_is_reported_with_evidence_and_the_command_to_repeat_the_check() -> None:
    wrong = outcome(lines=["lost: record 3 of producer 0 …"], counts={"lost": 1}, stream_kept=True)
    text = to_text(wrong)
    assert EXIT_CODES[wrong.verdict] == 1
    assert "\n\nlost: record 3 of producer 0 …\n\nVIOLATED: 1 finding; once more: kera check --bootstrap there" in text
    assert text.endswith(
        "--bootstrap there:7400 --seconds 60 --streamlets 4 --entries 1 --replication 0 --durability replicated"
        " --producers 2 --readers 2 --members 2 --rate 1000 --record-bytes 100 --within 60 --seed 7"
        " --kill reboot --kill-every 30"
    )
    assert "stream    checked: 4 streamlets, durability replicated, 0 backups, kept\n" in text


def test_the_report_names_failed_commands_and_shows_only_the_first_of_many() -> None:
    kills = [Kill("true", number, number + 0.5, 0) for number in range(30)]
    kills += [Kill("kill it", 30.0, 30.5, -9), Kill("sleep", 31.0, 32.0, None)]
    text = to_text(outcome(kills=kills))
    assert text.count(": true: exit code 0") == 20
    assert "\n          and 12 more\n          never succeeded: kill it\n          never succeeded: sleep\n" in text
    assert "at 0.0 s: kill it: signal 9 after 500 ms\n" in to_text(outcome(kills=[Kill("kill it", 0.0, 0.5, -9)]))
    assert "sleep: ended by the check after 1 s" in to_text(outcome(kills=kills[-1:]))


def test_an_impossible_check_reports_its_reason() -> None:
    text = to_text(outcome(impossible="nothing was acknowledged", counts={"gap": 1}))
    assert EXIT_CODES[outcome(impossible="x", counts={"gap": 1}).verdict] == 2
    assert text.splitlines()[-1] == "not checked: nothing was acknowledged"


def test_the_json_report_has_everything() -> None:
    finding = Violation("lost", "text", 0, 3, 1, 0, 17, 2.5)
    shown = json.loads(json.dumps(to_json(outcome(findings=[finding], counts={"lost": 1}))))
    assert shown["verdict"] == "violated"
    assert shown["findings"] == [finding._asdict()]
    assert shown["stream"]["name"] == "checked"
    assert shown["kills"][0] == {
        "command": "reboot", "begun_s": 30.5, "ended_s": 31.0, "exit_code": 0, "output": "done"
    }  # fmt: skip
    assert shown["options"]["seed"] == 7


async def fails_with(number: int) -> None:
    raise OSError(number, os.strerror(number), "a module that is imported late")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_a_process_without_free_descriptors_makes_the_check_impossible(number: int) -> None:
    shared = Shared(Options(1.0), "there:1", STREAM, "checking")
    await shared.with_descriptors(partial(fails_with, number))
    assert shared.impossible is not None
    assert "this process can open no more files and connections" in shared.impossible
    assert shared.stopping.is_set()


async def test_other_system_errors_are_raised() -> None:
    shared = Shared(Options(1.0), "there:1", STREAM, "checking")
    with pytest.raises(OSError, match="a module that is imported late"):
        await shared.with_descriptors(partial(fails_with, errno.EIO))
    assert shared.impossible is None


async def test_data_in_reused_memory_are_neither_values_nor_a_finding() -> None:
    """The memory of a killed broker may have any bytes, also in the value offsets of a column."""
    shared = Shared(Options(1.0), "there:1", STREAM, "checking")
    values = Values("0" * 8, VALUE_BYTES)
    places = np.array([0, VALUE_BYTES], np.int32)
    reused = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(places), pa.py_buffer(bytes(VALUE_BYTES))])
    other = pa.array([Values("f" * 8, VALUE_BYTES).make(3, 7)], pa.binary())
    chunks = [SimpleNamespace(batch=pa.record_batch([each], ["value"]), intact=False) for each in (reused, other)]
    places += 1 << 20  # beyond the memory of the values
    for chunk in chunks:
        with pytest.raises(MemoryReused):
            shared.recognize(values, cast("ChunkBatch", chunk))
    assert shared.impossible is None

    chunks[1].intact = True
    shared.recognize(values, cast("ChunkBatch", chunks[1]))
    assert shared.impossible == "another check writes to stream 'checked'"
