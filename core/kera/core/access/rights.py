"""Rules about principals, operations and resources, and the decisions that follow from them. Pure.

An operation needs a rule that allows it, and a rule that denies it overrides all rules that allow it. A principal that
may read, write, create, alter, delete or use a resource may see that it exists: `DESCRIBE` follows from each of these,
unless it is denied. A principal with `ADMINISTER` on the cluster may describe, create, alter and delete everything, but
not read or write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, cast

from kera.core.access.identity import EVERYBODY, ROLE, Identity, check_principal
from kera.core.base.spelling import closest, hint
from kera.core.errors import InvalidArgument
from kera.v1 import access_pb2 as messages


class Operation(IntEnum):
    """An operation that rules allow or deny; the numbers are those of ``access.proto``."""

    DESCRIBE = 1
    READ = 2
    WRITE = 3
    CREATE = 4
    ALTER = 5
    DELETE = 6
    USE = 7
    ADMINISTER = 8

    __hash__ = int.__hash__  # the hash of enumerations looks up a name each time

    @property
    def word(self) -> str:
        """The name that people write."""
        return self.name.lower()


OF_RESOURCES = {
    "stream": (
        Operation.DESCRIBE,
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.ALTER,
        Operation.DELETE,
    ),
    "group": (Operation.DESCRIBE, Operation.USE, Operation.ALTER, Operation.DELETE),
    "producer": (Operation.USE,),
    "domain": (Operation.READ,),
    "cluster": (Operation.DESCRIBE, Operation.ADMINISTER),
}
"""Possible operations on each kind of resource."""
CLUSTER = "cluster"
ADMINISTRATORS = frozenset({Operation.DESCRIBE, Operation.CREATE, Operation.ALTER, Operation.DELETE})
RESOURCE_CHARS_MAX = 300
"""Longer than any name."""


class Decision(NamedTuple):
    """Whether a principal may carry out an operation."""

    allowed: bool
    reason: str
    rule_id: int = 0
    """Id of the rule that decided; 0: none did."""


def check_resource(resource: str) -> str:
    """Check the resource of a rule. Raises `InvalidArgument`."""
    kind, colon, name = resource.partition(":")
    if resource == CLUSTER:
        return resource
    if kind not in OF_RESOURCES or kind == CLUSTER:
        raise InvalidArgument(
            f"resource {resource!r}: stream:NAME, group:NAME, producer:NAME, domain:NAME or cluster; a * at the end"
            " of a name stands for all names with this"
            f" prefix{hint(kind, OF_RESOURCES) if colon else _meant(resource)}"
        )
    if not colon or not name or "*" in name[:-1] or len(resource) > RESOURCE_CHARS_MAX:
        raise InvalidArgument(f"resource {resource!r}: a name is missing, is too long, or has a * that is not its end")
    return resource


def _meant(resource: str) -> str:
    """Return a hint with the most likely meaning of a resource without a kind."""
    if closest(resource, [CLUSTER]):
        return f"; did you mean '{CLUSTER}'?"
    return f"; did you mean 'stream:{resource}'?" if resource else ""


def covers(pattern: str, resource: str) -> bool:
    """Return whether a resource of a rule covers `resource`, which may end with a * as well."""
    if pattern.endswith("*"):
        return resource.startswith(pattern[:-1])
    return pattern == resource


def check_rule(rule: messages.AccessRule) -> None:
    """Check a rule. Raises `InvalidArgument`."""
    check_principal(rule.principal)
    kind = check_resource(rule.resource).partition(":")[0]
    if not rule.operations:
        raise InvalidArgument("a rule needs operations")
    for operation in rule.operations:
        if int(operation) not in OF_RESOURCES[kind]:
            known = ", ".join(each.word for each in OF_RESOURCES[kind])
            raise InvalidArgument(f"{operation_word(operation)} does not apply to a {kind}: {known}")


def wire(operations: Iterable[Operation]) -> list[messages.Operation.ValueType]:
    """Return operations as messages have them; the numbers are the same."""
    return cast(list[messages.Operation.ValueType], list(operations))


def operation_word(operation: int) -> str:
    """Return the name of an operation that people write, also for one that only newer programs know."""
    try:
        return Operation(operation).word
    except ValueError:
        return f"operation {operation}"


class _Held(NamedTuple):
    rule_id: int
    deny: bool
    operations: frozenset[int]
    resource: str


class Rights:
    """The decisions that follow from a list of rules. Never changes."""

    def __init__(self, rules: Iterable[messages.AccessRule] = ()) -> None:
        self._of: dict[str, list[_Held]] = {}
        """The rules by principal."""
        for rule in rules:
            held = _Held(rule.rule_id, rule.deny, frozenset(rule.operations), rule.resource)
            self._of.setdefault(rule.principal, []).append(held)

    def decide(self, who: Identity, operation: Operation, resource: str) -> Decision:
        """Decide whether `who` may carry out an operation on a resource; `resource`: a full name, without a *."""
        if who.narrowed and not any(covers(each, resource) for each in who.narrowed):
            return Decision(allowed=False, reason=f"its token is narrowed to {', '.join(who.narrowed)}")
        if who.is_daemon or who.is_super:
            return Decision(allowed=True, reason="it is a daemon" if who.is_daemon else "it is a super user")
        decision = self._by_rules(who, operation, resource)
        if decision is None and operation in ADMINISTRATORS and resource != CLUSTER:
            above = self._by_rules(who, Operation.ADMINISTER, CLUSTER)
            decision = above if above is not None and above.allowed else None
        return decision or Decision(allowed=False, reason="no rule allows it")

    def _by_rules(self, who: Identity, operation: Operation, resource: str) -> Decision | None:
        """Return the decision of the rules about a resource; None: no rule applies."""
        found = [rule for rule in self._rules_of(who) if covers(rule.resource, resource)]
        for rule in found:
            if rule.deny and operation in rule.operations:
                return Decision(allowed=False, reason=f"rule {rule.rule_id} denies it", rule_id=rule.rule_id)
        for rule in found:
            if not rule.deny and (operation in rule.operations or operation is Operation.DESCRIBE):
                return Decision(allowed=True, reason=f"rule {rule.rule_id}", rule_id=rule.rule_id)
        return None

    def _rules_of(self, who: Identity) -> Iterable[_Held]:
        for principal in (who.principal, EVERYBODY, *(f"{ROLE}{role}" for role in sorted(who.roles))):
            yield from self._of.get(principal, ())
