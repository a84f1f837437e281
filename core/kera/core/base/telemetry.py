"""Logs: structlog to standard error.

Libraries only call `get_logger`; the application configures structlog if it wants other output. Daemons call
`configure_logging` once, at their start.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, TextIO

import structlog

from kera.core.errors import StartError

__all__ = ["configure_logging", "get_logger"]


def _to_standard_error(*_: object) -> structlog.PrintLogger:
    return structlog.PrintLogger(sys.stderr)  # looked up at each call, as tests and applications replace it


if not structlog.is_configured():
    # Unconfigured, structlog would write to standard output, which belongs to the application.
    structlog.configure(logger_factory=_to_standard_error)


def get_logger(name: str) -> Any:
    """A structured logger: ``log.info("what happened", stream=..., broker_id=...)``."""
    return structlog.get_logger(name)


def _write_traceback(output: TextIO, exc_info: Any) -> None:
    """Write a traceback for a terminal to `output`.

    structlog's own formatter shows the local variables of each frame, and with them passwords and tokens. The message
    of an error may repeat what a peer has sent, so characters that would control the terminal are escaped.
    """
    traced = io.StringIO()
    structlog.dev.plain_traceback(traced, exc_info)
    output.write(_printable(traced.getvalue()))


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def configure_logging(level: str = "info", **context: Any) -> None:
    """Log to standard error from `level` up: readable lines on a terminal, JSON lines elsewhere.

    Every line includes `context` (daemon, broker_id), also lines of threads. Raises `StartError` if the level is
    unknown.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise StartError(f"log level {level!r} is not one of debug, info, warning, error, critical", level=level)
    on_terminal = sys.stderr.isatty()
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback)
        if on_terminal
        else structlog.processors.JSONRenderer()
    )

    def with_context(_logger: Any, _method: str, line: Any) -> Any:
        return {**context, **line}

    processors: list[Any] = [
        with_context,
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
