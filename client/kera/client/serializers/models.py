"""Dataclasses and pydantic models, as JSON; in a stream with columns of its own, as its rows.

Pydantic writes and reads both, so times, decimals, UUIDs and enumerations have the forms that it gives them. What a
model takes is for the model to say: of names that come twice, or NaN, it knows more than we. Dataclasses have bytes in
base64, and NaN and infinities as text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pydantic
from pydantic_core import CoreConfig, SchemaSerializer, SchemaValidator

from kera.client.serializers.columns.models import columns_of
from kera.client.serializers.framed import WithFrame
from kera.client.serializers.json import unframed
from kera.client.serializers.model_classes import field_names, is_model, what_is_wrong
from kera.client.serializers.protocols import Context, Schemas, Serializer
from kera.client.serializers.refusing import cannot_encode, undecodable
from kera.core.errors import InvalidArgument
from kera.core.schemas import SchemaType

ModelT = TypeVar("ModelT")
_DATACLASSES = CoreConfig(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
"""How those are written that do not say it themselves (``__pydantic_config__``)."""


class JsonForm(NamedTuple):
    """The functions that write and read a model."""

    serializer: SchemaSerializer
    validator: SchemaValidator
    schema: Callable[[], dict[str, Any]]
    """Its JSON Schema."""


def json_form_of(model: type) -> JsonForm:
    """How a model is written. Raises `InvalidArgument` when it is none, or has what pydantic does not know."""
    if not is_model(model):
        raise InvalidArgument(f"{model!r} is neither a dataclass nor a pydantic model")
    return _json_form_of(model)


@functools.lru_cache(maxsize=256)
def _json_form_of(model: Any) -> JsonForm:
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(model)
        adapter.rebuild(raise_errors=True)
    except (pydantic.errors.PydanticUserError, TypeError, NameError) as error:
        raise InvalidArgument(f"{model.__name__} cannot be written as JSON: {error}") from error
    schema = _with_config(adapter.core_schema)
    return JsonForm(SchemaSerializer(schema), SchemaValidator(schema), adapter.json_schema)


def _with_config(schema: Any) -> Any:
    """A core schema, in which dataclasses without a configuration of their own have ours.

    Pydantic takes none for them from outside: theirs counts, though it only has their title.
    """
    if isinstance(schema, list):
        return [_with_config(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _with_config(each) for name, each in schema.items()}
    if made.get("type") == "dataclass" and not hasattr(made["cls"], "__pydantic_config__"):
        made["config"] = {**_DATACLASSES, **made.get("config", {})}
    return made


class ModelSerializer(Generic[ModelT]):
    """Instances of a dataclass or of a pydantic model, as JSON."""

    def __init__(self, model: type[ModelT], *, framed: bool = False) -> None:
        """`framed`: the model's JSON Schema is registered, and values begin with its id. Raises `InvalidArgument`."""
        self._model = model
        self._dump = json_form_of(model).serializer.to_json
        self.framed = framed

    async def ready(self, context: Context, schemas: Schemas) -> Serializer[ModelT]:
        """See `NeedsSchema`."""
        if not self.framed:
            return self.payload
        try:
            text = json.dumps(json_form_of(self._model).schema(), ensure_ascii=False)
        except pydantic.errors.PydanticUserError as error:
            raise InvalidArgument(f"{self._model.__name__} has no JSON Schema: {error}") from error
        return WithFrame(self.payload, await schemas.id_of(context, SchemaType.JSON, text))

    def payload(self, value: ModelT, context: Context, /) -> bytes:
        """`value` without a frame. Raises `CannotEncode`."""
        if value.__class__ is not self._model:  # of a subclass, pydantic would leave fields out
            raise cannot_encode(context, f"it is {type(value).__name__}, not {self._model.__name__}")
        try:
            return self._dump(value, warnings="error")
        except (pydantic.errors.PydanticUserError, ValueError, TypeError, RecursionError) as error:
            raise cannot_encode(context, error, self._field(value)) from error

    def _field(self, value: ModelT) -> str:
        """The field that is to blame, as far as one alone is."""
        for name in field_names(self._model):
            others = {other for other in field_names(self._model) if other != name}
            try:
                self._dump(value, warnings="error", exclude=others)
            except (pydantic.errors.PydanticUserError, ValueError, TypeError, RecursionError):
                return name
        return ""

    def __call__(self, value: ModelT, context: Context, /) -> bytes:
        """Raises `CannotEncode`."""
        if self.framed:
            raise cannot_encode(context, f"the serializer is not ready: await producer.prepare({context.stream!r})")
        return self.payload(value, context)


class ModelDeserializer(Generic[ModelT]):
    """Reads the output of `ModelSerializer`, with a frame or without, as instances of the model."""

    def __init__(self, model: type[ModelT]) -> None:
        """Raises `InvalidArgument`."""
        self._model = model
        self._parse = json_form_of(model).validator.validate_json

    def rows_of(self, schema: pa.Schema, stream: str) -> Callable[[Mapping[str, Any]], ModelT]:
        """See `RowDeserializer`."""
        columns = columns_of(self._model)
        columns.check(schema, stream)
        return columns.row

    def __call__(self, data: bytes, _context: Context, /) -> ModelT:
        """Raises `CannotDecode`."""
        payload = unframed(data)
        try:
            return self._parse(payload)  # type: ignore[no-any-return]
        except pydantic.ValidationError as error:
            raise undecodable(what_is_wrong(error)) from error
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # of validators of the model
            raise undecodable(error) from error
