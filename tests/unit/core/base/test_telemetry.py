"""Logs are lines on standard error."""

import json
import subprocess
import sys

import pytest

from kera.core.base.telemetry import configure_logging
from kera.core.errors import StartError


# Logging belongs to the whole process, so each test runs its own.
def lines(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_line_is_json_with_its_context_without_a_terminal() -> None:
    (line,) = lines(
        "from kera.core.base.telemetry import configure_logging, get_logger\n"
        "log = get_logger('kera.test')\n"  # modules ask for it before the daemon configures it
        "configure_logging('info', daemon='broker', broker_id=7)\n"
        "log.debug('too fine')\n"
        "log.info('stream created', stream='orders')\n"
    )

    record = json.loads(line)
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "event": "stream created",
        "level": "info",
        "stream": "orders",
        "daemon": "broker",
        "broker_id": 7,
    }


def test_lines_of_threads_have_the_context_too() -> None:
    (line,) = lines(
        "import threading\n"
        "from kera.core.base.telemetry import configure_logging, get_logger\n"
        "thread = threading.Thread(target=lambda: get_logger('kera.test').info('a'))\n"
        "configure_logging(daemon='broker')\n"
        "thread.start()\n"
    )
    assert json.loads(line)["daemon"] == "broker"


def test_an_exception_is_one_line_with_its_trace() -> None:
    (line,) = lines(
        "from kera.core.base.telemetry import configure_logging, get_logger\n"
        "configure_logging()\n"
        "try:\n"
        "    raise ValueError('no such luck')\n"
        "except ValueError as error:\n"
        "    get_logger('kera.test').error('failed', exc_info=error)\n"
    )

    assert "ValueError: no such luck" in json.loads(line)["exception"]


def test_a_traceback_on_a_terminal_shows_no_local_variables_and_no_control_characters() -> None:
    script = (
        "import sys\n"
        "from kera.core.base.telemetry import configure_logging, get_logger\n"
        "sys.stderr.isatty = lambda: True\n"
        "configure_logging()\n"
        "def log_in(password):\n"
        "    raise ValueError('peer says ' + chr(27) + ']0;title' + chr(7))\n"
        "try:\n"
        "    log_in('correct' + '-horse')\n"
        "except ValueError:\n"
        "    get_logger('kera.test').exception('failed')\n"
    )
    told = "\n".join(lines(script))

    assert r"ValueError: peer says \x1b]0;title\x07" in told
    assert "correct-horse" not in told


@pytest.mark.parametrize("level", ["debug", "INFO", "warning", "error"])
def test_a_level_can_be_chosen(level: str) -> None:
    told = lines(
        "from kera.core.base.telemetry import configure_logging, get_logger\n"
        f"configure_logging({level!r})\n"
        "log = get_logger('kera.test')\n"
        "log.debug('a'); log.info('a'); log.warning('a'); log.error('a')\n"
    )

    assert len(told) == 4 - ["debug", "info", "warning", "error"].index(level.lower())


def test_the_error_names_an_unknown_level() -> None:
    with pytest.raises(StartError, match="'loud' is not one of debug, info") as caught:
        configure_logging("loud")

    assert caught.value.attributes == {"level": "loud"}


def logged(before: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program that uses the library and configures logging only by `before`."""
    program = f"{before}\nfrom kera.core.base.telemetry import get_logger\nget_logger('sdk').warning('retrying')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)


def test_a_library_does_not_write_to_standard_output() -> None:
    done = logged()
    assert done.stdout == ""
    assert "retrying" in done.stderr


def test_an_application_can_configure_how_the_library_logs() -> None:
    done = logged("import structlog; structlog.configure(logger_factory=structlog.PrintLoggerFactory())")
    assert "retrying" in done.stdout
