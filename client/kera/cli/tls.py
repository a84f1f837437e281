"""``kera tls``: certificates for a cluster, from an authority that it makes if there is none yet."""

from __future__ import annotations

from pathlib import Path

import typer

from kera.cli._commands import Commands
from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._paths import expanded_path, path_of
from kera.cli._table import table

app = Commands(help="Make certificates for a cluster.", no_args_is_help=True)

DAYS_DEFAULT = 365


@app.callback()
def _tls() -> None:
    pass


@app.command()
def init(
    directory: Path = typer.Argument(
        ..., metavar="DIR", parser=path_of("DIR"), help="Directory of the authority and its certificates."
    ),
    hosts: list[str] = typer.Argument(
        None, metavar="[HOST]...", help="Names or IP addresses of the hosts on which daemons run; localhost if none."
    ),
    clients: list[str] = typer.Option(
        [], "--client", metavar="NAME", help="Make a certificate for a client as well; may be repeated."
    ),
    days: int = typer.Option(DAYS_DEFAULT, "--days", help="Validity of certificates, in days."),
    output: Output = OUTPUT_OPTION,
) -> None:
    """Make an authority in DIR, unless there is one, and certificates of it for hosts and clients.

    An existing certificate is replaced by a new one, which daemons and clients load without a restart. Keep ca-key.pem
    away from the cluster: with it, anybody can issue certificates for any user or host.
    """
    from kera.core.security.issuing import Authority, check_request

    hosts, clients = list(dict.fromkeys(hosts or ["localhost"])), list(dict.fromkeys(clients))
    check_request(hosts, clients, days)
    authority, made = Authority.open_or_make(expanded_path("DIR", directory))
    issued = [authority.issue(name, days=days) for name in hosts]
    issued += [authority.issue(name, days=days, client=True) for name in clients]
    if output.is_document:
        files = [
            {"name": one.name, "cert": str(one.cert), "key": str(one.key), "not_after": one.not_after.isoformat()}
            for one in issued
        ]
        show_document({"ca": str(authority.path), "ca_made": made, "certificates": files}, output)
        return
    rows = [(one.name, one.cert, one.key, f"{one.not_after:%Y-%m-%d}") for one in issued]
    print(f"authority: {authority.path}{'' if made else ' (it was there)'}")
    print(table(("NAME", "CERTIFICATE", "KEY", "GOOD UNTIL"), rows))
