"""Logs and metrics: structlog to standard error, Prometheus over HTTP.

Libraries only call `get_logger`; how they log is for the consumer group to configure, by structlog. Daemons call
`configure_logging` once, at their start. Metrics are made against a `CollectorRegistry` that the daemon owns, so that
several can live in one process (tests do).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from kera.core.errors import PortTaken, StartError
from kera.core.native import native

__all__ = ["CollectorRegistry", "configure_logging", "get_logger", "serve_metrics"]

METRICS_REQUEST_S = 5.0
"""For a request to the metrics' port to come."""
METRICS_REQUESTS_MAX = 16
"""At once; each has a thread and a descriptor. Who comes then is sent away."""


def _to_standard_error(*_: object) -> structlog.PrintLogger:
    return structlog.PrintLogger(sys.stderr)  # as it is now: tests and consumer groups exchange it


if not structlog.is_configured():
    # Else structlog would write to standard output until somebody configures it, and that is the application's own.
    structlog.configure(logger_factory=_to_standard_error)


def get_logger(name: str) -> Any:
    """A structured logger: ``log.info("what happened", stream=..., broker_id=...)``."""
    return structlog.get_logger(name)


def configure_logging(level: str = "info", **context: Any) -> None:
    """Log to standard error from `level` up: readable lines on a terminal, JSON lines elsewhere.

    `context` is bound to every line (daemon, broker_id). Raises `StartError` when there is no such level.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise StartError(f"log level {level!r} is none of debug, info, warning, error, critical", level=level)
    on_terminal = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if on_terminal else structlog.processors.JSONRenderer()
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not on_terminal:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**context)


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    *,
    request_s: float = METRICS_REQUEST_S,
    requests_max: int = METRICS_REQUESTS_MAX,
    start: Callable[..., tuple[Any, threading.Thread]] = start_http_server,
) -> int:
    """Serve `registry` at ``http://host:port/metrics`` from a thread of its own; returns the port (0: any free one).

    Adds what is to be seen of each daemon. Raises `PortTaken`.
    """
    Gauge("kera_native", "1: the native core runs; 0: all is done in Python.", registry=registry).set(
        native is not None
    )
    try:
        server, _ = start(port, addr=host, registry=registry)
        _bound(server, request_s, requests_max)
    except OSError as error:
        raise PortTaken(f"metrics: cannot listen on {host}:{port}: {error.strerror}", host=host, port=port) from error
    return int(server.server_port)


def _bound(server: Any, request_s: float, requests_max: int) -> None:
    """Let those who connect and say nothing keep neither threads nor descriptors."""
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": request_s})
    room = threading.Semaphore(requests_max)
    serve = server.process_request_thread

    def serve_and_leave(*request: Any) -> None:
        try:
            serve(*request)
        finally:
            room.release()

    server.verify_request = lambda *_: room.acquire(blocking=False)
    server.process_request_thread = serve_and_leave
