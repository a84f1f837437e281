"""Destinations of spans in tests: a receiver in the test's process, and a real OpenTelemetry Collector.

Tests read the spans that the Collector received in the file that it writes. It is built from ``tests/otel_collector``
with Go, once for each state of its sources, and kept below ``build``; the first time, this takes minutes. Without Go,
or if its modules cannot be fetched, tests that need it are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests" / "otel_collector"
BUILT = ROOT / "build" / "otel-collector"
BUILD_S = 1500
WAIT_S = 30


class Span(NamedTuple):
    """A received span."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    links: frozenset[tuple[str, str]]
    """Trace and span of each link."""
    attributes: dict[str, Any]


def built() -> Path:
    """The path of the program. Skips the test if it cannot be built."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("the OpenTelemetry Collector of the tests is built with Go, which is not installed")
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in {".go", ".mod", ".sum"})
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    BUILT.mkdir(parents=True, exist_ok=True)
    program = BUILT / f"collector-{state}"
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            made = program.with_suffix(".new")
            command = [go, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(made), "."]
            env = {**os.environ, "CGO_ENABLED": "0"}
            done = subprocess.run(
                command, cwd=SOURCES, env=env, capture_output=True, text=True, timeout=BUILD_S, check=False
            )
            if done.returncode:
                pytest.skip(f"the OpenTelemetry Collector of the tests cannot be built: {done.stderr.strip()[-300:]}")
            made.rename(program)
    return program


class Received(ABC):
    """The spans that were sent to `url`."""

    url: str

    @abstractmethod
    def spans(self) -> list[Span]:
        """All received spans."""

    @abstractmethod
    def text(self) -> str:
        """Everything that was received, as text."""

    def wait_for(self, *names: str, count: int = 1) -> list[Span]:
        """All received spans, once there are `count` with each of these names."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            found = self.spans()
            there = [each.name for each in found]
            missing = {name for name in names if there.count(name) < count}
            if not missing:
                return found
            assert time.monotonic() < deadline_s, f"no span {', '.join(sorted(missing))} among {found}"
            time.sleep(0.02)


class Collector(Received):
    """A running collector. Its traces go to a file of JSON lines."""

    def __init__(self, directory: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.path = directory / "spans.json"

    def spans(self) -> list[Span]:
        """See `Received`."""
        if not self.path.exists():
            return []
        *lines, unfinished = self.path.read_text().split("\n")
        del unfinished
        return [
            _span(each, of["resource"])
            for line in lines
            for of in json.loads(line)["resourceSpans"]
            for scope in of["scopeSpans"]
            for each in scope["spans"]
        ]

    def text(self) -> str:
        """See `Received`."""
        return self.path.read_text()


class Receiver(Received):
    """Keeps what is posted to it."""

    def __init__(self, port: int, posted: list[bytes]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._posted = posted

    def spans(self) -> list[Span]:
        """See `Received`."""
        return [span for body in list(self._posted) for span in _spans_in(body)]

    def text(self) -> str:
        """See `Received`."""
        return b"".join(self._posted).decode("latin-1")


def _spans_in(body: bytes) -> Iterator[Span]:
    for of in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _values(of.resource.attributes)["service.name"]
        for scope in of.scope_spans:
            for each in scope.spans:
                yield Span(
                    service=service,
                    name=each.name,
                    kind=each.kind,
                    trace_id=each.trace_id.hex(),
                    span_id=each.span_id.hex(),
                    parent_id=each.parent_span_id.hex(),
                    links=frozenset((link.trace_id.hex(), link.span_id.hex()) for link in each.links),
                    attributes=_values(each.attributes),
                )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """The values by name; numbers are text, as the Collector writes them."""
    found: dict[str, Any] = {}
    for each in attributes:
        value = getattr(each.value, each.value.WhichOneof("value") or "string_value")
        found[each.key] = str(value) if type(value) is int else value
    return found


def _span(told: dict[str, Any], resource: dict[str, Any]) -> Span:
    return Span(
        service=_attributes(resource)["service.name"],
        name=told["name"],
        kind=told["kind"],
        trace_id=told["traceId"],
        span_id=told["spanId"],
        parent_id=told.get("parentSpanId", ""),
        links=frozenset((link["traceId"], link["spanId"]) for link in told.get("links", [])),
        attributes=_attributes(told),
    )


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in of.get("attributes", [])}


@contextlib.contextmanager
def receiving(_directory: Path) -> Iterator[Receiver]:
    """A receiver of spans over OTLP/HTTP in this process."""
    posted: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield Receiver(server.server_address[1], posted)
        finally:
            server.shutdown()


@contextlib.contextmanager
def collecting(directory: Path) -> Iterator[Collector]:
    """A collector that receives spans over OTLP/HTTP."""
    program = built()
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        collector = Collector(directory, port)
        config = directory / "collector.yaml"
        text = (SOURCES / "config.yaml").read_text()
        config.write_text(text.replace("LISTEN", f"127.0.0.1:{port}").replace("FILE", str(collector.path)))
        with (directory / "collector.log").open("w") as log:
            process = subprocess.Popen([str(program), "--config", str(config)], stdout=log, stderr=subprocess.STDOUT)
        try:
            if _listens(process, port):
                yield collector
                return
        finally:
            process.terminate()
            process.wait(WAIT_S)
        assert "address already in use" in (directory / "collector.log").read_text()  # retry with another port


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=WAIT_S):
            return True
        assert time.monotonic() < deadline_s, "the collector does not listen"
    return False
