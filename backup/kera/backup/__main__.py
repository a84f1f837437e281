"""The backup's process: ``kera backup`` and ``python -m kera.backup``."""

from __future__ import annotations

import sys

from kera.backup.application import serve
from kera.backup.settings import BackupSettings
from kera.core.runtime import MACHINE, Runtime
from kera.server.daemon import run_daemon, run_from_environment


def run(settings: BackupSettings, runtime: Runtime = MACHINE) -> int:
    """Run a backup until a signal stops it; return the exit code of the process."""
    return run_daemon(
        lambda: serve(settings, runtime),
        name="backup",
        log_level=settings.log_level,
        stop_timeout_s=settings.stop_timeout_s,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(BackupSettings, run)


if __name__ == "__main__":
    sys.exit(main())
