"""The broker epochs that are refused, as they outlive the process: ``fences.json``, with a checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kera.core.blocks import FILE_CALLS, FileCalls
from kera.core.checksum import crc32c
from kera.core.data_dir import replace_durably
from kera.core.errors import StartError

NAME = "fences.json"
FORMAT = 1


def load_fences(directory: Path) -> dict[int, int]:
    """The highest epoch of each broker that was fenced. Raises `StartError` when the file is damaged, or newer."""
    path = directory / NAME
    try:
        content = json.loads(path.read_bytes())
        fences, found = content["fences"], content["format"]
        whole = content["crc32c"] == _checksum(found, fences)
        if whole and found == FORMAT:
            return {int(broker_id): int(epoch) for broker_id, epoch in fences.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if not whole:
        raise _unreadable(path, "it does not match its checksum")
    raise StartError(f"{path} has format {found}, this version knows {FORMAT}; use a newer version", path=str(path))


def store_fences(directory: Path, fences: Mapping[int, int], calls: FileCalls = FILE_CALLS) -> None:
    """Replace the file; durable when this returns. Raises ``OSError``."""
    named = {str(broker_id): epoch for broker_id, epoch in sorted(fences.items())}
    content = {"format": FORMAT, "fences": named, "crc32c": _checksum(FORMAT, named)}
    replace_durably(directory / NAME, json.dumps(content).encode(), calls)


def _checksum(version: int, fences: Mapping[str, int]) -> str:
    return f"{crc32c(json.dumps([version, fences], sort_keys=True).encode()):08x}"


def _unreadable(path: Path, reason: str) -> StartError:
    return StartError(
        f"cannot read {path}: {reason}; restore it, or remove it to go on without: an older launch of a broker"
        " that still runs could then write to replicas again",
        path=str(path),
    )
