"""``kera user``: the users that the cluster stores, their passwords and roles."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._access import CLUSTER_SECRET_OPTION, changing, reading, warn_of_untold
from kera.cli._client import BOOTSTRAP_OPTION
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._output import OUTPUT_OPTION, Output, show_list
from kera.cli._passwords import NO_PASSWORD_OPTION, PASSWORD_FILE_OPTION, new_password
from kera.cli._run import UsageError
from kera.cli._streams import warn
from kera.cli._table import format_time
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.client.admin.access import DeletedUser

app = Commands(help="Create, list and delete users, and set their passwords and roles.", no_args_is_help=True)

NAME_ARGUMENT = typer.Argument(..., metavar="NAME", help="Name of the user.")


@app.command()
async def create(
    name: str = NAME_ARGUMENT,
    role: list[str] = typer.Option([], "--role", metavar="ROLE", help="Role of the user; may be repeated."),
    password_file: str | None = PASSWORD_FILE_OPTION,
    no_password: bool = NO_PASSWORD_OPTION,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Create a user. It may do nothing until a rule allows it: kera acl grant.

    The password does not leave this machine: the cluster only gets a verifier that it checks passwords against.
    """
    password = new_password(name, password_file, none=no_password)
    async with changing(bootstrap, cluster_secret_file) as access:
        change = await access.create_user(name, password, role)
        has = "with a password" if password is not None else "without a password"
        print(f"created user {name} {has}" + (f", {_of_roles(role)}" if role else ""))
        warn_of_untold(change.untold, f"nobody can authenticate as {name}")


def _of_roles(roles: list[str]) -> str:
    names = sorted(set(roles))
    return f"{'role' if len(names) == 1 else 'roles'} {', '.join(names)}"


@app.command("list")
async def list_(
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """List the stored users; users with a certificate or another issuer's token need not be among them."""
    async with reading(bootstrap, cluster_secret_file) as access:
        users = await access.users()
    heading = ("USER", "PASSWORD", "ROLES", "CREATED", "CHANGED")
    rows = [
        (
            each.name,
            "yes" if each.has_password else "no",
            ", ".join(each.roles),
            format_time(each.created_us),
            format_time(each.changed_us),
        )
        for each in users
    ]
    show_list(map(dataclasses.asdict, users), heading, rows, output, none="no users")


@app.command()
async def passwd(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Name of the user. Default: KERA_CLIENT_USER."),
    password_file: str | None = PASSWORD_FILE_OPTION,
    no_password: bool = NO_PASSWORD_OPTION,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Change a user's password; everybody may change their own. Ends what was authenticated with the old one."""
    user = _myself() if name is None else name
    password = new_password(user, password_file, none=no_password)
    async with changing(bootstrap, cluster_secret_file) as access:
        change = await access.set_password(user, password)
        print(f"changed the password of {user}" if password is not None else f"{user} has no password any more")
        warn_of_untold(change.untold, "the old password still works")


def _myself() -> str:
    from kera.client import ClientSettings

    user = ClientSettings.load().user
    if not user:
        raise UsageError("whose password? give a NAME, or set KERA_CLIENT_USER")
    return user


@app.command()
async def roles(
    name: str = NAME_ARGUMENT,
    role: list[str] = typer.Option(
        [], "--role", metavar="ROLE", help="Role of the user, replacing the present ones; may be repeated."
    ),
    no_roles: bool = typer.Option(False, "--no-roles", help="Take all roles away."),
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Set all roles of a user: rules about role:NAME apply to the users that have it."""
    if bool(role) == no_roles:
        raise UsageError("give either each --role that the user is to have, or --no-roles")
    async with changing(bootstrap, cluster_secret_file) as access:
        change = await access.set_roles(name, role)
        has = f"the {_of_roles(role)}" if role else "no roles any more"
        print(f"{name} has {has}")
        warn_of_untold(change.untold, f"{name} keeps the previous roles")


@app.command()
async def delete(
    name: str = NAME_ARGUMENT,
    yes: bool = YES_OPTION,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Delete a user, and revoke its tokens. Ends its work in progress."""
    confirm(f"deleting user {name}", f"Delete user {name} and its tokens?", yes=yes)
    async with changing(bootstrap, cluster_secret_file) as access:
        done = await access.delete_user(name)
        _print_deleted(name, done)


def _print_deleted(name: str, done: DeletedUser) -> None:
    print(f"deleted user {name}" + (f" and {plural(done.tokens, 'token')}" if done.tokens else ""))
    if done.rule_ids:
        rules = ", ".join(map(str, done.rule_ids))
        flags = " ".join(f"--rule {each}" for each in done.rule_ids)
        what, names = ("rule", "names") if len(done.rule_ids) == 1 else ("rules", "name")
        warn(
            f"{what} {rules} still {names} user:{name}, and a later user of that name has these rights:"
            f" kera acl revoke {flags}"
        )
    warn_of_untold(done.change.untold, f"{name} may go on")
