"""Requests about users, rules and tokens. A change is answered once it is stored and sent (``telling``)."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kera.coordinator.access.changes import (
    TOKEN_RESOURCES_MAX,
    TOKENS_MAX,
    TOKENS_OF_USER_MAX,
    changed_user,
    checked_quota,
    granted,
    revoked,
)
from kera.coordinator.access.records import (
    DECOYS,
    DEFAULT_QUOTA,
    LAST_RULE_ID,
    VERSION,
    AccessRecords,
    rule_key,
    token_key,
    user_key,
)
from kera.coordinator.access.telling import Telling, TellMember
from kera.coordinator.cluster.audited import audited
from kera.coordinator.cluster.catalog import Catalog
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.state import State
from kera.coordinator.store.ledger import number
from kera.core.access.accounts import Token
from kera.core.access.identity import EVERYBODY, USER, Identity, check_name, check_principal
from kera.core.access.rights import CLUSTER, Operation, Rights, check_resource, covers, operation_word
from kera.core.base.spelling import closest
from kera.core.errors import InvalidArgument, NotAllowed, UnknownStream, UnknownUser
from kera.core.rpc import api
from kera.core.rpc.method import Peer
from kera.server.access.guard import CALLER, Guard
from kera.v1 import access_pb2 as messages

TOKEN_LIFETIME_MS = 24 * 3600 * 1000
"""Maximum lifetime of a token, until it has to be renewed."""
DECOYS_BYTES = 32
TOKEN_RENEWABLE_MS = 7 * 24 * 3600 * 1000
"""How long after its issue a token can be renewed."""


Say = Callable[..., None]
"""Says a change for the audit: in a word or two, with its fields."""
COMPARED_MAX = 1000
"""Maximum of stream names that are compared to suggest a name: comparing more would delay other requests."""


def remark_on(rule: messages.AccessRule, catalog: Catalog, records: AccessRecords) -> str:
    """Return a remark on a valid rule that names things that do not exist, probably by mistake; empty: no remark."""
    remarks = []
    kind, _, name = rule.resource.partition(":")
    if kind == "stream" and not name.endswith("*"):
        try:
            catalog.named(name)
        except UnknownStream:
            known = [stream.name for stream in catalog.streams()] if len(catalog) <= COMPARED_MAX else []
            meant = closest(name, known)
            remarks.append(f"there is no stream {name!r} now" + (f"; did you mean {meant!r}?" if meant else ""))
    if kind == "domain" and not name.endswith("*"):
        domains = {stream.config.memory_domain for stream in catalog.streams()}
        if name not in domains:
            meant = closest(name, sorted(domains))
            text = f"no stream is in memory domain {name!r} now"
            remarks.append(text + (f"; did you mean {meant!r}?" if meant else ""))
    user = rule.principal.removeprefix(USER)
    if rule.principal.startswith(USER) and rule.principal != EVERYBODY and records.user(user) is None:
        remarks.append(f"no user {user!r} is kept here, which is right for one with a certificate or a JWT")
    return "; ".join(remarks)


class AccessService:
    """Serves requests about users, rights and tokens.

    A change is answered once it is stored and sent to all daemons; the answer names those that did not take it.
    """

    def __init__(self, state: State, guard: Guard | None, tell: TellMember) -> None:
        """`guard`: the coordinator's own; None: security is off, and daemons get no table."""
        self._state = state
        self._guard = guard
        self._records = AccessRecords(state.ledger)
        self.telling = Telling(state, self._table, tell)

    @property
    def is_on(self) -> bool:
        """Whether users and rules are enforced."""
        return self._guard is not None

    def load(self) -> None:
        """Apply the users and rules that the ledger has."""
        self._apply()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        handlers: Mapping[Any, Callable[[Any], Any]] = {
            api.PUT_USER: self.put_user,
            api.DELETE_USER: self.delete_user,
            api.LIST_USERS: self.list_users,
            api.GRANT_RIGHT: self.grant,
            api.REVOKE_RIGHTS: self.revoke,
            api.LIST_RIGHTS: self.list_rights,
            api.CHECK_RIGHT: self.check,
            api.ISSUE_TOKEN: self.issue_token,
            api.RENEW_TOKEN: self.renew_token,
            api.REVOKE_TOKEN: self.revoke_token,
            api.LIST_TOKENS: self.list_tokens,
        }
        return handlers

    def heard(self, noun: str, member_id: int, version: int) -> None:
        """Take note of the version of the table that a member applies."""
        if self._guard is not None:
            self.telling.heard(noun, member_id, version, self._records.version)

    # -- users -----------------------------------------------------------------------------------------------------

    async def put_user(self, request: messages.PutUserRequest) -> messages.PutUserResponse:
        """Create or change a user. Raises `InvalidArgument`, and `NotAllowed`.

        A caller that is no administrator may only change its own password.
        """
        if not self._administers():
            who = _caller()
            # A caller with other credentials, such as a token, could keep its access beyond them with a new password.
            own = who is not None and who.user == request.name and who.how == "password" and request.HasField("scram")
            if not own or request.create or request.HasField("roles") or request.HasField("quota"):
                raise self._not_allowed("administer", CLUSTER)
            if request.scram == messages.ScramVerifier():
                raise InvalidArgument("only an administrator of the cluster can remove a password")
        return messages.PutUserResponse(untold=await self._change(partial(self._put_user, request)))

    def _put_user(self, request: messages.PutUserRequest, say: Say) -> dict[str, bytes | None]:
        if not request.name:
            if not request.HasField("quota"):
                raise InvalidArgument("a user needs a name; without one, only the default quota can be set")
            say("default quota", quota=_limits(request.quota))
            return {DEFAULT_QUOTA: checked_quota(request.quota).SerializeToString()}
        known = self._records.user(request.name)
        version = self._state.number_after(0 if known is None else known.password_version)
        now_us = self._state.clock.now_us()
        record = changed_user(known, request, users=self._records.user_count, version=version, now_us=now_us)
        quota = {"quota": _limits(request.quota)} if request.HasField("quota") else {}
        say("user", user=record.name, created=known is None, password=request.HasField("scram"), **quota)
        return {user_key(record.name): record.SerializeToString()}

    async def delete_user(self, request: messages.DeleteUserRequest) -> messages.DeleteUserResponse:
        """Delete a user and its tokens. Raises `UnknownUser`."""
        answer = messages.DeleteUserResponse()

        def delete(say: Say) -> dict[str, bytes | None]:
            name = request.name
            tokens = [token.token_id for token in self._records.tokens() if token.owner == name]
            if self._records.user(name) is None:
                raise UnknownUser(f"there is no user {name!r}: kera user list shows all", user=name)
            answer.tokens_revoked = len(tokens)
            answer.rule_ids[:] = [rule.rule_id for rule in self._records.rules() if rule.principal == USER + name]
            say("user", user=name, deleted=True, tokens=len(tokens))
            return {user_key(name): None, **{token_key(token_id): None for token_id in tokens}}

        answer.untold.CopyFrom(await self._change(delete))
        return answer

    def list_users(self, _: messages.ListUsersRequest) -> messages.ListUsersResponse:
        """Return all users, without the secrets against which passwords are checked."""
        users = self._records.users()
        for user in users:
            if user.HasField("scram"):
                user.scram.CopyFrom(messages.ScramVerifier(iterations=user.scram.iterations))
        return messages.ListUsersResponse(users=users, default_quota=self._records.default_quota())

    # -- rules -----------------------------------------------------------------------------------------------------

    async def grant(self, request: messages.GrantRightRequest) -> messages.GrantRightResponse:
        """Add a rule, or operations to an existing rule. Raises `InvalidArgument`."""
        answer = messages.GrantRightResponse()

        def add(say: Say) -> dict[str, bytes | None]:
            rule_id = self._state.ledger.next_number(LAST_RULE_ID)
            rule = granted(
                self._records.rules(),
                request.rule,
                rule_id=rule_id,
                by=_caller_principal(),
                now_us=self._state.clock.now_us(),
            )
            answer.rule.CopyFrom(rule)
            new = {LAST_RULE_ID: number(rule_id)} if rule.rule_id == rule_id else {}
            say("right granted", **_fields(rule))
            return {rule_key(rule.rule_id): rule.SerializeToString(), **new}

        answer.untold.CopyFrom(await self._change(add))
        answer.remark = remark_on(answer.rule, self._state.catalog, self._records)
        return answer

    async def revoke(self, request: messages.RevokeRightsRequest) -> messages.RevokeRightsResponse:
        """Remove rules, or operations from a rule. Raises `InvalidArgument`."""
        answer = messages.RevokeRightsResponse()

        def take(say: Say) -> dict[str, bytes | None]:
            before, after = revoked(self._records.rules(), request)
            answer.revoked.extend(before)
            for rule in before:
                say("right revoked", **_fields(rule))
            return {
                rule_key(rule_id): None if rule is None else rule.SerializeToString() for rule_id, rule in after.items()
            }

        answer.untold.CopyFrom(await self._change(take))
        return answer

    def list_rights(self, request: messages.ListRightsRequest) -> messages.ListRightsResponse:
        """Return the rules that apply to a principal or to a resource. Callers that do not administer see only their
        own.

        Raises `InvalidArgument`.
        """
        mine = None if self._administers() else _principals_of(_caller())
        theirs = _principals_of(self._who(request.principal)) | {request.principal} if request.principal else None
        resource = check_resource(request.resource) if request.resource else ""
        return messages.ListRightsResponse(
            rules=[
                rule
                for rule in self._records.rules()
                if (mine is None or rule.principal in mine)
                and (theirs is None or rule.principal in theirs)
                and (not resource or covers(rule.resource, resource))
            ]
        )

    def check(self, request: messages.CheckRightRequest) -> messages.CheckRightResponse:
        """Decide whether a principal may do something, and why.

        Raises `InvalidArgument`, and `NotAllowed` if the caller may not ask about others.
        """
        resource = check_resource(request.resource)
        if resource.endswith("*"):
            raise InvalidArgument("ask about one resource, without a * at its end")
        try:
            operation = Operation(request.operation)
        except ValueError as error:
            raise InvalidArgument(f"unknown operation {operation_word(request.operation)}") from error
        who = _caller()
        if request.principal and (who is None or request.principal != who.principal):
            if not self._administers():
                raise self._not_allowed("administer", CLUSTER)
            who = self._who(request.principal)
        if who is None:
            raise InvalidArgument("whose right? name a principal: user:NAME")
        decision = Rights(self._records.rules()).decide(who, operation, resource)
        return messages.CheckRightResponse(allowed=decision.allowed, reason=decision.reason, rule_id=decision.rule_id)

    def _who(self, principal: str) -> Identity:
        check_principal(principal)
        name = principal.removeprefix(USER)
        if not principal.startswith(USER) or name == "*":
            return Identity("*", roles=frozenset({principal.partition(":")[2]} - {"*"}))
        user = self._records.user(name)
        roles = frozenset() if user is None else frozenset(user.roles)
        who = Identity(name, roles=roles)
        return who if self._guard is None else self._guard.authenticator.known(who)

    # -- tokens ----------------------------------------------------------------------------------------------------

    async def issue_token(self, request: messages.IssueTokenRequest) -> messages.IssueTokenResponse:
        """Issue the caller a token with its own rights, or some of them. Raises `InvalidArgument` and `NotAllowed`."""
        who = _caller()
        if who is None or not who.user:
            raise InvalidArgument("tokens are for users: authenticate as one")
        if who.token_id:
            raise NotAllowed(
                "a client that authenticated with a token cannot get another one; authenticate as the token's owner",
                principal=who.principal,
                operation="issue",
                resource="token",
            )
        if len(request.resources) > TOKEN_RESOURCES_MAX:
            raise InvalidArgument(f"a token is narrowed to at most {TOKEN_RESOURCES_MAX} resources")
        resources = [check_resource(each) for each in request.resources]
        token = Token(secrets.token_hex(8), secrets.token_hex(32))
        lifetime_ms = min(request.lifetime_ms or TOKEN_LIFETIME_MS, TOKEN_LIFETIME_MS)
        user = check_name("user", who.user)

        def add(say: Say) -> dict[str, bytes | None]:
            now_us, tokens = self._state.clock.now_us(), self._records.tokens()
            gone = {token_key(each.token_id): None for each in tokens if each.expires_us <= now_us}
            if len(tokens) - len(gone) >= TOKENS_MAX:
                raise InvalidArgument(f"there are {len(tokens)} tokens already; revoke some", limit=TOKENS_MAX)
            own = sum(each.owner == user and each.expires_us > now_us for each in tokens)
            if own >= TOKENS_OF_USER_MAX:
                raise InvalidArgument(f"{user} has {own} tokens already; revoke some", limit=TOKENS_OF_USER_MAX)
            record = messages.TokenRecord(
                token_id=token.token_id,
                digest=token.digest,
                owner=user,
                owner_roles=sorted(who.brought),
                resources=resources,
                created_us=now_us,
                expires_us=now_us + lifetime_ms * 1000,
                lifetime_ms=lifetime_ms,
                renewable_until_us=now_us + TOKEN_RENEWABLE_MS * 1000,
            )
            say("token issued", token_id=token.token_id, resources=resources)
            return {**gone, token_key(token.token_id): record.SerializeToString()}

        untold = await self._change(add)
        return messages.IssueTokenResponse(
            token=str(token),
            token_id=token.token_id,
            expires_in_ms=lifetime_ms,
            renewable_for_ms=TOKEN_RENEWABLE_MS,
            untold=untold,
        )

    async def renew_token(self, request: messages.RenewTokenRequest) -> messages.RenewTokenResponse:
        """Extend a token by its lifetime, up to the end of its renewals. Raises `InvalidArgument`."""
        answer = messages.RenewTokenResponse()

        def renew(say: Say) -> dict[str, bytes | None]:
            record, now_us = self._token(request.token_id), self._state.clock.now_us()
            expires_us = min(now_us + record.lifetime_ms * 1000, record.renewable_until_us)
            if record.expires_us <= now_us or expires_us <= now_us:
                raise InvalidArgument(f"token {request.token_id} has expired; get a new one")
            record.expires_us = max(record.expires_us, expires_us)
            answer.expires_in_ms = (record.expires_us - now_us) // 1000
            say("token renewed", token_id=request.token_id)
            return {token_key(record.token_id): record.SerializeToString()}

        answer.untold.CopyFrom(await self._change(renew))
        return answer

    async def revoke_token(self, request: messages.RevokeTokenRequest) -> messages.RevokeTokenResponse:
        """Revoke a token at once. Raises `InvalidArgument`."""

        def end(say: Say) -> dict[str, bytes | None]:
            self._token(request.token_id)
            say("token revoked", token_id=request.token_id)
            return {token_key(request.token_id): None}

        return messages.RevokeTokenResponse(untold=await self._change(end))

    def list_tokens(self, _: messages.ListTokensRequest) -> messages.ListTokensResponse:
        """Return the caller's tokens. Administrators get all tokens, a caller that authenticated with a token only that
        one.
        """
        administers = self._administers()
        tokens = [each for each in self._table().tokens if administers or _is_callers(each)]
        for token in tokens:
            token.ClearField("digest")
        return messages.ListTokensResponse(tokens=tokens)

    def _token(self, token_id: str) -> messages.TokenRecord:
        """Return the record of a token that the caller may change. Raises `InvalidArgument`."""
        record = self._records.token(token_id)
        if record is None or not (self._administers() or _is_callers(record)):
            raise InvalidArgument(f"there is no token {token_id!r}", token_id=token_id)
        return record

    # -- changes ---------------------------------------------------------------------------------------------------

    async def _change(self, decide: Callable[[Say], dict[str, bytes | None]]) -> messages.Untold:
        """Write the changes that `decide` returns, apply them here, send them to all members; return who could not be
        told.

        `decide` says each change, for the audit.
        """

        async def write() -> None:
            said: list[tuple[str, dict[str, object]]] = []
            changes = decide(lambda what, **fields: said.append((what, fields)))
            changes[VERSION] = number(self._state.number_after(self._records.version))
            if not self._records.decoys():
                changes[DECOYS] = secrets.token_bytes(DECOYS_BYTES)
            with contextlib.ExitStack() as stack:
                for what, fields in said:
                    stack.enter_context(audited(self._guard, None, what, **fields))
                await self._state.write(changes)
            self._apply()

        await self._state.change(write(), for_caller=True)
        return messages.Untold() if self._guard is None else await self._state.to_the_end(self.telling.all())

    def _apply(self) -> None:
        if self._guard is not None:
            self._guard.apply(self._table(), self._state.coordinator_epoch)

    def _table(self) -> messages.AccessTable:
        return self._records.table(self._state.clock.now_us())

    def _administers(self) -> bool:
        peer = CALLER.get()
        return self._guard is None or peer is None or self._guard.allows(peer, Operation.ADMINISTER, CLUSTER)

    def _not_allowed(self, operation: str, resource: str) -> NotAllowed:
        principal = _caller_principal()
        return NotAllowed(
            f"{principal} may not {operation} {resource}", principal=principal, operation=operation, resource=resource
        )


def _limits(quota: messages.Quota) -> dict[str, int]:
    return {field.name: value for field, value in quota.ListFields()}


def _fields(rule: messages.AccessRule) -> dict[str, object]:
    return {
        "rule_id": rule.rule_id,
        "deny": rule.deny,
        "of": rule.principal,
        "operations": [operation_word(each) for each in rule.operations],
        "resource": rule.resource,
    }


def _peer() -> Peer | None:
    return CALLER.get()


def _caller() -> Identity | None:
    """Return the identity of the caller; None: callers do not authenticate."""
    peer = _peer()
    return None if peer is None else peer.identity


def _is_callers(token: messages.TokenRecord) -> bool:
    """Whether the caller owns a token; a caller that authenticated with a token, possibly a stolen one, has only that
    one.
    """
    who = _caller()
    return who is not None and token.owner == who.user and who.token_id in {"", token.token_id}


def _caller_principal() -> str:
    who = _caller()
    return "" if who is None else who.principal


def _principals_of(who: Identity | None) -> set[str]:
    return set() if who is None else {who.principal, "user:*", *(f"role:{role}" for role in who.roles)}
