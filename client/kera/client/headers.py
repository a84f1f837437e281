"""The headers of a record: an ordered sequence of names and values; a name may repeat.

`Headers` loses nothing: every pair that was sent is in `pairs`, in order, also one whose value is None. Access by name
is a convenience on top of that: `headers["a"]` is the last value of the name, like Kafka's ``lastHeader``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from kera.client import arguments
from kera.core.errors import InvalidArgument

Header: TypeAlias = tuple[str, bytes | None]
"""The name and the value of a header."""
HeadersLike: TypeAlias = Mapping[str, bytes | None] | Iterable[Header]
"""The accepted forms of headers: a mapping, or pairs, whose names may repeat."""

_BYTES_OR_TEXT = (str, bytes, bytearray, memoryview)
_FEW = 16
"""Up to this many headers are searched one by one: making a dict of them would take longer."""


class Headers(Mapping[str, bytes | None]):
    """The headers of one record, immutable.

    As a mapping, it has each name once, with its last value. `pairs`, `get_all`, `add` and `without` work on all
    headers. Two `Headers` are equal if they have the same pairs in the same order; `Headers` equal any other mapping if
    no name repeats and both have the same names and values.
    """

    __slots__ = ("_by_name", "_pairs")

    _pairs: tuple[Header, ...]
    _by_name: dict[str, bytes | None]
    """The last value of each name; made when it is first needed."""

    def __init__(self, headers: HeadersLike = ()) -> None:
        """Raise `InvalidArgument` for a name that is not text, or a value that is neither bytes nor None."""
        self._pairs = pairs_of(headers)

    @classmethod
    def of_valid(cls, pairs: tuple[Header, ...]) -> Headers:
        """Make headers of pairs that are known to be valid because they come from a batch."""
        made = cls.__new__(cls)
        made._pairs = pairs  # noqa: SLF001 - made here
        return made

    @property
    def pairs(self) -> tuple[Header, ...]:
        """Every header, in order."""
        return self._pairs

    def get_all(self, name: str) -> tuple[bytes | None, ...]:
        """Return all values of a name, in order; empty if there is none."""
        return tuple([value for each, value in self._pairs if each == name])

    def add(self, name: str, value: bytes | None) -> Headers:
        """Return a copy with one more header at the end. Raises `InvalidArgument` as `Headers` does."""
        return Headers.of_valid((*self._pairs, *pairs_of([(name, value)])))

    def without(self, name: str) -> Headers:
        """Return a copy without the headers of a name."""
        return Headers.of_valid(tuple([pair for pair in self._pairs if pair[0] != name]))

    def _names(self) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] | None = getattr(self, "_by_name", None)
        if found is None:
            found = self._by_name = dict(self._pairs)
        return found

    def __getitem__(self, name: str) -> bytes | None:
        """Return the last value of a name. Raises `KeyError`."""
        if len(self._pairs) <= _FEW:
            for each, value in reversed(self._pairs):
                if each == name:
                    return value
            raise KeyError(name)
        return self._names()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        """Return the number of names; ``len(headers.pairs)`` counts headers."""
        return len(self._names()) if self._pairs else 0

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Headers):
            return self._pairs == other._pairs
        if isinstance(other, Mapping):
            return len(self._pairs) == len(other) and self._names() == dict(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it can be equal to a dict, which has no hash

    def __repr__(self) -> str:
        return f"Headers({list(self._pairs)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Headers, (self._pairs,)


def pairs_of(headers: HeadersLike) -> tuple[Header, ...]:
    """Return all headers, in order: a copy that does not change with the argument. Raises `InvalidArgument`."""
    if isinstance(headers, Headers):
        return headers.pairs
    given: Any = headers
    if given.__class__ is dict or isinstance(given, Mapping):
        given = given.items()
    elif isinstance(given, _BYTES_OR_TEXT) or not isinstance(given, Iterable):
        raise _wrong(headers)
    pairs = tuple(given)
    for pair in pairs:
        if pair.__class__ is tuple and len(pair) == 2:
            name, value = pair
            if name.__class__ is str and name.isascii() and (value.__class__ is bytes or value is None):
                continue
        return tuple([_checked_pair(each, headers) for each in pairs])  # rare, and takes twice as long
    return pairs


def _checked_pair(pair: Any, headers: HeadersLike) -> Header:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise _wrong(headers)
    name, value = pair
    if not _is_text(name):
        raise InvalidArgument(f"a header's name is text, not {name!r}")
    if value is not None and not isinstance(value, bytes):
        raise InvalidArgument(f"header {name!r} is {type(value).__name__}, not bytes or None; encode it first")
    return name, value


def _is_text(name: Any) -> bool:
    try:
        return isinstance(name, str) and (name.isascii() or bool(name.encode()))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _wrong(headers: object) -> InvalidArgument:
    return arguments.wrong("headers", headers, "a mapping of names to bytes, or (name, bytes) pairs")


NO_HEADERS = Headers()
"""The headers of a record without any."""
