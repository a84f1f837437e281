"""The violations in a history: a few cases of each kind in full, the others counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kera.client.checking.history import Place
from kera.client.checking.numbers import unpacked

EVIDENCE_MAX = 5
"""Number of cases of each kind that are kept in full; the others are counted."""


class Violation(NamedTuple):
    """A violation of a promise."""

    kind: str
    text: str
    producer: int | None = None
    number: int | None = None
    streamlet: int | None = None
    entry: int | None = None
    record: int | None = None
    """The ordinal of the record in the entry."""
    seconds: float | None = None
    """Time when the record was acknowledged or seen, from the beginning."""


class Violations:
    """The findings about one history, by kind, in order of first occurrence."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Violation]] = {}
        self.counts: Counter[str] = Counter()
        """Number of cases, by kind."""

    def add(self, kind: str, text: str, value: int | None, place: Place | None, seconds: float | None = None) -> None:
        """Add a violation. `value`: the packed number of the record, if it is a record of the check."""
        self.counts[kind] += 1
        kept = self._kept.setdefault(kind, [])
        if len(kept) < EVIDENCE_MAX:
            producer, number = (None, None) if value is None or value < 0 else unpacked(value)
            streamlet, entry, record = place or (None, None, None)
            kept.append(Violation(kind, text, producer, number, streamlet, entry, record, seconds))

    @property
    def kept(self) -> list[Violation]:
        """The violations that are kept in full."""
        return [each for found in self._kept.values() for each in found]

    def lines(self) -> Iterator[str]:
        """Yield lines of text about all violations."""
        for kind, found in self._kept.items():
            yield from (f"{kind}: {each.text}{_when(each)}" for each in found)
            if self.counts[kind] > len(found):
                yield f"{kind}: and {self.counts[kind] - len(found):,} more"


def _when(finding: Violation) -> str:
    return "" if finding.seconds is None else f" ({finding.seconds:.3f} s)"
