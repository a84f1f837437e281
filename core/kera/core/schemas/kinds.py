"""Kinds of schemas, and which changes of a schema are allowed."""

from __future__ import annotations

from enum import StrEnum
from typing import cast

from kera.v1 import schema_pb2


class SchemaType(StrEnum):
    """The language in which a schema is written."""

    AVRO = "avro"
    """The definition is its JSON text."""
    JSON = "json"
    """JSON Schema; the definition is its text."""
    PROTOBUF = "protobuf"
    """The definition is a serialized FileDescriptorSet in base64, each file after those that it imports."""
    ARROW = "arrow"
    """The definition is the schema as an Arrow IPC message, in base64."""

    @property
    def wire(self) -> schema_pb2.SchemaType.ValueType:
        """The number in messages."""
        return cast(schema_pb2.SchemaType.ValueType, _SCHEMA_TYPES.index(self) + 1)

    @classmethod
    def from_wire(cls, value: int) -> SchemaType | None:
        """Return the kind with a number in messages; None: not set, or a kind that only newer programs know."""
        return _SCHEMA_TYPES[value - 1] if 0 < value <= len(_SCHEMA_TYPES) else None


class Compatibility(StrEnum):
    """Which schemas may follow those that a subject has.

    Backward: readers with the new schema can read data written with the previous one; forward: readers with the
    previous schema can read data written with the new one; full: both. Transitive: the same for all earlier schemas.
    """

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL_TRANSITIVE = "full_transitive"

    @property
    def backward(self) -> bool:
        """Whether readers with the new schema have to read data written with earlier ones."""
        return self.partition("_")[0] in {"backward", "full"}

    @property
    def forward(self) -> bool:
        """Whether readers with earlier schemas have to read data written with the new one."""
        return self.partition("_")[0] in {"forward", "full"}

    @property
    def transitive(self) -> bool:
        """Whether this holds for all earlier schemas, not only for the last one."""
        return self.endswith("_transitive")

    @property
    def wire(self) -> schema_pb2.Compatibility.ValueType:
        """The number in messages."""
        return cast(schema_pb2.Compatibility.ValueType, _COMPATIBILITIES.index(self) + 1)

    @classmethod
    def from_wire(cls, value: int) -> Compatibility | None:
        """Return the mode with a number in messages; None: not set, or a mode that only newer programs know."""
        return _COMPATIBILITIES[value - 1] if 0 < value <= len(_COMPATIBILITIES) else None


_SCHEMA_TYPES = tuple(SchemaType)
"""In the order of their numbers on the wire, from 1."""
_COMPATIBILITIES = tuple(Compatibility)
