"""Differences of two schemas that break a reader, and the bound of the search for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kera.core.errors import InvalidSchema

STEPS_MAX = 300_000
"""Maximum of all comparisons for one answer: some ten microseconds each at worst."""
LEVEL_STEPS = 3
"""Steps that a look into a nested schema costs."""
DIFFERENCES_MAX = 50
"""Maximum of reported differences."""
LEVELS_MAX = 100
"""Maximum depth of nested types; recursive readers could not handle many more."""
PATH_CHARS_MAX = 200
REASON_CHARS_MAX = 300


class Difference(NamedTuple):
    """The reason why a reader cannot read a field."""

    path: str
    """Path of the field, with dots; ``[]`` are items, ``{}`` values of a map. Empty: the whole value."""
    reason: str


class Pair:
    """A comparison of a writer's schema with a reader's: its budget, and the differences found.

    One of both schemas is the new one; texts for people name the new and the previous state.
    """

    def __init__(self, budget: Budget, *, new_reads: bool) -> None:
        self._budget = budget
        self._levels = 0
        self.new_reads = new_reads
        """Whether the new schema is the reader's, and not the writer's."""
        self.found: dict[Difference, None] = {}
        """The differences in the order in which they were found, each once."""

    def step(self, count: int = 1) -> None:
        """Count steps of the comparison. Raises `InvalidSchema` if there are too many."""
        self._budget.spend(count)

    @contextmanager
    def level(self) -> Iterator[None]:
        """Enter a nested schema. Raises `InvalidSchema` if it is too deep."""
        self.step(LEVEL_STEPS)
        self._levels += 1
        if self._levels > LEVELS_MAX:
            raise InvalidSchema(f"types of the schema have each other in them more than {LEVELS_MAX} levels deep")
        try:
            yield
        finally:
            self._levels -= 1

    def tried(self) -> Pair:
        """Return a pair for a tentative comparison, whose differences are not reported here."""
        tried = Pair(self._budget, new_reads=self.new_reads)
        tried._levels = self._levels
        return tried

    def differ(self, path: str, *, writes: object, reads: object) -> None:
        """Report that a field is written as `writes`, and read as `reads`."""
        new, old = (reads, writes) if self.new_reads else (writes, reads)
        self.say(path, f"{new}, was {old}")

    def say(self, path: str, reason: str) -> None:
        """Report any other difference."""
        if len(self.found) <= DIFFERENCES_MAX:
            self.found[Difference(_cut(path, PATH_CHARS_MAX), _cut(reason, REASON_CHARS_MAX))] = None

    def either(self, *, reads: str, writes: str) -> str:
        """Return the text for the case that the new schema reads, or the text for the case that it writes."""
        return reads if self.new_reads else writes


class Budget:
    """The budget of all comparisons for one answer, as a schema could make them take for ever."""

    def __init__(self, steps: int = STEPS_MAX) -> None:
        self._left = steps

    def spend(self, count: int) -> None:
        """Spend steps. Raises `InvalidSchema` if none are left."""
        self._left -= count
        if self._left < 0:
            raise InvalidSchema(
                "the comparison with the present versions takes too long: simplify the schema, delete unused"
                " versions, or set a weaker compatibility, such as backward"
            )


def below(path: str, name: str) -> str:
    """Return the path of a field within `path`."""
    if len(path) > PATH_CHARS_MAX:
        return path
    return f"{path}.{name}" if path else name


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"
