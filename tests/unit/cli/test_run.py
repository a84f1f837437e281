"""`kera.cli._run`, `__main__` and `app`: exit codes and error lines of commands."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from kera.cli.__main__ import main
from kera.cli._run import MissingExtra, UsageError, ended_by_signals, extra, run_app, run_async
from kera.cli.app import app as kera
from kera.core.base.build import this_build
from kera.core.errors import InvalidArgument, PortTaken
from kera.core.native import describe
from tests.examples import first_quick, first_rows_quick


def app_that(action: object) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    def command() -> object:
        return action() if callable(action) else action

    return app


def raises(error: BaseException) -> object:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        (lambda: None, 0, ""),
        (lambda: 5, 5, ""),
        (raises(typer.Exit(4)), 4, ""),
        (raises(InvalidArgument("no good")), 1, "kera: error: no good\n"),
        (raises(UsageError("say what")), 2, "kera: error: say what\n"),
        (raises(PortTaken("port 1 is taken")), 2, "kera: error: port 1 is taken\n"),
        (raises(typer.Abort()), 1, "kera: error: not confirmed\n"),
        (raises(typer.BadParameter("bad")), 2, "kera: error: Invalid value: bad\n"),
    ],
)
def test_each_outcome_has_its_exit_code_and_line(
    action: object, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app_that(action), []) == code
    assert capsys.readouterr().err == text


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_app(app_that(lambda: 1 / 0), [])


def test_ctrl_c_cancels_the_command_with_clean_up_and_exit_code_130() -> None:
    cleaned = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    assert run_app(app_that(lambda: run_async(work())), []) == 130
    assert cleaned == [True]


def test_ctrl_c_interrupts_blocking_code_within_the_event_loop() -> None:
    answered = False

    async def work() -> None:
        nonlocal answered
        with ended_by_signals():
            signal.raise_signal(signal.SIGINT)
            answered = True

    assert run_app(app_that(lambda: run_async(work())), []) == 130
    assert not answered


def test_logged_warnings_are_printed_as_kera_warnings() -> None:
    program = (
        "import asyncio\nfrom kera.cli._run import run_async\nfrom kera.core.base.telemetry import get_logger\n"
        "async def work():\n"
        "    get_logger('kera.test').info('not shown')\n"
        "    get_logger('kera.test').warning('slow broker', broker_id=1)\n"
        "run_async(work())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "kera: warning: slow broker (broker_id=1)\n")


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    with (
        pytest.raises(MissingExtra, match=r"no_such_package is missing; .* pip install 'kera\[server\]'"),
        extra("server"),
    ):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError), extra("server"):
        import kera.core.no_such_module  # type: ignore[import-untyped]  # noqa: F401


def run_main(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys\n{code}\nfrom kera.cli.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments", first_quick([["coordinator"], ["inspect", "."], ["verify", "."]], 1), ids=" ".join
)
def test_a_command_without_its_extra_names_the_package_to_install(arguments: list[str]) -> None:
    ended = run_main("sys.modules['lmdb'] = None", *arguments)

    assert ended.returncode == 1
    assert ended.stderr == "kera: error: lmdb is missing; install it with: pip install 'kera[server]'\n"


DAEMONS = ("kera.backup", "kera.broker", "kera.coordinator", "kera.local", "kera.server")


@pytest.mark.parametrize(
    "arguments",
    first_quick(
        [
            ["broker"],
            ["dev"],
            ["bench", "produce"],
            ["cluster", "restore", "copy", "--data-dir", "."],
            ["doctor", "--config", "kera.toml"],
            ["inspect", "."],
            ["node", "--data-dir", "."],
            ["verify", "."],
        ],
        2,
    ),
    ids=lambda arguments: arguments[0],
)
def test_a_command_without_the_daemons_it_needs_names_the_package_to_install(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kera.toml").write_text("[broker]\n")

    ended = run_main(f"sys.modules.update(dict.fromkeys({DAEMONS}))", *arguments)

    assert ended.returncode == 1
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("kera: error: kera.")
    assert line.endswith("is missing; install it with: pip install 'kera[server]'")


def test_doctor_checks_secrets_and_certificates_without_the_daemons_installed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret of a cluster\n")
    made = run_main("", "tls", "init", str(tmp_path))
    assert made.returncode == 0, made.stderr
    files = [f"--tls-cert={tmp_path}/localhost.pem", f"--tls-key={tmp_path}/localhost-key.pem"]
    files += [f"--tls-ca={tmp_path}/ca.pem", f"--cluster-secret-file={tmp_path}/secret", "--name=localhost"]

    ended = run_main(f"sys.modules.update(dict.fromkeys({DAEMONS}))", "doctor", *files)

    assert "localhost.pem is accepted for localhost" in ended.stdout, ended.stderr
    assert str(tmp_path / "secret") in ended.stdout


@pytest.mark.parametrize(
    "arguments", first_quick([["--version"], ["stream", "create", "--help"], ["--help"], ["consume", "--help"]], 2)
)
def test_help_and_version_do_not_import_large_packages(arguments: list[str]) -> None:
    report = (
        "import atexit\n"
        "large = ('asyncio', 'pyarrow', 'grpc', 'numpy', 'pydantic_settings', 'structlog', 'rich')\n"
        "atexit.register(lambda: print([name for name in large if name in sys.modules], file=sys.stderr))"
    )
    ended = run_main(report, *arguments)
    assert ended.returncode == 0
    assert ended.stdout
    assert ended.stderr == "[]\n"


def test_the_version_names_the_commit_and_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    commit = this_build().commit or "unknown"
    assert run_app(kera, ["--version"]) == 0 == main(["--version"])
    assert capsys.readouterr().out == 2 * f"kera {version('kera')} (commit {commit}, {describe()})\n"


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(kera, ["stream"]) == 2
    assert "describe  Show a stream" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "No such command 'nothing'. See kera --help"),
        (["stream", "delete"], "Missing argument 'NAME'. See kera stream delete --help"),
        (["stream", "delete", "x"], "deleting x needs --yes when standard input is not a terminal"),
        (["stream", "create", "x", "--key-column", "a"], "give the columns with --column"),
        (["stream", "create", "x", "--retention-bytes", "much"], "--retention-bytes: 'much' is not a size"),
        (["stream", "create", "x", "--retention-ms", "-1"], "Invalid value for '--retention-ms'"),
        (["stream", "alter", "x"], "no change is given"),
        (["stream", "truncate", "x", "--all"], "truncating x needs --yes when standard input is not a terminal"),
        (["stream", "truncate", "x", "--yes"], "say what to delete"),
        (["stream", "truncate", "x", "--yes", "--streamlet", "0"], "say what to delete"),
        (["stream", "truncate", "x", "--yes", "--to", "1/1+0"], "say what to delete"),
        (["stream", "truncate", "x", "--yes", "--all", "--streamlet", "0", "--to", "1/1+0"], "say what to delete"),
        (["stream", "truncate", "x", "--yes", "--all", "--streamlet", "0"], "say what to delete"),
        (["stream", "truncate", "x", "--yes", "--all", "--entry", "0"], "say what to delete"),
        (["stream", "truncate", "x", "--yes", "--streamlet", "0", "--to", "1/1"], "--to: '1/1' is not a position"),
        (["consume", "x", "y"], "several streams are read in one order only: add --ordered"),
        (["consume", "x", "--ordered", "--epoch", "soon"], "not a duration"),
        (["produce", "x", "-K", ""], "--key-separator must not be empty"),
        (["dev", "--brokers", "0"], "Invalid value for '--brokers'"),
        (["dev", "--arena-bytes", "much"], "--arena-bytes: 'much' is not a size"),
        (["broker", "--port", "70000"], "port is '70000': Input should be less than or equal to 65535"),
        (["bench", "produce", "--records", "1", "--bytes", "1"], "records and bytes are mutually exclusive"),
        (
            ["bench", "produce", "--records", "1", "--producers", "2"],
            "a round has fewer records than producers",
        ),
    ],
)
def test_an_invalid_command_line_prints_one_line_and_exits_with_2(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_app(kera, arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kera: error: ")
    assert says in line


FULL = Path("/dev/full")


def run_kera(*arguments: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **environment: str) -> Any:
    own = {name: value for name, value in os.environ.items() if name not in {"LC_ALL", "LANG", "PYTHONUTF8"}}
    command = [sys.executable, "-m", "kera.cli", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=stderr, env=own | environment, check=False)


@pytest.mark.parametrize("arguments", first_quick([["--help"], ["--version"]], 1))
def test_output_that_cannot_be_written_prints_one_line_and_exits_with_1(arguments: list[str]) -> None:
    with FULL.open("wb") as full:
        ended = run_kera(*arguments, stdout=full)
    assert (ended.returncode, ended.stderr) == (1, b"kera: error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("arguments", first_quick([["--help"], ["--version"]], 1))
def test_a_closed_pipe_as_output_is_no_error(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        ended = run_kera(*arguments, stdout=nobody)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_error_message_that_cannot_be_written_keeps_its_exit_code() -> None:
    with FULL.open("wb") as full:
        assert run_kera("nonsense", stderr=full).returncode == 2


@pytest.mark.parametrize(
    ("line", "code", "told"),
    first_rows_quick(
        [
            ("generate completion bash >&-", 1, b"kera: error: standard output is closed\n"),
            ("schema check x - --type avro <&-", 1, b"kera: error: standard input is closed\n"),
            ("nonsense 2>&-", 2, b""),
            ("--version >&-", 1, b"kera: error: standard output is closed\n"),
            ("nonsense >&-", 2, None),
            ("--version <&- 2>&-", 0, b""),
        ],
        3,
    ),
)
def test_a_closed_standard_stream_is_an_error_only_if_needed(line: str, code: int, told: bytes | None) -> None:
    command = f"{shlex.quote(sys.executable)} -m kera.cli {line}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert ended.returncode == code
    assert told is None or ended.stderr == told


POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    "environment", first_quick([POSIX, POSIX | {"PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}], 1)
)
def test_characters_outside_the_encoding_are_escaped(environment: dict[str, str]) -> None:
    program = (
        "import sys\nfrom kera.cli._streams import open_standard_streams, show\nopen_standard_streams()\n"
        "sys.exit(show('a \\u2192 b', 0))"
    )
    # Without site: it cannot read the paths of an editable install if they have letters that the locale lacks.
    environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, env=environment, check=True)
    assert ended.stdout in {"a \u2192 b".encode(), b"a \\u2192 b"}
