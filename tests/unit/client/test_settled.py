"""Settled entries for display: how far each entry is, and which one holds up the next epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kera.client.epochs.settled import BY_CLOCK, BY_NOBODY, BY_RECORDS, NO_MATTER, Settled, settled_entries
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import EARLIEST, Position
from tests.unit.client.support import stream_info

CONFIG = StreamDescription.from_message(stream_info("s", 7)).config


def bounds(settled_us: int | None, watermark_us: int | None = None) -> EntryBounds:
    return EntryBounds(EARLIEST, Position(1, 1, 9), 0, 1, 9, watermark_us=watermark_us, settled_us=settled_us)


@pytest.mark.parametrize(
    ("punctuation", "by", "holds_up"), [("clock", BY_NOBODY, True), ("producers", NO_MATTER, False)]
)
def test_the_entry_that_holds_up_the_next_epoch_comes_first(punctuation: str, by: str, *, holds_up: bool) -> None:
    config = replace(CONFIG, epoch_ms=10, punctuation=punctuation)
    found = settled_entries(config, {0: [bounds(7000, 7000), bounds(None)], 1: [bounds(7000, 5000), bounds(-3, -3)]})
    silent = Settled(0, 1, None, by, holds_up)
    known = [
        Settled(1, 1, -3, BY_RECORDS, holds_up=True),
        Settled(0, 0, 7000, BY_RECORDS, holds_up=True),
        Settled(1, 0, 7000, BY_CLOCK, holds_up=True),
    ]
    assert found == ([silent, *known] if holds_up else [*known, silent])
    assert [each.behind_ms(8999) for each in known] == [9, 1, 1]
    assert (silent.behind_ms(8999), known[1].behind_ms(5)) == (None, 0)


def test_a_stream_without_entries_has_no_settled_entries() -> None:
    assert settled_entries(CONFIG, {}) == []
