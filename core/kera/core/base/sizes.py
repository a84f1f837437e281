"""Numbers of bytes as people write and read them: ``128 MiB``, ``1GB``, ``8388608``."""

from __future__ import annotations

import re

UNITS = "B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB"
"""For messages."""
_UNITS_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BINARY = tuple((unit, 1024**power) for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB"), 1))[::-1]
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,12})?)\s*([a-z]*)")


def size_bytes(text: str) -> int | None:
    """Return the bytes in `text`, a number with an optional unit (`UNITS`); cuts off a fraction. None: not a size."""
    found = _SIZE.fullmatch(text.replace("_", "").strip().lower())
    if found is None or found[2] not in _UNITS_BYTES:
        return None
    number, unit = found[1], _UNITS_BYTES[found[2]]
    return int(float(number) * unit) if "." in number else int(number) * unit


def exact_size(number: int) -> str:
    """`number` bytes with the largest binary unit that divides it, so that `size_bytes` gives the same number again."""
    for unit, unit_bytes in _BINARY:
        if number and not number % unit_bytes:
            return f"{number // unit_bytes} {unit}"
    return f"{number} B"


def format_size(number: float) -> str:
    """`number` bytes for people: ``8 MiB``, ``1.5 GiB``, ``512 B``."""
    value, unit = float(number), 0
    while abs(value) >= 1024 and unit < len(_SHOWN) - 1:
        value /= 1024
        unit += 1
    return f"{value:.0f} {_SHOWN[unit]}" if value == int(value) or not unit else f"{value:.1f} {_SHOWN[unit]}"
