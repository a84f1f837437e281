"""The conversion between values of one annotation and an Arrow column.

A shape makes a column of all values at once, level by level: the values of a field in all rows, the items of all lists,
and so on. For each value, Python code only does what is needed to get it out of its object.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import accumulate, chain
from typing import Any, NamedTuple

import pyarrow as pa

from kera.client.arrow_input import null_column
from kera.core.errors import KeraError


class DoesNotFit(KeraError):
    """A value does not fit into a column. The error becomes a `CannotEncode` once the stream is known."""

    def __init__(self, path: str, reason: object) -> None:
        super().__init__(str(reason))
        self.path = path
        self.reason = reason


class Shape(ABC):
    """The column of one annotation."""

    kind: pa.DataType
    """The type of the column, unless the stream has another type that can hold its values."""
    nullable = False
    as_it_is = False
    """Whether the result of Arrow's conversion to Python is already the value."""

    @abstractmethod
    def column(self, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
        """Return all `values` (None for a missing one) as a column of type `kind`.

        Raises `DoesNotFit`, with the path of the field.
        """

    @abstractmethod
    def value(self, stored: Any) -> Any:
        """Return the value for Arrow's `stored`, which is not None. Raises Python's errors for invalid data."""

    def field(self, name: str) -> pa.Field:
        """Return the field of a schema for this shape."""
        return pa.field(name, self.kind, nullable=self.nullable)


def checked(shape: Shape, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
    """Return a column, which has nulls only if the shape is nullable. Raises `DoesNotFit`."""
    if not shape.nullable and any(value is None for value in values):
        raise DoesNotFit(path, "it is None, and the field does not allow None")
    return shape.column(values, kind, path)


class Leaf(Shape):
    """A single value."""

    def __init__(
        self,
        kind: pa.DataType,
        types: tuple[type, ...],
        *,
        stored: Callable[[Any], Any] | None = None,
        loaded: Callable[[Any], Any] | None = None,
    ) -> None:
        """Make the shape for values of `types`.

        `stored` converts a value to a form that Arrow accepts. `loaded` converts Arrow's result to a value.
        """
        self.kind = kind
        self._types = types
        self._stored = stored
        self._loaded = loaded
        self._is_time = pa.types.is_temporal(kind)
        self.as_it_is = loaded is None and not self._is_time

    def column(self, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
        """See `Shape`."""
        for value in values:
            if value is not None and value.__class__ not in self._types:
                self._look_at(value, path)
        if pa.types.is_timestamp(kind):
            _look_at_zones(values, kind, path)
        if self._types == (Decimal,):
            _look_at_digits(values, path)
        try:
            if self._stored is not None:
                values = [None if value is None else self._stored(value) for value in values]
            return pa.array(values, kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DoesNotFit(path, f"{error} (the column is {kind})") from error

    def _look_at(self, value: Any, path: str) -> None:
        """Check a value's class. A subclass is accepted, unless it has another meaning, as bool has for int."""
        of_another = isinstance(value, bool) or (
            isinstance(value, datetime.datetime) and datetime.datetime not in self._types
        )
        if of_another or not isinstance(value, self._types):
            names = " or ".join(each.__name__ for each in self._types)
            raise DoesNotFit(path, f"it is {type(value).__name__}, not {names}")

    def value(self, stored: Any) -> Any:
        """See `Shape`."""
        if self._is_time and stored.__class__ is int:
            raise ValueError(f"{stored} does not fit {self._types[0].__name__}: its years are 1 to 9999")
        return stored if self._loaded is None else self._loaded(stored)


def _look_at_zones(values: Sequence[Any], kind: pa.DataType, path: str) -> None:
    """Check that times have a zone if and only if the column has one.

    Arrow would treat a time without a zone as UTC, and would drop the zone if the column has none.
    """
    for value in values:
        if value is not None and (value.tzinfo is None) != (kind.tz is None):
            raise DoesNotFit(
                path,
                f"{value} has no time zone: give it one (datetime.UTC), or annotate the field with pa.timestamp('us')"
                if kind.tz is not None
                else f"{value} has a time zone, and the column has no time zone",
            )


def _look_at_digits(values: Sequence[Any], path: str) -> None:
    """Check that decimals have a place in Arrow's decimals.

    A tiny one (1e-999999999) would end the process, as Arrow (26) looks up its power of ten.
    """
    for value in values:
        if value is not None and not (value.is_finite() and abs(value.as_tuple().exponent) <= _EXPONENT_MAX):
            raise DoesNotFit(path, f"{str(value)[:40]} has no place in a decimal of Arrow's")


_EXPONENT_MAX = 76
"""The number of digits of Arrow's largest decimals."""


class Optional(Shape):
    """A value, or None."""

    nullable = True

    def __init__(self, inner: Shape) -> None:
        self.inner = inner
        self.kind = inner.kind
        self.as_it_is = inner.as_it_is

    def column(self, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
        """See `Shape`."""
        return self.inner.column(values, kind, path)

    def value(self, stored: Any) -> Any:
        """See `Shape`."""
        return self.inner.value(stored)


class Repeated(Shape):
    """A list, a set, or a tuple of any length."""

    def __init__(self, item: Shape, make: type) -> None:
        self.item = item
        self._make = make
        self.kind = pa.list_(item.field("item"))
        self.as_it_is = make is list and item.as_it_is

    def column(self, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
        """See `Shape`."""
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise DoesNotFit(path, f"it is {self.kind}, and the stream's column is {kind}")
        for value in values:
            if value is not None and not isinstance(value, self._make):
                raise DoesNotFit(path, f"it is {type(value).__name__}, not {self._make.__name__}")
        items = list(chain.from_iterable(value for value in values if value is not None))
        column = checked(self.item, items, kind.value_type, f"{path}[]")
        large = pa.types.is_large_list(kind)
        made = pa.LargeListArray if large else pa.ListArray
        return made.from_arrays(_offsets(values, large=large), column, type=kind, mask=_nulls(values))

    def value(self, stored: Any) -> Any:
        """See `Shape`."""
        item = self.item
        return self._make(stored if item.as_it_is else [None if each is None else item.value(each) for each in stored])


class Mapped(Shape):
    """A mapping."""

    def __init__(self, key: Shape, item: Shape) -> None:
        self.key = key
        self.item = item
        self.kind = pa.map_(key.kind, item.field("value"))

    def column(self, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
        """See `Shape`."""
        if not pa.types.is_map(kind):
            raise DoesNotFit(path, f"it is {self.kind}, and the stream's column is {kind}")
        for value in values:
            if value is not None and not isinstance(value, Mapping):
                raise DoesNotFit(path, f"it is {type(value).__name__}, not a mapping")
        there = [value for value in values if value is not None]
        keys = checked(self.key, list(chain.from_iterable(there)), kind.key_type, f"{path}{{}}")
        items = list(chain.from_iterable(value.values() for value in there))
        column = checked(self.item, items, kind.item_type, f"{path}{{}}")
        return pa.MapArray.from_arrays(_offsets(values), keys, column, type=kind, mask=_nulls(values))

    def value(self, stored: Any) -> Any:
        """See `Shape`."""
        key, item = self.key, self.item
        return {key.value(name): None if each is None else item.value(each) for name, each in stored}


class Member(NamedTuple):
    """A field of a model."""

    name: str
    shape: Shape
    argument: str
    """Name of the argument for the field in the model's constructor."""
    optional: bool
    """Whether the model has a default for the field."""


class Struct(Shape):
    """A model, with a struct field for each of its fields."""

    def __init__(self, model: type, members: Sequence[Member], make: Callable[[dict[str, Any]], Any]) -> None:
        self.model = model
        self.members = tuple(members)
        self._make = make
        self.kind = pa.struct([member.shape.field(member.name) for member in members])

    def columns(
        self, values: Sequence[Any], kind: pa.DataType | pa.Schema, path: str = ""
    ) -> list[tuple[str, pa.Array]]:
        """Return a column for each field of the model. Other columns of the stream are left out."""
        types = {field.name: field.type for field in kind}
        made = []
        for member in self.members:
            name, where = member.name, f"{path}.{member.name}" if path else member.name
            if name not in types:
                raise DoesNotFit(where, "the stream has no such column")
            fields = [None if value is None else getattr(value, name) for value in values]
            shape = member.shape
            if not shape.nullable and not all(fields):  # some are None, or 0, or empty
                for value, found in zip(values, fields, strict=True):
                    if found is None and value is not None:
                        raise DoesNotFit(where, "it is None, and the field does not allow None")
            made.append((name, shape.column(fields, types[name], where)))
        return made

    def column(self, values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
        """See `Shape`."""
        if not pa.types.is_struct(kind):
            raise DoesNotFit(path, f"it is {self.kind}, and the stream's column is {kind}")
        self.check(values, path)
        made = dict(self.columns(values, kind, path))
        children = [made[field.name] if field.name in made else null_column(len(values), field.type) for field in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=_nulls(values))

    def check(self, values: Sequence[Any], path: str) -> None:
        """Check that all values are instances of the model. Raises `DoesNotFit`."""
        for at, value in enumerate(values):
            if value is not None and value.__class__ is not self.model:
                raise DoesNotFit(path or f"[{at}]", f"it is {type(value).__name__}, not {self.model.__name__}")

    def value(self, stored: Any) -> Any:
        """See `Shape`."""
        given = {}
        for member in self.members:
            found = stored.get(member.name)
            if found is not None:
                given[member.argument] = found if member.shape.as_it_is else member.shape.value(found)
            elif member.shape.nullable and member.name in stored:
                given[member.argument] = None
            elif not member.optional:  # records from before the column was added have no value
                raise ValueError(f"{member.name}: the record has no value, and {self.model.__name__} has no default")
        return self._make(given)


def _offsets(values: Sequence[Any], *, large: bool = False) -> pa.Array:
    lengths = (0 if value is None else len(value) for value in values)
    return pa.array(list(accumulate(lengths, initial=0)), pa.int64() if large else pa.int32())


def _nulls(values: Sequence[Any]) -> pa.Array | None:
    return pa.array([value is None for value in values]) if any(value is None for value in values) else None
