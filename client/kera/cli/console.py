"""``kera console``: a web application that shows a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION
from kera.cli._paths import path_of
from kera.cli._run import check_insecure, command_line, extra, run_async

if TYPE_CHECKING:
    pass

LISTEN = "127.0.0.1:7480"


def console(
    listen: str = typer.Option(
        LISTEN, "--listen", metavar="HOST:PORT", help="Address to listen on; port 0: any free one."
    ),
    admin: bool = typer.Option(
        False,
        "--admin",
        help="Let pages change the cluster: streams, records, consumer groups, schemas, moves and drains.",
    ),
    host: list[str] = typer.Option(
        [], "--host", metavar="NAME", help="Another host name that browsers use, such as a proxy's; repeatable."
    ),
    tls_cert: Path | None = typer.Option(
        None,
        "--tls-cert",
        parser=path_of("--tls-cert"),
        help="Certificate (PEM) for HTTPS, with those up to its authority.",
    ),
    tls_key: Path | None = typer.Option(
        None, "--tls-key", parser=path_of("--tls-key"), help="Its key, without a password."
    ),
    insecure: bool = typer.Option(
        False, "--insecure", help="Listen at an address that other hosts reach, without sign-in or without TLS."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Serve pages that show the cluster, until Ctrl-C: streams and their records, consumer groups, members, recoveries.

    If security is on, users sign in with their passwords and see what they may; otherwise anybody who reaches it
    sees everything. Nothing can be changed unless --admin is given.
    """
    with extra("console"):
        from kera.console.settings import ConsoleSettings, parse_listen
    with command_line():
        address, port = parse_listen(listen)
    check_insecure("--listen", address, insecure=insecure)
    settings = ConsoleSettings(address, port, admin, tuple(host), tls_cert, tls_key, insecure)
    run_async(_serve(bootstrap, settings))


async def _serve(bootstrap: str, settings: object) -> None:
    with extra("console"):
        from kera.console.house import Cluster
        from kera.console.serving import serve
    from kera.client import ClientSettings

    cluster = Cluster(bootstrap, ClientSettings.load())
    await serve(settings, cluster, ready=_tell)  # type: ignore[arg-type]  # the class is imported late


def _tell(url: str) -> None:
    print(f"KerA console at {url}", flush=True)
    print("Ctrl-C stops it.", file=sys.stderr, flush=True)
