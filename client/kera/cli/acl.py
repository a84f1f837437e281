"""``kera acl``: rules that allow or forbid operations to authenticated users."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._access import CLUSTER_SECRET_OPTION, changing, reading, warn_of_untold
from kera.cli._client import BOOTSTRAP_OPTION
from kera.cli._commands import Commands
from kera.cli._output import OUTPUT_OPTION, Output, show_list, show_result
from kera.cli._run import UsageError, command_line
from kera.cli._streams import fail, warn
from kera.cli._table import format_time
from kera.core.errors import KeraError

if TYPE_CHECKING:
    from kera.client.admin.access import Operation, Revoked, Rule

app = Commands(help="Grant, revoke and list rights, and check whether a user has a right.", no_args_is_help=True)

ALL = "all"
"""Given in place of operations: all operations that apply to a resource."""
EXIT_NO = 1
EXIT_UNKNOWN = 2
"""Exit code of a check that could not be made."""

PRINCIPAL_HELP = "user:NAME, role:NAME, or user:* for every authenticated user."
RESOURCE_HELP = "stream:NAME, group:NAME, producer:NAME, domain:NAME (a * at the end: all that begin so), or cluster."
OPERATIONS_HELP = (
    "describe, read, write, create, alter, delete, use (of groups and producers), administer (of the cluster), several"
    f" with commas; {ALL}: every operation of the resource."
)
DENY_HELP = "Forbid it. Such a rule overrides all rules that allow it."


@app.command()
async def grant(
    principal: str = typer.Argument(..., metavar="PRINCIPAL", help=PRINCIPAL_HELP),
    operations: str = typer.Argument(..., metavar="OPERATION[,OPERATION]...", help=OPERATIONS_HELP),
    resource: str = typer.Argument(..., metavar="RESOURCE", help=RESOURCE_HELP),
    deny: bool = typer.Option(False, "--deny", help=DENY_HELP),
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Allow operations on a resource to a user or a role; with --deny, forbid them.

    The change is in effect when the command ends. If the principal has a rule about the resource already, the
    operations are added to it.
    """
    wanted = _checked(principal, operations, resource)
    async with changing(bootstrap, cluster_secret_file) as access:
        done = await access.grant(principal, wanted, resource, deny=deny)
        document = {**dataclasses.asdict(done.rule), "untold": done.change.untold}
        show_result(document, f"rule {done.rule.rule_id}: {_text(done.rule)}", output)
        if done.remark:
            warn(done.remark)
        meaning = "what it forbids may go on" if done.rule.deny else "what it allows may be refused"
        warn_of_untold(done.change.untold, meaning)


@app.command()
async def revoke(
    principal: str | None = typer.Argument(None, metavar="[PRINCIPAL]", help=PRINCIPAL_HELP),
    operations: str | None = typer.Argument(None, metavar="[OPERATION[,OPERATION]...]", help=OPERATIONS_HELP),
    resource: str | None = typer.Argument(None, metavar="[RESOURCE]", help=RESOURCE_HELP),
    rule: list[int] = typer.Option(
        [], "--rule", min=1, metavar="ID", help="Number of the rule, in place of the others; may be repeated."
    ),
    deny: bool = typer.Option(False, "--deny", help="Take back a rule that denies."),
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Revoke rights as they were granted, or by --rule; operations that are no longer allowed have ended then."""
    if rule:
        if principal is not None or deny:
            raise UsageError("--rule says all of it: give it alone")
        async with changing(bootstrap, cluster_secret_file) as access:
            _print_revoked(await access.revoke_rules(rule), [])
        return
    if principal is None or operations is None or resource is None:
        raise UsageError(
            "give a PRINCIPAL, an OPERATION and a RESOURCE, as they were granted, or --rule; kera acl list shows all"
        )
    wanted = [] if operations == ALL else _checked(principal, operations, resource)
    async with changing(bootstrap, cluster_secret_file) as access:
        _print_revoked(await access.revoke(principal, resource, wanted, deny=deny), wanted)


def _print_revoked(done: Revoked, operations: list[Operation]) -> None:
    """`operations`: the revoked ones; empty: all."""
    for rule in done.rules:
        left = tuple(each for each in rule.operations if operations and each not in operations)
        if left:
            print(f"rule {rule.rule_id}: {_text(dataclasses.replace(rule, operations=left))}")
        else:
            print(f"revoked rule {rule.rule_id}: {_text(rule)}")
    forbade = all(rule.deny for rule in done.rules)
    warn_of_untold(done.change.untold, "what it forbade may be refused" if forbade else "what it allowed may go on")


@app.command("list")
async def list_(
    principal: str = typer.Option("", "--principal", help="Only rules that count for it, with those of its roles."),
    resource: str = typer.Option("", "--resource", help="Only rules that are about it, with those of its prefixes."),
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """List the rules; users who do not administer the cluster see the rules about themselves."""
    async with reading(bootstrap, cluster_secret_file) as access:
        rules = await access.rules(principal, resource)
    heading = ("RULE", "PRINCIPAL", "MAY", "OPERATIONS", "RESOURCE", "CREATED", "BY")
    rows = [
        (
            each.rule_id,
            each.principal,
            "no" if each.deny else "yes",
            ", ".join(each.operations),
            each.resource,
            format_time(each.created_us),
            each.created_by,
        )
        for each in rules
    ]
    none = "no such rules" if principal or resource else "no rules"
    show_list(map(dataclasses.asdict, rules), heading, rows, output, none=none)


@app.command()
async def check(
    operation: str = typer.Argument(..., metavar="OPERATION", help="Operation to check, such as read."),
    resource: str = typer.Argument(..., metavar="RESOURCE", help="Its resource, such as stream:orders."),
    principal: str = typer.Option("", "--principal", metavar="PRINCIPAL", help="User: user:NAME. Default: yourself."),
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> int:
    """Ask whether a user may do something, and by which rule. Exit code 0: yes, 1: no, 2: it could not be asked."""
    (wanted,) = _operations(operation, resource, most=1)
    try:
        async with reading(bootstrap, cluster_secret_file) as access:
            said = await access.check(wanted, resource, principal)
    except UsageError:
        raise
    except KeraError as error:
        return fail(error.message, EXIT_UNKNOWN)
    answer = "yes" if said.allowed else "no"
    text = f"may {principal or _myself()} {wanted} {resource}? {answer}: {said.reason}"
    show_result(said._asdict(), text, output)
    return 0 if said.allowed else EXIT_NO


def _myself() -> str:
    from kera.client import ClientSettings

    user = ClientSettings.load().user
    return f"user:{user}" if user else "you"


def _text(rule: Rule) -> str:
    may = "may not" if rule.deny else "may"
    return f"{rule.principal} {may} {', '.join(rule.operations)} {rule.resource}"


def _checked(principal: str, operations: str, resource: str) -> list[Operation]:
    """Check principal and resource, and return the operations of a rule. Raises `UsageError`."""
    from kera.core.access.identity import check_principal

    with command_line():
        check_principal(principal)
    return _operations(operations, resource)


def _operations(text: str, resource: str, *, most: int = 0) -> list[Operation]:
    """Return the operations in `text`; all have to apply to the resource, and be at most `most` (0: any number).

    Raises `UsageError`.
    """
    from kera.core.access.rights import OF_RESOURCES, check_resource
    from kera.core.base.spelling import hint

    with command_line():
        kind = check_resource(resource).partition(":")[0]
    known = [each.word for each in OF_RESOURCES[kind]]
    words = known if text == ALL and not most else [each.strip() for each in text.split(",")]
    if most and len(words) > most:
        raise UsageError(f"one operation at a time, not {text}")
    for word in words:
        if word not in known:
            raise UsageError(f"{word!r} does not apply to a {kind}{hint(word, known)}")
    return words  # type: ignore[return-value]  # checked above
