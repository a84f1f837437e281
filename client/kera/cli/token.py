"""``kera token``: delegation tokens, which replace a password for a limited time, with the same or fewer rights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._access import CLUSTER_SECRET_OPTION, changing, reading, warn_of_untold
from kera.cli._client import BOOTSTRAP_OPTION
from kera.cli._commands import Commands
from kera.cli._durations import parse_duration_ms
from kera.cli._output import OUTPUT_OPTION, Output, show_document, show_list
from kera.cli._paths import expanded_path, file_to_replace, path_of, written_for_owner
from kera.cli._run import UsageError, command_line
from kera.cli._streams import warn
from kera.core.base.spans import format_ms

if TYPE_CHECKING:
    from kera.client.admin.access import Access, Token

app = Commands(help="Issue, list, renew and revoke delegation tokens.", no_args_is_help=True)

TOKEN_ARGUMENT = typer.Argument(..., metavar="ID", help="Id of the token, as kera token list shows it.")


@app.command()
async def issue(
    stream: list[str] = typer.Option(
        [], "--stream", metavar="NAME", help="Narrow it to this stream (a * at the end: prefix); may be repeated."
    ),
    group: list[str] = typer.Option(
        [], "--group", metavar="NAME", help="Narrow it to this consumer group, likewise; may be repeated."
    ),
    resource: list[str] = typer.Option(
        [], "--resource", metavar="RESOURCE", help="Narrow it to this, as kera acl grant has it; may be repeated."
    ),
    lifetime: str | None = typer.Option(
        None,
        "--lifetime",
        metavar="TIME",
        help="Lifetime until renewal: 8h. Default and maximum: 24h.",
    ),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", parser=path_of("--out"), help="Write it into a file that you alone can read."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Issue a token with your rights, or fewer. Anybody who has it can use these rights: keep it like a password.

    Programs take it from KERA_CLIENT_TOKEN_FILE. It is printed once, and the cluster cannot show it again.
    """
    from kera.core.access.rights import check_resource

    resources = [*(f"stream:{each}" for each in stream), *(f"group:{each}" for each in group), *resource]
    lifetime_ms = 0 if lifetime is None else parse_duration_ms(lifetime, name="--lifetime")
    if lifetime is not None and not lifetime_ms:
        raise UsageError("--lifetime: the time must be above 0")
    with command_line():
        for each in resources:
            check_resource(each)
    file = None if out is None else file_to_replace(expanded_path("--out", out))
    async with changing(bootstrap, None) as access:
        if file is None:
            token = await access.issue_token(resources, lifetime_ms=lifetime_ms)
        else:
            token = await _issued_into(file, access, resources, lifetime_ms)
        _print_issued(token, out, output)
        if lifetime_ms > token.expires_in_ms:
            warn(f"it is valid for {format_ms(token.expires_in_ms)} only, the maximum; renew it before it expires")
        warn_of_untold(token.untold, "the token is refused")


def _print_issued(token: Token, out: Path | None, output: Output) -> None:
    secret = {} if out is not None else {"token": token.secret}
    if output.is_document:
        document = {
            "token_id": token.token_id,
            **secret,
            "resources": token.resources,
            "expires_in_ms": token.expires_in_ms,
            "renewable_for_ms": token.renewable_for_ms,
            "untold": token.untold,
        }
        show_document(document, output)
        return
    text = (
        f"token {token.token_id}, valid for {format_ms(token.expires_in_ms)}, and as long again whenever it is renewed"
        f" within {format_ms(token.renewable_for_ms)}"
    )
    text += f", for {', '.join(token.resources)} only" if token.resources else ""
    if out is not None:
        print(f"{text}; it is in {out}")
    else:
        print(token.secret)  # the only line on standard output, so that a script can take it
        print(text, file=sys.stderr)


async def _issued_into(file: Path, access: Access, resources: list[str], lifetime_ms: int) -> Token:
    """Issue a token, and write its secret into `file`; without a place for the file, no token is issued."""
    token: Token | None = None
    try:
        with written_for_owner(file) as written:
            token = await access.issue_token(resources, lifetime_ms=lifetime_ms)
            written.write(f"{token.secret}\n".encode())
    except OSError as error:
        reason = f"cannot write {file}: {error.strerror}"
        if token is None:
            raise UsageError(reason) from error
        raise UsageError(
            f"{reason}; the token was issued, and its secret may be lost: kera token revoke {token.token_id} ends it"
        ) from error
    return token


@app.command("list")
async def list_(
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """List your tokens, or all if you administer the cluster. Their secrets cannot be shown."""
    async with reading(bootstrap, cluster_secret_file) as access:
        tokens = await access.tokens()
    documents = [
        {name: getattr(each, name) for name in ("token_id", "owner", "resources", "expires_in_ms")} for each in tokens
    ]
    rows = [
        (each.token_id, each.owner, ", ".join(each.resources) or "all", f"in {format_ms(each.expires_in_ms)}")
        for each in tokens
    ]
    show_list(documents, ("TOKEN", "OWNER", "FOR", "EXPIRES"), rows, output, none="no tokens")


@app.command()
async def renew(
    token: str = TOKEN_ARGUMENT,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Extend a token: it is valid for its lifetime again, from now."""
    token_id = _id_of(token)
    async with changing(bootstrap, cluster_secret_file) as access:
        done = await access.renew_token(token_id)
        print(f"token {token_id} is valid for {format_ms(done.expires_in_ms)}")
        warn_of_untold(done.change.untold, "it ends when it would have ended before")


@app.command()
async def revoke(
    token: str = TOKEN_ARGUMENT,
    cluster_secret_file: Path | None = CLUSTER_SECRET_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """End a token now, and all access that was authenticated with the token."""
    token_id = _id_of(token)
    async with changing(bootstrap, cluster_secret_file) as access:
        change = await access.revoke_token(token_id)
        print(f"revoked token {token_id}")
        warn_of_untold(change.untold, "it may still be accepted")


def _id_of(text: str) -> str:
    """Return the id of a token that is given by id or as a whole, so that no message repeats its secret."""
    from kera.core.access.accounts import Token

    whole = Token.parse(text)
    return text if whole is None else whole.token_id
