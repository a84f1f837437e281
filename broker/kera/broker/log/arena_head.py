"""The head of an arena file: whose it is and how it is cut, as JSON in the file's first page.

    {"given": 0, "format": 2, "data_dir": "/data", "lock": "2049:131", "ephemeral": false, "slot_bytes": …, …}

`ArenaHead.read` takes any bytes: a start reads heads of files that it finds by name, and none of them may keep a broker
from starting. Whether the file itself can be trusted is decided before (``kera.core.base.own_file``).
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
"""Format of files of other domains: a program that knows only format 2 does not take one of these for its arena."""
HEAD_BYTES = 4096
PAGE_BYTES = 4096
ROW_BYTES = 64
SLOT_BYTES_MAX = (1 << 32) - 1
"""Rows count the bytes of a slot with 32 bits."""
FILE_BYTES_MAX = 1 << 62


class Geometry(NamedTuple):
    """How the files of an arena are cut; all of them are alike."""

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
        """Offset of a slot."""
        return self.slots_at + index * self.slot_bytes


class Owner(NamedTuple):
    """The broker that an arena's files belong to."""

    data_dir: Path
    ephemeral: bool


class ArenaHead(NamedTuple):
    """The content of a head. The file itself may be incomplete, or of a format that this version does not know."""

    data_dir: str
    ephemeral: bool
    format: int
    lock: str = ""
    """`lock_id` of the data directory that the owner has locked; empty in files of earlier versions."""
    geometry: Geometry | None = None
    """None: it says nothing of that which could be right."""
    domain: str = DEFAULT_DOMAIN
    number: int = 0

    @classmethod
    def read(cls, fd: int) -> Self | None:
        """The head of the file behind `fd`; None when it has none: its maker died before it wrote one.

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
    """The head of a new file. As soon as readers may have it mapped, its ``given`` gets another digit."""
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
