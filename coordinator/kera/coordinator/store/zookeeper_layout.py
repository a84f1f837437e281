"""The layout of records in ZooKeeper, and the packed form of staged writes. No I/O.

    format                     version of this layout, as decimal text
    revision                   set by each write, to an id of the write
    records/<first>/<rest>     a record; its key's first component, then the rest, both percent-encoded
    staged/<id>/<number>       parts of a write that is too large for one transaction
    pending                    id of the staged write that is decided, and not carried out to its end
    candidates/<id>.<feature level>-<number>
                               ephemeral: a running coordinator's address; the one with the lowest number leads

All is below a root: the path behind the addresses, ``/kera`` by default.
"""

from __future__ import annotations

import string
import struct
import urllib.parse
from collections.abc import Iterable

from kera.coordinator.store.metadata import Write
from kera.server.feature_level import FEATURE_LEVEL

_PLAIN = frozenset(string.ascii_letters + string.digits + "-_")
_EMPTY = "+"
"""Stands for an empty text; percent-encoding never results in it."""
_TOP = _EMPTY * 2
"""Directory of the records whose key has one component."""


def format_path(root: str) -> str:
    """Return the path of the layout's version."""
    return f"{root}/format"


def revision_path(root: str) -> str:
    """Return the path of the node that each write changes."""
    return f"{root}/revision"


def records_path(root: str) -> str:
    """Return the path above the directories of records."""
    return f"{root}/records"


def record_path(root: str, key: str) -> str:
    """Return the path of a record."""
    return "/".join((records_path(root), *path_of(key)))


def staged_path(root: str) -> str:
    """Return the path above staged writes."""
    return f"{root}/staged"


def pending_path(root: str) -> str:
    """Return the path of the id of the staged write that is decided."""
    return f"{root}/pending"


def candidates_path(root: str) -> str:
    """Return the path above the candidates."""
    return f"{root}/candidates"


def candidate_id(name: str) -> str:
    """Return the prefix of the node's name of a coordinator of this version, up to its number; `name` is unique."""
    return f"{name}.{FEATURE_LEVEL}"


def candidate_level(path: str) -> int:
    """Return the feature level of the coordinator with this node."""
    level = path.rpartition("-")[0].rpartition(".")[2]
    return int(level) if level.isdecimal() else 0


# --- keys ----------------------------------------------------------------------------------------------------------


def _quoted(text: str) -> str:
    if not text:
        return _EMPTY
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02X}" for byte in text.encode())


def _unquoted(name: str) -> str:
    return "" if name == _EMPTY else urllib.parse.unquote(name)


def path_of(key: str) -> tuple[str, str]:
    """Return the directory and the name of a record."""
    head, slash, rest = key.partition("/")
    return (_quoted(head), _quoted(rest)) if slash else (_TOP, _quoted(key))


def key_of(directory: str, name: str) -> str:
    """Return the key of a directory and name: the inverse of `path_of`."""
    return _unquoted(name) if directory == _TOP else f"{_unquoted(directory)}/{_unquoted(name)}"


def may_have(directory: str, prefix: str) -> bool:
    """Whether keys of `directory` may start with `prefix`."""
    if directory == _TOP:
        return "/" not in prefix
    head, slash, _ = prefix.partition("/")
    return _unquoted(directory) == head if slash else _unquoted(directory).startswith(head)


# --- staged writes -------------------------------------------------------------------------------------------------

_HEAD = struct.Struct(">HQq")
"""Head of a change: length of the key, expected version, length of the value (-1: delete the record). Key and
value follow.
"""


def packed(writes: Iterable[Write]) -> bytes:
    """Return a part of a large write as bytes."""
    pieces = []
    for write in writes:
        key = write.key.encode()
        pieces += [
            _HEAD.pack(len(key), write.expected_version, -1 if write.value is None else len(write.value)),
            key,
            write.value or b"",
        ]
    return b"".join(pieces)


def unpacked(data: bytes) -> list[Write]:
    """Return the writes in such bytes: the inverse of `packed`."""
    writes, at = [], 0
    while at < len(data):
        key_bytes, version, value_bytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        key = data[at : at + key_bytes].decode()
        at += key_bytes
        value = None if value_bytes < 0 else data[at : at + value_bytes]
        at += max(0, value_bytes)
        writes.append(Write(key, value, version))
    return writes
