"""A terminal driver for Textual that survives invalid input and the end of the terminal.

It ignores bytes that are not UTF-8, as from a terminal with another encoding. When the terminal is gone, as after a
broken ssh connection, it ends the view as SIGHUP does, even if no signal comes; until then, output is discarded.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import IO, Any, cast

from textual.drivers.linux_driver import LinuxDriver

GRACE_S = 5.0
"""Time for the process to end after its terminal is gone: mostly it gets a signal from the system."""


class TolerantDriver(LinuxDriver):
    """A driver that survives invalid input, and does not block for ever on output to a lost terminal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._file is not None:
            self._file = cast("Any", _Screen(self._file))
        self._looks_for_the_end = False

    def start_application_mode(self) -> None:
        """Start, and watch for the end of the terminal as well."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        if not self._looks_for_the_end:  # the thread goes on after Ctrl-Z, when this is called again
            self._looks_for_the_end = True
            threading.Thread(target=self._end_with_terminal, name="terminal", daemon=True).start()

    def _end_with_terminal(self) -> None:
        poll = select.poll()
        poll.register(self.fileno, 0)  # no events, so that only an error or a hang-up is reported
        poll.poll()
        if not self.exit_event.wait(GRACE_S):
            os.kill(os.getpid(), signal.SIGHUP)

    def run_input_thread(self) -> None:
        """Read until the driver exits. Input that is read together with bytes that are not UTF-8 is lost."""
        while True:
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                continue
            except OSError:
                pass  # the terminal is gone
            return


class _Screen:
    """The output file of the driver, without errors from a lost terminal."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.fileno = file.fileno
        self.isatty = file.isatty

    def write(self, text: str) -> None:
        """Write; ignore errors."""
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        """Flush; ignore errors."""
        with contextlib.suppress(OSError):
            self._file.flush()
