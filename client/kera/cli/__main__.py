"""Entry point of ``kera`` and ``python -m kera.cli``.

Whatever goes wrong reaches the user here, as one line ``kera: error: …`` and an exit code: 1 for an error, 2
for a command line or settings that make no sense, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.
"""

from __future__ import annotations

import os
import sys

_DAEMONS = ("coordinator", "broker", "backup")
_VERBOSITY, _SILENT = "GRPC_VERBOSITY", "NONE"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:  # without what all commands need
        from kera.core.monitoring.build import describe

        print(describe())
        return 0
    _hush_grpc(arguments)
    try:
        from kera.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kera"):
            raise
        print(f"kera: error: {error.name} is missing; install it with: pip install 'kera[cli]'", file=sys.stderr)
        return 1
    from kera.cli._run import open_standard_streams, run_app

    open_standard_streams()
    return run_app(app, arguments)


def _hush_grpc(arguments: list[str]) -> None:
    """Before it is imported: what it writes by itself is said better by an error. Daemons put it into their log."""
    if arguments[:1] and arguments[0] in _DAEMONS:
        if os.environ.get(_VERBOSITY) == _SILENT:
            del os.environ[_VERBOSITY]  # from the command that has started this one
    else:
        os.environ.setdefault(_VERBOSITY, _SILENT)


if __name__ == "__main__":
    sys.exit(main())
