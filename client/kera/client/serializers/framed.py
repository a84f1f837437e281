"""Values in front of which the id of their schema is."""

from __future__ import annotations

from typing import Any

from kera.client.serializers.protocols import Context, Serializer
from kera.core.schemas.framing import frame_of


class WithFrame:
    """A serializer whose schema has its id."""

    def __init__(self, payload: Serializer[Any], schema_id: int, behind: bytes = b"") -> None:
        """`behind`: what comes between the id and each payload."""
        self._payload = payload
        self._frame = frame_of(schema_id) + behind

    def __call__(self, value: Any, context: Context, /) -> bytes:
        """Raises `CannotEncode`."""
        return self._frame + self._payload(value, context)
