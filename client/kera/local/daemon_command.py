"""The command that runs a daemon with given settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping


def daemon_command(daemon: str, settings: Mapping[str, object]) -> list[str]:
    """Return the command line of ``kera broker`` or another daemon; `settings` are given by name."""
    return [sys.executable, "-m", "kera.cli", daemon, *_flags(settings)]


def _flags(settings: Mapping[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list | tuple):
            for each in value:
                yield from (f"--{flag}", str(each))
        else:
            yield from (f"--{flag}", str(value))
