"""Spans of time have the same forms wherever people write them."""

from __future__ import annotations

import pytest

from kera.cli._durations import parse_duration_ms
from kera.core.base.spans import exact_span, span_ms
from kera.spark_connector.options.values import duration_ms

WORDS = [
    ("5ms", 5),
    ("90 s", 90_000),
    ("30min", 1_800_000),
    ("30m", 1_800_000),
    ("1.5h", 5_400_000),
    (" 7D ", 604_800_000),
]


@pytest.mark.parametrize(("text", "milliseconds"), [*WORDS, ("2w", 14 * 86_400_000), ("0s", 0)])
def test_the_command_line_and_spark_take_the_same_spans(text: str, milliseconds: int) -> None:
    assert (span_ms(text), parse_duration_ms(text), duration_ms("epoch", text)) == (milliseconds,) * 3


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5y", "1h30m", "5 months", "1.h", ".5h", "9" * 13 + "s", "٣s"])
def test_an_invalid_span_gives_none(text: str) -> None:
    assert span_ms(text) is None


@pytest.mark.parametrize("number", [0, 1, 999, 1000, 90_000, 604_800_000, 604_800_001])
def test_an_exact_span_is_read_as_the_same_number(number: int) -> None:
    assert span_ms(exact_span(number)) == number
