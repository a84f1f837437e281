"""What is typed, as Textual reads it: bytes that are no UTF-8 are passed over, as of a terminal with another coding."""

from __future__ import annotations

from textual.drivers.linux_driver import LinuxDriver


class TolerantDriver(LinuxDriver):
    """As Textual has it, whose thread that reads keys would end with a traceback, and the view with it."""

    def run_input_thread(self) -> None:
        """Read until told to exit. What was read together with bytes that are no UTF-8 is lost."""
        while True:
            try:
                super().run_input_thread()
            except UnicodeDecodeError:
                continue
            return
