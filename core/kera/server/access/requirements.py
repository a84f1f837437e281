"""The requirements of each method on its caller. Pure.

A method that is not in `REQUIREMENTS` cannot be served: a new method needs an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

from kera.core.access.rights import CLUSTER, Operation
from kera.core.rpc import api
from kera.core.rpc.method import Method
from kera.core.schemas import stream_of

DESCRIBE, READ, WRITE, CREATE = Operation.DESCRIBE, Operation.READ, Operation.WRITE, Operation.CREATE
ALTER, DELETE, USE, ADMINISTER = Operation.ALTER, Operation.DELETE, Operation.USE, Operation.ADMINISTER


class Who(Enum):
    """The kind of caller that may call a method at all."""

    ANYBODY = "anybody"
    """Also callers that have not authenticated."""
    IDENTIFIED = "identified"
    """Callers that have authenticated; `needs` has their rights."""
    DAEMONS = "daemons"


class Need(NamedTuple):
    """A right that a request needs."""

    operation: Operation
    resource: str | int
    """A resource as in rules; or the id of a stream, whose name has to be looked up."""


May = Callable[[Operation, str], bool]
"""Returns whether the caller may carry out an operation on a resource."""


@dataclass(frozen=True)
class Requirement:
    """The callers that a method admits, and the rights that they need."""

    who: Who
    needs: Callable[[Any], Iterable[Need]] = lambda _: ()
    """Returns all needs of a request."""
    narrow: Callable[[Any, May], None] | None = None
    """Removes parts of a response that the caller may not see."""
    each: bool = False
    """Whether the handler reports unknown streams one by one, and checks the rights for a stream that has become known
    meanwhile. Otherwise the guard reports them."""


def stream(name: str) -> str:
    """Return the resource of a stream."""
    return f"stream:{name}"


def group(name: str) -> str:
    """Return the resource of a consumer group."""
    return f"group:{name}"


def _cluster(operation: Operation) -> Requirement:
    return Requirement(Who.IDENTIFIED, lambda _: (Need(operation, CLUSTER),))


def _named(operation: Operation) -> Requirement:
    return Requirement(Who.IDENTIFIED, lambda request: (Need(operation, stream(request.name)),))


def _by_id(operation: Operation) -> Requirement:
    return Requirement(Who.IDENTIFIED, lambda request: (Need(operation, request.stream_id),))


def _of_group(operation: Operation) -> Requirement:
    return Requirement(Who.IDENTIFIED, lambda request: (Need(operation, group(request.consumer_group)),))


def _described(request: Any) -> Iterable[Need]:
    by_id = request.WhichOneof("stream") == "stream_id"
    return (Need(DESCRIBE, request.stream_id if by_id else stream(request.name)),)


def _of_streamlets(request: Any) -> Iterable[Need]:
    """Return the needs to describe streamlets. A caller that wants a promise needs the right to read the stream: the
    promise makes records late that are written afterwards.
    """
    yield Need(DESCRIBE, request.stream_id)
    if request.promise:
        yield Need(READ, request.stream_id)


def _produced(request: Any) -> Iterable[Need]:
    return (Need(USE, f"producer:{request.name}"),) if request.name else ()


def _altered(request: Any) -> Iterable[Need]:
    yield Need(ALTER, stream(request.name))
    for name in request.retention_consumer_groups.names:
        yield Need(DESCRIBE, group(name))


def _read(request: Any) -> Iterable[Need]:
    ranges = request.ranges
    if len(ranges) == 1:
        return (Need(READ, ranges[0].start.stream_id),)
    return [Need(READ, stream_id) for stream_id in {wanted.start.stream_id for wanted in ranges}]


def _of_cursors(operation: Operation) -> Callable[[Any], Iterable[Need]]:
    def needs(request: Any) -> Iterable[Need]:
        return (Need(operation, stream_id) for stream_id in {each.stream_id for each in request.cursors})

    return needs


def _committed(request: Any) -> Iterable[Need]:
    yield from _of_cursors(READ)(request)
    if request.consumer_group:
        yield Need(USE, group(request.consumer_group))


def _located(request: Any) -> Iterable[Need]:
    return (Need(DESCRIBE, stream_id) for stream_id in {each.start.stream_id for each in request.queries})


def _consumed(request: Any) -> Iterable[Need]:
    """Return the needs of a round, also to read the streams: records that a group has read may be removed from them."""
    yield Need(USE, group(request.consumer_group))
    about = {step.next.stream_id for steps in (request.steps, request.ended) for step in steps}
    about |= {each.stream_id for many in (request.starts, request.seen) for each in many}
    for stream_id in about.union(request.stream_ids):
        yield Need(READ, stream_id)


def _left(request: Any) -> Iterable[Need]:
    yield Need(USE, group(request.consumer_group))
    for stream_id in {step.next.stream_id for step in request.steps}:
        yield Need(READ, stream_id)


def _reset(request: Any) -> Iterable[Need]:
    goes_on = request.forward_only and not request.force
    yield Need(USE if goes_on else ALTER, group(request.consumer_group))
    for stream_id in {start.stream_id for start in request.starts}:
        yield Need(READ, stream_id)


def _of_subject(operation: Operation) -> Requirement:
    return Requirement(Who.IDENTIFIED, lambda request: (Need(operation, stream(stream_of(request.subject))),))


def _schema_got(request: Any) -> Iterable[Need]:
    return (Need(DESCRIBE, stream(stream_of(request.subject))),) if request.WhichOneof("which") == "subject" else ()


def _compatibility_got(request: Any) -> Iterable[Need]:
    return (Need(DESCRIBE, stream(stream_of(request.subject))),) if request.subject else ()


def _compatibility_set(request: Any) -> Iterable[Need]:
    if request.subject:
        return (Need(ALTER, stream(stream_of(request.subject))),)
    return (Need(ADMINISTER, CLUSTER),)


PATH_ELEMENTS_MAX = 64
"""Maximum number of elements of a latency constraint that are checked; a constraint with more is always refused."""


def _on_path(operation: Operation, path: Iterable[str]) -> Iterable[Need]:
    for element in islice(path, PATH_ELEMENTS_MAX):
        kind, _, name = element.partition(":")
        yield Need(DESCRIBE, group(name)) if kind == "group" else Need(operation, stream(element))


def _constraint_created(request: Any) -> Iterable[Need]:
    return _on_path(ALTER, request.constraint.path)


def _constraint_altered(request: Any) -> Iterable[Need]:
    return _on_path(ALTER, request.path)


def _narrow_constraints(response: Any, may: May) -> None:
    _keep(
        response.constraints,
        lambda each: all(may(DESCRIBE, str(need.resource)) for need in _on_path(DESCRIBE, each.constraint.path)),
    )


def _narrow_subjects(response: Any, may: May) -> None:
    _keep(response.subjects, lambda subject: may(DESCRIBE, stream(stream_of(subject))))


def _narrow_streams(response: Any, may: May) -> None:
    _keep(response.streams, lambda each: may(DESCRIBE, stream(each.name)))


def _narrow_groups(response: Any, may: May) -> None:
    _keep(response.consumer_groups, lambda each: may(DESCRIBE, group(each.consumer_group)))


def _narrow_cluster(response: Any, may: May) -> None:
    _keep(response.unknown_streams, lambda each: may(DESCRIBE, stream(each.stream.name)))


def _keep(messages: Any, is_kept: Callable[[Any], bool]) -> None:
    kept = [each for each in messages if is_kept(each)]
    if len(kept) < len(messages):
        del messages[:]
        messages.extend(kept)


_DAEMONS = Requirement(Who.DAEMONS)
_IDENTIFIED = Requirement(Who.IDENTIFIED)

REQUIREMENTS: Mapping[Method[Any, Any], Requirement] = {
    # The streams of a request's chunks are known only when the broker reads them: see kera.broker.serving.write_access.
    api.MULTI_WRITE_CHUNKS: _IDENTIFIED,
    api.MULTI_READ_CHUNKS: Requirement(Who.IDENTIFIED, _read, each=True),
    api.GET_NEXT_GROUPS: _by_id(DESCRIBE),
    api.GET_NEXT_SEGMENTS: _by_id(DESCRIBE),
    api.GET_AVAILABLE_GROUPS: _by_id(DESCRIBE),
    api.GET_AVAILABLE_SEGMENTS: _by_id(DESCRIBE),
    api.DESCRIBE_STREAMLETS: Requirement(Who.IDENTIFIED, _of_streamlets),
    api.TRUNCATE_STREAMLETS: Requirement(Who.IDENTIFIED, _of_cursors(DELETE), each=True),
    api.COMMIT_CURSORS: Requirement(Who.IDENTIFIED, _committed, each=True),
    api.MEASURE_LAG: Requirement(Who.IDENTIFIED, _of_cursors(DESCRIBE), each=True),
    api.LIST_GROUPS: _by_id(DESCRIBE),
    api.LOCATE_CHUNKS: Requirement(Who.IDENTIFIED, _located, each=True),
    api.LIST_SEGMENTS: Requirement(Who.IDENTIFIED, lambda request: (Need(DESCRIBE, request.start.stream_id),)),
    api.PUNCTUATE: _by_id(WRITE),
    api.SEAL_STREAMLETS: _DAEMONS,
    api.TAKE_OVER: _DAEMONS,
    api.OPEN_STREAMLETS: _DAEMONS,
    api.DROP_STREAM: _DAEMONS,
    api.CREATE_STREAM: _named(CREATE),
    api.GET_STREAM_ID: _named(DESCRIBE),
    api.DESCRIBE_STREAM: Requirement(Who.IDENTIFIED, _described),
    api.LIST_STREAMS: Requirement(Who.IDENTIFIED, narrow=_narrow_streams),
    api.DELETE_STREAM: _named(DELETE),
    api.ALTER_STREAM: Requirement(Who.IDENTIFIED, _altered),
    api.DESCRIBE_CLUSTER: Requirement(Who.IDENTIFIED, narrow=_narrow_cluster),
    api.INIT_PRODUCER: Requirement(Who.IDENTIFIED, _produced),
    api.FIND_PRODUCERS: _DAEMONS,
    api.REPORT_BROKER: _IDENTIFIED,
    api.REGISTER_BROKER: _DAEMONS,
    api.HEARTBEAT: _DAEMONS,
    api.REGISTER_BACKUP: _DAEMONS,
    api.BACKUP_HEARTBEAT: _DAEMONS,
    api.PREPARE_RESTART: _DAEMONS,
    api.MOVE_STREAMLET: _cluster(ADMINISTER),
    api.REBALANCE: _cluster(ADMINISTER),
    api.DRAIN: _cluster(ADMINISTER),
    api.LIST_RECOVERIES: _cluster(DESCRIBE),
    api.FORGET_MEMBER: _cluster(ADMINISTER),
    api.ADOPT_STREAM: _cluster(ADMINISTER),
    api.READ_METADATA: _cluster(ADMINISTER),
    api.CONSUME_ROUND: Requirement(Who.IDENTIFIED, _consumed),
    api.KEEP_ALIVE: _of_group(USE),
    api.LEAVE: Requirement(Who.IDENTIFIED, _left, each=True),  # a stream that no longer exists needs no right
    api.FETCH_CONSUMER_GROUP: _of_group(DESCRIBE),
    api.LIST_CONSUMER_GROUPS: Requirement(Who.IDENTIFIED, narrow=_narrow_groups),
    api.DESCRIBE_CONSUMER_GROUP: _of_group(DESCRIBE),
    api.RESET_CONSUMER_GROUP: Requirement(Who.IDENTIFIED, _reset),
    api.DELETE_CONSUMER_GROUP: _of_group(DELETE),
    api.REPLICATE: _DAEMONS,
    api.READ_REPLICA: _DAEMONS,
    api.LIST_REPLICAS: _DAEMONS,
    api.FREE_REPLICAS: _DAEMONS,
    api.FENCE_BROKER: _DAEMONS,
    api.DESCRIBE_DAEMON: _cluster(DESCRIBE),
    api.READ_FIGURES: _cluster(DESCRIBE),
    api.AUTHENTICATE: Requirement(Who.ANYBODY),
    api.APPLY_ACCESS: _DAEMONS,
    api.PUT_USER: _IDENTIFIED,  # all users may change their own passwords: see the coordinator
    api.DELETE_USER: _cluster(ADMINISTER),
    api.LIST_USERS: _cluster(ADMINISTER),
    api.GRANT_RIGHT: _cluster(ADMINISTER),
    api.REVOKE_RIGHTS: _cluster(ADMINISTER),
    api.LIST_RIGHTS: _IDENTIFIED,  # the caller's own rights, or with administer: see the coordinator
    api.CHECK_RIGHT: _IDENTIFIED,
    api.ISSUE_TOKEN: _IDENTIFIED,
    api.RENEW_TOKEN: _IDENTIFIED,
    api.REVOKE_TOKEN: _IDENTIFIED,
    api.LIST_TOKENS: _IDENTIFIED,
    api.REGISTER_SCHEMA: _IDENTIFIED,  # write or alter on the stream: see the coordinator
    api.CHECK_SCHEMA: _of_subject(DESCRIBE),
    api.GET_SCHEMA: Requirement(Who.IDENTIFIED, _schema_got),  # by id: describe on a stream with it: coordinator
    api.LIST_SUBJECTS: Requirement(Who.IDENTIFIED, narrow=_narrow_subjects),
    api.LIST_SCHEMA_VERSIONS: _of_subject(DESCRIBE),
    api.GET_COMPATIBILITY: Requirement(Who.IDENTIFIED, _compatibility_got),
    api.SET_COMPATIBILITY: Requirement(Who.IDENTIFIED, _compatibility_set),
    api.DELETE_SCHEMA: _of_subject(DELETE),
    # The rights also depend on the path that a constraint already has: see the coordinator.
    api.CREATE_LATENCY_CONSTRAINT: Requirement(Who.IDENTIFIED, _constraint_created),
    api.ALTER_LATENCY_CONSTRAINT: Requirement(Who.IDENTIFIED, _constraint_altered),
    api.LIST_LATENCY_CONSTRAINTS: Requirement(Who.IDENTIFIED, narrow=_narrow_constraints),
    api.DELETE_LATENCY_CONSTRAINT: _IDENTIFIED,
    api.DESCRIBE_LATENCY_CONSTRAINT: _IDENTIFIED,
}
CHANGES: frozenset[Method[Any, Any]] = frozenset(
    {
        api.CREATE_STREAM,
        api.ALTER_STREAM,
        api.DELETE_STREAM,
        api.TRUNCATE_STREAMLETS,
        api.ADOPT_STREAM,
        api.MOVE_STREAMLET,
        api.REBALANCE,
        api.DRAIN,
        api.FORGET_MEMBER,
        api.READ_METADATA,
        api.RESET_CONSUMER_GROUP,
        api.DELETE_CONSUMER_GROUP,
    }
)
"""Methods whose calls are written to the audit log (``audit``). The coordinator itself logs changes of users, rules,
tokens, schemas and latency constraints, as it knows what has changed."""
