"""Entry point of ``kera`` and ``python -m kera.cli``.

Whatever goes wrong reaches the user here, as one line ``kera: error: …`` and an exit code: 1 for an error, 2
for a command line or settings that make no sense, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.
"""

from __future__ import annotations

import sys

from kera.cli._streams import open_standard_streams, show
from kera.core.base.process import own_files

_DAEMONS = ("coordinator", "broker", "backup")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_daemon = arguments[:1] and arguments[0] in (*_DAEMONS, "node")
    open_standard_streams(required=not is_daemon)  # a service manager may give daemons none
    own_files()
    if arguments == ["--version"]:  # without what all commands need
        from kera.core.base.build import describe

        return show(describe() + "\n", 0)
    if arguments[:1] and arguments[0] in _DAEMONS:
        import grpc  # noqa: F401 - what it writes goes into the log of daemons; KerA imports it silently
    from kera.cli._run import run_app
    from kera.cli.app import app

    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
