"""Digests of stored chunks: they distinguish a repeat from another chunk with the same sequence. Pure.

The broker compares a chunk that is in memory by its header. For chunks that have left memory, the index keeps the
digests of each producer's last chunks (``kera.broker.storage.index_format``), so a comparison never reads a segment
file.

A digest guards against accidents: two processes that use one producer id, a copied machine, a program with a defect. An
attacker can forge it, because it is made of checksums. Where security is on, ``kera.broker.serving.write_access`` keeps
others from using a producer's id.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kera.broker.log.segment import Segment
from kera.broker.records import DIGEST_BYTES, DIGESTS_MAX, Digests
from kera.core.base.ids import PRODUCER_IDS
from kera.core.format.chunk import ChunkHeader
from kera.core.format.header_table import Headers
from kera.core.format.punctuation import FLAG as PUNCTUATION

_DIGEST = struct.Struct("<II")
_FIRST_CHOSEN_ID = np.uint64(PRODUCER_IDS.start)
Numbers = npt.NDArray[np.uint64]


def digest_of(header: ChunkHeader) -> bytes:
    """Return the digest of one chunk.

    A producer repeats a chunk byte for byte, so the header's checksum counts, which covers the creation time and the
    payload's checksum. A writer that chooses its id may build a chunk anew to repeat it, so for such chunks only the
    payload counts, by its checksum and length.
    """
    other = header.payload_bytes if header.producer_id in PRODUCER_IDS else header.header_crc32c
    return _DIGEST.pack(header.payload_crc32c, other)


def joined(one: Digests | None, other: Digests) -> Digests:
    """Merge two runs of digests of one producer. If they leave a gap, return the later run only."""
    if one is None:
        return other
    older, newer = sorted((one, other))
    if older.producer_epoch != newer.producer_epoch or older.next_sequence < newer.first_sequence:
        return newer
    before = max(0, newer.first_sequence - older.first_sequence) * DIGEST_BYTES
    digests = older.digests[:before] + newer.digests
    return newer._replace(digests=digests[-DIGESTS_MAX * DIGEST_BYTES :])


def join(known: dict[int, Digests], more: dict[int, Digests]) -> None:
    """Merge the digests in `more` into `known`, by producer."""
    for producer_id, digests in more.items():
        known[producer_id] = joined(known.get(producer_id), digests)


def digests_of(headers: Headers) -> dict[int, Digests]:
    """Return the digests of chunks by producer; `headers` are in the order of appending."""
    payload_crcs = headers["payload_crc32c"].astype(np.uint64)
    producers = headers["producer_id"].astype(np.uint64)
    others = np.where(producers >= _FIRST_CHOSEN_ID, headers["payload_bytes"], headers["header_crc32c"])
    return _by_producer(
        headers["flags"] & PUNCTUATION == 0,
        producers,
        headers["producer_epoch"].astype(np.uint64),
        headers["sequence"].astype(np.uint64),
        payload_crcs | others.astype(np.uint64) << np.uint64(32),
    )


def digests_in(segment: Segment) -> dict[int, Digests]:
    """Return the digests of the chunks of a segment in memory, by producer."""
    ends = np.array(segment.chunk_ends, dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    for hole in segment.holes:
        starts = starts[starts != hole.start]
    view = segment.slot.view
    bytes_ = np.frombuffer(view, dtype=np.uint8)
    small = np.frombuffer(view[: len(view) // 4 * 4], dtype="<u4")
    large = np.frombuffer(view[: len(view) // 8 * 8], dtype="<u8")
    words, longs = starts // 4, starts // 8  # chunks start at multiples of 64; where fields are: kera.core.format.chunk
    producers, digests = large[longs + 4], large[longs + 10]
    lengths = small[words + 2].astype(np.uint64) << np.uint64(32)
    digests = np.where(producers >= _FIRST_CHOSEN_ID, digests & np.uint64(0xFFFF_FFFF) | lengths, digests)
    return _by_producer(
        bytes_[starts + 5] & PUNCTUATION == 0,
        producers,
        small[words + 10].astype(np.uint64),
        large[longs + 6],
        digests,
    )


def _by_producer(
    counted: npt.NDArray[np.bool_], producers: Numbers, epochs: Numbers, sequences: Numbers, digests: Numbers
) -> dict[int, Digests]:
    rows = np.flatnonzero(counted)
    rows = rows[np.lexsort((sequences[rows], epochs[rows], producers[rows]))]
    producers, epochs, sequences, digests = producers[rows], epochs[rows], sequences[rows], digests[rows]
    breaks = np.ones(len(rows), dtype=np.bool_)
    breaks[1:] = (
        (producers[1:] != producers[:-1])
        | (epochs[1:] != epochs[:-1])
        | (sequences[1:] != sequences[:-1] + np.uint64(1))
    )
    found: dict[int, Digests] = {}
    for start, end in pairwise([*np.flatnonzero(breaks).tolist(), len(rows)]):  # the last run of a producer counts
        kept = digests[max(start, end - DIGESTS_MAX) : end].astype("<u8").tobytes()
        found[int(producers[start])] = Digests(int(epochs[start]), int(sequences[end - 1]) + 1, kept)
    return found
