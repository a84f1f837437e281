"""Limits of consumers' requests, checked before anything is done. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kera.coordinator.consumer_groups.progress import known, position_of
from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument
from kera.v1 import consumer_group_pb2 as messages

MEMBER_ID_CHARS_MAX = 64
TIMEOUT_MS_MIN, TIMEOUT_MS_MAX = 100, 24 * 3600 * 1000
ITEMS_MAX = 8192
"""Maximum length of each list of a request (steps, starts, seen groups); no consumer needs more."""
RESET_STREAMLETS_MAX = 1024
"""Maximum of streamlets in one request: each is a record, and all are stored in one write."""


class StreamShape(NamedTuple):
    """The number of streamlets and entries of a stream."""

    streamlets: int
    entries: int


def check_round(request: messages.ConsumeRoundRequest) -> None:
    """Raise `InvalidArgument` for an invalid round."""
    check_member_id(request.member_id)
    for name in ("session_timeout_ms", "progress_timeout_ms"):
        value = getattr(request, name)
        if not TIMEOUT_MS_MIN <= value <= TIMEOUT_MS_MAX:
            raise InvalidArgument(
                f"{name} must be between {TIMEOUT_MS_MIN} and {TIMEOUT_MS_MAX}, not {value}", field=name, value=value
            )
    for name in ("stream_ids", "steps", "starts", "seen", "ended"):
        check_items(getattr(request, name), name)
    if not request.groups_max or not request.stream_ids:
        raise InvalidArgument("a consumer reads at least one stream, and holds at least one group")


def check_member_id(member_id: str) -> None:
    """Raise `InvalidArgument` for a text that is not the id of a consumer."""
    if not 0 < len(member_id) <= MEMBER_ID_CHARS_MAX:
        raise InvalidArgument(f"a consumer has an id of 1 to {MEMBER_ID_CHARS_MAX} characters")


def check_items(items: Sequence[object], name: str, limit: int = ITEMS_MAX) -> None:
    """Raise `InvalidArgument` if a list has more items than a request may have."""
    if len(items) > limit:
        raise InvalidArgument(f"at most {limit} {name} in a request, not {len(items)}", field=name, limit=limit)


def checked_start(
    start: messages.StreamletStart, shapes: Mapping[int, StreamShape]
) -> tuple[tuple[int, int], list[Position], list[int | None]]:
    """Return the key of the streamlet, the cursors, and the ordinals of the records there. Raises `InvalidArgument`."""
    shape = shapes.get(start.stream_id)
    if shape is None:
        raise InvalidArgument(f"stream {start.stream_id} is not one of the consumer's", stream_id=start.stream_id)
    if (
        start.streamlet_id >= shape.streamlets
        or len(start.cursors) != shape.entries
        or len(start.records) not in (0, shape.entries)
    ):
        raise InvalidArgument(
            f"stream {start.stream_id} has {shape.streamlets} streamlets with {shape.entries} entries each",
            stream_id=start.stream_id,
        )
    records = [known(each, "record") for each in start.records] or [None] * shape.entries
    return (start.stream_id, start.streamlet_id), [position_of(cursor) for cursor in start.cursors], records
