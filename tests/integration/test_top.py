"""`kera top` and real daemons: its figures match the produced records, and it reports lost daemons and missing
rights.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from kera.cli.top._collector import Collector
from kera.cli.top._snapshot import snapshot
from kera.client import Client, ClientSettings
from kera.client.admin.watching import Watch
from kera.core.access.rights import Operation
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster
from tests.integration.command_line import run_kera
from tests.integration.control_support import HEARTBEAT_MS, HEARTBEATS_MISSED_MAX, control_cluster
from tests.integration.secured_cluster import PASSWORD, Secured
from tests.integration.support import troubles

pytestmark = pytest.mark.timeout(180)
RECORDS = 1000


def top(bootstrap: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = run_kera("top", "--json", "--interval", "0.2", "--bootstrap", bootstrap, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kera(*arguments: str, bootstrap: str, stdin: bytes = b"") -> bytes:
    done = run_kera(*arguments, "--bootstrap", bootstrap, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_figures_match_the_produced_records_and_a_lost_broker_is_shown() -> None:
    beats = {"heartbeat_interval_ms": HEARTBEAT_MS, "heartbeats_missed_max": HEARTBEATS_MISSED_MAX}
    with LocalCluster.running(brokers=2, backups=1, coordinator_settings=beats) as cluster:
        at = cluster.bootstrap
        kera("stream", "create", "orders", "--streamlets", "4", "--replication", "0", bootstrap=at)
        kera("stream", "create", "safe", "--replication", "1", bootstrap=at)
        lines = b"".join(b"%d\n" % number for number in range(RECORDS))
        kera("produce", "orders", bootstrap=at, stdin=lines)
        kera("produce", "safe", bootstrap=at, stdin=lines[:10])
        kera("consume", "orders", "--group", "audit", "--count", str(RECORDS), bootstrap=at)
        kera("produce", "orders", bootstrap=at, stdin=lines)

        found = top(at)
        streams = {each["name"]: each for each in found["streams"]}
        assert troubles(found) == []
        assert found["notes"] == []
        assert streams["orders"]["records_in"] == 2 * RECORDS
        assert sum(part["streamlets"] for part in streams["orders"]["parts"]) == 4
        assert streams["safe"]["records_in"] == 5
        assert streams["safe"]["lag_bytes"] == 0
        assert found["totals"]["records_in"] == sum(each["records_in"] for each in found["brokers"]) == 2 * RECORDS + 5
        assert found["totals"]["bytes_in"] == sum(each["bytes_in"] for each in streams.values())
        assert found["totals"]["records_in_per_s"] == 0.0
        assert found["backups"][0]["bytes_in"] == streams["safe"]["bytes_in"]
        assert all(each["loop"] is not None and each["process_bytes"] > 0 for each in found["brokers"])
        (group,) = found["groups"]
        assert (group["name"], group["lag_records"], group["streams"]) == ("audit", RECORDS, ["orders"])

        shown = kera("top", "--once", "--interval", "0.2", bootstrap=at).decode()
        assert "BROKER" in shown
        assert "2.0k" not in shown  # these are rates, and nothing arrives
        assert "orders" in shown
        assert kera("top", "-o", "yaml", "--interval", "0.2", bootstrap=at).startswith(b"at_us: ")

        cluster.kill("broker-2")
        while (left := top(at))["brokers"][1]["state"] != "lost":
            pass  # the test's time-out bounds it
        assert left["health"] in {"degraded", "broken"}
        assert left["brokers"][0]["records_in"] is not None
        assert {each["name"]: each["state"] for each in left["streams"]}["orders"] == "no owner"
        gone = at
    done = run_kera("top", "--json", "--bootstrap", gone)
    assert done.returncode == 1
    assert b"no coordinator that leads answers at " + gone.encode() in done.stderr


@pytest.mark.slow
async def test_a_lost_coordinator_is_reported_while_figures_continue(tmp_path: Path) -> None:
    async with control_cluster(tmp_path, brokers=2, backups=0) as running:
        settings = ClientSettings(retry_timeout_ms=200, request_timeout_ms=1000)
        async with await Client.connect(running.bootstrap, settings) as client:
            await client.admin.create_stream("orders", replication=0)
            collector = Collector(Watch(client.admin))
            try:
                first = snapshot(await collector.sample(patience_s=30))
                assert [row.name for row in first.streams] == ["orders"]
                await running.kill("coordinator")
                while (lost := snapshot(await collector.sample())).health != "broken":
                    pass  # the test's time-out bounds it
                assert lost.notes[0].startswith("no coordinator answers since ")
                assert [row.name for row in lost.streams] == ["orders"]
                while snapshot(await collector.sample()).brokers[0].loop is None:
                    pass  # brokers continue to report
                await running.restart("coordinator")
                while snapshot(await collector.sample()).notes:
                    pass
            finally:
                await collector.close()


def test_with_security_a_user_sees_its_streams_and_learns_what_is_hidden(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path, stack)

        async def prepare() -> None:
            await secured.make_user("admin")
            await secured.make_user("alice")
            await secured.make_user("bob")
            await secured.grant("user:alice", "stream:hers*", Operation.READ, Operation.DESCRIBE)
            async with await secured.client("admin") as admin:
                for name in ("hers", "others"):
                    await admin.admin.create_stream(name)
                    await admin.latency.create(f"late-{name}", [name], 100)

        def seen_by(user: str) -> dict[str, Any]:
            env = {"KERA_CLIENT_TLS_CA": str(secured.ca), "KERA_CLIENT_USER": user, "KERA_CLIENT_PASSWORD": PASSWORD}
            return top(secured.cluster.bootstrap, env=env)

        asyncio.run(prepare())
        everything = seen_by("admin")
        assert [each["name"] for each in everything["streams"]] == ["hers", "others"]
        assert everything["notes"] == []
        assert everything["brokers"][0]["loop"] is not None
        assert [each["name"] for each in everything["constraints"]] == ["late-hers", "late-others"]

        hers = seen_by("alice")
        assert [each["name"] for each in hers["streams"]] == ["hers"]
        assert hers["streams"][0]["records_in"] is None
        assert [(each["name"], len(each["hops"])) for each in hers["constraints"]] == [("late-hers", 3)]
        assert not any("latency" in note for note in hers["notes"])
        assert any(note.startswith("you may not see figures of daemons: ") for note in hers["notes"]), hers["notes"]

        none = seen_by("bob")
        assert (none["constraints"], none["totals"]["constraints"]) == ([], 0)
        assert not any("latency" in note for note in none["notes"])


@pytest.mark.parametrize("told", ["by the terminal", pytest.param("by nobody", marks=pytest.mark.slow)])
async def test_top_ends_with_its_terminal(told: str) -> None:
    """As when an ssh connection breaks; also if no signal is sent."""
    async with LocalCluster(brokers=1, arena_bytes=32 * MIB) as cluster:
        mine, its = pty.openpty()
        command = [sys.executable, "-m", "kera.cli", "top", "--interval", "0.2", "--bootstrap", cluster.bootstrap]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=take_terminal if told == "by the terminal" else None,
        )
        os.close(its)
        try:
            seen = b""
            while b"Brokers" not in seen:  # the test's time-out bounds it
                seen += await asyncio.to_thread(os.read, mine, 1 << 16)
            os.close(mine)
            assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGHUP
        finally:
            if process.returncode is None:
                process.kill()


def take_terminal() -> None:
    """Make the terminal at standard input the controlling terminal of this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
