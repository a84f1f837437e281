"""The life of a daemon's process, each case as a process of its own."""

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kera.core.native import describe
from kera.server.daemon import ExitCode

TIMEOUT_S = 30.0

SCRIPT = """
import asyncio, gc, sys, time
from contextlib import asynccontextmanager
from kera.server.daemon import run_daemon
from kera.core.errors import StaleEpoch, StartError

async def fail():
    raise StaleEpoch("a newer launch has taken over") if case == "fenced" else ZeroDivisionError("defect")

@asynccontextmanager
async def serve():
    if case == "cannot start":
        raise StartError("no room\\nin memory")
    if case == "looks for cycles":
        raise StartError(f"{gc.get_freeze_count()} objects are spared")
    if case == "slow start":
        print("starting", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
    async with asyncio.TaskGroup() as tasks:
        if case in {"fenced", "defect"}:
            tasks.create_task(fail())
        try:
            yield {"grpc_address": "here:1"}
        finally:
            if case == "hangs":
                time.sleep(1000)

case = sys.argv[1]
sys.exit(run_daemon(serve, name="example", stop_timeout_s=0.2 if case == "hangs" else 30))
"""


async def start(tmp_path: Path, case: str) -> asyncio.subprocess.Process:
    script = tmp_path / "daemon.py"
    script.write_text(SCRIPT)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, str(script), case, stdout=pipe, stderr=pipe)


async def first_line(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return (await asyncio.wait_for(stream.readline(), TIMEOUT_S)).decode()


async def end(process: asyncio.subprocess.Process) -> tuple[int | None, list[str]]:
    _, stderr = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    return process.returncode, stderr.decode().splitlines()


def events(lines: list[str]) -> list[Any]:
    return [json.loads(line)["event"] for line in lines if line.startswith("{")]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
async def test_a_daemon_prints_its_address_and_stops_on_a_signal(tmp_path: Path, number: int) -> None:
    process = await start(tmp_path, "serves")
    ready = json.loads(await first_line(process.stdout))
    assert ready == {"ready": "example", "pid": process.pid, "grpc_address": "here:1"}

    process.send_signal(number)
    process.send_signal(number)
    code, lines = await end(process)

    assert code == ExitCode.STOPPED
    assert events(lines) == ["ready", "stopping", "stopped"]
    assert json.loads(lines[0])["core"] == describe()


async def test_a_signal_stops_a_daemon_that_is_still_starting(tmp_path: Path) -> None:
    process = await start(tmp_path, "slow start")
    assert await first_line(process.stderr) == "starting\n"

    process.send_signal(signal.SIGTERM)
    code, lines = await end(process)

    assert code == ExitCode.STOPPED
    assert events(lines) == ["stopping", "stopped"]


async def test_a_start_error_is_printed_as_one_line(tmp_path: Path) -> None:
    code, lines = await end(await start(tmp_path, "cannot start"))

    assert (code, lines) == (ExitCode.NOT_STARTED, ["kera: error: no room in memory"])


async def test_imported_modules_are_frozen_for_the_garbage_collector_before_serving(tmp_path: Path) -> None:
    _, lines = await end(await start(tmp_path, "looks for cycles"))

    spared = re.fullmatch("kera: error: ([0-9]+) objects are spared", lines[-1])
    assert spared is not None
    assert int(spared[1]) > 10_000


async def test_an_error_while_serving_ends_the_daemon_and_is_printed(tmp_path: Path) -> None:
    code, lines = await end(await start(tmp_path, "fenced"))

    assert code == ExitCode.FAILED
    assert lines[-1] == "kera: error: a newer launch has taken over"
    assert events(lines) == ["ready"]


async def test_a_defect_is_logged_with_its_traceback(tmp_path: Path) -> None:
    code, lines = await end(await start(tmp_path, "defect"))

    assert code == ExitCode.FAILED
    assert lines[-1] == "kera: error: unexpected ZeroDivisionError: defect"
    assert "in fail" in json.loads(lines[-2])["exception"]


async def test_a_stop_that_hangs_ends_at_its_time_out(tmp_path: Path) -> None:
    process = await start(tmp_path, "hangs")
    await first_line(process.stdout)

    process.send_signal(signal.SIGTERM)
    code, lines = await end(process)

    assert code == ExitCode.FAILED
    assert lines[-1] == "kera: error: did not stop within 0.2 s"
