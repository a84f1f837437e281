"""Chooses columns for the annotations of a model's fields. Each has one Arrow type, or is refused with its path.

==============================  =====================================================================
`int`, `float`, `bool`, `str`   int64, double, bool, string
`bytes`                         binary
`datetime`                      timestamp in microseconds, of UTC: values have a time zone
`date`, `time`, `timedelta`     date32, time64 and duration in microseconds
`Decimal`                       decimal128(38, 18); or by pydantic's `max_digits`, `decimal_places`
`Enum`, `Literal`               the type of their values, which are all text or all whole numbers
`UUID`                          string
`list`, `set`, `tuple[T, ...]`  list
`dict`                          map
a model                         struct
`T | None`                      the same, with nulls
==============================  =====================================================================

``Annotated[int, pa.int32()]`` chooses another type: any that Arrow can make of such values.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
import types
import typing
import uuid
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pyarrow as pa
import pydantic

from kera.client.serializers.columns.shapes import Leaf, Mapped, Member, Optional, Repeated, Shape, Struct
from kera.client.serializers.model_classes import is_model
from kera.core.errors import InvalidArgument

DECIMAL = pa.decimal128(38, 18)
_LEAVES: dict[Any, tuple[pa.DataType, tuple[type, ...]]] = {
    bool: (pa.bool_(), (bool,)),
    int: (pa.int64(), (int,)),
    float: (pa.float64(), (float, int)),
    str: (pa.string(), (str,)),
    bytes: (pa.binary(), (bytes,)),
    datetime.datetime: (pa.timestamp("us", tz="UTC"), (datetime.datetime,)),
    pydantic.AwareDatetime: (pa.timestamp("us", tz="UTC"), (datetime.datetime,)),
    pydantic.NaiveDatetime: (pa.timestamp("us"), (datetime.datetime,)),
    datetime.date: (pa.date32(), (datetime.date,)),
    datetime.time: (pa.time64("us"), (datetime.time,)),
    datetime.timedelta: (pa.duration("us"), (datetime.timedelta,)),
    Decimal: (DECIMAL, (Decimal,)),
}
_REPEATED: dict[Any, type] = {
    list: list,
    set: set,
    frozenset: frozenset,
    tuple: tuple,
    Sequence: list,
}
_CONTAINERS = {*_REPEATED, dict, Mapping}


def shape_of(annotation: Any, path: str, metadata: Iterable[Any] = (), within: tuple[type, ...] = ()) -> Shape:
    """Return the shape of values of an annotation. `within`: the models that contain it. Raises `InvalidArgument`."""
    annotation, metadata = _bare(annotation, metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {Union, types.UnionType}:
        others = [each for each in arguments if each is not type(None)]
        if len(others) == 1 and len(others) < len(arguments):
            return Optional(shape_of(others[0], path, metadata, within))
        raise _refused(path, annotation, "a column has values of one type: use one of them, or T | None")
    if origin is Literal:
        return _of_values(path, annotation, arguments, metadata)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = [member.value for member in annotation]
        return _of_values(path, annotation, values, metadata, annotation)
    if annotation in _CONTAINERS or origin in _CONTAINERS:
        return _container(path, annotation, within)
    model = origin if origin is not None and is_model(origin) else annotation
    if is_model(model):
        return struct_of(annotation, path, within)
    return _leaf(path, annotation, metadata)


def _bare(annotation: Any, metadata: Iterable[Any]) -> tuple[Any, list[Any]]:
    """Unwrap an annotation. Returns the inner type, and the metadata of the wrappers."""
    said = list(metadata)
    while True:
        if get_origin(annotation) is Annotated:
            said += annotation.__metadata__
            annotation = annotation.__origin__
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # from ``type X = …``, Python 3.12 and later
            annotation = annotation.__value__
        else:
            return annotation, said


def _leaf(path: str, annotation: Any, metadata: Iterable[Any]) -> Shape:
    wanted = next((each for each in metadata if isinstance(each, pa.DataType)), None)
    if annotation is uuid.UUID:
        return Leaf(wanted or pa.string(), (uuid.UUID,), stored=str, loaded=uuid.UUID)
    if annotation not in _LEAVES:
        raise _refused(path, annotation, "Arrow has no type for it")
    kind, kinds = _LEAVES[annotation]
    if annotation is Decimal and wanted is None:
        digits = next((each.max_digits for each in metadata if getattr(each, "max_digits", None)), DECIMAL.precision)
        places = next((each.decimal_places for each in metadata if hasattr(each, "decimal_places")), None)
        scale = DECIMAL.scale if places is None else places
        try:
            wanted = pa.decimal128(digits, min(scale, digits))
        except ValueError as error:
            raise _refused(path, annotation, str(error)) from error
    return Leaf(wanted or kind, kinds)


def _of_values(
    path: str, annotation: Any, values: Sequence[Any], metadata: Iterable[Any], made: type[enum.Enum] | None = None
) -> Shape:
    for kind in (str, int):
        if values and all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            wanted = next((each for each in metadata if isinstance(each, pa.DataType)), _LEAVES[kind][0])
            if made is None:
                return Leaf(wanted, (kind,), loaded=_one_of(values))
            # Pydantic models may hold the values instead of the members (`use_enum_values`).
            return Leaf(wanted, (made, kind), stored=lambda member: made(member).value, loaded=made)
    raise _refused(path, annotation, "its values are neither all text nor all whole numbers")


def _one_of(values: Sequence[Any]) -> Any:
    def checked(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, values))}")
        return value

    return checked


def _container(path: str, annotation: Any, within: tuple[type, ...]) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in {dict, Mapping}:
        raise _refused(path, annotation, "give the types of its items: dict[str, int]")
    if origin in {dict, Mapping}:
        key = shape_of(arguments[0], f"{path}{{}}", (), within)
        if not isinstance(key, Leaf):
            raise _refused(path, annotation, "names of a map are single values, and not None")
        return Mapped(key, shape_of(arguments[1], f"{path}{{}}", (), within))
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not Ellipsis):
        raise _refused(path, annotation, "a tuple of any length is tuple[T, ...]; for others make a dataclass")
    if not arguments:
        raise _refused(path, annotation, "give the type of its items: list[int]")
    return Repeated(shape_of(arguments[0], f"{path}[]", (), within), _REPEATED[origin])


def struct_of(model: Any, path: str, within: tuple[type, ...] = ()) -> Struct:
    """Return the shape of a model. Raises `InvalidArgument`."""
    if model in within:
        raise _refused(path, model, "it contains itself")
    if len(within) >= _DEPTH_MAX:
        raise _refused(path, model, f"models are within others more than {_DEPTH_MAX} levels deep")
    inner = (*within, model)
    bare = get_origin(model) or model
    pydantic_model = issubclass(bare, pydantic.BaseModel)
    members = _pydantic_members(model, path, inner) if pydantic_model else _dataclass_members(bare, path, inner)
    if not members:
        raise _refused(path, model, "it has no fields")
    make: Any = bare.model_validate if pydantic_model else lambda given: bare(**given)
    return Struct(bare, members, model.model_validate if pydantic_model else make)


_DEPTH_MAX = 32
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _pydantic_members(model: Any, path: str, within: tuple[type, ...]) -> list[Member]:
    if issubclass(model, pydantic.RootModel):
        raise _refused(path, model, "it has a value and no fields")
    if model.model_config.get("extra") == "allow":
        raise _refused(path, model, "it allows fields that it does not name, which have no column")
    members = []
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        where = f"{path}.{name}"
        shape = shape_of(field.annotation, where, field.metadata, within)
        alias = field.validation_alias or field.alias or name
        if not isinstance(alias, str):
            raise _refused(where, model, "give it one alias that is text, or none")
        members.append(Member(name, shape, alias, not field.is_required()))
    return members


def _dataclass_members(model: Any, path: str, within: tuple[type, ...]) -> list[Member]:
    try:
        hints = typing.get_type_hints(model, include_extras=True)
    except (NameError, TypeError) as error:
        raise _refused(path, model, f"an annotation cannot be looked up: {error}") from error
    given = {field.name for field in dataclasses.fields(model) if field.init}
    for name, parameter in inspect.signature(model).parameters.items():
        if name not in given and parameter.default is parameter.empty and parameter.kind not in _ANY_NUMBER:
            raise _refused(path, model, f"it cannot be made without {name!r}, which is not a field")
    members = []
    for field in dataclasses.fields(model):
        if field.init:  # the model makes its other fields itself, also for a read instance
            optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            shape = shape_of(hints[field.name], f"{path}.{field.name}", (), within)
            members.append(Member(field.name, shape, field.name, optional))
    return members


def _refused(path: str, annotation: Any, why: str) -> InvalidArgument:
    shown = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else repr(annotation)
    return InvalidArgument(f"{path}: {shown[:200]} cannot be a column: {why}", field=path)
