"""Users, rules and tokens: who may do what in a cluster with security on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from kera.client import arguments
from kera.client.admin.quotas import NO_QUOTA, Quota
from kera.client.cluster.cluster import Cluster
from kera.core.access.passwords import verifier_for
from kera.core.base.spelling import hint
from kera.core.errors import InvalidArgument, Uncertain, UnknownUser
from kera.core.rpc import api
from kera.v1 import access_pb2 as messages

Operation = Literal["describe", "read", "write", "create", "alter", "delete", "use", "administer"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True, slots=True)
class User:
    """A user that the cluster keeps."""

    name: str
    roles: tuple[str, ...] = ()
    has_password: bool = False
    """Without one, it authenticates by a certificate or a token of another issuer."""
    created_us: int = 0
    changed_us: int = 0
    quota: Quota = NO_QUOTA
    """Its own; one that limits nothing: it has the default one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: a principal may do something with a resource, or, with `deny`, may not."""

    rule_id: int
    principal: str
    operations: tuple[Operation, ...]
    resource: str
    deny: bool = False
    created_us: int = 0
    created_by: str = ""


class Change(NamedTuple):
    """The result of a change: it is stored, and every daemon that has been notified applies it."""

    untold: tuple[str, ...]
    """Brokers and backups that may still go by what was before, each with the reason; they are told as soon as they are
    heard of."""


class Granted(NamedTuple):
    """A rule that was added, or was given more operations."""

    rule: Rule
    remark: str
    """For people: names in the rule that do not exist now."""
    change: Change


class Revoked(NamedTuple):
    """Rules that have lost operations."""

    rules: tuple[Rule, ...]
    """As they were."""
    change: Change


class DeletedUser(NamedTuple):
    """The parts of a user that were deleted with it, and those that stay."""

    tokens: int
    rule_ids: tuple[int, ...]
    """Rules that name the user: a new user with this name will have these rights."""
    change: Change


class Check(NamedTuple):
    """Whether somebody may do something."""

    allowed: bool
    reason: str
    rule_id: int
    """Id of the rule that decided; 0: none did."""


@dataclass(frozen=True, slots=True)
class Token:
    """A delegation token: who shows it has the rights of its owner, or some of them."""

    token_id: str
    owner: str
    resources: tuple[str, ...]
    """It is narrowed to; empty: it is not."""
    expires_in_ms: int
    secret: str = field(default="", repr=False)
    """The text to show as a token; only the caller that created it gets it."""
    renewable_for_ms: int = 0
    """For how long it can be renewed, known of one that was just issued."""
    untold: tuple[str, ...] = ()
    """See `Change.untold`, of one that was just issued."""


class RenewedToken(NamedTuple):
    """A token that is good for longer."""

    expires_in_ms: int
    change: Change
    """Daemons in `untold` may end the token when it would have ended before."""


class Access:
    """Users, rules and tokens. Get it as `Client.access`.

    All methods raise `NotAllowed` for who may not administer the cluster, but for what is one's own.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create_user(self, name: str, password: str | None = None, roles: Sequence[str] = ()) -> Change:
        """Make a user. What the password is checked against is made here: it does not leave this process.

        Raises `InvalidArgument` and `UserExists`.
        """
        request = messages.PutUserRequest(name=arguments.text("name", name, "a user's"), create=True)
        if password is not None:
            request.scram.CopyFrom(verifier_for(password))
        request.roles.names.extend(arguments.names("roles", roles))
        return _change((await self._cluster.ask(api.PUT_USER, request)).untold)

    async def set_password(self, name: str, password: str | None) -> Change:
        """Give a user another password, or none; what was authenticated with the old one ends.

        One's own can be changed by everybody. Raises `InvalidArgument` and `UnknownUser`.
        """
        scram = messages.ScramVerifier() if password is None else verifier_for(password)
        request = messages.PutUserRequest(name=arguments.text("name", name, "a user's"), scram=scram)
        return _change((await self._cluster.ask(api.PUT_USER, request)).untold)

    async def set_roles(self, name: str, roles: Sequence[str]) -> Change:
        """Have a user be these roles, and no others. Raises `InvalidArgument` and `UnknownUser`."""
        request = messages.PutUserRequest(
            name=arguments.text("name", name, "a user's"),
            roles=messages.Roles(names=arguments.names("roles", roles)),
        )
        return _change((await self._cluster.ask(api.PUT_USER, request)).untold)

    async def set_quota(
        self,
        name: str,
        *,
        bytes_in_per_s: int | None = None,
        bytes_out_per_s: int | None = None,
        requests_per_s: int | None = None,
        connections: int | None = None,
        streams: int | None = None,
        stored_bytes: int | None = None,
    ) -> Change:
        """Limit what a user may use, see `Quota`, by this and nothing else; without limits: by the default quota.

        It holds at once, and ends no connection. Raises `InvalidArgument` and `UnknownUser`.
        """
        quota = Quota(bytes_in_per_s, bytes_out_per_s, requests_per_s, connections, streams, stored_bytes)
        if not arguments.text("name", name, "a user's"):
            raise InvalidArgument("a quota needs the name of a user; that of all others is set with set_default_quota")
        return await self._set_quota(name, quota)

    async def set_default_quota(
        self,
        *,
        bytes_in_per_s: int | None = None,
        bytes_out_per_s: int | None = None,
        requests_per_s: int | None = None,
        connections: int | None = None,
        streams: int | None = None,
        stored_bytes: int | None = None,
    ) -> Change:
        """The same of each user that has no quota of its own, and is not a super user."""
        quota = Quota(bytes_in_per_s, bytes_out_per_s, requests_per_s, connections, streams, stored_bytes)
        return await self._set_quota("", quota)

    async def default_quota(self) -> Quota:
        """The quota of each user that has none of its own, and is not a super user."""
        answer = await self._cluster.ask(api.LIST_USERS, messages.ListUsersRequest())
        return Quota.from_message(answer.default_quota)

    async def delete_user(self, name: str) -> DeletedUser:
        """Forget a user, and revoke its tokens. Raises `UnknownUser`."""
        request = messages.DeleteUserRequest(name=arguments.text("name", name, "a user's"))
        try:
            answer = await self._cluster.ask(api.DELETE_USER, request)
        except UnknownUser as error:
            if not isinstance(error.__cause__, Uncertain):
                raise
            answer = messages.DeleteUserResponse()  # an attempt that got no answer has deleted it, most likely
        return DeletedUser(answer.tokens_revoked, tuple(answer.rule_ids), _change(answer.untold))

    async def users(self) -> list[User]:
        """All, by name."""
        answer = await self._cluster.ask(api.LIST_USERS, messages.ListUsersRequest())
        return [
            User(
                each.name,
                tuple(each.roles),
                each.HasField("scram"),
                each.created_us,
                each.changed_us,
                Quota.from_message(each.quota),
            )
            for each in answer.users
        ]

    async def grant(
        self, principal: str, operations: Iterable[Operation], resource: str, *, deny: bool = False
    ) -> Granted:
        """Let `principal` (``user:alice``, ``role:etl``, ``user:*``) do these things with `resource`.

        That is ``stream:orders``, ``group:etl``, ``producer:loader``, each also with a ``*`` at its end, or
        ``cluster``. `deny`: forbid it, which counts more than any rule that allows it. Raises `InvalidArgument`.
        """
        rule = _rule(principal, operations, resource, deny=deny)
        answer = await self._cluster.ask(api.GRANT_RIGHT, messages.GrantRightRequest(rule=rule))
        return Granted(_as_rule(answer.rule), answer.remark, _change(answer.untold))

    async def revoke(
        self, principal: str, resource: str, operations: Iterable[Operation] = (), *, deny: bool = False
    ) -> Revoked:
        """Take operations (none: all) away from the rule of `principal` about `resource`. Raises `InvalidArgument`."""
        request = messages.RevokeRightsRequest(rule=_rule(principal, operations, resource, deny=deny))
        return await self._revoke(request)

    async def revoke_rules(self, rule_ids: Iterable[int]) -> Revoked:
        """Take rules away. Raises `InvalidArgument`."""
        return await self._revoke(messages.RevokeRightsRequest(rule_ids=rule_ids))

    async def rules(self, principal: str = "", resource: str = "") -> list[Rule]:
        """The rules that count for a principal and a resource, as far as these are named; one's own all may see.

        For a user, those of its roles count, too, and those of everybody; about a resource, those with a prefix of it.
        Raises `InvalidArgument`.
        """
        request = messages.ListRightsRequest(principal=principal, resource=resource)
        return [_as_rule(each) for each in (await self._cluster.ask(api.LIST_RIGHTS, request)).rules]

    async def check(self, operation: Operation, resource: str, principal: str = "") -> Check:
        """Whether somebody may do something, and why; without `principal`: who asks. Raises `InvalidArgument`."""
        request = messages.CheckRightRequest(principal=principal, operation=_operation(operation), resource=resource)
        answer = await self._cluster.ask(api.CHECK_RIGHT, request)
        return Check(answer.allowed, answer.reason, answer.rule_id)

    async def issue_token(self, resources: Iterable[str] = (), *, lifetime_ms: int = 0) -> Token:
        """A token with the rights of who asks, narrowed to `resources` if any are named; 0 ms: as long as may be.

        Who has it can authenticate with it, and do what its owner may: keep it as a password. Raises `InvalidArgument`.
        """
        request = messages.IssueTokenRequest(resources=resources, lifetime_ms=lifetime_ms)
        answer = await self._cluster.ask(api.ISSUE_TOKEN, request)
        return Token(
            answer.token_id,
            "",
            tuple(request.resources),
            answer.expires_in_ms,
            answer.token,
            answer.renewable_for_ms,
            tuple(answer.untold.members),
        )

    async def renew_token(self, token_id: str) -> RenewedToken:
        """Have a token be good for as long again. Raises `InvalidArgument`."""
        answer = await self._cluster.ask(api.RENEW_TOKEN, messages.RenewTokenRequest(token_id=token_id))
        return RenewedToken(answer.expires_in_ms, _change(answer.untold))

    async def revoke_token(self, token_id: str) -> Change:
        """End a token now. Raises `InvalidArgument`."""
        answer = await self._cluster.ask(api.REVOKE_TOKEN, messages.RevokeTokenRequest(token_id=token_id))
        return _change(answer.untold)

    async def tokens(self) -> list[Token]:
        """One's own; all, for who administers the cluster."""
        answer = await self._cluster.ask(api.LIST_TOKENS, messages.ListTokensRequest())
        return [Token(each.token_id, each.owner, tuple(each.resources), each.expires_in_ms) for each in answer.tokens]

    async def _set_quota(self, name: str, quota: Quota) -> Change:
        request = messages.PutUserRequest(name=name, quota=quota.to_message())
        return _change((await self._cluster.ask(api.PUT_USER, request)).untold)

    async def _revoke(self, request: messages.RevokeRightsRequest) -> Revoked:
        answer = await self._cluster.ask(api.REVOKE_RIGHTS, request)
        return Revoked(tuple(map(_as_rule, answer.revoked)), _change(answer.untold))


def _operation(word: str) -> messages.Operation.ValueType:
    if word not in OPERATIONS:
        raise InvalidArgument(f"{word!r} is not an operation{hint(word, OPERATIONS)}")
    return messages.Operation.Value(f"OPERATION_{word.upper()}")


def _rule(principal: str, operations: Iterable[str], resource: str, *, deny: bool) -> messages.AccessRule:
    return messages.AccessRule(
        principal=principal, operations=map(_operation, operations), resource=resource, deny=deny
    )


def _as_rule(rule: messages.AccessRule) -> Rule:
    operations = tuple(each for each in OPERATIONS if _operation(each) in rule.operations)
    return Rule(rule.rule_id, rule.principal, operations, rule.resource, rule.deny, rule.created_us, rule.created_by)


def _change(untold: messages.Untold) -> Change:
    return Change(tuple(untold.members))
