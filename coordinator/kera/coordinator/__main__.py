"""The coordinator's process: ``kera coordinator`` and ``python -m kera.coordinator``."""

from __future__ import annotations

import sys

from kera.coordinator.application import serve
from kera.coordinator.settings import CoordinatorSettings
from kera.core.runtime import MACHINE, Runtime
from kera.server.daemon import run_daemon, run_from_environment

SWITCH_INTERVAL_S = 0.0001
"""The time after which the event loop yields to another thread that waits to run (Python's default is 5 ms).

The thread that writes metadata waits this long whenever it returns from the kernel, several times per write, and the
caller of the write waits too. Brokers have more to do in their loops, and would lose by a short interval
(bench/notes/load.md).
"""


def run(settings: CoordinatorSettings, runtime: Runtime = MACHINE) -> int:
    """Run a coordinator until it is stopped; return the exit code of the process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return run_daemon(
        lambda: serve(settings, runtime),
        name="coordinator",
        log_level=settings.log_level,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(CoordinatorSettings, run)


if __name__ == "__main__":
    sys.exit(main())
