"""The interface of traces: spans that are begun, linked, and ended. The base classes do nothing: traces are off."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence

from kera.core.tracing.context import TraceContext

LINKS_MAX = 128
"""Maximum of links of one span; the default of SDKs."""

Attributes = Mapping[str, str | int | float | bool]


class SpanKind(enum.Enum):
    """The role of a span in its trace, see OpenTelemetry's SpanKind."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


class Span:
    """A span that is not recorded."""

    context: TraceContext | None = None
    """The context to pass on to other processes; None: the span is not recorded."""

    def set(self, name: str, value: str | float) -> None:
        """Set an attribute."""

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed; `error`: the exception, or its code."""

    def end(self) -> None:
        """End the span; later changes have no effect."""

    @contextlib.contextmanager
    def current(self) -> Iterator[Span]:
        """Make this the current span within the block, so that spans of the application belong to it."""
        yield self


NO_SPAN = Span()


class Tracing:
    """Traces that are off: makes spans that are not recorded."""

    is_on = False

    def starts(self) -> bool:
        """Return whether a span that begins now would be recorded. It is cheap, as it is called for each record.

        Within a trace of the application, that trace decides; otherwise it is random, with the ratio in the setting.
        """
        return False

    def span(
        self,
        name: str,
        kind: SpanKind,
        *,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext] = (),
        attributes: Attributes | None = None,
        begun_ns: int | None = None,
    ) -> Span:
        """Begin a span. `parent`: None: the application's current span, if any.

        `links`: only the first `LINKS_MAX` count. `begun_ns`: when it has begun, on the wall clock, if that is not now.
        """
        del name, kind, parent, links, attributes, begun_ns
        return NO_SPAN

    def flush(self, timeout_s: float) -> bool:
        """Export all ended spans; return whether that was done in time."""
        del timeout_s
        return True


OFF = Tracing()
