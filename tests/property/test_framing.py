"""Frames before any payload, and any bytes as a frame; see `kera.core.schemas.framing`."""

from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import NotFramed
from kera.core.schemas.framing import (
    SCHEMA_ID_MAX,
    frame,
    message_path_to_bytes,
    split_message_path,
    unframe,
)

PATHS = st.lists(st.integers(0, SCHEMA_ID_MAX), min_size=1, max_size=64)


@given(st.integers(1, SCHEMA_ID_MAX), st.binary())
def test_a_framed_payload_is_unframed_again(schema_id: int, payload: bytes) -> None:
    assert unframe(frame(schema_id, payload)) == (schema_id, payload)


@given(st.binary() | st.binary().map(lambda payload: b"\x00" + payload))
def test_any_bytes_are_a_frame_or_refused(value: bytes) -> None:
    try:
        schema_id, payload = unframe(value)
    except NotFramed:
        return
    assert frame(schema_id, payload) == value


@given(PATHS, st.binary())
def test_a_message_path_is_split_off_again(path: list[int], message: bytes) -> None:
    assert split_message_path(message_path_to_bytes(path) + message) == (tuple(path), message)


@given(st.binary())
def test_any_bytes_are_a_message_path_or_refused(payload: bytes) -> None:
    try:
        path, message = split_message_path(payload)
    except NotFramed:
        return
    assert payload.endswith(message)
    assert split_message_path(message_path_to_bytes(path) + message) == (path, message)
