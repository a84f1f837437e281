"""``kera connect``: copies between streams and files, Kafka, PostgreSQL; see docs/connect.md.

What a copy does is in `kera.connect`. Here are the command line, the choice of source and target (`_copy`), and how one
is told how it goes (`_telling`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._run import UsageError, run_async
from kera.cli._sizes import parse_size
from kera.cli._table import table
from kera.cli.connect._options import Begin, CopyOptions

if TYPE_CHECKING:
    from kera.client import Client
    from kera.connect.planning.rounds import Round

app = Commands(
    help="Copy between streams and files, Kafka or PostgreSQL, each record once, also after crashes.",
    no_args_is_help=True,
)


@app.command()
def copy(
    source: str = typer.Argument(
        ..., metavar="SOURCE", help="kera:NAME, kafka://HOST/TOPIC, postgresql://HOST/DB?table=NAME, or files."
    ),
    target: str = typer.Argument(..., metavar="TARGET", help="Likewise; one of the two is a stream."),
    name: str | None = typer.Option(
        None, "--name", metavar="NAME", help="Of the copy, by which it finds how far it was. Default: of both ends."
    ),
    create: bool = typer.Option(False, "--create", help="Make the stream, topic or table if it is not there."),
    streamlets: int | None = typer.Option(
        None, min=1, metavar="M", help="Of a stream or topic that is made. Default: as many as the source has, or 1."
    ),
    key: str | None = typer.Option(None, "--key", metavar="COLUMN", help="Key column of a stream that is made."),
    time: str | None = typer.Option(None, "--time", metavar="COLUMN", help="Time column of a stream that is made."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on for ever, with what comes."),
    begin: Begin = typer.Option(
        Begin.EARLIEST, "--from", help="Where a new copy begins: with the oldest record, or the next new one."
    ),
    file_format: str | None = typer.Option(
        None, "--format", metavar="FORMAT", help="Of files: parquet, csv, jsonl. Default: as they end."
    ),
    file_size: str | None = typer.Option(
        None, "--file-size", metavar="SIZE", help="Of files in a directory, after which the next begins (256MiB)."
    ),
    kafka_config: Path | None = typer.Option(
        None, "--kafka-config", metavar="FILE", help="Settings of librdkafka, name=value: how to log in, TLS."
    ),
    skip_lost: bool = typer.Option(
        False, "--skip-lost", help="Go on behind what the source has removed before it was copied."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print what happens as JSON lines to standard output."),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Copy records from SOURCE to TARGET.

    Ends when all that is there at the beginning is copied, unless it is to follow. Started again, also after it
    was killed, it goes on where it was; nothing is copied twice.
    """
    from kera.cli.connect._copy import run

    options = CopyOptions(
        source=source,
        target=target,
        name=name,
        create=create,
        streamlets=streamlets,
        key=key,
        time=time,
        follow=follow,
        from_latest=begin is Begin.LATEST,
        file_format=file_format,
        file_bytes=None if file_size is None else parse_size(file_size, name="--file-size"),
        kafka_config=kafka_config,
        skip_lost=skip_lost,
        as_json=as_json,
        bootstrap=bootstrap,
    )
    run_async(run(options))


@app.command("list")
def list_(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """List copies into streams of this cluster, and how far they are.

    Copies out of streams are kept where they go to.
    """
    run_async(_list(bootstrap, output))


async def _list(bootstrap: str, output: Output) -> None:
    async with connected(bootstrap) as client:
        rounds = await _rounds(client)
        streams = {stream.stream_id: stream.name for stream in await client.admin.list_streams()}
    if output.is_document:
        show_document(
            [
                {
                    "name": name,
                    "source": last.source if last else None,
                    "stream": streams.get(last.stream_id) if last else None,
                    "records": last.records if last else 0,
                    "places": dict(last.places) if last else {},
                }
                for name, last in rounds
            ],
            output,
        )
        return
    if not rounds:
        print("no copies")
        return
    rows = [
        (name, last.source, streams.get(last.stream_id, "(deleted)"), f"{last.records:,}")
        if last
        else (name, "", "", "0")
        for name, last in rounds
    ]
    print(table(("NAME", "SOURCE", "STREAM", "RECORDS"), rows))


async def _rounds(client: Client) -> list[tuple[str, Round | None]]:
    """The name of each copy, and its last round."""
    from kera.connect.streams.journal import PREFIX, last_round

    names = [stream.name for stream in await client.admin.list_streams() if stream.name.startswith(PREFIX)]
    return [(name.removeprefix(PREFIX), await last_round(client, name)) for name in names]


@app.command()
def forget(
    name: str = typer.Argument(..., metavar="NAME", help="Of a copy, as kera connect list shows it."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Forget how far a copy into a stream is: started again, it copies everything anew."""
    run_async(_forget(name, yes, bootstrap))


async def _forget(name: str, yes: bool, bootstrap: str) -> None:
    from kera.connect.streams.journal import journal_stream
    from kera.core.errors import UnknownStream

    async with connected(bootstrap) as client:
        try:
            await client.describe(journal_stream(name))
        except UnknownStream:
            raise UsageError(f"no copy {name!r} into a stream of this cluster; kera connect list shows them") from None
        question = f"Forget how far copy {name!r} is? Started again, it copies everything anew."
        confirm("forgetting a copy", question, yes=yes)
        await client.admin.delete_stream(journal_stream(name))
    print(f"forgot {name}")
