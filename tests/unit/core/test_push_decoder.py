"""Messages of the push channel that arrive in pieces of any size."""

from __future__ import annotations

from typing import Any

import pytest

from kera.core.errors import ProtocolError
from kera.core.push import ALIVE, Decoder, PushKind, encode

MESSAGES = [(PushKind.HELLO, b"hello"), (PushKind.ALIVE, b""), (PushKind.RELEASE, bytes(300)), (PushKind.END, b"x")]
SENT = b"".join(encode(*message) for message in MESSAGES)


class Piece(bytes):
    """Counts the bytes copied out of the piece."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        part = super().__getitem__(at)
        Piece.copied += len(part) if isinstance(part, bytes) else 1
        return part


@pytest.mark.parametrize("piece_bytes", [1, 3, 8, 100, len(SENT)])
def test_messages_are_the_same_in_pieces_of_any_size(piece_bytes: int) -> None:
    decoder = Decoder()
    found: list[tuple[PushKind, bytes]] = []
    for at in range(0, len(SENT), piece_bytes):
        found += decoder.feed(SENT[at : at + piece_bytes])
    assert found == MESSAGES
    assert not decoder.unfinished


def test_the_decoder_does_not_copy_the_rest_of_a_piece_for_each_message() -> None:
    """A peer that sends 30,000 short messages at once would otherwise stop the others for a second."""
    piece = Piece(ALIVE * 1000)
    assert len(list(Decoder().feed(piece))) == 1000
    assert Piece.copied <= len(piece)


def test_messages_not_taken_yet_arrive_with_the_next_piece() -> None:
    decoder = Decoder()
    first = next(decoder.feed(SENT[:-1]))
    assert decoder.unfinished
    assert [first, *decoder.feed(SENT[-1:])] == MESSAGES
    assert not decoder.unfinished


def test_messages_before_invalid_bytes_still_arrive() -> None:
    found = Decoder().feed(ALIVE + b"\0\0\0\0\x63\0\0\0")
    assert next(found) == (PushKind.ALIVE, b"")
    with pytest.raises(ProtocolError, match="a push message of unknown kind 99"):
        next(found)
