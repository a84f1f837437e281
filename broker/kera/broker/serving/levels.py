"""The levels at which a request asks for acknowledgement."""

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
    """Raises `InvalidArgument` for a level that only newer clients know."""
    if durability not in _KNOWN:
        raise InvalidArgument(
            f"level {level_name(durability)} is not known to this version", durability=level_name(durability)
        )


def level_name(durability: int) -> str:
    """The name of a level, or the number of one that only newer clients know."""
    known = common_pb2.Durability.DESCRIPTOR.values_by_number.get(durability)
    return str(known.name) if known is not None else str(durability)
