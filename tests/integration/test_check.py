"""`kera check` against real daemons: it passes while brokers are killed, and notices tampering with its streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kera.cli.check import _workload
from kera.cli.check._options import Options
from kera.cli.check._run import Check, Outcome, carry_out
from kera.client import Client
from kera.client.checking.numbers import Values
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.killing import killing_command
from tests.integration.shared_cluster import SharedCluster

pytestmark = pytest.mark.timeout(120)
LOAD_S = 100.0
"""Longer than a test takes: either the tampering ends the load, or the test ends."""
ASCII_ONLY = (
    "PYTHONIOENCODING=ascii {kera} check --seconds 2 --kill-every 1 --kill 'printf \"caf\\303\\251\"' | grep -q xe9"
)
NO_SPACE = "kera: error: cannot write the output: No space left on device\n"
checks: list[Check] = []
"""The checks whose streams were tampered with, in order."""
Tampering = Callable[[Client, str], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize("durability", ["replicated", pytest.param("persisted", marks=pytest.mark.slow)])
def test_a_cluster_whose_brokers_are_killed_keeps_its_promises(
    shared_members: SharedCluster, tmp_path: Path, durability: str
) -> None:
    asyncio.run(shared_members.make_whole())
    names = iter(["broker-1", "broker-2", "broker-3"])

    def kill() -> str:
        name = next(names)
        asyncio.run(shared_members.kill(name))
        asyncio.run(shared_members.restart(name))
        return f"{name} is back"

    with killing_command(tmp_path, kill) as command:
        ended = run_kera(
            *("check", "--bootstrap", shared_members.bootstrap, "--json", "--seconds", "5", "--rate", "500"),
            *("--replication", "1", "--durability", durability, "--entries", "2", "--readers", "2", "--members", "2"),
            *("--kill", command, "--kill-every", "2", "--seed", "1"),
        )
    shown = json.loads(ended.stdout)
    assert (ended.returncode, shown["verdict"]) == (0, "kept"), shown
    kills = [(kill["exit_code"], kill["output"]) for kill in shown["kills"]]
    assert kills  # the machine decides how many there is time for
    assert kills == [(0, f"broker-{number} is back") for number in range(1, len(kills) + 1)]
    assert shown["acknowledged"] > 100
    assert shown["calm_s"] is not None
    assert shown["ends_looked"] > 1
    assert shown["longest_pause_s"] > 0
    assert asyncio.run(streams_of(shared_members.bootstrap)) == []


async def streams_of(bootstrap: str) -> list[str]:
    async with await Client.connect(bootstrap) as client:
        return [stream.name for stream in await client.admin.list_streams()]


async def tampered(cluster: RunningCluster, name: str, tamper: Tampering, **options: Any) -> Outcome:
    """Check a stream, tamper with it as soon as it has acknowledged records, and return the outcome."""

    @contextlib.asynccontextmanager
    async def watching(check: Check) -> AsyncIterator[None]:
        checks.append(check)

        async def act() -> None:
            while check.ledger.acknowledged < 100:
                await asyncio.sleep(0.01)
            await tamper(client, name)
            check.shared.stopping.set()

        acting = asyncio.create_task(act())
        yield
        await acting

    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(name, streamlets=2, durability="leader")
        given = Options(LOAD_S, stream=name, rate=500.0, within_s=20.0, **options)
        outcome = await carry_out(given, cluster.bootstrap, watching)
        with contextlib.suppress(Exception):
            await client.admin.delete_stream(name)
    return outcome


async def test_a_check_reports_records_of_another_program(cluster: RunningCluster) -> None:
    async def write(client: Client, name: str) -> None:
        async with client.producer() as producer:
            await producer.prepare(name)
            await producer.send(name, b"a stranger", streamlet=1)

    outcome = await tampered(cluster, "check-stranger", write)
    assert outcome.verdict == "violated"
    assert outcome.counts == {"never sent": 1}
    assert re.match(
        r"never sent: a value of 10 bytes, b'a stranger', is at streamlet 1, entry 0, record \d+: did another"
        r" program write it\? \(\d",
        outcome.lines[0],
    )
    assert outcome.stream_kept


@pytest.mark.slow
async def test_violations_count_even_if_no_kill_command_succeeds(cluster: RunningCluster) -> None:
    """A command that takes a host down may well end with an error of its own."""

    async def write(client: Client, name: str) -> None:
        while not any(each.exit_code == 255 for check in checks for each in check.kills.done):
            await asyncio.sleep(0.01)
        async with client.producer() as producer:
            await producer.prepare(name)
            await producer.send(name, b"a stranger", streamlet=1)

    outcome = await tampered(cluster, "check-commands", write, kill=("exit 255",), kill_every_s=0.1)
    assert (outcome.verdict, outcome.counts, outcome.stream_kept) == ("violated", {"never sent": 1}, True)


@pytest.mark.slow
async def test_a_foreign_member_in_its_consumer_group_makes_a_check_impossible(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workload, "MEMBERS_EVERY_S", 0.1)

    async def consume(client: Client, name: str) -> None:
        groups: list[str] = []
        while not groups:
            groups = [each.consumer_group for each in await client.admin.consumer_groups() if name in each.streams]
        async with client.group_consumer(groups[0], name) as consumer:
            while checks[-1].shared.impossible is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await anext(aiter(consumer))

    outcome = await tampered(cluster, "check-members", consume)
    assert outcome.verdict == "not checked"
    assert re.fullmatch("others consume in its consumer group 'kera-check-[0-9a-f]+'", str(outcome.impossible))


async def test_a_stream_that_is_deleted_and_recreated_cannot_be_checked(cluster: RunningCluster) -> None:
    async def make_anew(client: Client, name: str) -> None:
        await client.admin.delete_stream(name)
        await client.admin.create_stream(name, streamlets=2)

    outcome = await tampered(cluster, "check-anew", make_anew)
    assert outcome.verdict == "not checked"
    assert outcome.impossible is not None
    assert "'check-anew' is not there any more: it was deleted meanwhile, or" in outcome.impossible
    assert not outcome.stream_kept


@pytest.mark.slow
async def test_a_stream_with_removed_records_cannot_be_checked(cluster: RunningCluster) -> None:
    async def truncate(client: Client, name: str) -> None:
        await client.admin.truncate_stream(name, "latest")

    outcome = await tampered(cluster, "check-truncated", truncate)
    assert outcome.verdict == "not checked"
    assert outcome.impossible is not None
    assert re.fullmatch(
        r"[\d,]+ records of streamlet \d, entry 0 have been removed meanwhile, by retention or truncation",
        outcome.impossible,
    )


@pytest.mark.slow
async def test_a_stream_whose_durability_changes_cannot_be_checked(cluster: RunningCluster) -> None:
    async def alter(client: Client, name: str) -> None:
        await client.admin.alter_stream(name, durability="persisted")

    outcome = await tampered(cluster, "check-altered", alter)
    assert outcome.verdict == "not checked"
    assert "was durability leader, 0 backups, and is durability persisted, 0 backups since" in str(outcome.impossible)


@pytest.mark.slow
async def test_a_stream_to_which_another_check_writes_cannot_be_checked(cluster: RunningCluster) -> None:
    async def write(client: Client, name: str) -> None:
        async with client.producer() as producer:
            await producer.prepare(name)
            await producer.send(name, Values("0" * 8, 40).make(0, 0), streamlet=1)

    outcome = await tampered(cluster, "check-twice", write)
    assert outcome.verdict == "not checked"
    assert outcome.impossible == "another check writes to stream 'check-twice'"


@pytest.mark.slow
def test_reported_losses_with_durability_leader_are_no_violation(tmp_path: Path) -> None:
    """A broker loses its memory: the check also reads the records after the loss, and misses none of them."""
    with LocalCluster.running(brokers=1, data_dir=tmp_path, arena_bytes=64 << 20, segment_bytes=256 << 10) as there:

        def lose_memory() -> str:
            there.kill("broker-1")
            Path(there.ready["broker-1"]["arena_path"]).unlink()
            there.restart("broker-1")
            return "it has lost its memory"

        with killing_command(tmp_path, lose_memory) as command:
            ended = run_kera(
                *("check", "--bootstrap", there.bootstrap, "--json", "--seconds", "8", "--rate", "1000"),
                *("--durability", "leader", "--streamlets", "1", "--kill", command, "--kill-every", "6"),
            )
    shown = json.loads(ended.stdout)
    assert [kill["output"] for kill in shown["kills"]] == ["it has lost its memory"]
    assert (ended.returncode, shown["verdict"], shown["findings"]) == (0, "kept", [])
    assert shown["lost_as_told"] < shown["acknowledged"] / 2


@pytest.mark.slow
def test_damage_loses_only_the_records_of_its_chunk(tmp_path: Path) -> None:
    with LocalCluster.running(brokers=1, data_dir=tmp_path, arena_bytes=64 << 20, segment_bytes=256 << 10) as there:

        def damage() -> str:
            with Path(there.ready["broker-1"]["arena_path"]).open("r+b") as arena:
                data = arena.read()
                at = data.index(b"/00000/0000000000100")
                arena.seek(at)
                arena.write(b"#")
            return "damaged"

        with killing_command(tmp_path, damage) as command:
            ended = run_kera(
                *("check", "--bootstrap", there.bootstrap, "--json", "--seconds", "6", "--rate", "500"),
                *("--streamlets", "2", "--kill", command, "--kill-every", "4", "--within", "5"),
            )
    shown = json.loads(ended.stdout)
    assert [kill["output"] for kill in shown["kills"]] == ["damaged"]
    assert (ended.returncode, shown["verdict"]) == (1, "violated")
    assert shown["counts"]["corrupt"] == 1
    assert shown["counts"]["lost"] < 100
    assert "vanished" not in shown["counts"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_terminated_check_deletes_its_streams(cluster: RunningCluster, number: signal.Signals, code: int) -> None:
    before = asyncio.run(streams_of(cluster.bootstrap))
    command = [sys.executable, "-m", "kera.cli", "check", "--bootstrap", cluster.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until_it_has_stored(process, cluster.bootstrap)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (code, b"", b"")
    assert asyncio.run(streams_of(cluster.bootstrap)) == before


@pytest.mark.slow
def test_a_load_that_ends_before_the_first_kill_command_is_not_checked(cluster: RunningCluster) -> None:
    command = [sys.executable, "-m", "kera.cli", "check", "--bootstrap", cluster.bootstrap, "--kill", "true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        until_it_has_stored(process, cluster.bootstrap)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.splitlines()[-1] == "not checked: no --kill command was run: the load was ended before"


@pytest.mark.slow
def test_a_hanging_kill_command_does_not_delay_the_check(cluster: RunningCluster) -> None:
    ended = run_kera(
        *("check", "--bootstrap", cluster.bootstrap, "--json", "--seconds", "3", "--kill-every", "1", "--within", "3"),
        *("--kill", "true", "--kill", "sleep 999"),
    )
    shown = json.loads(ended.stdout)
    assert (ended.returncode, shown["verdict"], shown["counts"]) == (0, "kept", {})
    assert [kill["exit_code"] for kill in shown["kills"]] == [0, None]


@pytest.mark.slow
def test_a_full_output_device_is_no_violation(cluster: RunningCluster) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kera.cli", "check", "--seconds", "1", "--bootstrap", cluster.bootstrap],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (2, NO_SPACE)


@pytest.mark.slow  # the shell starts programs with all their imports; tests/unit/cli/test_run.py has commands that end
@pytest.mark.parametrize(
    ("shell", "code", "told"),
    [
        ("{kera} cluster describe | true", 0, ""),
        ("{kera} cluster describe > /dev/full", 1, NO_SPACE),
        ("{kera} check --seconds 1 | true", 0, ""),
        ("{kera} check --seconds 1 <&- | tail -n 1 | cut -c1-4", 0, ""),
        ("{kera} check --seconds 1 >&-", 2, "kera: error: standard output is closed\n"),
        (ASCII_ONLY, 0, ""),
    ],
)
def test_closed_or_unread_output_is_no_violation(cluster: RunningCluster, shell: str, code: int, told: str) -> None:
    text = shell.format(kera=f"{shlex.quote(sys.executable)} -m kera.cli")
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        env=os.environ | {"KERA_BOOTSTRAP": cluster.bootstrap},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, told)


@pytest.mark.slow
def test_running_out_of_file_descriptors_gives_no_verdict_on_the_cluster(cluster: RunningCluster) -> None:
    text = f"ulimit -n 90; {shlex.quote(sys.executable)} -m kera.cli check --seconds 3 --within 5 --readers 30"
    ended = subprocess.run(
        ["bash", "-c", text],
        env=os.environ | {"KERA_BOOTSTRAP": cluster.bootstrap},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stdout
    assert "this process can open no more files and connections: its limit is 90 (ulimit -n); raise" in ended.stdout


def test_ctrl_c_ends_the_load_and_checks_the_stored_records(cluster: RunningCluster) -> None:
    argv = [sys.executable, "-m", "kera.cli", "check", "--minutes", "10", "--rate", "200"]
    environment = {**os.environ, "KERA_BOOTSTRAP": cluster.bootstrap}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until_it_has_stored(process, cluster.bootstrap)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert ", ended by Ctrl-C\n" in out.decode()
    assert out.decode().splitlines()[-1].startswith("kept: ")


def until_it_has_stored(process: subprocess.Popen[Any], bootstrap: str) -> None:
    """Wait until a check has acknowledged records; until the time-out of the test, at most."""
    while not any(asyncio.run(stored_in_checks(bootstrap))):
        assert process.poll() is None
        time.sleep(0.1)  # sleep: between looks


async def stored_in_checks(bootstrap: str) -> list[int]:
    """Records in each stream that a check has made."""
    async with await Client.connect(bootstrap) as client:
        names = [name for name in await streams_of(bootstrap) if name.startswith("kera-check-")]
        found = [await client.bounds(name) for name in names]
    return [sum(entry.next_record for entries in each.values() for entry in entries) for each in found]
