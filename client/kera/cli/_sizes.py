"""Numbers of bytes as people write and read them: ``256MiB``, ``1GB``, ``8388608``."""

from __future__ import annotations

from kera.cli._run import UsageError
from kera.core.base.sizes import size_bytes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(text: str, *, name: str = "size") -> int:
    """Bytes in `text`, see `kera.core.base.sizes`. Raises `UsageError` that mentions `name`."""
    found = size_bytes(text)
    if found is None:
        raise UsageError(f"{name}: {text!r} is no size; write 8388608, 8MiB or 1GB", name=name)
    return found


def format_size(size_bytes: int) -> str:
    """`size_bytes` with the largest binary unit that divides it, or rounded to one decimal when none does."""
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    number = f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    return f"{number} {_UNITS[unit]}"
