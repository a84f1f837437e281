"""The parameters of a request. They are checked when they are read: absent, empty, repeated, too large, or no number.

Pure: turns pairs of text into values, or raises an `InvalidArgument` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import parse_qsl

from kera.console import limits
from kera.console.web.words import parse_moment
from kera.core.base.sizes import size_bytes
from kera.core.base.spans import exact_span, span_ms
from kera.core.errors import InvalidArgument

NUMBER_MAX: Final = (1 << 63) - 1
_DIGITS_MAX = 19


class Parameters:
    """The fields of a query or of a form. Each may be given at most once, except those that `several` reads."""

    def __init__(self, pairs: Collection[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        self._values: dict[str, str] = {}
        self._twice: set[str] = set()
        for name, value in pairs:
            if name in self._values:
                self._twice.add(name)
            self._values[name] = value

    @classmethod
    def parse(cls, encoded: bytes, *, fields_max: int = limits.PARAMETERS_MAX) -> Parameters:
        """Parse ``application/x-www-form-urlencoded``.

        Raises `InvalidArgument` for too many fields, or a part that is not UTF-8.
        """
        try:
            pairs = parse_qsl(
                encoded.decode("ascii"), keep_blank_values=True, max_num_fields=fields_max, errors="strict"
            )
        except UnicodeDecodeError:
            raise InvalidArgument("parameters have to be UTF-8, and encoded as those of a URL are") from None
        except ValueError:
            raise InvalidArgument(f"more than {fields_max} parameters") from None
        return cls(pairs)

    def has(self, name: str) -> bool:
        """Return whether a parameter is present and not empty."""
        return bool(self.raw(name))

    def text(self, name: str, default: str | None = "", *, length_max: int = limits.TEXT_MAX) -> str:
        """Return the text of a parameter; `default` None: it is required. Raises `InvalidArgument`."""
        value = self.raw(name)
        if not value:
            if default is None:
                raise InvalidArgument(f"{name} is missing", parameter=name)
            return default
        if len(value) > length_max:
            raise InvalidArgument(f"{name} has {len(value)} characters; {length_max} are the most", parameter=name)
        return value

    def several(self, name: str) -> list[str]:
        """Return all values of a field that a form may have more than once, in order."""
        return [value for each, value in self._pairs if each == name]

    def whole(self, name: str, default: int | None, low: int = 0, high: int = NUMBER_MAX) -> int:
        """Return a whole number from `low` to `high`; `default` None: it is required. Raises `InvalidArgument`."""
        value = self.raw(name)
        if not value:
            if default is None:
                raise InvalidArgument(f"{name} is missing", parameter=name)
            return default
        if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS_MAX and low <= int(value) <= high):
            shown = value if len(value) <= 40 else value[:40] + "…"
            raise InvalidArgument(f"{name} is {shown!r}, and takes a number from {low} to {high}", parameter=name)
        return int(value)

    def optional(self, name: str, low: int = 0, high: int = NUMBER_MAX) -> int | None:
        """Return a whole number from `low` to `high`; None: it is absent. Raises `InvalidArgument`."""
        return self.whole(name, None, low, high) if self.has(name) else None

    def choice(self, name: str, among: Collection[str], default: str | None = None) -> str:
        """Return one of the words `among`. Raises `InvalidArgument`."""
        value = self.text(name, default)
        if value not in among:
            raise InvalidArgument(f"{name} is {value!r}, and takes one of {', '.join(among)}", parameter=name)
        return value

    def flag(self, name: str) -> bool:
        """Return whether a box was ticked. Raises `InvalidArgument`."""
        return self.has(name) and self.choice(name, ("1", "on")) != ""

    def span_ms(self, name: str, default: int, high: int = NUMBER_MAX) -> int:
        """Return a span of time such as ``7d`` in milliseconds. Raises `InvalidArgument`."""
        value = self.text(name).strip()
        if not value:
            return default
        found = 0.0 if value == "0" else span_ms(value)
        if found is None:
            raise InvalidArgument(f"{value!r} is not a duration; write 7d, 12h, 30min, 90s or 250ms", parameter=name)
        if 0 < found < 1:
            raise InvalidArgument(f"{value!r} is less than a millisecond, which is the shortest", parameter=name)
        if found > high:
            raise InvalidArgument(f"{value!r} is too long; {exact_span(high)} is the longest", parameter=name)
        return round(found)

    def size_bytes(self, name: str, default: int, high: int = NUMBER_MAX) -> int:
        """Return a size such as ``128 MiB`` in bytes. Raises `InvalidArgument`."""
        value = self.text(name).strip()
        if not value:
            return default
        found = size_bytes(value)
        if found is None:
            raise InvalidArgument(f"{value!r} is not a size; write 512 MiB, 10 GiB or 8388608", parameter=name)
        if found > high:
            raise InvalidArgument(f"{value!r} is too large; {high} bytes are the most", parameter=name)
        return found

    def names(self, name: str) -> list[str]:
        """Return names that are separated by commas. Raises `InvalidArgument`."""
        return [each.strip() for each in self.text(name, length_max=8192).split(",") if each.strip()]

    def moment(self, name: str) -> int:
        """Return a time in microseconds since the epoch. Raises `InvalidArgument`."""
        value = self.text(name, None)
        try:
            return parse_moment(value)
        except ValueError:
            raise InvalidArgument(
                f"{name} is {value!r}, and takes a time in UTC like 2026-01-31T12:00", parameter=name
            ) from None

    def raw(self, name: str) -> str:
        """Return the text that was sent; empty if it is absent. Raises `InvalidArgument` if it is given twice."""
        if name in self._twice:
            raise InvalidArgument(f"{name} is given twice", parameter=name)
        return self._values.get(name, "")
