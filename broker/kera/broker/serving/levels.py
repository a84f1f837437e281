"""The durability levels at which a request can ask for acknowledgement."""

from __future__ import annotations

from kera.core.errors import InvalidArgument
from kera.v1 import common_pb2

_KNOWN = (
    common_pb2.DURABILITY_UNSPECIFIED,
    common_pb2.DURABILITY_LEADER,
    common_pb2.DURABILITY_REPLICATED,
    common_pb2.DURABILITY_PERSISTED,
)


def check_level(durability: int) -> None:
    """Check that this version knows a level. Raises `InvalidArgument` for a level that only newer clients know."""
    if durability not in _KNOWN:
        raise InvalidArgument(
            f"level {level_name(durability)} is not known to this version", durability=level_name(durability)
        )


def level_name(durability: int) -> str:
    """Return the name of a level, or its number if only newer clients know it."""
    known = common_pb2.Durability.DESCRIPTOR.values_by_number.get(durability)
    return str(known.name) if known is not None else str(durability)
