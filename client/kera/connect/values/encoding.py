"""The interface of encoders of values."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from kera.core.schemas import SchemaType


class UnknownField(Exception):
    """A value has a field that the schema does not have. Never leaves `kera.connect.values`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"field {path} is not in the schema")
        self.path = path


class Encoder(Protocol):
    """Encodes values with one schema."""

    def __call__(self, value: Any) -> bytes:
        """Encode a value into its payload. Raises `CannotEncode`, `UnknownField`."""
        ...


class Encoding(NamedTuple):
    """How a copy encodes the values of records."""

    schema_type: SchemaType
    """`AVRO` or `JSON`."""
    subject: str
    """The subject under which the schema is registered."""
    key: str | None = None
    """The column, or field of a value, that is the record's key; None: the record's original key."""
    time: str | None = None
    """The column, or field of a value, that is the record's time; None: the record's original time."""

    @property
    def shown(self) -> str:
        """A description for users, which is always the same."""
        extras = [f", {what} {name}" for what, name in (("key", self.key), ("time", self.time)) if name is not None]
        return f"as {self.schema_type} of subject {self.subject}{''.join(extras)}"
