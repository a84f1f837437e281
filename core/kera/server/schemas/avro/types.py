"""The parts of a parsed Avro schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

SHOWN_MAX = 8
"""Maximum of branches of a union that are shown to people."""
PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})


@dataclass(frozen=True, slots=True)
class Logical:
    """The meaning of values beyond their type."""

    name: str
    precision: int = 0
    """Precision of decimals."""
    scale: int = 0
    """Scale of decimals."""

    def __str__(self) -> str:
        return f"decimal({self.precision}, {self.scale})" if self.name == "decimal" else self.name


@dataclass(slots=True, eq=False)
class Primitive:
    """A type in `PRIMITIVES`."""

    kind: str
    logical: Logical | None = None


@dataclass(slots=True, eq=False)
class Array:
    """A list."""

    items: Type


@dataclass(slots=True, eq=False)
class Map:
    """A map from text to values."""

    values: Type


@dataclass(slots=True, eq=False)
class Union:
    """A union of several types."""

    branches: Sequence[Type]


@dataclass(slots=True, eq=False)
class Reference:
    """A reference to a type that was defined before, by its full name."""

    name: str


@dataclass(slots=True, eq=False)
class Enum:
    """An enumeration of words."""

    name: str
    """The full name, as in the classes below."""
    aliases: frozenset[str]
    symbols: Sequence[str]
    default: str | None


@dataclass(slots=True, eq=False)
class Fixed:
    """A fixed number of bytes."""

    name: str
    aliases: frozenset[str]
    size: int
    logical: Logical | None = None


@dataclass(slots=True, eq=False)
class Field:
    """A field of a record."""

    name: str
    aliases: frozenset[str]
    type: Type
    has_default: bool
    default: Any = None


@dataclass(slots=True, eq=False)
class Record:
    """Named fields in their order."""

    name: str
    aliases: frozenset[str]
    fields: list[Field] = field(default_factory=list)


Named: TypeAlias = Enum | Fixed | Record
Type: TypeAlias = Primitive | Array | Map | Union | Reference | Named


@dataclass(slots=True, eq=False)
class AvroSchema:
    """A parsed definition."""

    root: Type
    named: dict[str, Named]
    """Named types by their full names."""

    def resolve(self, kind: Type) -> Type:
        """Return the type that a reference stands for; any other type is returned unchanged."""
        return self.named[kind.name] if isinstance(kind, Reference) else kind


def word(kind: Type) -> str:
    """Return a short description of a type."""
    match kind:
        case Primitive(name, logical):
            said = f"{name} ({logical})" if logical else name
        case Array():
            said = "array"
        case Map():
            said = "map"
        case Union(branches):
            said = f"union of {', '.join(map(word, branches[:SHOWN_MAX]))}{', …' if len(branches) > SHOWN_MAX else ''}"
        case Reference(name):
            said = name
        case Fixed(name, _, size, logical):
            said = f"fixed {name} of {size} bytes{f' ({logical})' if logical else ''}"
        case Enum(name):
            said = f"enum {name}"
        case Record():
            said = f"record {kind.name}"
        case _:
            assert_never(kind)
    return said
