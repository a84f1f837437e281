"""Values that begin with the id of their schema."""

from __future__ import annotations

from typing import Any

from kera.client.serializers.protocols import Context, Serializer
from kera.core.schemas.framing import frame_of


class WithFrame:
    """A serializer that puts the id of its schema in front of each value."""

    def __init__(self, payload: Serializer[Any], schema_id: int, behind: bytes = b"") -> None:
        """Make the serializer. `behind` is put between the id and each payload."""
        self._payload = payload
        self._frame = frame_of(schema_id) + behind

    def __call__(self, value: Any, context: Context, /) -> bytes:
        """Return the framed bytes of `value`. Raises `CannotEncode`."""
        return self._frame + self._payload(value, context)
