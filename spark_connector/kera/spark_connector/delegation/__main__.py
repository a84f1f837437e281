"""The process that keeps the tokens of a driver: ``python -m kera.spark_connector.delegation <process> <its start>``.

A planning process starts it (`asking`), and waits until it closes its standard output.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from kera.spark_connector.delegation.driver import Driver
from kera.spark_connector.delegation.keeper import run


def main(arguments: list[str]) -> int:
    """Run the process, and return its exit code."""
    process_id, started = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends with the driver, and not with Ctrl-C
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="kera: %(message)s")
    ready = os.dup(1)
    os.dup2(2, 1)
    run(Driver(int(process_id), started), ready)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
