"""Users and rules at the coordinator: what requests change, and the remarks and errors in the answers."""

from __future__ import annotations

import asyncio

import pytest

from kera.core.access.passwords import verifier_for
from kera.core.access.rights import Operation, wire
from kera.core.errors import InvalidArgument, UnknownUser, UserExists
from kera.v1 import access_pb2 as messages
from tests.unit.coordinator.fake_cluster import Cluster

PASSWORD = "correct horse battery"
VERIFIER = verifier_for(PASSWORD, iterations=4096)


def made(name: str, *roles: str, scram: messages.ScramVerifier | None = VERIFIER) -> messages.PutUserRequest:
    """A request for a new user."""
    return messages.PutUserRequest(name=name, create=True, scram=scram, roles=messages.Roles(names=roles))


def rule(principal: str, resource: str, *operations: Operation) -> messages.GrantRightRequest:
    wanted = messages.AccessRule(principal=principal, resource=resource, operations=wire(operations))
    return messages.GrantRightRequest(rule=wanted)


def listed(cluster: Cluster, principal: str = "", resource: str = "") -> list[int]:
    request = messages.ListRightsRequest(principal=principal, resource=resource)
    return [each.rule_id for each in cluster.coordinator.access.list_rights(request).rules]


async def test_a_repeated_request_to_create_a_user_succeeds(cluster: Cluster) -> None:
    access = cluster.coordinator.access
    for _ in range(2):  # like a client that got no answer to its first attempt
        await access.put_user(made("alice"))
    assert [each.name for each in access.list_users(messages.ListUsersRequest()).users] == ["alice"]
    for other in (made("alice", scram=verifier_for(PASSWORD, iterations=4096)), made("alice", scram=None)):
        with pytest.raises(UserExists, match="there is a user 'alice' already: kera user passwd"):
            await access.put_user(other)


async def test_changing_or_deleting_a_missing_user_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(UnknownUser, match="there is no user 'alise': kera user create makes one"):
        await cluster.coordinator.access.put_user(messages.PutUserRequest(name="alise", scram=VERIFIER))
    with pytest.raises(UnknownUser, match="there is no user 'alise': kera user list shows all"):
        await cluster.coordinator.access.delete_user(messages.DeleteUserRequest(name="alise"))


async def test_listing_the_rules_of_a_principal_includes_those_of_its_roles_and_of_everyone(cluster: Cluster) -> None:
    access = cluster.coordinator.access
    await access.put_user(made("alice", "etl"))
    for principal, resource in (
        ("user:alice", "stream:orders"),
        ("role:etl", "stream:or*"),
        ("role:ops", "stream:orders"),
        ("user:*", "stream:public"),
        ("user:bob", "group:orders"),
    ):
        await access.grant(rule(principal, resource, Operation.DESCRIBE))
    assert listed(cluster) == [1, 2, 3, 4, 5]
    assert listed(cluster, "user:alice") == [1, 2, 4]
    assert listed(cluster, "role:etl") == [2, 4]
    assert listed(cluster, "user:*") == [4]
    assert listed(cluster, resource="stream:orders") == [1, 2, 3]
    assert listed(cluster, resource="stream:or*") == [2]
    assert listed(cluster, "user:alice", "stream:orders") == [1, 2]
    for principal, resource in (("alice", ""), ("", "orders")):
        with pytest.raises(InvalidArgument):
            listed(cluster, principal, resource)


async def test_a_rule_about_a_missing_stream_or_user_is_granted_with_a_remark(cluster: Cluster) -> None:
    access = cluster.coordinator.access
    await cluster.register("a")
    await cluster.create("orders")
    await access.put_user(made("alice"))
    for principal, resource, remark in (
        ("user:alice", "stream:orders", ""),
        ("user:alice", "stream:nothing-like-it", "there is no stream 'nothing-like-it' now"),
        ("user:alice", "stream:ordrs", "there is no stream 'ordrs' now; did you mean 'orders'?"),
        ("user:alice", "stream:new*", ""),
        ("user:alice", "group:new", ""),
        ("role:etl", "stream:orders", ""),
        ("user:*", "stream:orders", ""),
        ("user:bob", "stream:orders", "no user 'bob' is kept here, which is right for one with a certificate or a JWT"),
    ):
        answer = await access.grant(rule(principal, resource, Operation.DESCRIBE))
        assert (answer.rule.principal, answer.remark) == (principal, remark)


async def test_users_created_concurrently_are_all_kept(cluster: Cluster) -> None:
    access = cluster.coordinator.access
    names = [f"user-{number}" for number in range(10)]
    await asyncio.gather(*(access.put_user(made(name)) for name in names))
    assert [each.name for each in access.list_users(messages.ListUsersRequest()).users] == names
