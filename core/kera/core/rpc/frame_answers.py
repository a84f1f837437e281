"""Answers to requests, as frames."""

from __future__ import annotations

from typing import Any

from kera.core.rpc.frames import FrameHeader, Kind, encode_error, encode_frame
from kera.core.rpc.handling import error_reply
from kera.core.rpc.method import Method, Reply

_REPLY = Kind.REPLY
"""Finding a member of an enumeration takes longer than looking at it, and is done for each frame."""


def encode_answer(header: FrameHeader, method: Method[Any, Any], reply: Reply[Any], bulk_bytes_max: int) -> list[Any]:
    """A reply in pieces, see `encode_frame`; what cannot be sent becomes an error."""
    try:
        return encode_frame(_REPLY, method, header.request_id, reply.message, reply.bulk, bulk_bytes_max)
    except Exception as error:  # noqa: BLE001 - too large, or what the handler returned cannot be sent
        return [encode_refusal(header, method, error)]


def encode_refusal(header: FrameHeader, method: Method[Any, Any] | None, error: BaseException) -> bytes:
    """An error."""
    return encode_error(header.method, header.request_id, error_reply(error, method))
