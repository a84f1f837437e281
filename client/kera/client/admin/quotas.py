"""Quotas of principals, in the form for users."""

from __future__ import annotations

import dataclasses
from typing import Self

from kera.client import arguments
from kera.v1 import access_pb2 as messages

RATES = frozenset({"bytes_in_per_s", "bytes_out_per_s", "requests_per_s"})


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """The maximum that a principal may use. None: unlimited.

    A principal that exceeds a rate gets its answers late; exceeding another limit is refused (`QuotaExceeded`).
    """

    bytes_in_per_s: int | None = None
    """Bytes of chunks that it writes per second, to each broker."""
    bytes_out_per_s: int | None = None
    """Bytes of chunks that it reads per second, from each broker."""
    requests_per_s: int | None = None
    """Requests per second, to each broker and to the coordinator."""
    connections: int | None = None
    """Connections to each broker: of frames, and streams of gRPC."""
    streams: int | None = None
    """Existing streams that it has created."""
    stored_bytes: int | None = None
    """Size of the chunks in these streams, each counted once, however many replicas it has."""

    def __bool__(self) -> bool:
        """Return whether anything is limited."""
        return self != Quota()

    def to_message(self) -> messages.Quota:
        """Convert to the wire form. Raises `InvalidArgument`."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return messages.Quota(
            **{
                name: arguments.whole(name, value, int(name in RATES), arguments.UINT64_MAX)
                for name, value in known.items()
            }
        )

    @classmethod
    def from_message(cls, message: messages.Quota) -> Self:
        """Convert from the wire form."""
        return cls(**{field.name: value for field, value in message.ListFields()})


NAMES = tuple(field.name for field in dataclasses.fields(Quota))
"""Names of all limits."""
NO_QUOTA = Quota()
