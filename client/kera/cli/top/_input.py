"""The terminal as Textual has it, which bears what terminals do that it does not expect.

Bytes that are not UTF-8, as of a terminal with another coding, are passed over. A terminal that is gone, as when a
connection of ssh breaks, ends the view as SIGHUP does, also where nobody sends that; until it has ended, what is
written goes nowhere.
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
"""A process whose terminal is gone mostly gets a signal, and needs a moment to end by that."""


class TolerantDriver(LinuxDriver):
    """Without it, the thread that reads keys ends with a traceback, and writing to nobody blocks for ever."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._file is not None:
            self._file = cast("Any", _Screen(self._file))
        self._looks_for_the_end = False

    def start_application_mode(self) -> None:
        """Look for the end of the terminal as well."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        if not self._looks_for_the_end:  # else it comes back from Ctrl-Z
            self._looks_for_the_end = True
            threading.Thread(target=self._end_with_terminal, name="terminal", daemon=True).start()

    def _end_with_terminal(self) -> None:
        poll = select.poll()
        poll.register(self.fileno, 0)  # which leaves its end
        poll.poll()
        if not self.exit_event.wait(GRACE_S):
            os.kill(os.getpid(), signal.SIGHUP)

    def run_input_thread(self) -> None:
        """Read until told to exit. What was read together with bytes that are not UTF-8 is lost."""
        while True:
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                continue
            except OSError:
                pass  # there is no terminal any more
            return


class _Screen:
    """The screen to write to."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.fileno = file.fileno
        self.isatty = file.isatty

    def write(self, text: str) -> None:
        """Write, if anybody is there."""
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        """Likewise."""
        with contextlib.suppress(OSError):
            self._file.flush()
