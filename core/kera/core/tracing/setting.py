"""Whether there are traces, and where they go: the setting ``traces``, or else the variables of OpenTelemetry.

traces = ""                                 as the variables say; without them, off
traces = "off"                              off, whatever the variables say
traces = "otlp"                             to the endpoint in the variables, or else to http://localhost:4318
traces = "otlp http://collector:4318"       to this endpoint, over OTLP/HTTP
traces = "otlp http://collector:4318 0.05"  the same, with one in twenty of the traces that begin here recorded
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kera.core.base.settings import HIDDEN_VALUE, InvalidSettings, KeraSettings
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument
from kera.core.tracing.face import OFF, Tracing

RATIO_DEFAULT = 0.01
TRACES_PATH = "/v1/traces"
ENDPOINT_DEFAULT = "http://localhost:4318"
_SYNTAX = "write off, otlp, 'otlp http://HOST:4318' or 'otlp http://HOST:4318 RATIO'"

log = get_logger("kera.tracing")


class TracesSettings(KeraSettings):
    """The setting of traces, for daemons and clients."""

    traces: str = Field(
        "",
        description="Destination of traces (OpenTelemetry): otlp http://HOST:4318, with the share of recorded traces"
        " behind it (default: 0.01); off: nowhere. Empty: OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT and"
        " related variables decide; without them, nowhere.",
    )

    @field_validator("traces")
    @classmethod
    def _is_good(cls, value: str) -> str:
        try:
            parse(value, {})
        except InvalidArgument as error:
            hidden = HIDDEN_VALUE if "@" in value else "value_error"
            raise PydanticCustomError(hidden, "{text}", {"text": error.message}) from None
        return value


class Target(NamedTuple):
    """The destination of spans, and the share of recorded traces."""

    endpoint: str
    """The URL to which spans are posted."""
    ratio: float
    """Share of recorded traces among those that begin here."""
    asked_for: bool
    """Whether the setting asks for traces, and not only variables that may be meant for other programs."""


def parse(setting: str, environ: Mapping[str, str]) -> Target | None:
    """Return the target that the settings ask for; None: no traces. Raises `InvalidArgument`."""
    words = setting.split()
    if "@" in setting:
        _checked(setting)
    if words == ["off"]:
        return None
    if not words:
        return _by_variables(environ)
    if words[0] != "otlp" or len(words) > 3:
        raise InvalidArgument(f"{setting!r} says nothing; {_SYNTAX}")
    endpoint = _posted_to(words[1]) if len(words) > 1 else _endpoint_of(environ)
    ratio = _ratio(words[2]) if len(words) > 2 else _ratio_of(environ)
    return Target(endpoint, ratio, asked_for=True)


def _by_variables(environ: Mapping[str, str]) -> Target | None:
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    named = [environ.get(f"OTEL_EXPORTER_OTLP_{each}ENDPOINT") for each in ("TRACES_", "")]
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or exporter not in {"", "otlp"} or not (exporter or any(named)):
        return None
    try:
        return Target(_endpoint_of(environ), _ratio_of(environ), asked_for=False)
    except InvalidArgument as error:  # only a warning, as the variables are not only for KerA
        log.warning("tracing is off: invalid variable of OpenTelemetry", error=error.message)
        return None


def _endpoint_of(environ: Mapping[str, str]) -> str:
    given = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if given:
        return _checked(given)
    return _posted_to(environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ENDPOINT_DEFAULT)


def _posted_to(base: str) -> str:
    """Return a collector's URL, with the path of traces added if it is missing."""
    return _checked(base if base.endswith(TRACES_PATH) else base.rstrip("/") + TRACES_PATH)


def _checked(url: str) -> str:
    if "@" in url:  # before the URL is in any message, as it may have a password
        raise InvalidArgument(
            "the URL of the collector has a user or a password in it: leave them out, and put the credentials into"
            " OTEL_EXPORTER_OTLP_HEADERS"
        )
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise InvalidArgument(f"{url!r} is not a collector URL; {_SYNTAX}")
    return url


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InvalidArgument(f"{text!r} is not a ratio from 0 to 1; {_SYNTAX}")
    return ratio


def _ratio_of(environ: Mapping[str, str]) -> float:
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if sampler == "always_on":
        return 1.0
    if sampler == "always_off":
        return 0.0
    return _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "1")) if sampler == "traceidratio" else RATIO_DEFAULT


def tracing_of(settings: TracesSettings, service: str) -> Tracing:
    """Return the tracing of a process, or of a part of it; `service`: its name, unless ``OTEL_SERVICE_NAME`` is set.

    Raises `InvalidSettings` if the setting asks for traces and OpenTelemetry is not installed.
    """
    target = parse(settings.traces, os.environ)
    return OFF if target is None else _made(target, service)


@functools.cache
def _made(target: Target, service: str) -> Tracing:
    """Return one object for all callers with the same target, as each object has a thread and a queue."""
    try:
        from kera.core.tracing.otel import OtelTracing  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"opentelemetry", "requests"}:
            raise
        missing = f"{error.name} is missing; install it with: pip install 'kera[traces]'"
        if target.asked_for:
            raise InvalidSettings(f"traces: {missing}") from error
        log.warning("there are no traces, for which variables of OpenTelemetry ask", error=missing)
        return OFF
    return OtelTracing(target.endpoint, target.ratio, service)
