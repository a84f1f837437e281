"""The most likely meaning of a misspelt name, for error messages, and nouns with their numbers.

The suggestion is always one of the known names, or there is none: a guess that is far off is worse than no guess.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
"""How alike two names have to be, of 1."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most like `name`, whatever the case; None: none is close enough."""
    by_folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=CUTOFF)
    return by_folded[found[0]] if found else None


def hint(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?``, or a list of the known names."""
    names = sorted(known)
    meant = closest(name, names)
    if meant is not None:
        return f"; did you mean {meant!r}?"
    return f"; there are {', '.join(map(repr, names))}" if names else ""


def plural(count: int, noun: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
