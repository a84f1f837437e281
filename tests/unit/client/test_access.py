"""The SDK's calls about users, rules and tokens. Tests against a real cluster are in tests/integration."""

from __future__ import annotations

from typing import Any

import pytest

from kera.client.admin.access import Access, DeletedUser
from kera.client.admin.quotas import Quota
from kera.core.errors import InvalidArgument, Uncertain, UnknownUser
from kera.v1 import access_pb2 as messages
from tests.unit.client.support import Asked


def access(answer: Any) -> tuple[Access, Asked]:
    cluster = Asked(answer)
    return Access(cluster), cluster  # type: ignore[arg-type]


async def test_a_password_does_not_leave_the_process() -> None:
    made, cluster = access(messages.PutUserResponse())
    await made.create_user("alice", "correct horse battery", ["etl"])
    (request,) = cluster.requests
    assert request.scram.stored_key
    assert b"horse" not in request.SerializeToString()


async def test_setting_a_quota_replaces_the_previous_quota() -> None:
    made, cluster = access(messages.PutUserResponse())
    await made.set_quota("alice", bytes_in_per_s=5, streams=0)
    await made.set_quota("alice")
    await made.set_default_quota(connections=3)
    own, cleared, default = cluster.requests
    assert (own.name, own.quota) == ("alice", messages.Quota(bytes_in_per_s=5, streams=0))
    assert cleared.HasField("quota")
    assert cleared.quota == messages.Quota()
    assert (default.name, default.quota) == ("", messages.Quota(connections=3))
    for wrong in ({"bytes_in_per_s": 0}, {"streams": -1}, {"connections": "3"}, {"requests_per_s": 1.5}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            await made.set_quota("alice", **wrong)
    with pytest.raises(InvalidArgument):
        await made.set_quota(None, streams=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="set_default_quota"):
        await made.set_quota("", streams=1)  # a missing name must not set the quota of all users


async def test_users_are_listed_with_their_quotas() -> None:
    users = [messages.UserRecord(name="alice", quota=messages.Quota(streams=0)), messages.UserRecord(name="bob")]
    made, _ = access(messages.ListUsersResponse(users=users, default_quota=messages.Quota(requests_per_s=9)))
    assert [each.quota for each in await made.users()] == [Quota(streams=0), Quota()]
    assert [bool(each.quota) for each in await made.users()] == [True, False]
    assert await made.default_quota() == Quota(requests_per_s=9)


async def test_a_retried_deletion_succeeds_when_the_user_is_gone() -> None:
    error = UnknownUser("there is no user 'alice'")
    made, cluster = access(error)
    with pytest.raises(UnknownUser):
        await made.delete_user("alice")
    error.__cause__ = Uncertain("no answer")
    cluster.answer = error
    assert await made.delete_user("alice") == DeletedUser(0, (), ((),))  # type: ignore[arg-type]


async def test_an_issued_token_has_its_lifetime_and_the_members_not_yet_informed() -> None:
    untold = messages.Untold(members=["broker 3: gone"])
    answer = messages.IssueTokenResponse(token="kera_a_b", token_id="a", expires_in_ms=1, renewable_for_ms=2)
    answer.untold.CopyFrom(untold)
    made, cluster = access(answer)
    token = await made.issue_token(["stream:s"])
    assert (token.expires_in_ms, token.renewable_for_ms, token.untold) == (1, 2, ("broker 3: gone",))
    assert "kera_a_b" not in repr(token)
    cluster.answer = messages.RenewTokenResponse(expires_in_ms=3, untold=untold)
    assert await made.renew_token("a") == (3, (("broker 3: gone",),))


async def test_roles_that_are_not_a_list_are_refused() -> None:
    made, cluster = access(messages.PutUserResponse())
    for wrong in ("etl", 3):
        with pytest.raises(InvalidArgument, match="roles"):
            await made.set_roles("alice", wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="roles"):
            await made.create_user("alice", roles=wrong)  # type: ignore[arg-type]
    assert not cluster.requests
