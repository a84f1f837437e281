"""Lines that gRPC itself writes to standard error, put into the daemon's log.

gRPC's core knows no logger of ours. It has a line for each handshake that fails, which is where the reason is to be
found, and a flood of them would fill the log: so whatever is written to the file descriptor of standard error goes
through a pipe. Refused handshakes are told as those of other ports are, other words of gRPC's now and then; what
others write (a library that ends the process, say) is passed on. Python's own `sys.stderr` goes past all this.

gRPC repeats what peers have sent, ends of lines as well. So what comes with a line of gRPC's, or looks like one of the
log, is passed on with a mark, and nothing with a character that is none to print: a peer writes no lines of the log.
Of those with a mark there are `MARKED_MAX` in `MARKED_S`; further ones, and empty ones, are dropped.

Nothing waits for the pipe: while it is full, what is written to it is lost. So are the last words of a process that is
killed by a signal, but for the tracebacks of all its threads.
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
"""Before a line that is none of the log, though it may look like one."""
MARKED_MAX, MARKED_S = 200, 60.0
_STANDARD_ERROR = 2
_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 8192
_JOIN_S = 1.0
_WORDS = re.compile(rb"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ ([\w.-]+):\d+\] (.*)", re.DOTALL)
"""A line of gRPC's: how bad it is, the file, the text."""
_HANDSHAKE = re.compile(rb"Handshake failed with error .*OPENSSL_internal:([A-Z0-9_]+)(?:: ([^:]*))?")
_SERVER_NAME = re.compile(rb"No match found for server name: ")


@contextlib.contextmanager
def heard(interface: str = "grpc") -> Iterator[None]:
    """Put gRPC's words into the log meanwhile. For the main thread of a process that has no others yet.

    The process has imported gRPC before anything of KerA's. With `VERBOSITY` set, all of it goes to standard error.
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
        os.dup2(own, _STANDARD_ERROR)  # the last end to which somebody writes: the thread finds its end
        listening.join(_JOIN_S)
        sys.stderr.flush()
        sys.stderr = before
        os.close(own)


class Words:
    """Tells lines of gRPC's from others."""

    def __init__(self, interface: str) -> None:
        self._refusals = Refusals(interface)
        self._others = Refusals(interface, event="gRPC says")

    def take(self, line: bytes) -> bool:
        """Whether it is one of gRPC's, which is told if it is worth it; else it is to be passed on."""
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
            goes_on = goes_on and bool(rest)  # what gRPC says at once is read at once
    if rest:
        _pass_on(own, rest, room, marked=goes_on)


class _Room:
    """For lines with a mark."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._count = 0

    def take(self) -> bool:
        """Whether there is any for one more."""
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
