"""``kera node``: runs the brokers of one host, one for each core or NUMA node, until the command ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._paths import expanded_path, path_of
from kera.cli._run import UsageError, command_line, extra, run_async
from kera.cli._streams import warn
from kera.cli._table import table
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.local.node import LocalNode, NodeBroker

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def node(
    data_dir: Path = typer.Option(
        ...,
        metavar="DIR",
        parser=path_of("--data-dir"),
        help="Directory of the brokers' data: broker-1, broker-2, …",
    ),
    coordinator: str | None = typer.Option(
        None, metavar="ADDRESS", help="Coordinators: host:port, comma-separated. Default: KERA_BROKER_COORDINATOR."
    ),
    per: str = typer.Option("core", metavar="UNIT", help="A broker for each core, or for each NUMA node: core, numa."),
    cpus: str | None = typer.Option(
        None, metavar="LIST", help="CPUs for brokers, as 2-15,18. Default: all that this command may run on."
    ),
    brokers: int = typer.Option(
        0,
        min=0,
        metavar="N",
        help="Number of brokers; more than there are cores or nodes share. Default: one for each.",
    ),
    port: int = typer.Option(
        0, min=0, max=65535, metavar="PORT", help="Port of the first broker; each takes two. 0: any free ones."
    ),
    metrics_port: int | None = typer.Option(
        None, min=0, max=65535, metavar="PORT", help="Port of the first broker's metrics; the others follow."
    ),
    log_dir: Path | None = typer.Option(
        None, metavar="DIR", parser=path_of("--log-dir"), help="Directory of the brokers' logs. Default: DIR/logs."
    ),
) -> int:
    """Run the brokers of this host, one for each core or NUMA node.

    Each runs on its own CPUs only, and is started again when it ends. Set any other setting of a broker through its
    environment variable (see kera broker --help): each broker has the memory that KERA_BROKER_ARENA_BYTES says.
    """
    from kera.core.base.cpus import allowed_cpus, grouped, parse_cpus

    with extra("server"):
        from kera.broker.settings import BrokerSettings
        from kera.local.node import LocalNode, planned
    if per not in ("core", "numa"):
        raise UsageError(f"--per is core or numa, not {per}")
    directory = expanded_path("--data-dir", data_dir).absolute()
    with command_line():
        chosen = allowed_cpus() if cpus is None else parse_cpus(cpus)
        if not chosen <= allowed_cpus():
            raise UsageError("--cpus has CPUs on which this command may not run, or that there are not")
        plan = planned(
            grouped(chosen, per),  # type: ignore[arg-type]  # checked above
            brokers,
            directory,
            port=port,
            metrics_port=metrics_port,
        )
    environment = dict(os.environ)
    if coordinator is not None:
        environment["KERA_BROKER_COORDINATOR"] = coordinator
    running = LocalNode(
        plan,
        directory,
        env=environment,
        say=warn,
        stop_grace_s=BrokerSettings.load().stop_timeout_s + 2.0,
        log_dir=None if log_dir is None else expanded_path("--log-dir", log_dir).absolute(),
    )
    return run_async(_run(running, plan))


async def _run(running: LocalNode, plan: list[NodeBroker]) -> int:
    import asyncio

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(running.start())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            print(_welcome(running, plan), flush=True)
            await stopping
        return 0
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.wait([starting])
        for name in await running.stop():
            warn(f"{name} did not stop in time and was killed")


def _welcome(running: LocalNode, plan: list[NodeBroker]) -> str:
    from kera.core.base.cpus import format_cpus

    ready = running.ready
    rows = [
        (
            one.name,
            ready[one.name]["broker_id"],
            format_cpus(one.cpus),
            ready[one.name]["grpc_address"],
            ready[one.name]["frames_address"],
        )
        for one in plan
    ]
    listed = table(("", "BROKER", "CPUS", "GRPC", "FRAMES"), rows)
    return f"{plural(len(plan), 'broker')} on this host; logs in {running.log_dir}\n\n{listed}\n\nCtrl-C stops them."
