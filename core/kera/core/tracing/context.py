"""W3C Trace Context: names the trace to which a record or a request belongs. Pure.

    traceparent   00-<trace id, 32 hex digits>-<span id, 16>-<flags, 2>
    tracestate    data of vendors; passed on unchanged

Contexts from others are checked: an invalid one counts as absent, and causes no error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Self

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
"""Headers of records, with the same names as in HTTP."""
TRACEPARENT_BYTES = 55
TRACESTATE_BYTES_MAX = 512
SAMPLED = 1
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_STATE = re.compile(r"[\x20-\x7e]*")


class TraceContext(NamedTuple):
    """A reference to a span, possibly in another process."""

    traceparent: str
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str | bytes | None, tracestate: str | bytes | None = None) -> Self | None:
        """Return the context in headers; None: it is absent or invalid. An invalid tracestate is left out."""
        parent = _text(traceparent)
        found = _PARENT.fullmatch(parent) if parent is not None and len(parent) <= 4 * TRACEPARENT_BYTES else None
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        state = _text(tracestate) or ""
        if len(state) > TRACESTATE_BYTES_MAX or _STATE.fullmatch(state) is None:
            state = ""
        return cls(f"00-{trace_id}-{span_id}-{flags}", state)

    @property
    def trace_id(self) -> int:
        """Id of the trace, which all its spans share."""
        return int(self.traceparent[3:35], 16)

    @property
    def span_id(self) -> int:
        """Id of this span."""
        return int(self.traceparent[36:52], 16)

    @property
    def sampled(self) -> bool:
        """Whether the span is recorded, so that its children should be recorded, too."""
        return bool(int(self.traceparent[53:55], 16) & SAMPLED)

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The context as headers of a record."""
        headers = {TRACEPARENT: self.traceparent.encode()}
        return {**headers, TRACESTATE: self.tracestate.encode()} if self.tracestate else headers


def _text(value: str | bytes | None) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode("ascii")
        except UnicodeDecodeError:
            return None
    return value
