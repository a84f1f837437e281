"""Traces that keep their spans for a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kera.core.tracing.otel import OtelTracing

WAIT_S = 30


class Recorded:
    """`tracing`, and the spans that it exported."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = OtelTracing("", ratio, "test", exporter=self._exporter)

    def spans(self) -> list[Any]:
        assert self.tracing.flush(WAIT_S)
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> Any:
        (found,) = [each for each in self.spans() if each.name == name]
        return found

    def names(self) -> list[str]:
        return [each.name for each in self.spans()]


@contextmanager
def recorded(ratio: float = 1.0) -> Iterator[Recorded]:
    made = Recorded(ratio)
    yield made
    made.tracing._exporting.close()
