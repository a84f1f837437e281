"""Entry point of ``kera`` and ``python -m kera.cli``.

Whatever goes wrong reaches the user here, as one line ``kera: error: …`` and an exit code: 1 for an error, 2
for a command line or settings that make no sense, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.
"""

from __future__ import annotations

import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:  # without what all commands need
        from kera.core.monitoring.build import describe

        print(describe())
        return 0
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before it is imported: what else it says is said better
    try:
        from kera.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kera"):
            raise
        print(f"kera: error: {error.name} is missing; install it with: pip install 'kera[cli]'", file=sys.stderr)
        return 1
    from kera.cli._run import open_standard_streams, run_app

    open_standard_streams()
    return run_app(app, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
