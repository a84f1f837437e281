"""Chunks and bundles that go to a broker together, as one request."""

from __future__ import annotations

from typing import Any

from kera.client.producing.lanes.bundle import Bundle
from kera.client.producing.lanes.lane import PendingChunk
from kera.core.format.chunk import padding_of
from kera.v1 import broker_pb2, common_pb2

JOINED_BYTES_MAX = 4 << 10
"""Payloads of fewer bytes, on average, are copied into one piece."""


class Request:
    """One request to a broker, with the chunks and bundles that it carries."""

    __slots__ = ("bundles", "chunk_count", "chunks", "message", "sent_s")

    def __init__(
        self,
        bundles: list[Bundle],
        chunks: list[PendingChunk],
        durability: common_pb2.Durability.ValueType,
        sent_s: float,
    ) -> None:
        """`sent_s`: when the request is sent, on the loop's clock."""
        self.bundles = bundles
        self.chunks = chunks
        self.chunk_count = count = sum([each.chunk_count for each in bundles]) + len(chunks)
        """Number of chunks, including those in bundles."""
        self.message = broker_pb2.MultiWriteChunksRequest(chunk_count=count, durability=durability)
        self.sent_s = sent_s

    @property
    def deadline_s(self) -> float:
        """The earliest deadline of its chunks."""
        return min([each.deadline_s for each in self.bundles] + [each.deadline_s for each in self.chunks])

    def bulk(self) -> list[Any]:
        """Return the bytes of the chunks, in pieces. Joins small pieces, because each piece has a fixed cost."""
        bundled: list[Any] = [each.bulk for each in self.bundles]
        pieces: list[Any] = []
        size = 0
        for chunk in self.chunks:
            payload = chunk.payload.payload
            size += len(payload)
            pieces += (chunk.header, payload, padding_of(len(payload)))
        if not pieces:
            return bundled
        if size < len(self.chunks) * JOINED_BYTES_MAX:
            return [*bundled, b"".join(pieces)]
        return [*bundled, *(piece for piece in pieces if piece)]
