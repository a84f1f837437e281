"""Parses JSON from untrusted senders: it accepts only unambiguous documents, and no document can crash the reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

NAME_CHARS_SHOWN = 100


def parsed_object(data: bytes) -> dict[str, Any]:
    """Parse `data` as a JSON object.

    Raises `ValueError` for everything else, such as an object with the same name twice: readers take one value or the
    other, so the value that is used might not be the one that was checked.
    """
    try:
        document = json.loads(data.decode(), object_pairs_hook=unique_names, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    if not isinstance(document, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - one error for every wrong document
    return document


def shown(value: object) -> str:
    """Return a value that a peer has sent for use in a message: bounded, and without control characters."""
    text = repr(value)
    return text if len(text) <= NAME_CHARS_SHOWN else f"{text[:NAME_CHARS_SHOWN]}…"


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of `pairs`, as an ``object_pairs_hook`` of `json`. Raises `ValueError` if a name repeats."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {shown(twice)} comes twice in one object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")
