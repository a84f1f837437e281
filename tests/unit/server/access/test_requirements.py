"""The matrix: every method of every service, and its permitted callers.

It comes from the descriptors, so a new method fails here until its permitted callers are decided.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kera.core.access.identity import Identity
from kera.core.access.rights import CLUSTER, OF_RESOURCES, Operation
from kera.core.errors import AuthenticationFailed, NotAllowed, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.method import Call, Method, Reply
from kera.server.access.guard import Guard
from kera.server.access.requirements import REQUIREMENTS, Requirement, Who
from kera.v1 import (
    access_pb2,
    backup_pb2,
    broker_pb2,
    consumer_group_pb2,
    coordinator_pb2,
    daemon_pb2,
    latency_pb2,
    schema_pb2,
)
from tests.unit.core.access.support import DAEMON, Now, guard, peer, rule, table

FILES = (access_pb2, backup_pb2, broker_pb2, consumer_group_pb2, coordinator_pb2, daemon_pb2, latency_pb2, schema_pb2)
DECLARED = {
    f"{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
METHODS: dict[str, Method[Any, Any]] = {
    f"{each.service}/{each.name}": each for each in vars(api).values() if isinstance(each, Method)
}
ALICE, MALLORY = Identity("alice"), Identity("mallory")
STREAM, GROUP = "orders", "etl"
STREAM_ID = 7
EVERYTHING = [
    rule("user:alice", resource, *OF_RESOURCES[resource.partition(":")[0]])
    for resource in (f"stream:{STREAM}", f"group:{GROUP}", f"producer:{STREAM}", CLUSTER)
]
OF_OTHERS = [rule("user:mallory", "stream:payments", *OF_RESOURCES["stream"])]


def test_each_declared_method_has_a_requirement() -> None:
    assert set(METHODS) == DECLARED
    assert {f"{each.service}/{each.name}" for each in REQUIREMENTS} == DECLARED


def filled(message: Message, depth: int = 0) -> Message:
    """Fill in a stream, a consumer group and a producer wherever the request has such a field."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < 3 and field.name not in {"scram", "attributes"}:
                part = getattr(message, field.name)
                filled(part.add() if field.is_repeated else part, depth + 1)
        elif field.name in {"stream_id", "name", "consumer_group", "stream", "stream_ids"}:
            value: Any = STREAM_ID if field.name.startswith("stream_id") else GROUP if "group" in field.name else STREAM
            if field.is_repeated:
                getattr(message, field.name).append(value)
            elif field.containing_oneof is None or field.name == "name":
                setattr(message, field.name, value)
        elif field.name == "path":
            getattr(message, field.name).extend([STREAM, f"group:{GROUP}"])
        elif field.name == "subject":
            setattr(message, field.name, f"{STREAM}-value")
    return message


async def outcome(guard: Guard, method: Method[Any, Any], who: Identity | None) -> str:
    async def handler(_: Call[Any]) -> Reply[Any]:
        await asyncio.sleep(0)
        return Reply(method.response())

    served = guard.guarded({method: handler})[method]
    try:
        result = served(Call(filled(method.request()), memoryview(b""), peer(who)))
        assert inspect.isawaitable(result)
        await result
    except (AuthenticationFailed, NotAllowed, UnknownStream) as error:
        return error.code
    return "ok"


def expected(requirement: Requirement, method: Method[Any, Any], who: str) -> set[str]:
    if requirement.who is Who.ANYBODY or who == "daemon":
        return {"ok"}
    if who == "nobody":
        return {"authentication_failed"}
    if requirement.who is Who.DAEMONS:
        return {"not_allowed"}
    needs = list(requirement.needs(filled(method.request())))
    return {"ok"} if who in {"with", "super"} or not needs else {"not_allowed", "unknown_stream"}


@pytest.mark.parametrize("who", ["nobody", "wrong", "without", "with", "super", "daemon"])
async def test_a_method_is_served_only_to_its_permitted_callers(who: str) -> None:
    with guard(Now(), super_users=["user:root"]) as door:
        door.apply(table(rules=EVERYTHING + OF_OTHERS), 1)
        identity = {
            "nobody": None,
            "wrong": MALLORY,
            "without": Identity("bob"),
            "with": ALICE,
            "super": door.authenticator.known(Identity("root")),
            "daemon": DAEMON,
        }[who]
        for name in sorted(DECLARED):
            method = METHODS[name]
            assert await outcome(door, method, identity) in expected(REQUIREMENTS[method], method, who), name


def test_a_method_without_a_requirement_is_not_served() -> None:
    new = Method("kera.v1.New", "New", 999, api.HEARTBEAT.request, api.HEARTBEAT.response)
    with pytest.raises(KeyError):
        guard(Now()).guarded({new: lambda _: Reply(new.response())})


@pytest.mark.parametrize(
    ("method", "operation"),
    [
        (api.MULTI_READ_CHUNKS, Operation.READ),
        (api.TRUNCATE_STREAMLETS, Operation.DELETE),
        (api.PUNCTUATE, Operation.WRITE),
        (api.CREATE_STREAM, Operation.CREATE),
        (api.ALTER_STREAM, Operation.ALTER),
        (api.DELETE_STREAM, Operation.DELETE),
        (api.DESCRIBE_STREAM, Operation.DESCRIBE),
        (api.GET_SCHEMA, Operation.DESCRIBE),
        (api.CHECK_SCHEMA, Operation.DESCRIBE),
        (api.SET_COMPATIBILITY, Operation.ALTER),
        (api.DELETE_SCHEMA, Operation.DELETE),
        (api.CREATE_LATENCY_CONSTRAINT, Operation.ALTER),
        (api.CREATE_LATENCY_CONSTRAINT, Operation.DESCRIBE),
        (api.ALTER_LATENCY_CONSTRAINT, Operation.ALTER),
    ],
)
def test_these_methods_need_their_operation(method: Method[Any, Any], operation: Operation) -> None:
    assert operation in {need.operation for need in REQUIREMENTS[method].needs(filled(method.request()))}


async def test_streams_that_a_user_may_not_see_are_not_listed() -> None:
    async def handler(_: Call[Any]) -> Reply[coordinator_pb2.ListStreamsResponse]:
        response = coordinator_pb2.ListStreamsResponse()
        for name in ("orders", "payments", "secret"):
            response.streams.add(name=name)
        return Reply(response)

    with guard(Now()) as door:
        door.apply(table(rules=[rule("user:alice", "stream:pay*", Operation.WRITE)]), 1)
        served: Any = door.guarded({api.LIST_STREAMS: handler})[api.LIST_STREAMS]
        request = coordinator_pb2.ListStreamsRequest()
        of = {
            who.principal: [
                each.name for each in (await served(Call(request, memoryview(b""), peer(who)))).message.streams
            ]
            for who in (ALICE, MALLORY, DAEMON)
        }
    assert of == {"user:alice": ["payments"], "user:mallory": [], "daemons": ["orders", "payments", "secret"]}


@pytest.mark.parametrize(("promise", "operations"), [(False, {Operation.DESCRIBE}), (True, {Operation.READ})])
def test_a_promise_needs_the_right_to_read_the_stream(*, promise: bool, operations: set[Operation]) -> None:
    request = broker_pb2.DescribeStreamletsRequest(stream_id=STREAM_ID, promise=promise)
    needs = set(REQUIREMENTS[api.DESCRIBE_STREAMLETS].needs(request))
    assert needs == {(operation, STREAM_ID) for operation in operations | {Operation.DESCRIBE}}


@pytest.mark.parametrize("method", [api.CONSUME_ROUND, api.LEAVE, api.RESET_CONSUMER_GROUP])
def test_reporting_progress_needs_the_right_to_read_the_stream(method: Method[Any, Any]) -> None:
    """Retention may depend on the reported progress."""
    needs = set(REQUIREMENTS[method].needs(filled(method.request())))
    assert (Operation.READ, STREAM_ID) in needs


@pytest.mark.parametrize(
    ("forward_only", "force", "operation"),
    [(True, False, Operation.USE), (True, True, Operation.ALTER), (False, False, Operation.ALTER)],
)
def test_a_member_may_reset_its_group_only_forward(*, forward_only: bool, force: bool, operation: Operation) -> None:
    request = consumer_group_pb2.ResetConsumerGroupRequest(
        consumer_group=GROUP, forward_only=forward_only, force=force, unnamed=True
    )
    assert list(REQUIREMENTS[api.RESET_CONSUMER_GROUP].needs(request)) == [(operation, f"group:{GROUP}")]
