"""A decoder that is fuzzed: how its inputs are made, and which outcomes are allowed.

An input is bytes, made from a seed and nothing else, so an input that found a defect can be kept as a file. Its outcome
is a word. A decoder may refuse an input with an error of KerA's. Any other exception is a defect, and so is
`InternalError`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from kera.core.errors import InternalError, KeraError


class Target(NamedTuple):
    """A decoder to fuzz: it makes inputs, and runs each of them."""

    name: str
    make: Callable[[Random], bytes]
    run: Callable[[bytes], str]
    """Decode an input and return the outcome. Raises."""
    modules: tuple[str, ...] = ()
    """The modules that decode, for the share of lines that a corpus reaches."""
    slow_s: float = 1.0
    """An input that takes longer holds up its reader."""


def random_of(target: str, seed: int, number: int) -> Random:
    """The random numbers that make one input of a target."""
    return Random(f"{seed} {target} {number}")


def outcome(target: Target, data: bytes) -> str:
    """The outcome of an input: a word, or the code of the error that refused it. Raises if the input finds a defect."""
    try:
        return target.run(data)
    except InternalError:
        raise
    except KeraError as error:
        repr(error.attributes)
        return error.code
