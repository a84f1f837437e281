"""The most likely meaning of a misspelt name, for error messages, and nouns with their numbers.

Promises of the first: the answer is one of the names, or nothing at all; a guess that is far off is worse than none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
"""How alike two names have to be, of 1."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `name`, whatever the case; None: none is."""
    by_folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=CUTOFF)
    return by_folded[found[0]] if found else None


def hint(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or which there are."""
    names = sorted(known)
    meant = closest(name, names)
    if meant is not None:
        return f"; did you mean {meant!r}?"
    return f"; there are {', '.join(map(repr, names))}" if names else ""


def plural(count: int, noun: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
