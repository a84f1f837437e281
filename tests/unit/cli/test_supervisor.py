"""`kera.local.child` and its log reader, with small programs in place of daemons."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kera.core.errors import InternalError, PathNotWritable
from kera.local.child import Child, ChildStartError, log_tail
from kera.local.cluster import LocalCluster
from kera.local.running import run_in_thread

READY = """
import json, os, sys
print(json.dumps({"ready": "stub", "pid": os.getpid()}), flush=True)
"""
SERVE = READY + "import signal\nsignal.pause()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "while True: signal.pause()\n"

MakeChild = Callable[..., Child]


def exists(pid: int) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], bound_s: float = 30) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture
async def make_child(tmp_path: Path) -> AsyncIterator[MakeChild]:
    async with contextlib.AsyncExitStack() as stack:

        def make(program: str, on_death: Callable[[Child], None] | None = None) -> Child:
            argv = [sys.executable, "-c", program]
            child = Child("stub", argv, env=os.environ, log_path=tmp_path / "logs" / "stub.log", on_death=on_death)
            stack.push_async_callback(child.kill)
            return child

        yield make


async def test_start_returns_the_ready_line(make_child: MakeChild) -> None:
    child = make_child('print("some banner")\n' + SERVE)

    ready = await child.start(ready_timeout_s=30)

    assert ready == child.ready == {"ready": "stub", "pid": child.pid}


async def test_start_names_a_log_that_cannot_be_written(make_child: MakeChild, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    child = make_child(SERVE)

    with pytest.raises(PathNotWritable, match=r"logs/stub.log: .*; choose another directory for logs"):
        await child.start(ready_timeout_s=30)

    assert child.pid is None
    assert await child.stop(grace_s=30)


async def test_stop_ends_the_child_with_sigterm(make_child: MakeChild) -> None:
    child = make_child(SERVE)
    await child.start(ready_timeout_s=30)
    pid = child.pid
    assert pid is not None

    assert await child.stop(grace_s=30)

    assert not exists(pid)
    assert child.pid is None
    assert child.returncode == -signal.SIGTERM
    assert await child.stop(grace_s=30), "stop may be called again"


def state_of(child: Child) -> str:
    """The kernel's letter for the state of the process: T is stopped."""
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_child_can_be_paused_and_resumed(make_child: MakeChild) -> None:
    child = make_child(SERVE)
    with pytest.raises(InternalError, match="does not run"):
        child.pause()
    await child.start(ready_timeout_s=30)

    child.pause()
    await asyncio.to_thread(wait_until, lambda: state_of(child) == "T")
    child.resume()
    await asyncio.to_thread(wait_until, lambda: state_of(child) != "T")


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_paused_child_can_be_stopped_or_killed(make_child: MakeChild, end: str) -> None:
    deaths: list[Child] = []
    child = make_child(SERVE, deaths.append)
    await child.start(ready_timeout_s=30)
    child.pause()

    assert await (child.stop(grace_s=30) if end == "stop" else child.kill()) in {True, None}

    assert child.returncode == (-signal.SIGTERM if end == "stop" else -signal.SIGKILL)
    assert not deaths


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(make_child: MakeChild) -> None:
    child = make_child(STUBBORN)
    await child.start(ready_timeout_s=30)

    assert not await child.stop(grace_s=0.05)

    assert child.returncode == -signal.SIGKILL


async def test_a_grandchild_that_holds_the_pipe_open_does_not_block_stop(
    make_child: MakeChild,
) -> None:
    child = make_child("import subprocess, sys\nsubprocess.Popen(['sleep', '1000'])\n" + STUBBORN)
    await child.start(ready_timeout_s=30)

    assert not await child.stop(grace_s=0.05)

    assert child.pid is None


async def test_stop_reports_a_clean_end_although_another_process_holds_the_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = asyncio.StreamReader()
    output.feed_data(b'{"ready": "stub"}\n')  # the output never ends
    process = SimpleNamespace(pid=0, returncode=None, stdout=output)

    async def started(*_: object, **__: object) -> SimpleNamespace:
        return process

    def obey(_: int, number: int) -> None:
        process.returncode = -number

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(os, "kill", obey)
    child = Child("stub", [], env={}, log_path=tmp_path / "stub.log")
    await child.start(ready_timeout_s=30)

    assert await child.stop(grace_s=0)


async def test_a_child_with_much_output_does_not_block(make_child: MakeChild, tmp_path: Path) -> None:
    done = tmp_path / "done"
    child = make_child(
        SERVE.replace("import signal", f"print('x' * 1_000_000)\nopen({str(done)!r}, 'w')\nimport signal")
    )
    await child.start(ready_timeout_s=30)

    while not done.exists():
        await asyncio.sleep(0.01)


async def test_on_death_reports_unexpected_deaths_only(make_child: MakeChild) -> None:
    deaths: asyncio.Queue[Child] = asyncio.Queue()
    child = make_child(SERVE, deaths.put_nowait)
    await child.start(ready_timeout_s=30)
    assert child.pid is not None

    os.kill(child.pid, signal.SIGUSR1)

    assert await asyncio.wait_for(deaths.get(), 30) is child
    assert child.describe_exit() == "was killed by SIGUSR1"

    await child.start(ready_timeout_s=30)
    await child.kill()
    await child.start(ready_timeout_s=30)
    await child.stop(grace_s=30)
    assert deaths.empty()


async def test_a_failed_start_reports_the_reason_from_the_log(make_child: MakeChild) -> None:
    child = make_child("import sys\nsys.exit('some log\\nkera: error: port 7400 is taken')")

    with pytest.raises(ChildStartError) as caught:
        await child.start(ready_timeout_s=30)

    assert caught.value.message == "stub: port 7400 is taken"
    assert caught.value.attributes["log_tail"] == "some log\nkera: error: port 7400 is taken"


async def test_a_failed_start_without_a_reason_reports_the_end_of_the_log(make_child: MakeChild) -> None:
    child = make_child("1 / 0")

    with pytest.raises(ChildStartError, match=r"stub exited with code 1\n(?s:.)*ZeroDivisionError"):
        await child.start(ready_timeout_s=30)


async def test_a_failed_start_does_not_report_the_reason_of_an_earlier_run(make_child: MakeChild) -> None:
    child = make_child("import sys\nsys.exit('kera: error: first')")
    with pytest.raises(ChildStartError, match="stub: first"):
        await child.start(ready_timeout_s=30)

    child.argv[-1] = "import sys\nsys.exit(3)"

    with pytest.raises(ChildStartError, match="stub exited with code 3"):
        await child.start(ready_timeout_s=30)


async def test_a_child_that_is_not_ready_in_time_is_ended(make_child: MakeChild) -> None:
    child = make_child("import signal\nsignal.pause()")

    with pytest.raises(ChildStartError, match=r"was not ready within 0\.3 s"):
        await child.start(ready_timeout_s=0.3)

    assert child.pid is None


async def test_an_endless_line_instead_of_the_ready_line_fails_the_start(make_child: MakeChild) -> None:
    child = make_child("while True: print('x' * 100_000, end='')")

    with pytest.raises(ChildStartError, match="endless line"):
        await child.start(ready_timeout_s=30)

    assert child.pid is None


async def test_a_cancelled_start_leaves_no_process(make_child: MakeChild) -> None:
    child = make_child("import signal\nsignal.pause()")
    start = asyncio.create_task(child.start(ready_timeout_s=30))
    while child.pid is None:
        await asyncio.sleep(0.01)
    pid = child.pid

    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start

    assert not exists(pid)


def starting(path: Path, does: str = "signal.pause()") -> str:
    """A program that never finishes its start; it makes a file, and removes it on SIGTERM."""
    return f"""
import pathlib, signal, sys
made = pathlib.Path({str(path)!r})
def stop(*_):
    made.unlink()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
made.touch()
while True: {does}
"""


@pytest.mark.parametrize("end", ["cancelled", "useless"])
async def test_a_starting_child_can_clear_up(make_child: MakeChild, tmp_path: Path, end: str) -> None:
    made = tmp_path / "made"
    does = "print('x' * 100_000, flush=True)" if end == "useless" else "signal.pause()"
    child = make_child(starting(made, does))
    start = asyncio.create_task(child.start(ready_timeout_s=30))

    if end == "cancelled":
        await asyncio.to_thread(wait_until, made.exists)
        start.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else ChildStartError):
        await start

    assert child.returncode == 0
    assert not made.exists()


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_a_starting_child_that_ignores_sigterm_is_killed(
    make_child: MakeChild, tmp_path: Path, cancelled: int
) -> None:
    made = tmp_path / "made"
    child = make_child(starting(made).replace("made.unlink()\n    sys.exit()", "made.write_text('told')"))
    start = asyncio.create_task(child.start(ready_timeout_s=30, stop_grace_s=0.1 if cancelled == 1 else 1000))
    await asyncio.to_thread(wait_until, made.exists)

    start.cancel()
    if cancelled == 2:  # a second cancellation does not wait for the grace
        await asyncio.to_thread(wait_until, lambda: made.read_text() == "told")
        start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start

    assert child.returncode == -signal.SIGKILL


class Interrupted:
    """A cluster whose start or stop sends Ctrl-C to the main thread and goes on until it is cancelled."""

    def __init__(self, at: str) -> None:
        self._at = at
        self._thread = threading.get_ident()
        self.done: list[str] = []

    async def start(self) -> None:
        await self._do("start")

    async def stop(self) -> list[str]:
        await self._do("stop")
        return []

    async def _do(self, what: str) -> None:
        try:
            if what == self._at:
                signal.pthread_kill(self._thread, signal.SIGINT)
                await asyncio.Event().wait()
            self.done.append(what)
        except asyncio.CancelledError:
            self.done.append(f"cancelled {what}")
            raise


@pytest.mark.parametrize(
    ("at", "done"), [("start", ["cancelled start", "stop"]), ("stop", ["start", "cancelled stop"])]
)
def test_ctrl_c_cancels_start_or_stop_of_a_cluster_in_a_thread_and_waits_for_it(at: str, done: list[str]) -> None:
    cluster = Interrupted(at)

    with pytest.raises(KeyboardInterrupt), run_in_thread(cast("Any", cluster)):
        pass

    assert cluster.done == done


async def test_a_cancelled_stop_kills_all_children_before_it_removes_their_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    stops = asyncio.Event()

    class Stub:
        def __init__(self, name: str, *_: object, **__: object) -> None:
            self.name = name
            self.ready = {"grpc_address": "h:1"}

        async def start(self, **_: object) -> None: ...

        async def stop(self, **_: object) -> bool:
            stops.set()
            return await asyncio.Event().wait()

        async def kill(self) -> None:
            assert cluster.directory.is_dir()
            told.append(self.name)

    monkeypatch.setattr("kera.local.cluster.Child", Stub)
    cluster = LocalCluster(backups=1)
    await cluster.start()
    stopping = asyncio.create_task(cluster.stop())
    await stops.wait()

    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping

    assert told == ["coordinator", "backup-1", "broker-1"]
    assert not cluster.directory.exists()


def test_a_child_dies_with_its_killed_supervisor(tmp_path: Path) -> None:
    child_program = "from kera.core.base.process import die_with_parent\ndie_with_parent()\n" + SERVE
    supervisor_program = f"""
import asyncio, json, os, sys
from pathlib import Path
from kera.local.child import Child
async def main():
    argv = [sys.executable, "-c", {child_program!r}]
    child = Child("stub", argv, env=os.environ, log_path=Path({str(tmp_path)!r}, "log"))
    print((await child.start(ready_timeout_s=30))["pid"], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", supervisor_program], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child_pid = int(supervisor.stdout.readline())
        assert exists(child_pid)

        supervisor.kill()

        wait_until(lambda: not exists(child_pid))


def test_the_tail_of_a_log_shows_json_lines_as_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record = {
        "event": "stream created",
        "level": "info",
        "timestamp": "2026-01-02T03:04:05.678901Z",
        "stream": "a",
    }
    path.write_text(f"old\n{json.dumps(record)}\n{json.dumps({'event': 'failed', 'exception': 'Trace'})}\n[1]\nplain\n")

    assert log_tail(path, lines=4).splitlines() == [
        "03:04:05.678 info stream created stream=a",
        "failed",
        "Trace",
        "[1]",
        "plain",
    ]
    assert log_tail(tmp_path / "absent") == ""
