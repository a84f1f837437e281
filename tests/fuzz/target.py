"""A decoder that is fuzzed: how its inputs are made, and what may come of them.

An input is bytes, made from a seed and nothing else, so that one that was found can be kept as a file. What comes of it
is a word. A decoder may refuse with an error of KerA's; whatever else it raises is a defect, and so is an error that
says that there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from kera.core.errors import InternalError, KeraError


class Target(NamedTuple):
    """See the head of this module."""

    name: str
    make: Callable[[Random], bytes]
    run: Callable[[bytes], str]
    """What came of an input. Raises."""
    modules: tuple[str, ...] = ()
    """What decodes it, for the share of lines that a corpus reaches."""
    slow_s: float = 1.0
    """An input that takes longer holds up whoever decodes it."""


def random_of(target: str, seed: int, number: int) -> Random:
    """What one input of a target is made with."""
    return Random(f"{seed} {target} {number}")


def outcome(target: Target, data: bytes) -> str:
    """What came of an input: the word, or the code of the error that it was refused with. Raises what is a defect."""
    try:
        return target.run(data)
    except InternalError:
        raise
    except KeraError as error:
        repr(error.attributes)
        return error.code
