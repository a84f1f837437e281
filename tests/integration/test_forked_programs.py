"""A program that `tests.forked_programs` forks behaves like a program with an interpreter of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_programs import started_alone

SHOWS = (
    "import os, sys, kera.core; print(os.getcwd(), sys.argv, os.environ.get('TOLD'), sys.stdin.read(), os.getppid())"
)


@pytest.fixture(autouse=True, params=["forked", "alone"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "forked":
        if os.environ.get("KERA_TESTS_FORK") == "0":
            pytest.skip("programs are not forked in this run")
        yield request.param
    else:
        with started_alone():
            yield request.param


def is_forked(pid: int) -> bool:
    return b"JE_ARROW_MALLOC_CONF" in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_program_has_its_arguments_environment_directory_and_streams(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOWS, "one", "two words"]
    environment = os.environ | {"TOLD": "yes"}
    done = subprocess.run(
        command, input="in", capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    assert done.stdout.split("\n")[0] == f"{tmp_path} ['-c', 'one', 'two words'] yes in {os.getpid()}"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('in words')", 1, "in words\n"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'bye', file=sys.stderr)", 0, "bye\n"),
    ],
)
def test_a_program_ends_with_its_own_exit_code_and_errors(ending: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", f"import os, sys, kera.core; {ending}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_an_uncaught_exception_prints_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import kera.core; 1 / 0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_refused_command_ends_with_its_exit_code() -> None:
    done = subprocess.run([sys.executable, "-m", "kera.cli", "no-such"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such" in done.stderr


async def test_a_program_started_by_asyncio_takes_signals(how: str) -> None:
    program = "import signal, kera.core; print('up', flush=True); signal.pause()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    assert is_forked(process.pid) is (how == "forked")
    shown = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0")
    assert shown.split("\0") == [sys.executable, "-c", program]
    assert os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["-c", "import sys, kera.core; sys.stdin.read(); sys.modules"], {}),
        (["-c", "import sys; sys.stdin.read()"], {}),
        (["-c", "import sys, kera.core; sys.stdin.read()"], {"KERA_NATIVE": "0"}),
        (["-X", "utf8", "-c", "import sys, kera.core; sys.stdin.read()"], {}),
    ],
)
def test_a_program_about_imports_or_python_itself_starts_alone(command: list[str], variables: dict[str, str]) -> None:
    argv = [sys.executable, *command]
    with subprocess.Popen(argv, env=os.environ | variables, stdin=subprocess.PIPE) as process:
        assert not is_forked(process.pid)
