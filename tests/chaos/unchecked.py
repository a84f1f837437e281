"""A broker as before chunks were checked on arrival: ``python -m tests.chaos.unchecked broker …``.

A log keeps its contents, so a cluster may have chunks that its brokers would now refuse. To get such chunks into a log,
this broker takes every chunk with right checksums that belongs to one of its streamlets and is its producer's next.
Everything else is the usual broker. `UncheckedCluster` starts such brokers, and later those that check.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from kera.core import native
from kera.core.format import chunk, payload
from kera.local.cluster import BROKER, LocalCluster

ROOT = Path(__file__).parents[2]
"""The folder that contains the package of this module."""


class UncheckedCluster(LocalCluster):
    """A cluster whose brokers do not check chunks, until they are restarted with `checked` set."""

    checked = False

    def __init__(self, **arguments: Any) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        super().__init__(**{**arguments, "env": {**(arguments.get("env") or {}), "PYTHONPATH": path}})

    def _argv_of(self, name: str) -> list[str]:
        argv = super()._argv_of(name)
        if self.checked or not name.startswith(BROKER):
            return argv
        return [*argv[:1], "-m", "tests.chaos.unchecked", *argv[3:]]  # instead of -m kera.cli


def main() -> int:
    """Run the command line of ``kera``, in a process whose brokers do not check chunks."""
    # Replace these before importing anything of the broker, so that all of it uses the replacements.
    chunk.check_sent = lambda header: None  # noqa: ARG005 - the name is part of the replaced signature
    payload.check_payload = lambda *_: None
    native.native = None  # which would check chunks
    from kera.cli.__main__ import main as kera

    return kera()


if __name__ == "__main__":
    sys.exit(main())
