"""The head of an arena file: its owner and its layout, as JSON in the file's first page.

    {"given": 0, "format": 2, "data_dir": "/data", "lock": "2049:131", "ephemeral": false, "slot_bytes": …, …}

`ArenaHead.read` accepts any bytes: a start reads the heads of files that it finds by name, and no content may keep a
broker from starting. ``kera.core.base.own_file`` decides before whether the file itself can be trusted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Self

from kera.core.base.own_directory import lock_id
from kera.core.errors import invariant
from kera.core.push import DEFAULT_DOMAIN

FORMAT = 2
DOMAIN_FORMAT = 3
"""Format of the files of other domains: a program that knows only format 2 does not take such a file for its arena."""
HEAD_BYTES = 4096
PAGE_BYTES = 4096
ROW_BYTES = 64
SLOT_BYTES_MAX = (1 << 32) - 1
"""Rows have 32 bits for an offset in a slot."""
FILE_BYTES_MAX = 1 << 62


class Geometry(NamedTuple):
    """The layout of an arena's files; all of them have the same."""

    slot_bytes: int
    slots: int

    @property
    def slots_at(self) -> int:
        """Offset of the first slot."""
        return -(-(HEAD_BYTES + ROW_BYTES * self.slots) // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self.slots_at + self.slots * self.slot_bytes

    def slot_at(self, index: int) -> int:
        """Return the offset of a slot."""
        return self.slots_at + index * self.slot_bytes


class Owner(NamedTuple):
    """The broker that an arena's files belong to."""

    data_dir: Path
    ephemeral: bool


class ArenaHead(NamedTuple):
    """The content of a head. The file itself may be incomplete, or in a format that this version does not know."""

    data_dir: str
    ephemeral: bool
    format: int
    lock: str = ""
    """The `lock_id` of the data directory that the owner has locked; empty in files of earlier versions."""
    geometry: Geometry | None = None
    """None if the head has no valid layout."""
    domain: str = DEFAULT_DOMAIN
    number: int = 0

    @classmethod
    def read(cls, fd: int) -> Self | None:
        """Read the head of the file behind `fd`; None if it has none, because its creator died before writing it.

        Raises `OSError`.
        """
        try:
            content = json.loads(os.pread(fd, HEAD_BYTES, 0).rstrip(b"\0"))
        except (ValueError, RecursionError):
            return None
        match content:
            case {"data_dir": str(data_dir), "ephemeral": bool(ephemeral), "format": int(form)}:
                pass
            case _:
                return None
        lock, domain, number = content.get("lock", ""), content.get("domain", DEFAULT_DOMAIN), content.get("number", 0)
        if not (isinstance(lock, str) and isinstance(domain, str) and domain and _is_count(number, 0)):
            return cls(data_dir, ephemeral, form)
        return cls(data_dir, ephemeral, form, lock, _geometry(content), domain, number)


def new_head(owner: Owner, geometry: Geometry, domain: str, number: int, *, reserved: bool) -> bytes:
    """Return the head of a new file. `ArenaFile.note_given` later changes the digit of ``given``."""
    content: dict[str, Any] = {
        "given": 0,
        "format": FORMAT if reserved else DOMAIN_FORMAT,
        "data_dir": str(owner.data_dir),
        "lock": lock_id(owner.data_dir),
        "ephemeral": owner.ephemeral,
        "slot_bytes": geometry.slot_bytes,
        "slots": geometry.slots,
        "slots_at": geometry.slots_at,
    }
    if not reserved:
        content |= {"domain": domain, "number": number}
    text = json.dumps(content).encode()
    invariant(len(text) < HEAD_BYTES, "the arena's head is larger than its page", data_dir=str(owner.data_dir))
    return text


def _geometry(content: dict[str, Any]) -> Geometry | None:
    slot_bytes, slots, slots_at = (content.get(name) for name in ("slot_bytes", "slots", "slots_at"))
    if not (_is_count(slot_bytes, 1, SLOT_BYTES_MAX) and _is_count(slots, 1)):
        return None
    geometry = Geometry(slot_bytes, slots)  # type: ignore[arg-type]  # `_is_count` has looked at the types
    return geometry if geometry.slots_at == slots_at else None


def _is_count(value: object, least: int, most: int = FILE_BYTES_MAX) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
