"""The ``kera`` command line, put together from its groups of commands."""

from __future__ import annotations

import typer

from kera.cli import (
    acl,
    bench,
    check,
    cluster,
    connect,
    console,
    consume,
    context,
    daemons,
    dev,
    doctor,
    epochs,
    generate,
    group,
    inspect,
    latency,
    node,
    produce,
    quota,
    schema,
    stream,
    tls,
    token,
    top,
    user,
    verify,
)
from kera.cli._commands import Commands

app = Commands(
    name="kera",
    help="Ingest and store streams: run daemons, manage streams, produce and consume records.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # the traceback of a bug: plain and complete
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(value: bool) -> None:
    if value:
        from kera.core.base.build import describe

        print(describe())
        raise typer.Exit


@app.callback()
def _kera(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    pass


daemons.register(app)
app.command("node")(node.node)
app.command("dev")(dev.dev)
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)
app.add_typer(stream.app, name="stream")
app.add_typer(epochs.app, name="epochs")
app.add_typer(schema.app, name="schema")
app.add_typer(context.app, name="context")
app.add_typer(cluster.app, name="cluster")
app.add_typer(group.app, name="group")
app.add_typer(latency.app, name="latency")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.command("console")(console.console)
app.add_typer(connect.app, name="connect")
app.add_typer(user.app, name="user")
app.add_typer(acl.app, name="acl")
app.add_typer(token.app, name="token")
app.add_typer(quota.app, name="quota")
app.add_typer(tls.app, name="tls")
app.add_typer(generate.app, name="generate")
app.add_typer(bench.app, name="bench")
app.command("check")(check.check)
app.command("verify")(verify.verify)
app.command("inspect")(inspect.inspect)
