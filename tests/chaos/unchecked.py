"""A broker as they were before chunks were looked at on their way in: ``python -m tests.chaos.unchecked broker …``.

What is in a log stays there, so a cluster may have chunks that its brokers would refuse by now. To have such in a log,
this broker takes whatever has right checksums, belongs to a streamlet of its own and is its producer's next. All else
is the broker as it is. `UncheckedCluster` starts such brokers, and later those that look.
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
"""Where the package of this module is found."""


class UncheckedCluster(LocalCluster):
    """A cluster whose brokers do not look at chunks, until they are restarted with `checked` set."""

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
    """The command line of ``kera``, in a process whose brokers do not look."""
    # Before anything of the broker is imported, so that all of it has these.
    chunk.check_sent = lambda header: None  # noqa: ARG005 - its name is part of what it stands for
    payload.check_payload = lambda *_: None
    native.native = None  # which would look
    from kera.cli.__main__ import main as kera

    return kera()


if __name__ == "__main__":
    sys.exit(main())
