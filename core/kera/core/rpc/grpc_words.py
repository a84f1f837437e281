"""Puts lines that gRPC itself writes to standard error into the daemon's log.

gRPC's core does not use our logger. It writes a line, with the reason, for each handshake that fails, and a flood of
them would fill the log. So everything written to the file descriptor of standard error goes through a pipe. Refused
handshakes are logged like those of other ports, and other lines of gRPC's from time to time. Lines of other writers (a
library that aborts the process, say) are passed on. Python's own `sys.stderr` bypasses the pipe.

gRPC repeats data that peers have sent, including newlines. So lines that arrive along with a line of gRPC's, or that
look like lines of the log, are passed on with a mark, and unprintable characters are escaped: a peer cannot forge lines
of the log. At most `MARKED_MAX` marked lines are passed on in `MARKED_S`; further ones, and empty ones, are dropped.

No writer waits for the pipe: while it is full, output is lost. So is the last output of a process that is killed by a
signal, except for the tracebacks of all its threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Iterator

from kera.core.base.address import not_taken, tls_reason
from kera.core.base.silent_grpc import VERBOSITY
from kera.core.security.refusals import Refusals

MARK = "| "
"""Precedes a line that does not belong to the log, though it may look like a line of it."""
MARKED_MAX, MARKED_S = 200, 60.0
_STANDARD_ERROR = 2
_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 8192
_JOIN_S = 1.0
_WORDS = re.compile(rb"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ([\w.-]+):\d+\] (.*)", re.DOTALL)
"""A line of gRPC's: severity, file, text."""
_HANDSHAKE = re.compile(rb"Handshake failed with error .*OPENSSL_internal:([A-Z0-9_]+)(?:: ([^:]*))?")
_SERVER_NAME = re.compile(rb"No match found for server name: ")


@contextlib.contextmanager
def heard(interface: str = "grpc") -> Iterator[None]:
    """Put gRPC's lines into the log meanwhile. For the main thread of a process that has no other threads yet.

    The process must import gRPC before any module of KerA's. If `VERBOSITY` is set, all lines go to standard error.
    """
    if os.environ.get(VERBOSITY):
        yield
        return
    own = os.dup(_STANDARD_ERROR)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    sys.stderr.flush()
    before, sys.stderr = sys.stderr, open(own, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.dup2(writing, _STANDARD_ERROR)
    os.close(writing)
    traces = not faulthandler.is_enabled()
    if traces:
        faulthandler.enable(own)
    listening = threading.Thread(target=_listen, args=(reading, own, Words(interface)), name="kera-grpc-words")
    listening.daemon = True
    listening.start()
    try:
        yield
    finally:
        if traces:
            faulthandler.disable()
        os.dup2(own, _STANDARD_ERROR)  # closes the last writing end, so the thread reaches the end of the pipe
        listening.join(_JOIN_S)
        sys.stderr.flush()
        sys.stderr = before
        os.close(own)


class Words:
    """Recognises lines of gRPC's, and logs them."""

    def __init__(self, interface: str) -> None:
        self._refusals = Refusals(interface)
        self._others = Refusals(interface, event="gRPC says")

    def take(self, line: bytes) -> bool:
        """Return whether a line is gRPC's, and log it if it matters; the caller passes on other lines."""
        found = _WORDS.fullmatch(line.rstrip(b"\n"))
        if found is None:
            return False
        severity, text = found[1], found[3]
        if handshake := _HANDSHAKE.match(text):
            name, detail = handshake[1].decode(), (handshake[2] or b"").decode(errors="replace")
            self._refusals.tell(not_taken(detail) if name == "CERTIFICATE_VERIFY_FAILED" else tls_reason(name))
        elif _SERVER_NAME.match(text):
            self._refusals.tell("it calls this host by a name for which there is no certificate here")
        elif severity != b"I":
            self._others.tell(text.decode(errors="replace"))
        return True


def _listen(reading: int, own: int, words: Words) -> None:
    rest, goes_on, room = b"", False, _Room()
    with open(reading, "rb", buffering=0) as pipe:
        while data := pipe.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if words.take(line):
                    goes_on = True
                else:
                    _pass_on(own, line, room, marked=goes_on)
            goes_on = goes_on and bool(rest)  # one write of gRPC is read at once
    if rest:
        _pass_on(own, rest, room, marked=goes_on)


class _Room:
    """The bound on marked lines."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._count = 0

    def take(self) -> bool:
        """Count a line; return whether there is room for it."""
        now_s = time.monotonic()
        if now_s >= self._since_s + MARKED_S:
            self._since_s, self._count = now_s, 0
        self._count += 1
        return self._count <= MARKED_MAX


def _pass_on(own: int, line: bytes, room: _Room, *, marked: bool) -> None:
    text = line.decode(errors="backslashreplace")
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    mark = MARK if marked or text.lstrip().startswith("{") else ""
    if not text.strip() or (mark and not room.take()):
        return
    with contextlib.suppress(OSError):
        os.write(own, f"{mark}{shown}\n".encode())
