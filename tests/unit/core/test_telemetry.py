"""Logs are lines on standard error; metrics are served over HTTP."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIServer

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter

from kera.core.errors import PortTaken, StartError
from kera.core.native import native
from kera.core.telemetry import configure_logging, serve_metrics

ServeMetrics = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[ServeMetrics]:
    """A daemon serves metrics until it ends; here the servers end with the test."""
    started: list[tuple[WSGIServer, threading.Thread]] = []

    def start(*arguments: Any, **options: Any) -> tuple[WSGIServer, threading.Thread]:
        started.append(prometheus_client.start_http_server(*arguments, **options))
        return started[-1]

    yield partial(serve_metrics, start=start)
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("chunks_appended", "Chunks.", registry=registry).inc(3)
    return registry


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def test_metrics_are_served_on_any_free_port(serve: ServeMetrics, registry: CollectorRegistry) -> None:
    port = serve(registry, "127.0.0.1", 0)

    assert port > 0
    assert "chunks_appended_total 3.0\n" in get(port)


def test_metrics_say_whether_the_native_core_runs(serve: ServeMetrics, registry: CollectorRegistry) -> None:
    assert f"\nkera_native {float(native is not None)}\n" in get(serve(registry, "127.0.0.1", 0))


def test_who_connects_and_says_nothing_is_sent_away_and_makes_room(
    serve: ServeMetrics, registry: CollectorRegistry
) -> None:
    port = serve(registry, "127.0.0.1", 0, request_s=0.2, requests_max=2)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(3)]
        for each in reversed(silent):
            assert each.recv(1) == b"", "it is closed: the last one at once, the others in time"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
            assert response.status == 200


def test_metrics_are_served_on_the_port_asked_for(registry: CollectorRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    assert serve_metrics(registry, "127.0.0.1", port) == port
    assert "chunks_appended_total" in get(port)


def test_two_registries_of_one_process_do_not_mix(serve: ServeMetrics, registry: CollectorRegistry) -> None:
    first, second = (serve(each, "127.0.0.1", 0) for each in (registry, CollectorRegistry()))

    assert "chunks_appended_total" in get(first)
    assert "chunks_appended_total" not in get(second)


def test_a_port_that_is_taken_is_named(serve: ServeMetrics, registry: CollectorRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(PortTaken, match=f"metrics: cannot listen on 127.0.0.1:{port}: Address already in use") as e:
            serve(registry, "127.0.0.1", port)

    assert e.value.attributes == {"host": "127.0.0.1", "port": port}


# Logging is a matter of the whole process, so each of these is one of its own.
def lines(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_line_is_json_with_its_context_where_there_is_no_terminal() -> None:
    (line,) = lines(
        "from kera.core.telemetry import configure_logging, get_logger\n"
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


def test_an_exception_is_one_line_with_its_trace() -> None:
    (line,) = lines(
        "from kera.core.telemetry import configure_logging, get_logger\n"
        "configure_logging()\n"
        "try:\n"
        "    raise ValueError('no such luck')\n"
        "except ValueError as error:\n"
        "    get_logger('kera.test').error('failed', exc_info=error)\n"
    )

    assert "ValueError: no such luck" in json.loads(line)["exception"]


@pytest.mark.parametrize("level", ["debug", "INFO", "warning", "error"])
def test_a_level_can_be_chosen(level: str) -> None:
    told = lines(
        "from kera.core.telemetry import configure_logging, get_logger\n"
        f"configure_logging({level!r})\n"
        "log = get_logger('kera.test')\n"
        "log.debug('a'); log.info('a'); log.warning('a'); log.error('a')\n"
    )

    assert len(told) == 4 - ["debug", "info", "warning", "error"].index(level.lower())


def test_a_level_that_does_not_exist_is_named() -> None:
    with pytest.raises(StartError, match="'loud' is none of debug, info") as caught:
        configure_logging("loud")

    assert caught.value.attributes == {"level": "loud"}


def logged(before: str = "") -> "subprocess.CompletedProcess[str]":
    """A program that uses a library of ours and has not configured how it logs, but for `before`."""
    program = f"{before}\nfrom kera.core.telemetry import get_logger\nget_logger('sdk').warning('retrying')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)


def test_a_library_does_not_write_to_standard_output() -> None:
    done = logged()
    assert done.stdout == ""
    assert "retrying" in done.stderr


def test_an_application_says_how_we_log() -> None:
    done = logged("import structlog; structlog.configure(logger_factory=structlog.PrintLoggerFactory())")
    assert "retrying" in done.stdout
