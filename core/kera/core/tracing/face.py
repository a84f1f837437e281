"""The face of traces: spans that are begun, linked, and ended; and one that does nothing, for when they are off."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence

from kera.core.tracing.context import TraceContext

LINKS_MAX = 128
"""Maximum of one span; the default of SDKs."""

Attributes = Mapping[str, str | int | float | bool]


class SpanKind(enum.Enum):
    """The role of a span for others, see OpenTelemetry's SpanKind."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


class Span:
    """One that nobody records."""

    context: TraceContext | None = None
    """For whoever it is to be passed on to; None: it is not recorded."""

    def set(self, name: str, value: str | float) -> None:
        """Say something about it."""

    def fail(self, error: BaseException | str) -> None:
        """It did not come to a good end: `error` says by which kind of error, or its code."""

    def end(self) -> None:
        """It is over; what is said of it later does not count."""

    @contextlib.contextmanager
    def current(self) -> Iterator[Span]:
        """Within it, what the application begins belongs to this span."""
        yield self


NO_SPAN = Span()


class Tracing:
    """Off: makes spans that nobody records."""

    is_on = False

    def starts(self) -> bool:
        """Whether something that begins now would be recorded. Cheap: it is asked for each record, when traces are on.

        Within a trace of the application, that trace says so; else it is chance, as the setting says.
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
        """Begin one. `parent`: None: the application's current span, if there is one. Of `links`, the first count.

        `begun_ns`: when it has begun, on the wall clock, if that is not now.
        """
        del name, kind, parent, links, attributes, begun_ns
        return NO_SPAN

    def flush(self, timeout_s: float) -> bool:
        """Have all ended spans exported; whether that was done in time."""
        del timeout_s
        return True


OFF = Tracing()
