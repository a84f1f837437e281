"""Users, rules and tokens: changes by requests, how daemons learn of them, and how they outlast a coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from kera.coordinator.access import changes, service
from kera.coordinator.access.changes import changed_user, granted, revoked
from kera.coordinator.access.service import TOKEN_LIFETIME_MS, TOKEN_RENEWABLE_MS, AccessService
from kera.coordinator.store.metadata import Check, MetadataStoreFailed, MetadataStoreFull, Write
from kera.core.access.accounts import Token
from kera.core.access.audit_events import AuditEvent
from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.identity import Identity
from kera.core.access.passwords import ITERATIONS_MIN, verifier_for
from kera.core.access.rights import Operation, wire
from kera.core.errors import (
    AuthenticationFailed,
    InvalidArgument,
    NotAllowed,
    Unavailable,
    UnknownUser,
    UserExists,
)
from kera.core.rpc.method import Peer
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import CALLER, Guard
from kera.v1 import access_pb2 as messages
from tests.unit.coordinator.fake_cluster import Cluster

READ, WRITE, ADMINISTER = Operation.READ, Operation.WRITE, Operation.ADMINISTER
VERIFIER = verifier_for("correct horse", iterations=ITERATIONS_MIN)


def rule(principal: str = "user:alice", resource: str = "stream:s", *operations: Operation) -> messages.AccessRule:
    return messages.AccessRule(principal=principal, resource=resource, operations=wire(operations or (READ,)))


def put(name: str = "alice", *, create: bool = True, **fields: object) -> messages.PutUserRequest:
    return messages.PutUserRequest(name=name, create=create, **fields)  # type: ignore[arg-type]


# --- changes by requests -----------------------------------------------------------------------------------------


def changed(known: messages.UserRecord | None, request: messages.PutUserRequest, users: int = 0) -> messages.UserRecord:
    return changed_user(known, request, users=users, version=7, now_us=5)


def test_a_user_can_be_created_only_once() -> None:
    made = changed(None, put(scram=VERIFIER, roles=messages.Roles(names=["b", "a", "b"])))
    assert (made.name, list(made.roles), made.password_version, made.created_us) == ("alice", ["a", "b"], 7, 5)
    with pytest.raises(UserExists):
        changed(made, put())
    with pytest.raises(UnknownUser, match="kera user create makes one"):
        changed(None, put(create=False))


def test_an_update_changes_only_the_named_fields_of_a_user() -> None:
    made = changed(None, put(scram=VERIFIER, roles=messages.Roles(names=["a"]), quota=messages.Quota(streams=3)))
    made.password_version = 3
    same = changed(made, put(create=False, roles=messages.Roles(names=["b"])))
    assert (list(same.roles), same.password_version, same.scram, same.quota.streams) == (["b"], 3, VERIFIER, 3)
    other = changed(made, put(create=False, scram=verifier_for("another one", iterations=ITERATIONS_MIN)))
    assert (list(other.roles), other.password_version) == (["a"], 7)
    none = changed(made, put(create=False, scram=messages.ScramVerifier(), quota=messages.Quota()))
    assert not none.HasField("scram")
    assert not none.HasField("quota")
    assert none.password_version == 7


@pytest.mark.parametrize("limit", ["bytes_in_per_s", "bytes_out_per_s", "requests_per_s"])
def test_a_rate_of_zero_is_refused(limit: str) -> None:
    """Rights forbid an operation altogether. With a rate of zero a request would wait for ever."""
    with pytest.raises(InvalidArgument, match=f"{limit} is 1 at least"):
        changed(None, put(quota=messages.Quota(**{limit: 0})))
    made = changed(None, put(quota=messages.Quota(**{limit: 1}, connections=0, streams=0)))
    assert made.quota.HasField("streams")


@pytest.mark.parametrize(
    "request_",
    [
        put("a b"),
        put(":daemon"),
        put("*"),
        put(roles=messages.Roles(names=["a b"])),
        put(roles=messages.Roles(names=[f"r{number}" for number in range(65)])),
        put(scram=messages.ScramVerifier(salt=b"x" * 12, iterations=1)),
    ],
)
def test_an_invalid_user_is_refused(request_: messages.PutUserRequest) -> None:
    with pytest.raises(InvalidArgument):
        changed(None, request_)


def test_the_numbers_of_users_and_rules_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="there are 10000 users already"):
        changed(None, put(), users=changes.USERS_MAX)
    monkeypatch.setattr(changes, "RULES_MAX", 1)
    one = granted([], rule(), rule_id=1, by="", now_us=0)
    with pytest.raises(InvalidArgument, match="a prefix or a role says more in one"):
        granted([one], rule(resource="stream:t"), rule_id=2, by="", now_us=0)


def test_granting_another_operation_extends_the_existing_rule() -> None:
    one = granted([], rule(), rule_id=1, by="user:admin", now_us=5)
    more = granted([one], rule("user:alice", "stream:s", WRITE), rule_id=2, by="user:other", now_us=9)
    assert (more.rule_id, list(more.operations), more.created_by) == (1, wire([READ, WRITE]), "user:admin")
    deny = rule()
    deny.deny = True
    assert granted([one], deny, rule_id=2, by="", now_us=9).rule_id == 2


def test_a_rule_is_deleted_when_its_last_operation_is_revoked() -> None:
    one = granted([], rule("user:alice", "stream:s", READ, WRITE), rule_id=1, by="", now_us=0)
    before, after = revoked([one], messages.RevokeRightsRequest(rule=rule("user:alice", "stream:s", WRITE)))
    assert before == [one]
    left = after[1]
    assert left is not None
    assert list(left.operations) == wire([READ])
    for request in (
        messages.RevokeRightsRequest(rule_ids=[1]),
        messages.RevokeRightsRequest(rule=messages.AccessRule(principal="user:alice", resource="stream:s")),
    ):
        assert revoked([one], request)[1] == {1: None}


@pytest.mark.parametrize(
    "request_",
    [
        messages.RevokeRightsRequest(),
        messages.RevokeRightsRequest(rule_ids=[1], rule=rule()),
        messages.RevokeRightsRequest(rule_ids=[2]),
        messages.RevokeRightsRequest(rule=rule("user:bob")),
        messages.RevokeRightsRequest(rule=rule("user:alice", "stream:s", WRITE)),
    ],
)
def test_a_revocation_that_matches_no_rule_is_refused(request_: messages.RevokeRightsRequest) -> None:
    one = granted([], rule(), rule_id=1, by="", now_us=0)
    with pytest.raises(InvalidArgument):
        revoked([one], request_)


# --- the requests ------------------------------------------------------------------------------------------------


class Daemons:
    """Daemons that take a change at once, or cannot be reached."""

    def __init__(self) -> None:
        self.told: dict[str, messages.ApplyAccessRequest] = {}
        self.away: set[str] = set()

    async def __call__(self, address: str, request: messages.ApplyAccessRequest, *, timeout_s: float) -> None:
        if address in self.away:
            raise Unavailable(f"cannot connect to {address} within {timeout_s:g} s", address=address)
        self.told[address] = request


class Secured:
    """A coordinator with a guard, a broker and a backup."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.daemons = Daemons()
        self.service: AccessService
        self.guard: Guard
        self.events: list[AuditEvent] = []

    async def restart(self) -> None:
        await self.cluster.restart()
        now_s = self.cluster.clock.boottime_s
        authenticator = Authenticator(
            CertificateNames.of(DAEMONS, USERS), now_s=now_s, super_users=frozenset({"user:root"})
        )
        self.guard = Guard(authenticator, Audit(now_s, self.events.append))
        self.service = AccessService(self.cluster.coordinator.state, self.guard, self.daemons)
        self.service.load()

    @property
    def table(self) -> messages.AccessTable:
        return self.daemons.told["broker-a:1"].table


def caller(who: Identity | None) -> None:
    CALLER.set(None if who is None else Peer("grpc", "10.0.0.9:1", identity=who))


ROOT = Identity("root", is_super=True)


@pytest.fixture
async def secured(cluster: Cluster) -> AsyncIterator[Secured]:
    secured = Secured(cluster)
    await secured.restart()
    await cluster.register("broker-a")
    yield secured
    await secured.service.telling.close()


@pytest.fixture(autouse=True)
def nobody_asks() -> Iterator[None]:
    token = CALLER.set(None)
    yield
    CALLER.reset(token)


async def test_a_change_is_sent_to_all_daemons_before_it_is_answered(secured: Secured) -> None:
    answer = await secured.service.put_user(put(scram=VERIFIER))
    assert not answer.untold.members
    assert [user.name for user in secured.table.users] == ["alice"]
    assert secured.table.version == secured.guard.version > 0
    await secured.service.grant(messages.GrantRightRequest(rule=rule()))
    assert [each.rule_id for each in secured.table.rules] == [1]


async def test_all_daemons_have_the_same_decoys_after_a_restart(secured: Secured) -> None:
    await secured.service.put_user(put(scram=VERIFIER))
    decoys = secured.table.decoys
    assert len(decoys) == 32
    await secured.restart()
    await secured.service.grant(messages.GrantRightRequest(rule=rule()))
    assert secured.table.decoys == decoys
    assert secured.guard.authenticator.accounts.decoys == decoys


async def test_an_unreachable_daemon_is_named_and_gets_the_change_later(secured: Secured) -> None:
    secured.daemons.away.add("broker-a:1")
    answer = await secured.service.put_user(put(scram=VERIFIER))
    assert list(answer.untold.members) == ["broker 1: cannot connect to broker-a:1 within 2 s"]
    assert not secured.daemons.told
    secured.daemons.away.clear()
    secured.service.heard("broker", 1, 0)
    await secured.service.telling.idle()
    assert [user.name for user in secured.table.users] == ["alice"]
    secured.daemons.told.clear()
    secured.service.heard("broker", 1, secured.guard.version)
    await secured.service.telling.idle()
    assert not secured.daemons.told


async def test_an_uncertain_write_takes_effect_only_after_the_next_coordinator_loads_it(secured: Secured) -> None:
    secured.cluster.store.failure = MetadataStoreFailed("input/output error")
    with pytest.raises(MetadataStoreFailed):
        await secured.service.put_user(put(scram=VERIFIER))
    assert not secured.daemons.told
    assert secured.guard.authenticator.accounts.verifier_of("alice") is None
    secured.cluster.store.failure = None
    await secured.restart()
    assert secured.guard.authenticator.accounts.verifier_of("alice") is not None


async def test_every_change_is_audited_before_its_write_and_a_failed_one_once_more(secured: Secured) -> None:
    store = secured.cluster.store
    write = store.write

    async def after_it_is_told(*writes: Write | Check) -> None:
        assert [each.operation for each in secured.events] == ["user"]
        await write(*writes)

    store.write = after_it_is_told  # type: ignore[method-assign]
    await secured.service.put_user(put())
    store.write = write  # type: ignore[method-assign]
    secured.events.clear()
    store.failure = MetadataStoreFull("no room")
    with pytest.raises(MetadataStoreFull):
        await secured.service.delete_user(messages.DeleteUserRequest(name="alice"))
    assert [(each.operation, json.loads(each.reason).get("failed")) for each in secured.events] == [
        ("user", None),
        ("user", "no room"),
    ]


async def test_a_change_that_cannot_be_written_has_no_effect(secured: Secured) -> None:
    await secured.service.put_user(put(scram=VERIFIER))
    rule_id = (await secured.service.grant(messages.GrantRightRequest(rule=rule()))).rule.rule_id
    caller(Identity("alice", how="password"))
    token_id = (await secured.service.issue_token(messages.IssueTokenRequest())).token_id
    caller(None)
    before, told = secured.guard.authenticator.accounts, secured.table
    secured.daemons.told.clear()
    secured.cluster.store.failure = MetadataStoreFull("no room")

    for change in (
        secured.service.put_user(put("bob", scram=VERIFIER)),
        secured.service.put_user(messages.PutUserRequest(name="alice", roles=messages.Roles(names=["boss"]))),
        secured.service.delete_user(messages.DeleteUserRequest(name="alice")),
        secured.service.grant(messages.GrantRightRequest(rule=rule("user:bob"))),
        secured.service.revoke(messages.RevokeRightsRequest(rule_ids=[rule_id])),
        secured.service.revoke_token(messages.RevokeTokenRequest(token_id=token_id)),
    ):
        with pytest.raises(MetadataStoreFull):
            await change

    assert not secured.daemons.told
    assert secured.guard.authenticator.accounts is before
    secured.cluster.store.failure = None
    await secured.restart()
    assert [user.name for user in secured.service.list_users(messages.ListUsersRequest()).users] == ["alice"]
    after = secured.guard.authenticator.accounts
    assert (after.roles_of("alice"), len(told.rules)) == (before.roles_of("alice"), 1)
    assert after.until_s(token_id) is not None


async def test_users_rules_and_tokens_outlast_the_coordinator(secured: Secured) -> None:
    await secured.service.put_user(put(scram=VERIFIER))
    await secured.service.grant(messages.GrantRightRequest(rule=rule()))
    caller(Identity("alice", how="password"))
    await secured.service.issue_token(messages.IssueTokenRequest())
    before = secured.guard.authenticator.accounts
    await secured.restart()
    after = secured.guard.authenticator.accounts
    assert (after.version, after.verifier_of("alice")) == (before.version, before.verifier_of("alice"))
    assert secured.guard.may(Identity("alice"), READ, "stream:s")
    assert len(secured.service.list_tokens(messages.ListTokensRequest()).tokens) == 1


async def test_versions_of_access_tables_rise_with_the_clock(secured: Secured) -> None:
    await secured.service.put_user(put())
    first = secured.guard.version
    secured.cluster.clock.advance(1_600_000_000)
    await secured.service.put_user(put("bob"))
    assert secured.guard.version > first + 1  # so versions keep rising after a restore of older metadata


async def test_only_an_administrator_creates_and_changes_users(secured: Secured) -> None:
    caller(Identity("alice", how="password"))
    for request in (put(scram=VERIFIER), put("bob", create=False, scram=VERIFIER), put("alice", create=False)):
        with pytest.raises(NotAllowed):
            await secured.service.put_user(request)
    caller(ROOT)
    await secured.service.put_user(put(scram=VERIFIER))


@pytest.mark.parametrize(("how", "may"), [("password", True), ("token", False), ("certificate", False), ("jwt", False)])
async def test_users_who_logged_in_with_a_password_can_change_their_own(
    secured: Secured, how: str, *, may: bool
) -> None:
    await secured.service.put_user(put(scram=VERIFIER))
    caller(Identity("alice", how=how))
    request = put(create=False, scram=verifier_for("another one", iterations=ITERATIONS_MIN))
    if may:
        await secured.service.put_user(request)
        with pytest.raises(InvalidArgument, match="only an administrator of the cluster can remove a password"):
            await secured.service.put_user(put(create=False, scram=messages.ScramVerifier()))
    else:
        with pytest.raises(NotAllowed):
            await secured.service.put_user(request)


async def test_a_waiting_change_fails_when_its_caller_loses_the_rights(secured: Secured) -> None:
    changing = secured.cluster.coordinator.state.changing
    caller(Identity("alice"))
    await secured.service.grant(messages.GrantRightRequest(rule=rule("user:mallory", "cluster", ADMINISTER)))
    secured.guard.known.meet(mallory := Peer("grpc", "10.0.0.8:1"), Identity("mallory"))
    CALLER.set(mallory)
    async with changing:
        waiting = asyncio.create_task(secured.service.put_user(put("accomplice", scram=VERIFIER)))
        queued = asyncio.create_task(secured.cluster.coordinator.streams.delete("s"))
        await asyncio.sleep(0)
        table = messages.AccessTable()
        table.CopyFrom(secured.table)
        del table.rules[:]
        caller(ROOT)
        secured.guard.apply(table, secured.cluster.coordinator.state.coordinator_epoch)
    for task in (waiting, queued):
        with pytest.raises(AuthenticationFailed, match="your rights have changed"):
            await task
    assert not secured.service.list_users(messages.ListUsersRequest()).users


async def test_deleting_a_user_revokes_its_tokens_and_names_its_rules(secured: Secured) -> None:
    await secured.service.put_user(put(scram=VERIFIER))
    await secured.service.grant(messages.GrantRightRequest(rule=rule()))
    caller(Identity("alice", how="password"))
    await secured.service.issue_token(messages.IssueTokenRequest())
    caller(ROOT)
    answer = await secured.service.delete_user(messages.DeleteUserRequest(name="alice"))
    assert (answer.tokens_revoked, list(answer.rule_ids)) == (1, [1])
    assert not secured.table.tokens
    with pytest.raises(UnknownUser):
        await secured.service.delete_user(messages.DeleteUserRequest(name="alice"))


async def test_a_rule_about_a_missing_stream_and_user_gets_a_remark(secured: Secured) -> None:
    answer = await secured.service.grant(messages.GrantRightRequest(rule=rule()))
    assert answer.remark == (
        "there is no stream 's' now; no user 'alice' is kept here, which is right for one with a certificate or a JWT"
    )


async def test_a_rule_about_a_memory_domain_without_streams_gets_a_remark(secured: Secured) -> None:
    await secured.service.put_user(put(scram=VERIFIER))
    await secured.cluster.create("orders")
    await secured.cluster.alter("orders", memory_domain="finance")
    for name, remark in (
        ("domain:finance", ""),
        ("domain:fin*", ""),
        ("domain:finanze", "no stream is in memory domain 'finanze' now; did you mean 'finance'?"),
    ):
        answer = await secured.service.grant(messages.GrantRightRequest(rule=rule("user:alice", name)))
        assert answer.remark == remark


async def test_a_check_of_a_right_names_its_reason(secured: Secured) -> None:
    await secured.service.put_user(put(scram=VERIFIER, roles=messages.Roles(names=["etl"])))
    await secured.service.grant(messages.GrantRightRequest(rule=rule("role:etl", "stream:*", READ)))

    def asked(principal: str, operation: int, resource: str = "stream:s") -> tuple[bool, str]:
        request = messages.CheckRightRequest(principal=principal, resource=resource)
        request.operation = operation  # type: ignore[assignment]
        answer = secured.service.check(request)
        return answer.allowed, answer.reason

    caller(ROOT)
    assert asked("user:alice", READ) == (True, "rule 1")
    assert asked("user:alice", WRITE) == (False, "no rule allows it")
    assert asked("role:etl", READ) == (True, "rule 1")
    assert asked("user:*", READ) == (False, "no rule allows it")
    assert asked("user:root", WRITE) == (True, "it is a super user")
    for wrong in (("user:alice", 99), ("user:alice", READ, "stream:*"), ("alice", READ)):
        with pytest.raises(InvalidArgument):
            asked(*wrong)
    caller(Identity("alice", roles=frozenset({"etl"})))
    assert asked("", READ) == (True, "rule 1")
    with pytest.raises(NotAllowed):
        asked("user:bob", READ)


async def test_a_token_can_be_renewed_until_it_expires(secured: Secured) -> None:
    caller(Identity("alice", how="password"))
    issued = await secured.service.issue_token(messages.IssueTokenRequest(lifetime_ms=10_000))
    token = Token.parse(issued.token)
    assert token is not None
    assert secured.guard.authenticator.of_token(issued.token).user == "alice"
    renew = messages.RenewTokenRequest(token_id=issued.token_id)
    for _ in range(3):
        secured.cluster.clock.advance(8)
        assert (await secured.service.renew_token(renew)).expires_in_ms == 10_000
    secured.cluster.clock.advance(11)
    with pytest.raises(InvalidArgument, match="has expired"):
        await secured.service.renew_token(renew)
    longest = await secured.service.issue_token(messages.IssueTokenRequest(lifetime_ms=1 << 60))
    assert longest.expires_in_ms == TOKEN_LIFETIME_MS
    assert longest.renewable_for_ms == TOKEN_RENEWABLE_MS


async def test_users_cannot_see_renew_or_revoke_the_tokens_of_others(secured: Secured) -> None:
    caller(Identity("alice", how="password"))
    issued = await secured.service.issue_token(messages.IssueTokenRequest())
    caller(Identity("bob", how="password"))
    assert not secured.service.list_tokens(messages.ListTokensRequest()).tokens
    with pytest.raises(InvalidArgument, match="there is no token"):
        await secured.service.renew_token(messages.RenewTokenRequest(token_id=issued.token_id))
    with pytest.raises(InvalidArgument, match="there is no token"):
        await secured.service.revoke_token(messages.RevokeTokenRequest(token_id=issued.token_id))
    caller(ROOT)
    assert [each.owner for each in secured.service.list_tokens(messages.ListTokensRequest()).tokens] == ["alice"]
    await secured.service.revoke_token(messages.RevokeTokenRequest(token_id=issued.token_id))


async def test_a_token_gives_access_to_no_other_token_of_its_owner(secured: Secured) -> None:
    caller(Identity("alice"))
    shown, other = [await secured.service.issue_token(messages.IssueTokenRequest()) for _ in range(2)]
    caller(Identity("alice", how="token", token_id=shown.token_id))
    assert [each.token_id for each in secured.service.list_tokens(messages.ListTokensRequest()).tokens] == [
        shown.token_id
    ]
    await secured.service.renew_token(messages.RenewTokenRequest(token_id=shown.token_id))
    with pytest.raises(InvalidArgument, match="there is no token"):
        await secured.service.renew_token(messages.RenewTokenRequest(token_id=other.token_id))
    with pytest.raises(InvalidArgument, match="there is no token"):
        await secured.service.revoke_token(messages.RevokeTokenRequest(token_id=other.token_id))
    await secured.service.revoke_token(messages.RevokeTokenRequest(token_id=shown.token_id))


async def test_the_number_of_tokens_of_a_user_is_limited(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TOKENS_OF_USER_MAX", 2)
    caller(Identity("mallory"))
    for _ in range(2):
        await secured.service.issue_token(messages.IssueTokenRequest())
    with pytest.raises(InvalidArgument, match="mallory has 2 tokens already"):
        await secured.service.issue_token(messages.IssueTokenRequest())
    caller(Identity("alice"))
    assert (await secured.service.issue_token(messages.IssueTokenRequest())).token


async def test_callers_with_a_token_and_daemons_cannot_get_tokens(secured: Secured) -> None:
    caller(Identity("alice", how="token", token_id="x"))
    with pytest.raises(NotAllowed):
        await secured.service.issue_token(messages.IssueTokenRequest())
    for who in (None, Identity("", is_daemon=True)):
        caller(who)
        with pytest.raises(InvalidArgument, match="tokens are for users"):
            await secured.service.issue_token(messages.IssueTokenRequest())


async def test_users_see_only_the_rules_that_apply_to_them(secured: Secured) -> None:
    for principal in ("user:alice", "role:etl", "user:*", "user:bob"):
        await secured.service.grant(messages.GrantRightRequest(rule=rule(principal)))

    def seen() -> list[str]:
        return [each.principal for each in secured.service.list_rights(messages.ListRightsRequest()).rules]

    caller(Identity("alice", roles=frozenset({"etl"})))
    assert seen() == ["user:alice", "role:etl", "user:*"]
    caller(ROOT)
    assert len(seen()) == 4


async def test_users_can_be_stored_without_security_and_are_not_sent_to_daemons(cluster: Cluster) -> None:
    daemons = Daemons()
    service = AccessService(cluster.coordinator.state, None, daemons)
    service.load()
    await service.put_user(put(scram=VERIFIER))
    assert [user.name for user in service.list_users(messages.ListUsersRequest()).users] == ["alice"]
    assert not daemons.told
