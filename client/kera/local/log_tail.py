"""The end of a child's log, which shows why the child died.

Daemons log JSON lines to a file. `log_tail` renders the last ones for reading; `failure_reason` finds the
sentence that explains a failed start. Nothing here fails: a log that cannot be read is an empty one.
"""

from __future__ import annotations

import json
from pathlib import Path

TAIL_BYTES = 16 << 10
"""How far back from the end of a log we look; a log may be large, its end says why the process ended."""

_ERROR_PREFIX = "kera: error: "


def log_tail(path: Path, *, since: int = 0, lines: int = 15) -> str:
    """The last `lines` lines of the log after byte `since`, JSON records rendered as text."""
    raw = _read_tail(path, since).splitlines()
    return "\n".join(_readable(line) for line in raw[-lines:])


def failure_reason(path: Path, *, since: int = 0) -> str | None:
    """The last ``kera: error: …`` after byte `since`, which is how a daemon says why it ends."""
    for line in reversed(_read_tail(path, since).splitlines()):
        if line.startswith(_ERROR_PREFIX):
            return line.removeprefix(_ERROR_PREFIX)
    return None


def _read_tail(path: Path, since: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _readable(line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    time = str(record.pop("timestamp", ""))[11:23]
    level = str(record.pop("level", ""))
    event = str(record.pop("event"))
    exception = record.pop("exception", None)
    fields = " ".join(f"{name}={value}" for name, value in record.items())
    text = " ".join(part for part in (time, level, event, fields) if part)
    return f"{text}\n{exception}" if exception else text
