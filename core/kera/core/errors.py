"""The single tree of errors, for users, daemons and the wire.

Every error names its subject in ``attributes``, says in its message what to do about it, and knows whether the same
request may simply be sent again (``retriable``). Foreign errors (gRPC, LMDB, sockets) are converted into these at the
boundary where they appear.

A caller can conclude about a write:

* a subclass of `NotAccepted`: nothing was stored; it is safe to send the records again as new ones;
* `Uncertain`: it may or may not be stored; only the same sequence number may be sent again (the producer does that).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

__all__ = [
    "ArenaFull",
    "AuthenticationFailed",
    "BackupFull",
    "BufferFull",
    "CannotDecode",
    "CannotEncode",
    "ClosedError",
    "CorruptChunk",
    "DataLost",
    "DiskFailed",
    "DiskFull",
    "EpochPassed",
    "IncompatibleSchema",
    "InternalError",
    "InvalidArgument",
    "InvalidCursor",
    "InvalidSchema",
    "KeraError",
    "LatencyConstraintExists",
    "LeaseLost",
    "NotAccepted",
    "NotAllowed",
    "NotFramed",
    "NotLeader",
    "NotOwner",
    "NotPersisted",
    "NotReplicated",
    "OutOfSequence",
    "PathNotWritable",
    "PortTaken",
    "ProducerFenced",
    "ProtocolError",
    "QuotaExceeded",
    "RecordTooLarge",
    "Recovering",
    "SchemaMismatch",
    "SessionLost",
    "SharedMemoryTooSmall",
    "StaleEpoch",
    "StartError",
    "StreamExists",
    "StreamletOutOfRange",
    "TimestampAhead",
    "TooFewBackups",
    "TooManyRequests",
    "Unavailable",
    "Uncertain",
    "UnknownGroup",
    "UnknownLatencyConstraint",
    "UnknownLaunch",
    "UnknownSchema",
    "UnknownStream",
    "UnknownSubject",
    "UnknownUser",
    "UserExists",
    "WokenUp",
    "error_from_wire",
    "error_to_attributes",
    "invariant",
]

_REGISTRY: dict[str, type[KeraError]] = {}


class KeraError(Exception):
    """Root of all errors of KerA.

    `attributes` names the subject of the error (stream, streamlet, limit, ...) as JSON-able values, for example
    ``error.attributes["stream"]``.
    """

    code: ClassVar[str] = "kera"
    retriable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in cls.__dict__:  # a class without its own code is sent as its base class, and must not replace it
            _REGISTRY[cls.code] = cls

    # Positional only, as an error from the wire may have an attribute that is called "message".
    def __init__(self, message: str, /, **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        self.attributes = attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.attributes))


def _rebuild(cls: type[KeraError], message: str, attributes: dict[str, Any]) -> KeraError:
    return cls(message, **attributes)


_REGISTRY[KeraError.code] = KeraError


class InternalError(KeraError):
    """A defect of KerA itself. Report it with the daemon's log."""

    code = "internal"


class NotAccepted(KeraError):
    """The request had no effect."""

    code = "not_accepted"


class InvalidArgument(NotAccepted):
    """A parameter is out of its range or does not fit the others."""

    code = "invalid_argument"


class ProtocolError(NotAccepted):
    """Bytes that are not a message of KerA: another protocol, another version, or over the size limit."""

    code = "protocol"


class AuthenticationFailed(NotAccepted):
    """The caller has shown no credentials, or invalid ones; the message says which."""

    code = "authentication_failed"


class NotAllowed(NotAccepted):
    """The caller may not do this; ``attributes`` has the `principal`, the `operation` and the `resource`."""

    code = "not_allowed"


class QuotaExceeded(NotAccepted):
    """A principal has used up one of its quotas; ``attributes`` has `quota`, `value`, `principal`."""

    code = "quota_exceeded"


class TooManyRequests(QuotaExceeded):
    """A principal makes more requests than its quota allows, and a call would have had to wait too long."""

    code = "too_many_requests"
    retriable = True


class UnknownUser(InvalidArgument):
    """The cluster keeps no user with this name."""

    code = "unknown_user"


class UserExists(InvalidArgument):
    """A user with this name exists already."""

    code = "user_exists"


class UnknownLatencyConstraint(InvalidArgument):
    """No latency constraint has this name."""

    code = "unknown_latency_constraint"


class LatencyConstraintExists(InvalidArgument):
    """A latency constraint with this name exists already, with another content."""

    code = "latency_constraint_exists"


class UnknownStream(NotAccepted):
    """No stream has this name or id."""

    code = "unknown_stream"


class StreamExists(NotAccepted):
    """A stream with this name exists already."""

    code = "stream_exists"


class StreamletOutOfRange(NotAccepted):
    """The stream has fewer streamlets than that."""

    code = "streamlet_out_of_range"


class UnknownGroup(NotAccepted):
    """The streamlet has no such group, or the group no such segment."""

    code = "unknown_group"


class NotOwner(NotAccepted):
    """The streamlet is owned by another broker; ask the coordinator which."""

    code = "not_owner"
    retriable = True


class NotLeader(NotAccepted):
    """Another coordinator leads; its address is the attribute `leader`, which is empty if none leads at present."""

    code = "not_leader"
    retriable = True


class LeaseLost(NotAccepted):
    """A consumer was silent or stuck for too long, and its groups of segments have gone to another consumer."""

    code = "lease_lost"


class StaleEpoch(NotAccepted):
    """A newer launch has taken over; this process must step down."""

    code = "stale_epoch"


class UnknownLaunch(NotAccepted):
    """The coordinator's metadata are older than this launch; the daemon registers again, and keeps all its data."""

    code = "unknown_launch"


class CorruptChunk(NotAccepted):
    """A chunk whose bytes do not agree with its checksums or its own header."""

    code = "corrupt_chunk"


class RecordTooLarge(NotAccepted):
    """A record (or a chunk) is larger than the limit named in the message."""

    code = "record_too_large"


class TimestampAhead(NotAccepted):
    """A chunk of a stream with epochs has a time too far ahead of its broker's clock (``timestamp_ahead_max_ms``)."""

    code = "timestamp_ahead"


class EpochPassed(NotAccepted):
    """A part of an epoch was read already, and only the rest would be returned.

    The rest arrived later, in an entry that had never been written to; or a consumer group has committed within the
    epoch.
    """

    code = "epoch_passed"


class SchemaMismatch(NotAccepted):
    """Records do not have the schema of the stream."""

    code = "schema_mismatch"


class CannotEncode(NotAccepted):
    """A value cannot be encoded, or not as its schema demands; ``attributes`` has `stream`, `field`, `reason`."""

    code = "cannot_encode"


class CannotDecode(NotAccepted):
    """A deserializer cannot decode a value or key; ``attributes`` has its position, and `reason`."""

    code = "cannot_decode"


class NotFramed(CannotDecode):
    """A value does not begin with the id of a schema."""

    code = "not_framed"


class InvalidSchema(InvalidArgument):
    """A definition is not a schema of its kind, or has a feature that the registry refuses; the message says where."""

    code = "invalid_schema"


class IncompatibleSchema(NotAccepted):
    """A schema is incompatible with earlier ones of its subject; ``attributes`` lists `incompatibilities` as text."""

    code = "incompatible_schema"


class UnknownSchema(NotAccepted):
    """No schema has this id, or the subject has no such version."""

    code = "unknown_schema"


class UnknownSubject(NotAccepted):
    """No schema is registered under this subject."""

    code = "unknown_subject"


class OutOfSequence(NotAccepted):
    """A chunk arrived before its predecessors of the same producer and streamlet; send them in order."""

    code = "out_of_sequence"
    retriable = True


class ProducerFenced(NotAccepted):
    """A newer instance of the same producer has taken over."""

    code = "producer_fenced"


class ArenaFull(NotAccepted):
    """All segments of the broker's memory are in use; writing resumes when some are released."""

    code = "arena_full"
    retriable = True


class DiskFull(NotAccepted):
    """The disk of a broker or coordinator has no room, or fails; writing resumes when there is room again."""

    code = "disk_full"
    retriable = True


class DiskFailed(NotAccepted):
    """A file of the broker's log cannot be read or written; the message names it."""

    code = "disk_failed"
    retriable = True


class BackupFull(NotAccepted):
    """The backup has no free segment, in memory or on disk; the broker chooses another one."""

    code = "backup_full"
    retriable = True


class TooFewBackups(NotAccepted):
    """Fewer backups can take replicas than the stream asks for; writing resumes when there are enough."""

    code = "too_few_backups"
    retriable = True


class BufferFull(NotAccepted):
    """The producer's buffer is full; ``await producer.drain()`` before sending more."""

    code = "buffer_full"
    retriable = True


class ClosedError(NotAccepted):
    """The producer, consumer or channel has been closed."""

    code = "closed"


class WokenUp(NotAccepted):
    """`wakeup` of a consumer has ended a wait for records. Nothing is lost: the next call goes on from there."""

    code = "woken_up"


class Unavailable(NotAccepted):
    """A daemon cannot be reached, and the request has not been sent."""

    code = "unavailable"
    retriable = True


class Recovering(Unavailable):
    """The requested data are being recovered from backups, after their broker was lost; ask again."""

    code = "recovering"


class Uncertain(KeraError):
    """The connection broke or time ran out after the request was sent: it may or may not have been carried out."""

    code = "uncertain"
    retriable = True


class NotPersisted(Uncertain):
    """The chunk is in the broker's memory, but could not be written to its disk; resend it with the same sequence."""

    code = "not_persisted"


class NotReplicated(Uncertain):
    """The chunk is in the broker's memory, but not on as many backups as asked; resend it with the same sequence."""

    code = "not_replicated"


class InvalidCursor(NotAccepted):
    """A cursor that points to no chunk boundary or beyond the durable head."""

    code = "invalid_cursor"


class SessionLost(NotAccepted):
    """The broker does not keep this read session, or not at this step: begin it anew, with all its ranges."""

    code = "session_lost"
    retriable = True


class DataLost(NotAccepted):
    """The records at the cursor are gone; ``attributes`` has the exact gap: `lost_from` up to `available_from`."""

    code = "data_lost"


class StartError(KeraError):
    """A daemon cannot start; the message says what to change."""

    code = "start"


class PortTaken(StartError):
    """Another process listens on the address."""

    code = "port_taken"


class PathNotWritable(StartError):
    """A directory cannot be created or written."""

    code = "path_not_writable"


class SharedMemoryTooSmall(StartError):
    """The shared-memory file system has no room for the arena."""

    code = "shared_memory_too_small"


def error_to_attributes(error: KeraError) -> dict[str, str]:
    """Return the attributes for the wire, as JSON text per name. A value that JSON cannot express becomes text."""
    return {name: _to_json(value) for name, value in error.attributes.items()}


def error_from_wire(code: str, message: str, attributes: dict[str, str]) -> KeraError:
    """Return the error that `code` names.

    An unknown code, from a newer peer, gives an `InternalError` with the message, and with the code as an attribute.
    """
    values = {name: _from_json(text) for name, text in attributes.items()}
    known = _REGISTRY.get(code)
    if known is None:
        return InternalError(message, **{"code": code, **values})
    return known(message, **values)


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are not text, or a value that contains itself
        return json.dumps(str(value))


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def invariant(condition: object, message: str, **attributes: Any) -> None:
    """Raise `InternalError` unless `condition` holds. Unlike ``assert`` it survives ``python -O``."""
    if not condition:
        raise InternalError(f"invariant broken: {message}", **attributes)
