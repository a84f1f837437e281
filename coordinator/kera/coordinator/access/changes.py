"""The changes that a request makes to users and rules. Pure: records in, records out.

The number of each is bounded: every daemon holds all of them in memory, and each table that is sent contains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kera.core.access.identity import check_name
from kera.core.access.passwords import check_verifier
from kera.core.access.rights import check_rule
from kera.core.errors import InvalidArgument, UnknownUser, UserExists
from kera.v1 import access_pb2 as messages

USERS_MAX = 10_000
RULES_MAX = 10_000
TOKENS_MAX = 10_000
TOKENS_OF_USER_MAX = 1_000
"""Maximum of tokens of one user: even users without any right may have tokens, and one user must not take them all."""
ROLES_MAX = 64
"""Maximum of roles of a user."""
TOKEN_RESOURCES_MAX = 64
"""Maximum of resources to which a token is narrowed."""


def changed_user(
    known: messages.UserRecord | None, request: messages.PutUserRequest, *, users: int, version: int, now_us: int
) -> messages.UserRecord:
    """Return the record of a user as a request wants it; `version`: the version of a new password.

    If the user exists with exactly the request's verifier, this request has created it, since its salt is random. So a
    client that repeats a request whose answer was lost gets the same record. Raises `InvalidArgument`, `UnknownUser`
    and `UserExists`.
    """
    name = check_name("user", request.name)
    if known is None and not request.create:
        raise UnknownUser(f"there is no user {name!r}: kera user create makes one", user=name)
    if known is not None and request.create:
        if request.HasField("scram") and known.scram == request.scram:
            return known
        raise UserExists(f"there is a user {name!r} already: kera user passwd and kera user roles change it", user=name)
    if known is None and users >= USERS_MAX:
        raise InvalidArgument(f"there are {users} users already", limit=USERS_MAX)
    record = messages.UserRecord(name=name, created_us=now_us)
    if known is not None:
        record.CopyFrom(known)
    if request.HasField("scram"):
        record.password_version = version
        if request.scram == messages.ScramVerifier():
            record.ClearField("scram")
        else:
            check_verifier(request.scram)
            record.scram.CopyFrom(request.scram)
    if request.HasField("roles"):
        if len(request.roles.names) > ROLES_MAX:
            raise InvalidArgument(f"a user has at most {ROLES_MAX} roles", limit=ROLES_MAX)
        record.roles[:] = sorted({check_name("role", role) for role in request.roles.names})
    if request.HasField("quota"):
        record.quota.CopyFrom(checked_quota(request.quota))
        if request.quota == messages.Quota():
            record.ClearField("quota")
    record.changed_us = now_us
    return record


def checked_quota(quota: messages.Quota) -> messages.Quota:
    """Check a quota. Raises `InvalidArgument`."""
    for field, value in quota.ListFields():
        if field.name.endswith("_per_s") and not value:
            raise InvalidArgument(
                f"{field.name} is 1 at least; to forbid everything, revoke the rights: kera acl revoke",
                quota=field.name,
            )
    return quota


def granted(
    rules: Sequence[messages.AccessRule], wanted: messages.AccessRule, *, rule_id: int, by: str, now_us: int
) -> messages.AccessRule:
    """Return a rule that includes `wanted`: an existing rule with more operations, or a new one with the id `rule_id`.

    Raises `InvalidArgument`.
    """
    check_rule(wanted)
    for rule in rules:
        if (rule.principal, rule.resource, rule.deny) == (wanted.principal, wanted.resource, wanted.deny):
            more = messages.AccessRule()
            more.CopyFrom(rule)
            more.operations[:] = sorted({*rule.operations, *wanted.operations})
            return more
    if len(rules) >= RULES_MAX:
        raise InvalidArgument(
            f"there are {len(rules)} rules already; a prefix or a role says more in one", limit=RULES_MAX
        )
    return messages.AccessRule(
        rule_id=rule_id,
        deny=wanted.deny,
        principal=wanted.principal,
        operations=sorted(set(wanted.operations)),
        resource=wanted.resource,
        created_us=now_us,
        created_by=by,
    )


def revoked(
    rules: Iterable[messages.AccessRule], request: messages.RevokeRightsRequest
) -> tuple[list[messages.AccessRule], dict[int, messages.AccessRule | None]]:
    """Return the rules that lose operations, unchanged, and the new version of each by id (None: it is deleted).

    Raises `InvalidArgument` if the request names neither rule ids nor a rule, or both, or a rule that does not exist.
    """
    ids, wanted = set(request.rule_ids), request.rule
    if bool(ids) == request.HasField("rule"):
        raise InvalidArgument("name rules by their ids, or a principal and a resource")
    before, after = list[messages.AccessRule](), dict[int, messages.AccessRule | None]()
    for rule in rules:
        if ids:
            taken = set(rule.operations) if rule.rule_id in ids else set()
        elif (rule.principal, rule.resource, rule.deny) == (wanted.principal, wanted.resource, wanted.deny):
            taken = set(wanted.operations or rule.operations) & set(rule.operations)
        else:
            taken = set()
        if taken:
            before.append(rule)
            rest = sorted(set(rule.operations) - taken)
            left = messages.AccessRule()
            left.CopyFrom(rule)
            left.operations[:] = rest
            after[rule.rule_id] = left if rest else None
    missing = ids - after.keys()
    if missing:
        raise InvalidArgument(f"there is no rule {', '.join(map(str, sorted(missing)))}: kera acl list shows them")
    if not before:
        raise InvalidArgument(f"{wanted.principal} has no such rule about {wanted.resource}: kera acl list shows them")
    return before, after
