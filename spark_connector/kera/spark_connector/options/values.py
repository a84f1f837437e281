"""How options are read, whatever they are for: names in any case, numbers, words, durations.

Each function raises `InvalidArgument` that names the option, and suggests what may have been meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from kera.core.base.spans import UNITS
from kera.core.errors import InvalidArgument
from kera.spark_connector.options.names import BOOTSTRAP, MEANT, SECRETS
from kera.spark_connector.options.places import span_ms

TARGET_MAX_MS = 24 * 3_600_000


def take(
    options: Mapping[str, str], known: Sequence[str], *, elsewhere: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return `options` under their canonical names (those of `known`).

    Raises `InvalidArgument` for any other name: with a did-you-mean, or, for the names in `elsewhere` (canonical names
    of options of other uses), with the text given there, as in {"stream": "is for writing; to read, use subscribe"}.
    """
    canonical = {name.lower(): name for name in known}
    others = {name.lower(): name for name in elsewhere or {}}
    given: dict[str, str] = {}
    for name, value in options.items():
        if (refused := _secret(name)) is not None:
            raise wrong(name, refused)
        if name.lower() in canonical:
            given[canonical[name.lower()]] = value
        elif name.lower() in others:
            other = others[name.lower()]
            raise InvalidArgument(f"option {other} does not apply here: {(elsewhere or {})[other]}", option=other)
        else:
            meant = MEANT.get(name.lower(), name).lower()
            close = difflib.get_close_matches(meant, canonical, n=1, cutoff=0.6)
            hint = f"did you mean {canonical[close[0]]}?" if close else f"known are {listed(known, len(known))}"
            raise InvalidArgument(f"unknown option {name}: {hint}", option=name)
    return given


def _secret(name: str) -> str | None:
    """Return why an option is refused whose value may be a secret; None: it is not refused."""
    words = re.split(r"[^a-z]+", name.lower())
    return SECRETS.get("jaas" if "jaas" in words else words[-1])


def bootstrap_of(given: Mapping[str, str]) -> str:
    """Return the value of ``kera.bootstrap.servers``; raises `InvalidArgument` if it is missing or has an ``@``."""
    bootstrap = given.get(BOOTSTRAP, "").strip()
    if not bootstrap:
        raise InvalidArgument(
            f"option {BOOTSTRAP} is missing: the address of the coordinator, as in 127.0.0.1:7400", option=BOOTSTRAP
        )
    if "@" in bootstrap:  # the message leaves the value out: it may contain a password
        raise wrong(BOOTSTRAP, f"addresses alone, without a user and a password; {SECRETS['password']}")
    return bootstrap


def whole_number(option: str, text: str) -> int:
    """Parse a whole number from 1; raises `InvalidArgument` that names `option`."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < 1:
        raise wrong(option, "must be a whole number from 1", text)
    return int(text)


def flag(option: str, text: str) -> bool:
    """Parse true or false; raises `InvalidArgument` that names `option`."""
    return choice(option, text, ("true", "false")) == "true"


def choice(option: str, text: str, words: Sequence[str]) -> str:
    """Parse one of `words`, in any case; raises `InvalidArgument` that names `option`."""
    word = text.strip().lower()
    if word not in words:
        raise wrong(option, f"must be {' or '.join(words)}{did_you_mean(word, words)}", text)
    return word


def duration_ms(option: str, text: str) -> int:
    """Parse ``500ms``, ``10s``, ``5min``, ``1h``, ``1d`` to milliseconds; raises `InvalidArgument` naming `option`."""
    found = span_ms(text)
    if found is None:
        raise wrong(option, f"must be a number with a unit, {UNITS}, as in 10s", text)
    return found


def target_ms(option: str, text: str, *, least_ms: int, why: str) -> int:
    """Parse a latency target into milliseconds: from `least_ms` to a day. The error for a smaller one gives `why`."""
    found = duration_ms(option, text)
    if found < least_ms:
        raise wrong(option, f"must be at least {least_ms}ms, {why}", text)
    if found > TARGET_MAX_MS:
        raise wrong(option, "must be at most a day", text)
    return found


def wrong(option: str, problem: str, value: str | None = None) -> InvalidArgument:
    """Return the error for an option with an invalid value."""
    if value is None:
        return InvalidArgument(f"option {option}: {problem}", option=option)
    return InvalidArgument(f"option {option}: {problem}; it is {value!r}", option=option, value=value)


def did_you_mean(name: str, there: Collection[str]) -> str:
    """Return the end of a message about `name`: the name of `there` that resembles it, or empty if none does."""
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


def listed(names: Collection[str], names_max: int = 30) -> str:
    """Return `names` as a list for a message, shortened to `names_max` names."""
    shown = sorted(names, key=str.lower)
    more = f" and {len(shown) - names_max} more" if len(shown) > names_max else ""
    return ", ".join(shown[:names_max]) + more
