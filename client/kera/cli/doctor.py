"""``kera doctor``: checks this machine before daemons run here, or a cluster after it was set up."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import is_given
from kera.cli._output import OUTPUT_OPTION, Output, show_result
from kera.cli._paths import path_of
from kera.cli._run import UsageError, extra, interruptible, run_async
from kera.cli._sizes import parse_size

if TYPE_CHECKING:
    from kera.client.diagnosis.findings import Finding

DATA_DIR = Path("~/.local/share/kera")
PORTS = [7400]
"""The coordinator's default port. The system chooses the ports of other daemons, unless they are set."""
OF_THIS_MACHINE = (
    "data_dir",
    "arena_bytes",
    "port",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "name",
    "cluster_secret_file",
    "config",
)
"""Options that apply to this machine only, not to a cluster."""


def doctor(
    command: typer.Context,
    bootstrap: str = typer.Option(
        "", "--bootstrap", "-b", metavar="HOST:PORT", help="Check the cluster there from here, instead of this machine."
    ),
    data_dir: list[Path] = typer.Option(
        [DATA_DIR],
        "--data-dir",
        metavar="PATH",
        parser=path_of("--data-dir"),
        help="Data directory, or disk, to check; repeatable.",
    ),
    arena_bytes: str = typer.Option("512MiB", "--arena-bytes", help="Memory that the broker is to have."),
    port: list[int] = typer.Option(PORTS, "--port", min=1, max=65535, help="Port that is to be free; repeatable."),
    tls_cert: Path | None = typer.Option(
        None, "--tls-cert", parser=path_of("--tls-cert"), help="Certificate that daemons here are to have."
    ),
    tls_key: Path | None = typer.Option(None, "--tls-key", parser=path_of("--tls-key"), help="Its key."),
    tls_ca: Path | None = typer.Option(
        None, "--tls-ca", parser=path_of("--tls-ca"), help="Authorities that are to be trusted."
    ),
    name: list[str] = typer.Option(
        [], "--name", help="Name or address at which others reach this host, which the certificate has; repeatable."
    ),
    cluster_secret_file: Path | None = typer.Option(
        None,
        "--cluster-secret-file",
        metavar="FILE",
        parser=path_of("--cluster-secret-file"),
        help="Secret that daemons here are to have.",
    ),
    config: Path | None = typer.Option(
        None,
        "--config",
        metavar="FILE",
        parser=path_of("--config"),
        help="File with settings of daemons: check their security settings, and the files that these name.",
    ),
    output: Output = OUTPUT_OPTION,
) -> int:
    """Check whether KerA would run well on this machine, or, with --bootstrap, whether a cluster was set up well.

    Each finding is ok, a warning or a problem, with what to do. Exit code 0 if all are ok, 1 with warnings, 2 with
    problems.
    """
    from kera.cli.diagnosis import certificates, host
    from kera.client.diagnosis import findings

    if bootstrap:
        given = [name for name in OF_THIS_MACHINE if is_given(command, name, "COMMANDLINE")]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is about this machine, and --bootstrap checks a cluster")
        found = run_async(_of_cluster(bootstrap))
    else:
        size = parse_size(arena_bytes, name="--arena-bytes")
        with interruptible():
            found = host.checkup(data_dir, size, port)
            if tls_cert is not None:
                names = name or [socket.gethostname()]
                found += certificates.certificates(tls_cert, tls_key, tls_ca, names, time.time())
            elif tls_key is not None or tls_ca is not None or name:
                raise UsageError("--tls-key, --tls-ca and --name need --tls-cert")
            found += _of_security(cluster_secret_file, config)
    severity = findings.worst(found)
    show_result(
        {"worst": severity.word, "findings": findings.document(found)}, "\n".join(findings.lines(found)), output
    )
    return int(severity)


def _of_security(cluster_secret_file: Path | None, config: Path | None) -> list[Finding]:
    found: list[Finding] = []
    if cluster_secret_file is not None or config is not None:
        from kera.cli.diagnosis import security

        found += [] if cluster_secret_file is None else security.secret(cluster_secret_file)
        if config is not None:
            with extra("server"):
                found += security.settings(config)
    return found


async def _of_cluster(bootstrap: str) -> list[Finding]:
    from kera.cli.diagnosis.asking import look
    from kera.client.diagnosis import cluster
    from kera.core.errors import KeraError, StartError

    try:
        return cluster.installed(await look(bootstrap))
    except StartError:
        raise  # our own settings are wrong, not the cluster
    except KeraError as error:
        return cluster.unreachable(bootstrap, error)
