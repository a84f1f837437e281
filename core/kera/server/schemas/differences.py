"""Differences of two schemas that break a reader, and the bound of the search for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kera.core.errors import InvalidSchema

STEPS_MAX = 300_000
"""Maximum of all comparisons for one answer: some ten microseconds each at worst."""
LEVEL_STEPS = 3
"""Steps that it costs to look into a nested schema."""
DIFFERENCES_MAX = 50
"""That are told; of more nobody would read all."""
LEVELS_MAX = 100
"""Maximum depth of nested types; recursive readers could not bear many more."""
PATH_CHARS_MAX = 200
REASON_CHARS_MAX = 300


class Difference(NamedTuple):
    """Why a reader cannot read something."""

    path: str
    """Path of the field, with dots; ``[]`` are items, ``{}`` values of a map. Empty: the whole value."""
    reason: str


class Pair:
    """A comparison of what is written with what reads it: how far it may go, and what it has found.

    One of both schemas is the new one; words for people say what is new, and what was before.
    """

    def __init__(self, budget: Budget, *, new_reads: bool) -> None:
        self._budget = budget
        self._levels = 0
        self.new_reads = new_reads
        """The new schema is the reader's; else it is the writer's."""
        self.found: dict[Difference, None] = {}
        """In the order in which they were found, each once."""

    def step(self, count: int = 1) -> None:
        """One thing more is looked at. Raises `InvalidSchema` when there are too many."""
        self._budget.spend(count)

    @contextmanager
    def level(self) -> Iterator[None]:
        """Enter a nested schema. Raises `InvalidSchema` when it is too deep."""
        self.step(LEVEL_STEPS)
        self._levels += 1
        if self._levels > LEVELS_MAX:
            raise InvalidSchema(f"types of the schema have each other in them more than {LEVELS_MAX} levels deep")
        try:
            yield
        finally:
            self._levels -= 1

    def tried(self) -> Pair:
        """For what may not hold: nothing that it finds is said here."""
        tried = Pair(self._budget, new_reads=self.new_reads)
        tried._levels = self._levels
        return tried

    def differ(self, path: str, *, writes: object, reads: object) -> None:
        """The same thing is written as `writes`, and read as `reads`."""
        new, old = (reads, writes) if self.new_reads else (writes, reads)
        self.say(path, f"{new}, was {old}")

    def say(self, path: str, reason: str) -> None:
        """Something else."""
        if len(self.found) <= DIFFERENCES_MAX:
            self.found[Difference(_cut(path, PATH_CHARS_MAX), _cut(reason, REASON_CHARS_MAX))] = None

    def either(self, *, reads: str, writes: str) -> str:
        """Words for when the new schema reads, and for when it writes."""
        return reads if self.new_reads else writes


class Budget:
    """The budget of all comparisons for one answer: a schema could make them take for ever."""

    def __init__(self, steps: int = STEPS_MAX) -> None:
        self._left = steps

    def spend(self, count: int) -> None:
        """Raises `InvalidSchema` when nothing is left."""
        self._left -= count
        if self._left < 0:
            raise InvalidSchema(
                "the comparison with the present versions takes too long: simplify the schema, delete unused"
                " versions, or set a weaker compatibility, such as backward"
            )


def below(path: str, name: str) -> str:
    """The path of a field within `path`."""
    if len(path) > PATH_CHARS_MAX:
        return path
    return f"{path}.{name}" if path else name


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"
