"""Entry point of ``kera`` and ``python -m kera.cli``.

Errors reach the user as one line ``kera: error: …`` and an exit code: 1 for an error, 2 for an invalid command line or
invalid settings, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.
"""

from __future__ import annotations

import sys

from kera.cli._streams import open_standard_streams, show
from kera.core.base.process import own_files

_DAEMONS = ("coordinator", "broker", "backup")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_daemon = arguments[:1] and arguments[0] in (*_DAEMONS, "node")
    open_standard_streams(required=not is_daemon)  # a service manager may start daemons without standard streams
    own_files()
    if arguments == ["--version"]:  # before the imports that all other commands need
        from kera.core.base.build import describe

        return show(describe() + "\n", 0)
    if arguments[:1] and arguments[0] in _DAEMONS:
        import grpc  # noqa: F401 - daemons want its messages in their log; KerA's own import silences them
    from kera.cli._run import run_app
    from kera.cli.app import app

    return run_app(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
