"""A copy of all metadata in one file: made by the leader, put back into a store while no coordinator leads.

It is of one moment, and has the same form for LMDB and ZooKeeper: a copy of one can be put back into the other.

    line of JSON    format, version, cluster_id, created_us, records, crc32 (of the rest, hexadecimal)
    rest            compressed with zlib: for each record the lengths of key and value (u32, little-endian), and both

The copy contains neither the record of the leader nor the census. Putting a copy back also rewrites the record of the
leader, so that a coordinator which still runs cannot write any more, and stops. It also writes a record that says that
the metadata may be older than the cluster (`RESTORED`).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from kera.coordinator.store.census import CENSUS
from kera.coordinator.store.leadership import LEADER, epoch_of
from kera.coordinator.store.metadata import MetadataDamaged, MetadataStore, Write
from kera.core.base.turns import at_once
from kera.core.errors import InvalidArgument

FORMAT = "kera metadata"
VERSION = 1
PIECE_BYTES = 32 << 10
"""Bytes that are compressed in one step."""
UNPACKED_BYTES_MAX = 1 << 30
"""Maximum of all records, as for `metadata_bytes_max`: a crafted megabyte can decompress to a gigabyte."""
CLUSTER_ID = "cluster_id"
RESTORED = "restored"
"""Key of a record that exists while the metadata may be older than the cluster, see ``restored``."""
_LENGTHS = struct.Struct("<II")


class MetadataCopy(NamedTuple):
    """The content of a file."""

    cluster_id: str
    created_us: int
    records: dict[str, bytes]


def pack(records: Mapping[str, bytes], created_us: int) -> bytes:
    """Return the file with these records."""
    return at_once(packing(records, created_us))


def packing(records: Mapping[str, bytes], created_us: int) -> Generator[None, None, bytes]:
    """Do the same as `pack` in steps: yields between pieces."""
    kept = {key: value for key, value in records.items() if key != LEADER and not key.startswith(CENSUS)}
    compressor, pieces, gathered = zlib.compressobj(), list[bytes](), bytearray()
    for key, value in sorted(kept.items()):
        name = key.encode()
        gathered += _LENGTHS.pack(len(name), len(value)) + name + value
        while len(gathered) >= PIECE_BYTES:
            pieces.append(compressor.compress(gathered[:PIECE_BYTES]))
            del gathered[:PIECE_BYTES]
            yield
        yield
    pieces += compressor.compress(gathered), compressor.flush()
    body = b"".join(pieces)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "cluster_id": kept.get(CLUSTER_ID, b"").decode(),
        "created_us": created_us,
        "records": len(kept),
        "crc32": f"{zlib.crc32(body):08x}",
    }
    return json.dumps(head).encode() + b"\n" + body


def unpack(data: bytes) -> MetadataCopy:
    """Return the content of a file. Raises `InvalidArgument` unless it is whole, and of a known version."""
    line, _, body = data.partition(b"\n")
    head: dict[str, Any] = {}
    try:
        head = json.loads(line)
        known = head["format"] == FORMAT
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise InvalidArgument("this is not a copy of metadata; kera cluster backup makes one")
    if head.get("version") != VERSION:
        raise InvalidArgument(
            f"the copy of metadata has version {head.get('version')}, this release knows {VERSION}",
            version=head.get("version"),
        )
    if f"{zlib.crc32(body):08x}" != head.get("crc32"):
        raise InvalidArgument("the copy of metadata is damaged: its checksum does not match")
    try:
        return MetadataCopy(str(head["cluster_id"]), int(head["created_us"]), _records(_decompressed(body)))
    except (zlib.error, struct.error, LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the copy of metadata is damaged: {error}") from error


def _decompressed(body: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    rest = decompressor.decompress(body, UNPACKED_BYTES_MAX + 1)
    if len(rest) > UNPACKED_BYTES_MAX:
        raise InvalidArgument(
            f"the copy of metadata would become more than {UNPACKED_BYTES_MAX} bytes, which is the limit",
            limit_bytes=UNPACKED_BYTES_MAX,
        )
    if not decompressor.eof:
        raise ValueError("it is cut off")
    return rest


def _records(rest: bytes) -> dict[str, bytes]:
    at, records = 0, dict[str, bytes]()
    while at < len(rest):
        key_bytes, value_bytes = _LENGTHS.unpack_from(rest, at)
        at += _LENGTHS.size
        if key_bytes + value_bytes > len(rest) - at:
            raise ValueError("a record is cut off")
        records[rest[at : at + key_bytes].decode()] = rest[at + key_bytes : at + key_bytes + value_bytes]
        at += key_bytes + value_bytes
    return records


def _leader(value: bytes) -> bytes | None:
    """Return the record of the leader, to be rewritten; None, which deletes it, if it cannot be read."""
    try:
        epoch_of(value)
    except MetadataDamaged:
        return None
    return value


async def put_back(store: MetadataStore, data: bytes, *, force: bool = False) -> MetadataCopy:
    """Replace the content of a store with that of a file; all or nothing.

    Raises `InvalidArgument` for a file that cannot be used, and, without `force`, if the store is not empty.
    """
    copy, there = unpack(data), await store.list("")
    if there.keys() - {LEADER} and not force:
        found = there.get(CLUSTER_ID)
        raise InvalidArgument(
            f"metadata exist already: cluster {found.value.decode() if found else '?'}, {len(there)} records; a"
            " restore would remove those that the copy lacks. Back them up and use --force, or restore to another"
            " place"
        )
    values: dict[str, bytes | None] = {**dict.fromkeys(there), **copy.records, RESTORED: b"{}"}
    if LEADER in there:
        values[LEADER] = _leader(there[LEADER].value)
    await store.write(
        *(Write(key, value, there[key].version if key in there else 0) for key, value in sorted(values.items()))
    )
    return copy
