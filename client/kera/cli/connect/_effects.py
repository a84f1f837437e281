"""Rules that refuse options of ``kera connect copy`` without an effect on the copy, with the reason.

This module does not connect to anything. Source and target check further conditions when they are opened, such as
whether a stream exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kera.cli.connect._options import CopyOptions
from kera.connect.endpoints import End, FilesEnd, StreamEnd, TableEnd, TopicEnd

Reason: TypeAlias = str | None
"""Why an option has no effect; None: it has one."""
Rule: TypeAlias = Callable[[CopyOptions, End, End], Reason]
"""Checks an option that is given; the arguments are all options, the source and the target."""

UNGIVEN = CopyOptions("", "")


def refusal(options: CopyOptions, source: End, target: End) -> Reason:
    """Return one line about the first option that has no effect on this copy; None: all options have one."""
    for field, (option, rule) in RULES.items():
        if getattr(options, field) != getattr(UNGIVEN, field):
            reason = rule(options, source, target)
            if reason is not None:
                return f"{option} has no effect: {reason}"
    return None


def is_directory(end: End) -> bool:
    """Return whether a target is a directory of files."""
    return isinstance(end, FilesEnd) and end.path.endswith("/")


def _name(_options: CopyOptions, _source: End, target: End) -> Reason:
    if not isinstance(target, FilesEnd):
        return None
    if is_directory(target):
        return "a directory has one copy, and keeps its progress; give another directory to copy the same once more"
    return "a single file keeps no progress: each copy starts from the beginning"


def _create(_options: CopyOptions, _source: End, target: End) -> Reason:
    return "files are always created" if isinstance(target, FilesEnd) else None


def _streamlets(options: CopyOptions, _source: End, target: End) -> Reason:
    if not isinstance(target, StreamEnd | TopicEnd):
        return "only a stream or a topic as the target has streamlets"
    return None if options.create else "it is for a stream or a topic that the copy creates: add --create"


def _column(options: CopyOptions, _source: End, target: End) -> Reason:
    if not isinstance(target, StreamEnd):
        return "only a stream as the target takes it"
    if options.create or options.value is not None:
        return None
    return "it is for a stream that the copy creates: with --create, or with --value for records of any stream"


def _partitioner(_options: CopyOptions, _source: End, target: End) -> Reason:
    if isinstance(target, StreamEnd):
        return None
    return "only a stream as the target takes it; the file of --kafka-config takes that of a topic"


def _value(_options: CopyOptions, _source: End, target: End) -> Reason:
    return None if isinstance(target, StreamEnd) else "only a stream as the target takes encoded values"


def _subject(options: CopyOptions, _source: End, _target: End) -> Reason:
    return None if options.value is not None else "it names the schema of encoded values: add --value avro, or json"


def _follow(_options: CopyOptions, _source: End, target: End) -> Reason:
    if isinstance(target, FilesEnd) and not is_directory(target):
        return "a single file appears when the copy ends; copy into a directory, with / at the end of its name"
    return None


def _from(_options: CopyOptions, source: End, _target: End) -> Reason:
    return "files are always read from their beginning" if isinstance(source, FilesEnd) else None


def _format(_options: CopyOptions, source: End, target: End) -> Reason:
    return None if FilesEnd in (type(source), type(target)) else "it is about files, and neither end is one"


def _file_size(_options: CopyOptions, _source: End, target: End) -> Reason:
    return None if is_directory(target) else "only a directory as the target has files of a size"


def _kafka_config(_options: CopyOptions, source: End, target: End) -> Reason:
    return None if isinstance(source, TopicEnd) or isinstance(target, TopicEnd) else "neither end is a topic of Kafka"


def _skip_lost(_options: CopyOptions, source: End, _target: End) -> Reason:
    if isinstance(source, TopicEnd | StreamEnd):
        return None
    return f"{'a table removes' if isinstance(source, TableEnd) else 'files remove'} nothing before it is copied"


def _bootstrap(_options: CopyOptions, source: End, target: End) -> Reason:
    ends = [end for end in (source, target) if isinstance(end, StreamEnd)]
    return None if any(not end.bootstrap for end in ends) else "the address of the stream names its cluster"


RULES: dict[str, tuple[str, Rule]] = {
    "name": ("--name", _name),
    "create": ("--create", _create),
    "streamlets": ("--streamlets", _streamlets),
    "key": ("--key", _column),
    "time": ("--time", _column),
    "partitioner": ("--partitioner", _partitioner),
    "value": ("--value", _value),
    "subject": ("--subject", _subject),
    "follow": ("--follow", _follow),
    "from_latest": ("--from latest", _from),
    "file_format": ("--format", _format),
    "file_bytes": ("--file-size", _file_size),
    "kafka_config": ("--kafka-config", _kafka_config),
    "skip_lost": ("--skip-lost", _skip_lost),
    "bootstrap_given": ("--bootstrap", _bootstrap),
}
"""Option and rule by field of `CopyOptions`. ``--json`` needs no rule: it has an effect on every copy."""
