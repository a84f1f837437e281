from __future__ import annotations

import pytest

from kera.core.access.identity import Identity, check_name, check_principal
from kera.core.access.rights import (
    CLUSTER,
    OF_RESOURCES,
    Operation,
    Rights,
    check_resource,
    check_rule,
    covers,
    operation_word,
)
from kera.core.errors import InvalidArgument
from tests.unit.core.access.support import DAEMON, rule

ALICE = Identity("alice")
READ, WRITE, DESCRIBE, ADMINISTER = Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.ADMINISTER


def test_an_operation_without_a_rule_is_refused() -> None:
    decision = Rights().decide(ALICE, READ, "stream:orders")
    assert not decision.allowed
    assert decision.reason == "no rule allows it"


@pytest.mark.parametrize(
    ("principal", "resource"),
    [
        ("user:alice", "stream:orders"),
        ("user:alice", "stream:ord*"),
        ("user:alice", "stream:*"),
        ("user:*", "stream:orders"),
        ("role:etl", "stream:orders"),
    ],
)
def test_a_rule_allows_its_operation_on_its_resource_only(principal: str, resource: str) -> None:
    rights = Rights([rule(principal, resource, READ, rule_id=5)])
    who = ALICE._replace(roles=frozenset({"etl"}))
    decision = rights.decide(who, READ, "stream:orders")
    assert decision.allowed
    assert decision.rule_id == 5
    assert not rights.decide(who, WRITE, "stream:orders").allowed
    assert not rights.decide(who, READ, "group:orders").allowed


@pytest.mark.parametrize(
    ("principal", "resource"),
    [
        ("user:bob", "stream:orders"),
        ("user:alice", "stream:order"),
        ("user:alice", "stream:orders2"),
        ("role:etl", "stream:*"),
    ],
)
def test_a_rule_does_not_allow_other_principals_or_resources(principal: str, resource: str) -> None:
    assert not Rights([rule(principal, resource, READ)]).decide(ALICE, READ, "stream:orders").allowed


def test_a_rule_that_denies_wins_over_one_that_allows() -> None:
    rights = Rights(
        [rule("user:alice", "stream:orders", READ), rule("user:*", "stream:o*", READ, deny=True, rule_id=2)]
    )
    decision = rights.decide(ALICE, READ, "stream:orders")
    assert not decision.allowed
    assert decision.rule_id == 2


@pytest.mark.parametrize("operation", OF_RESOURCES["stream"])
def test_a_right_to_any_operation_on_a_stream_includes_describe(operation: Operation) -> None:
    assert Rights([rule("user:alice", "stream:a", operation)]).decide(ALICE, DESCRIBE, "stream:a").allowed


def test_describe_can_be_denied_alone() -> None:
    rights = Rights([rule("user:alice", "stream:a", READ), rule("user:alice", "stream:a", DESCRIBE, deny=True)])
    assert not rights.decide(ALICE, DESCRIBE, "stream:a").allowed
    assert rights.decide(ALICE, READ, "stream:a").allowed


def test_an_administrator_manages_streams_but_does_not_read_or_write_them() -> None:
    rights = Rights([rule("user:alice", CLUSTER, ADMINISTER)])
    allowed = {each for each in Operation if rights.decide(ALICE, each, "stream:a").allowed}
    assert allowed == {DESCRIBE, Operation.CREATE, Operation.ALTER, Operation.DELETE}
    assert rights.decide(ALICE, DESCRIBE, CLUSTER).allowed


def test_a_rule_can_deny_an_operation_to_an_administrator() -> None:
    rights = Rights(
        [rule("user:alice", CLUSTER, ADMINISTER), rule("user:alice", "stream:a", Operation.DELETE, deny=True)]
    )
    assert not rights.decide(ALICE, Operation.DELETE, "stream:a").allowed


@pytest.mark.parametrize("who", [DAEMON, ALICE._replace(is_super=True)])
def test_daemons_and_super_users_may_do_everything(who: Identity) -> None:
    rights = Rights([rule("user:*", "stream:*", *OF_RESOURCES["stream"], deny=True)])
    assert all(rights.decide(who, each, "stream:a").allowed for each in Operation)


@pytest.mark.parametrize("who", [ALICE, ALICE._replace(is_super=True)])
def test_a_narrowed_token_works_for_its_resources_only(who: Identity) -> None:
    rights = Rights([rule("user:alice", "stream:*", READ), rule("user:alice", CLUSTER, ADMINISTER)])
    narrowed = who._replace(narrowed=("stream:orders", "group:etl-*"))
    assert rights.decide(narrowed, READ, "stream:orders").allowed
    assert not rights.decide(narrowed, READ, "stream:payments").allowed
    assert not rights.decide(narrowed, ADMINISTER, CLUSTER).allowed


@pytest.mark.parametrize(
    ("pattern", "resource", "does"),
    [
        ("stream:a", "stream:a", True),
        ("stream:a*", "stream:ab", True),
        ("stream:a*", "stream:a*", True),
        ("stream:a*", "stream:ab*", True),
        ("stream:ab*", "stream:a*", False),
        ("stream:*", "group:a", False),
        ("cluster", "cluster", True),
    ],
)
def test_a_pattern_covers_matching_resources(pattern: str, resource: str, *, does: bool) -> None:
    assert covers(pattern, resource) is does


@pytest.mark.parametrize(
    "resource", ["", "stream", "stream:", "topic:a", "stream:a*b", "cluster:x", "*", "stream:" + "a" * 300]
)
def test_an_invalid_resource_is_refused(resource: str) -> None:
    with pytest.raises(InvalidArgument):
        check_resource(resource)


@pytest.mark.parametrize(
    "principal", ["", "alice", "user:", "user:a b", "role:*", "user:-x", "user:" + "a" * 129, "group:a"]
)
def test_an_invalid_principal_is_refused(principal: str) -> None:
    with pytest.raises(InvalidArgument):
        check_principal(principal)


@pytest.mark.parametrize("name", ["alice", "alice@example.org", "svc-1_a.b", "a+b"])
def test_usual_names_of_users_are_accepted(name: str) -> None:
    assert check_name("user", name) == name


def test_a_rule_with_no_operation_or_one_that_does_not_apply_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="read does not apply to a group: describe, use, alter, delete"):
        check_rule(rule("user:alice", "group:a", READ))
    with pytest.raises(InvalidArgument, match="needs operations"):
        check_rule(rule("user:alice", "group:a"))
    assert operation_word(99) == "operation 99"
