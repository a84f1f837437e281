"""Limits of a latency constraint: its name, path, limit and window. Pure: checked before anything is written.

A path begins with a stream. Then come, in turn, ``group:`` with the name of a consumer group that reads the stream
before it, and a stream to which this group writes. A path may end with either: the records' way ends when they are
durable in its last stream, or when its last group is done with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kera.core.errors import InvalidArgument, LatencyConstraintExists, UnknownStream
from kera.core.latency.limits import LIMIT_US_MAX, LIMIT_US_MIN, WINDOW_MS_MAX, WINDOW_MS_MIN
from kera.v1 import latency_pb2 as messages

CONSTRAINTS_MAX = 1_000
STREAMS_MAX = 1_000
"""Maximum of streams of all constraints together: a broker gets the budgets of all at once."""
CONSTRAINTS_OF_STREAM_MAX = 16
"""Maximum of constraints whose paths have the same stream, so that a principal that may alter only one stream
cannot use up all constraints.
"""
ELEMENTS_MAX = 31
"""Maximum of a path: 16 streams, and the groups between them."""
NAME_CHARS_MAX = 100
"""Maximum of a name, which is part of a key in the metadata, and a label of metrics."""
WINDOW_MS_DEFAULT = 15_000
GROUP = "group:"
MEAN, P99 = messages.LATENCY_STATISTIC_MEAN, messages.LATENCY_STATISTIC_P99
WORDS = {MEAN: "mean", P99: "p99"}
"""Names of statistics."""
_ELEMENT_CHARS_MAX = 255
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class Stage(NamedTuple):
    """A stream of a path, and the consumer group that reads it there."""

    stream: str
    group: str
    """The consumer group; empty: the path ends with the stream."""


class Known(Protocol):
    """The streams and consumer groups of the cluster."""

    def has_stream(self, name: str) -> bool:
        """Whether a stream has this name."""
        ...

    def has_group(self, name: str) -> bool:
        """Whether there is a consumer group of this name."""
        ...

    def reads(self, group: str, stream: str) -> bool:
        """Whether a consumer group reads a stream."""
        ...


def checked(constraint: messages.LatencyConstraint) -> messages.LatencyConstraint:
    """Return a copy of `constraint` with all defaults, after checks that need only itself. Raises `InvalidArgument`."""
    found = messages.LatencyConstraint()
    found.CopyFrom(constraint)
    checked_name(found.name)
    _check_path(found.path)
    if not LIMIT_US_MIN <= found.limit_us <= LIMIT_US_MAX:
        raise InvalidArgument(
            f"the limit of a latency constraint is 1 ms to 1 h, not {found.limit_us / 1000:.15g} ms",
            limit_us=found.limit_us,
        )
    found.window_ms = found.window_ms or WINDOW_MS_DEFAULT
    if not WINDOW_MS_MIN <= found.window_ms <= WINDOW_MS_MAX:
        raise InvalidArgument(
            f"the window of a latency constraint is 1 s to 1 h, not {found.window_ms / 1000:g} s",
            window_ms=found.window_ms,
        )
    found.statistic = found.statistic or MEAN
    if found.statistic not in WORDS:
        raise InvalidArgument(f"statistic {found.statistic} is not known to this version: mean or p99")
    return found


def checked_name(name: str) -> str:
    """Return `name`. Raises `InvalidArgument` if a constraint cannot have it."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX or name in {".", ".."}:
        raise InvalidArgument(
            f"a latency constraint cannot be called {name[: NAME_CHARS_MAX + 1]!r}: a name has 1 to {NAME_CHARS_MAX}"
            " letters, digits, dots, underscores and hyphens, and is not . or ..",
            name=name[: NAME_CHARS_MAX + 1],
        )
    return name


def stages_of(path: Iterable[str]) -> tuple[Stage, ...]:
    """Return the streams of a checked path, each with the consumer group that reads it."""
    elements = list(path)
    groups = [element.removeprefix(GROUP) for element in elements[1::2]]
    return tuple(map(Stage, elements[::2], [*groups, ""]))


def streams_of(path: Iterable[str]) -> list[str]:
    """Return the names of the streams of a path."""
    return [element for element in path if not element.startswith(GROUP)]


def check_there(path: Iterable[str], known: Known) -> None:
    """Check that everything on a path exists. Raises `UnknownStream` and `InvalidArgument`."""
    for stream, group in stages_of(path):
        if not known.has_stream(stream):
            raise UnknownStream(f"there is no stream {stream!r}, which is on the path", stream=stream)
        if not group or known.reads(group, stream):
            continue
        if not known.has_group(group):
            raise InvalidArgument(
                f"there is no consumer group {group!r}, which is on the path: it is there once it has begun to read",
                consumer_group=group,
            )
        raise InvalidArgument(
            f"consumer group {group!r} does not read {stream!r}, which is before it on the path; a constraint can be"
            " created once it has begun to",
            consumer_group=group,
            stream=stream,
        )


def check_beside(constraint: messages.LatencyConstraint, others: Iterable[messages.LatencyConstraint]) -> None:
    """Check that a constraint is compatible with all others; it replaces the one of its name.

    Raises `InvalidArgument` if there are too many, or another one is about the same path, window and statistic.
    """
    others = [each for each in others if each.name != constraint.name]
    if len(others) >= CONSTRAINTS_MAX:
        raise InvalidArgument(
            f"there are {len(others)} latency constraints, which is the limit: delete unused ones",
            limit=CONSTRAINTS_MAX,
        )
    for other in others:
        same = (other.path, other.window_ms, other.statistic)
        if same == (constraint.path, constraint.window_ms, constraint.statistic):
            raise InvalidArgument(
                f"{other.name!r} is about the same path, window and statistic, with a limit of"
                f" {other.limit_us / 1000:g} ms: alter that one",
                name=other.name,
            )
    for stream in streams_of(constraint.path):
        if sum(stream in streams_of(other.path) for other in others) >= CONSTRAINTS_OF_STREAM_MAX:
            raise InvalidArgument(
                f"stream {stream!r} is on the paths of {CONSTRAINTS_OF_STREAM_MAX} latency constraints, which is the"
                " limit: delete unused ones",
                stream=stream,
                limit=CONSTRAINTS_OF_STREAM_MAX,
            )
    streams = {name for each in (constraint, *others) for name in streams_of(each.path)}
    if len(streams) > STREAMS_MAX:
        raise InvalidArgument(
            f"all latency constraints together would be about {len(streams)} streams, and the limit is {STREAMS_MAX}",
            limit=STREAMS_MAX,
        )


def check_new(constraint: messages.LatencyConstraint, known: messages.LatencyConstraint | None) -> bool:
    """Return whether a constraint is new. Raises `LatencyConstraintExists` if its name belongs to a different one."""
    if known is None:
        return True
    if known != constraint:
        raise LatencyConstraintExists(
            f"there is a latency constraint {known.name!r} already: alter it, or take another name", name=known.name
        )
    return False


def _check_path(path: Iterable[str]) -> None:
    elements = list(path)
    if not elements:
        raise InvalidArgument("a latency constraint needs a path, such as: clicks, group:enrich, visits")
    if len(elements) > ELEMENTS_MAX:
        raise InvalidArgument(
            f"a path has at most {ELEMENTS_MAX} streams and consumer groups, not {len(elements)}", limit=ELEMENTS_MAX
        )
    for number, element in enumerate(elements):
        name = element.removeprefix(GROUP)
        if not _NAME.fullmatch(name) or len(element) > _ELEMENT_CHARS_MAX:
            raise InvalidArgument(
                f"{element[:_ELEMENT_CHARS_MAX]!r} on the path is neither the name of a stream nor {GROUP} with that of"
                " a consumer group",
                element=element[:_ELEMENT_CHARS_MAX],
            )
        if element.startswith(GROUP) and not number % 2:
            before = f"after {elements[number - 1]!r}" if number else "at the beginning of the path"
            raise InvalidArgument(
                f"{element!r} is {before}, and a stream is required here: a path begins with a stream, then come"
                " consumer groups and streams in turn",
                element=element,
            )
        if not element.startswith(GROUP) and number % 2:
            raise InvalidArgument(
                f"no consumer group connects streams {elements[number - 1]!r} and {element!r} on the path: put"
                f" {GROUP}NAME between them, with the consumer group that reads the first one and writes to the"
                " second",
                element=element,
            )
        if element in elements[:number]:
            raise InvalidArgument(
                f"{element!r} is twice on the path, which would be a cycle without an end",
                element=element,
            )
