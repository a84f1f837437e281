"""The fenced broker epochs of a backup, which outlive its process: ``fences.json``, and a copy.

Epochs of a fence only grow. So it does not matter which file is newer: the higher epoch of each broker is valid, and a
process that ends between the two writes has not acknowledged the fence yet.

Promises: one intact file of the two is enough, and the other is written anew. A backup with replicas and without both
files starts, and logs a warning; a backup with two damaged files does not start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.base.telemetry import get_logger
from kera.core.data_dir import replace_durably
from kera.core.errors import StartError
from kera.core.format.checksum import crc32c

log = get_logger("kera.fences")

NAME = "fences.json"
NAMES = (NAME, "fences.copy.json")
FORMAT = 1


class DamagedFences(ValueError):
    """A file of fences is damaged."""


def load_fences(directory: Path, calls: FileCalls = FILE_CALLS, *, has_replicas: bool = False) -> dict[int, int]:
    """Return the highest fenced epoch of each broker.

    `has_replicas`: the backup has run before, so the files should exist. A file that is damaged or missing is written
    anew from the other one. Raises `StartError` if there are only damaged files, or a file of a newer version, and
    ``OSError`` if a new file cannot be written.
    """
    found, damaged, missing = _read(directory)
    if not found:
        if damaged:
            raise _unreadable(damaged)
        if has_replicas:
            log.warning(
                "there are replicas and no fences; if there was a file of fences, an older launch of a broker that"
                " still runs could write to replicas again",
                path=str(directory / NAME),
            )
            store_fences(directory, {}, calls)
        return {}
    fences: dict[int, int] = {}
    for each in found:
        fences = {number: max(each.get(number, 0), fences.get(number, 0)) for number in {*each, *fences}}
    for path, reason in damaged.items():
        log.error("a file is damaged; restoring it from its copy", path=str(path), reason=reason)
    if damaged or missing:
        store_fences(directory, fences, calls)
    return fences


def check_fences(directory: Path) -> tuple[dict[Path, str], list[Path]]:
    """Return the damaged files with their reasons, and the missing files, without writing anything.

    Raises `StartError` if a file is of a newer version.
    """
    _, damaged, missing = _read(directory)
    return damaged, missing


def store_fences(directory: Path, fences: Mapping[int, int], calls: FileCalls = FILE_CALLS) -> None:
    """Replace both files; durable when this returns. Raises ``OSError``."""
    named = {str(broker_id): epoch for broker_id, epoch in sorted(fences.items())}
    content = {"format": FORMAT, "fences": named, "crc32c": _checksum(FORMAT, named)}
    for name in NAMES:
        replace_durably(directory / name, json.dumps(content).encode(), calls)


def _read(directory: Path) -> tuple[list[dict[int, int]], dict[Path, str], list[Path]]:
    """Return the contents of the intact files, the damaged files with reasons, and the missing files."""
    found: list[dict[int, int]] = []
    damaged: dict[Path, str] = {}
    missing: list[Path] = []
    for path in (directory / name for name in NAMES):
        try:
            found.append(_parsed(path, path.read_bytes()))
        except FileNotFoundError:
            missing.append(path)
        except OSError as error:
            damaged[path] = error.strerror or str(error)
        except DamagedFences as error:
            damaged[path] = str(error)
    return found, damaged, missing


def _parsed(path: Path, data: bytes) -> dict[int, int]:
    try:
        content = json.loads(data)
        fences, found = content["fences"], content["format"]
        whole = content["crc32c"] == _checksum(found, fences)
        if whole and found == FORMAT:
            return {int(broker_id): int(epoch) for broker_id, epoch in fences.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFences(f"{type(error).__name__}: {error}") from error
    if not whole:
        raise DamagedFences("it does not match its checksum")
    raise StartError(f"{path} has format {found}, this version knows {FORMAT}; use a newer version", path=str(path))


def _checksum(version: int, fences: Mapping[str, int]) -> str:
    return f"{crc32c(json.dumps([version, fences], sort_keys=True).encode()):08x}"


def _unreadable(damaged: Mapping[Path, str]) -> StartError:
    (path, reason), *_ = damaged.items()
    names = " and ".join(map(str, damaged))
    return StartError(
        f"cannot read {names}: {reason}; restore one of {' and '.join(NAMES)}, or remove both to go on without: an"
        " older launch of a broker that still runs could then write to replicas again",
        path=str(path),
    )
