"""The process: it answers its parent over standard input and output, until the pipe is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from kera.spark_connector.service.lines import serve
from kera.spark_connector.service.methods import Service


def main() -> None:
    """Run until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole terminal, but the parent decides
    # Standard output belongs to the protocol, so all other output goes to the log.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        serve(sys.stdin.buffer, answers, Service())
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)  # does not wait for threads that still wait for a cluster


if __name__ == "__main__":
    main()
