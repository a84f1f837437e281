"""Users, rules and tokens of a cluster with security on."""

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
    """The user's own quota; if it limits nothing, the default quota applies."""


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
    """Brokers and backups that may still use the previous state, each with the reason; they are notified as soon as
    they contact the coordinator."""


class Granted(NamedTuple):
    """A rule that was added, or has got more operations."""

    rule: Rule
    remark: str
    """A remark to show to people: names in the rule that do not exist now."""
    change: Change


class Revoked(NamedTuple):
    """Rules that have lost operations."""

    rules: tuple[Rule, ...]
    """The rules as they were before."""
    change: Change


class DeletedUser(NamedTuple):
    """A deleted user, the things deleted with it, and the things that remain."""

    tokens: int
    rule_ids: tuple[int, ...]
    """Ids of rules that name the user: a new user with this name will have these rights."""
    change: Change


class Check(NamedTuple):
    """Whether a principal may do an operation."""

    allowed: bool
    reason: str
    rule_id: int
    """Id of the rule that decided; 0: none did."""


@dataclass(frozen=True, slots=True)
class Token:
    """A delegation token: its bearer has the rights of its owner, or some of them."""

    token_id: str
    owner: str
    resources: tuple[str, ...]
    """Resources that it is restricted to; empty: it is not restricted."""
    expires_in_ms: int
    secret: str = field(default="", repr=False)
    """The text to authenticate with; only the caller that created the token gets it."""
    renewable_for_ms: int = 0
    """Time for which it can be renewed; only set for a token that was just issued."""
    untold: tuple[str, ...] = ()
    """See `Change.untold`; only set for a token that was just issued."""


class RenewedToken(NamedTuple):
    """A token whose validity was extended."""

    expires_in_ms: int
    change: Change
    """Daemons in its `untold` may end the token at its previous end."""


class Access:
    """Users, rules and tokens. Get it as `Client.access`.

    All methods raise `NotAllowed` if the caller may not administer the cluster, except for the caller's own objects.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create_user(self, name: str, password: str | None = None, roles: Sequence[str] = ()) -> Change:
        """Make a user. The password does not leave this process: only a verifier for it is sent.

        Raises `InvalidArgument` and `UserExists`.
        """
        request = messages.PutUserRequest(name=arguments.text("name", name, "a user's"), create=True)
        if password is not None:
            request.scram.CopyFrom(verifier_for(password))
        request.roles.names.extend(arguments.names("roles", roles))
        return _change((await self._cluster.ask(api.PUT_USER, request)).untold)

    async def set_password(self, name: str, password: str | None) -> Change:
        """Give a user another password, or none; connections authenticated with the old one end.

        Every user can change their own. Raises `InvalidArgument` and `UnknownUser`.
        """
        scram = messages.ScramVerifier() if password is None else verifier_for(password)
        request = messages.PutUserRequest(name=arguments.text("name", name, "a user's"), scram=scram)
        return _change((await self._cluster.ask(api.PUT_USER, request)).untold)

    async def set_roles(self, name: str, roles: Sequence[str]) -> Change:
        """Give a user exactly these roles. Raises `InvalidArgument` and `UnknownUser`."""
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
        """Replace the quota of a user, see `Quota`; without any limits, the default quota applies.

        It takes effect at once, and ends no connection. Raises `InvalidArgument` and `UnknownUser`.
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
        """Set the quota of all users without their own quota, except super users; see `set_quota`."""
        quota = Quota(bytes_in_per_s, bytes_out_per_s, requests_per_s, connections, streams, stored_bytes)
        return await self._set_quota("", quota)

    async def default_quota(self) -> Quota:
        """Return the quota of all users without their own quota, except super users."""
        answer = await self._cluster.ask(api.LIST_USERS, messages.ListUsersRequest())
        return Quota.from_message(answer.default_quota)

    async def delete_user(self, name: str) -> DeletedUser:
        """Delete a user, and revoke its tokens. Raises `UnknownUser`."""
        request = messages.DeleteUserRequest(name=arguments.text("name", name, "a user's"))
        try:
            answer = await self._cluster.ask(api.DELETE_USER, request)
        except UnknownUser as error:
            if not isinstance(error.__cause__, Uncertain):
                raise
            answer = messages.DeleteUserResponse()  # most likely an earlier attempt without an answer has deleted it
        return DeletedUser(answer.tokens_revoked, tuple(answer.rule_ids), _change(answer.untold))

    async def users(self) -> list[User]:
        """Return all users, by name."""
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
        """Let `principal` (``user:alice``, ``role:etl``, ``user:*``) do these operations on `resource`.

        A resource is ``stream:orders``, ``group:etl``, ``producer:loader``, each also with a ``*`` at its end, or
        ``cluster``. `deny`: forbid them, which overrides any rule that allows them. Raises `InvalidArgument`.
        """
        rule = _rule(principal, operations, resource, deny=deny)
        answer = await self._cluster.ask(api.GRANT_RIGHT, messages.GrantRightRequest(rule=rule))
        return Granted(_as_rule(answer.rule), answer.remark, _change(answer.untold))

    async def revoke(
        self, principal: str, resource: str, operations: Iterable[Operation] = (), *, deny: bool = False
    ) -> Revoked:
        """Remove operations from the rule of `principal` about `resource`; if none are given, all of them.

        Raises `InvalidArgument`.
        """
        request = messages.RevokeRightsRequest(rule=_rule(principal, operations, resource, deny=deny))
        return await self._revoke(request)

    async def revoke_rules(self, rule_ids: Iterable[int]) -> Revoked:
        """Remove rules. Raises `InvalidArgument`."""
        return await self._revoke(messages.RevokeRightsRequest(rule_ids=rule_ids))

    async def rules(self, principal: str = "", resource: str = "") -> list[Rule]:
        """Return the rules that apply to a principal and a resource, if given; every user may see their own.

        For a user, rules of its roles and rules for everybody apply, too; for a resource, rules with a prefix of it.
        Raises `InvalidArgument`.
        """
        request = messages.ListRightsRequest(principal=principal, resource=resource)
        return [_as_rule(each) for each in (await self._cluster.ask(api.LIST_RIGHTS, request)).rules]

    async def check(self, operation: Operation, resource: str, principal: str = "") -> Check:
        """Return whether a principal, by default the caller, may do an operation, and why. Raises `InvalidArgument`."""
        request = messages.CheckRightRequest(principal=principal, operation=_operation(operation), resource=resource)
        answer = await self._cluster.ask(api.CHECK_RIGHT, request)
        return Check(answer.allowed, answer.reason, answer.rule_id)

    async def issue_token(self, resources: Iterable[str] = (), *, lifetime_ms: int = 0) -> Token:
        """Issue a token with the caller's rights, restricted to `resources` if any are given.

        `lifetime_ms`: 0 for as long as possible. Anyone with the token can authenticate with it, and has
        the rights of its owner: keep it like a password. Raises `InvalidArgument`.
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
        """Extend a token by its lifetime. Raises `InvalidArgument`."""
        answer = await self._cluster.ask(api.RENEW_TOKEN, messages.RenewTokenRequest(token_id=token_id))
        return RenewedToken(answer.expires_in_ms, _change(answer.untold))

    async def revoke_token(self, token_id: str) -> Change:
        """End a token now. Raises `InvalidArgument`."""
        answer = await self._cluster.ask(api.REVOKE_TOKEN, messages.RevokeTokenRequest(token_id=token_id))
        return _change(answer.untold)

    async def tokens(self) -> list[Token]:
        """Return the caller's tokens; all tokens if the caller may administer the cluster."""
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
