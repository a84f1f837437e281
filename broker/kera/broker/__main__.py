"""The broker's process: ``kera broker`` and ``python -m kera.broker``."""

from __future__ import annotations

import sys

from kera.broker.application import serve
from kera.broker.settings import BrokerSettings
from kera.core.runtime import MACHINE, Runtime
from kera.server.daemon import run_daemon, run_from_environment


def run(settings: BrokerSettings, runtime: Runtime = MACHINE) -> int:
    """Run a broker until it is stopped; return the exit code of the process."""
    return run_daemon(
        lambda: serve(settings, runtime),
        name="broker",
        log_level=settings.log_level,
        stop_timeout_s=settings.stop_timeout_s,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(BrokerSettings, run)


if __name__ == "__main__":
    sys.exit(main())
