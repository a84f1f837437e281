"""Dataclasses and pydantic models: as JSON, or as the rows of a stream with its own columns.

Pydantic writes and reads both, so times, decimals, UUIDs and enumerations have pydantic's forms. The model itself
decides which values it accepts, such as repeated names or NaN. Dataclasses write bytes in base64, and NaN and
infinities as text.
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
"""The configuration of dataclasses without their own (``__pydantic_config__``)."""


class JsonForm(NamedTuple):
    """The functions that write and read a model."""

    serializer: SchemaSerializer
    validator: SchemaValidator
    schema: Callable[[], dict[str, Any]]
    """Returns the JSON Schema of the model."""


def json_form_of(model: type) -> JsonForm:
    """Return the JSON form of a model.

    Raises `InvalidArgument` when `model` is not a model, or has a type that pydantic does not know.
    """
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
    """Return a core schema in which dataclasses without their own configuration have ours.

    Pydantic accepts no configuration for them from outside: it uses theirs, which only has their title.
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
        """Make the serializer. Raises `InvalidArgument`.

        `framed`: the model's JSON Schema is registered, and values begin with its id.
        """
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
        """Return the bytes of `value`, without a frame. Raises `CannotEncode`."""
        if value.__class__ is not self._model:  # pydantic would leave out fields of a subclass
            raise cannot_encode(context, f"it is {type(value).__name__}, not {self._model.__name__}")
        try:
            return self._dump(value, warnings="error")
        except (pydantic.errors.PydanticUserError, ValueError, TypeError, RecursionError) as error:
            raise cannot_encode(context, error, self._field(value)) from error

    def _field(self, value: ModelT) -> str:
        """Return the field that is to blame; empty if no single one is."""
        for name in field_names(self._model):
            others = {other for other in field_names(self._model) if other != name}
            try:
                self._dump(value, warnings="error", exclude=others)
            except (pydantic.errors.PydanticUserError, ValueError, TypeError, RecursionError):
                return name
        return ""

    def __call__(self, value: ModelT, context: Context, /) -> bytes:
        """Return the bytes of `value`. Raises `CannotEncode`, also if a framed serializer is not ready yet."""
        if self.framed:
            raise cannot_encode(context, f"the serializer is not ready: await producer.prepare({context.stream!r})")
        return self.payload(value, context)


class ModelDeserializer(Generic[ModelT]):
    """Reads the output of `ModelSerializer`, with a frame or without, as instances of the model."""

    def __init__(self, model: type[ModelT]) -> None:
        """Make the deserializer. Raises `InvalidArgument`."""
        self._model = model
        self._parse = json_form_of(model).validator.validate_json

    def rows_of(self, schema: pa.Schema, stream: str) -> Callable[[Mapping[str, Any]], ModelT]:
        """See `RowDeserializer`."""
        columns = columns_of(self._model)
        columns.check(schema, stream)
        return columns.row

    def __call__(self, data: bytes, _context: Context, /) -> ModelT:
        """Return the instance in `data`. Raises `CannotDecode`."""
        payload = unframed(data)
        try:
            return self._parse(payload)  # type: ignore[no-any-return]
        except pydantic.ValidationError as error:
            raise undecodable(what_is_wrong(error)) from error
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # raised by validators of the model
            raise undecodable(error) from error
