"""``kera connect``: copies between streams and files, Kafka, PostgreSQL; see docs/connect.md.

`kera.connect` copies. This package has the command line, the choice of source and target (`_copy`), and the output of
the progress (`_telling`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected, is_given
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._output import OUTPUT_OPTION, Output, show_document
from kera.cli._partitioner import PARTITIONER_OPTION, PartitionerChoice
from kera.cli._run import UsageError, run_async
from kera.cli._sizes import parse_size
from kera.cli._table import table
from kera.cli.connect._options import Begin, CopyOptions, ValueFormat

if TYPE_CHECKING:
    from kera.client import Client
    from kera.connect.planning.rounds import Round

app = Commands(
    help="Copy between streams and files, Kafka or PostgreSQL, each record once, also after crashes.",
    no_args_is_help=True,
)


@app.command()
def copy(
    command: typer.Context,
    source: str = typer.Argument(
        ..., metavar="SOURCE", help="kera:NAME, kafka://HOST/TOPIC, postgresql://HOST/DB?table=NAME, or files."
    ),
    target: str = typer.Argument(..., metavar="TARGET", help="Likewise; one of the two is a stream."),
    name: str | None = typer.Option(
        None, "--name", metavar="NAME", help="Name under which the copy keeps its progress. Default: from both ends."
    ),
    create: bool = typer.Option(False, "--create", help="Create the stream, topic or table if it does not exist."),
    streamlets: int | None = typer.Option(
        None, min=1, metavar="M", help="Streamlets of a created stream, or partitions. Default: as the source, or 1."
    ),
    key: str | None = typer.Option(
        None, "--key", metavar="COLUMN", help="Key column of a created stream; with --value, the key of each record."
    ),
    time: str | None = typer.Option(
        None, "--time", metavar="COLUMN", help="Time column of a created stream; with --value, the time of each record."
    ),
    value: ValueFormat | None = typer.Option(
        None, "--value", help="Encode rows, or values of JSON, with a schema of the registry."
    ),
    subject: str | None = typer.Option(
        None, "--subject", metavar="SUBJECT", help="Subject of that schema in the registry. Default: STREAM-value."
    ),
    partitioner: PartitionerChoice | None = PARTITIONER_OPTION,
    follow: bool = typer.Option(False, "--follow", "-f", help="Do not end; wait for new records and copy them."),
    begin: Begin = typer.Option(
        Begin.EARLIEST, "--from", help="Start of a new copy: the oldest record, or the next new one."
    ),
    file_format: str | None = typer.Option(
        None, "--format", metavar="FORMAT", help="Format of files: parquet, csv, jsonl. Default: by their suffix."
    ),
    file_size: str | None = typer.Option(
        None, "--file-size", metavar="SIZE", help="Size at which a directory gets its next file (256MiB)."
    ),
    kafka_config: Path | None = typer.Option(
        None, "--kafka-config", metavar="FILE", help="File with settings of librdkafka, name=value: login, TLS."
    ),
    skip_lost: bool = typer.Option(
        False, "--skip-lost", help="Continue behind records that the source removed or lost before they were copied."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print events as JSON lines to standard output."),
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Copy records from SOURCE to TARGET.

    The copy ends when everything that existed at its start is copied, unless it follows. Start it again, also after
    it was killed, and it continues where it was: no record is copied twice.
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
        value=value,
        subject=subject,
        partitioner=partitioner,
        follow=follow,
        from_latest=begin is Begin.LATEST,
        file_format=file_format,
        file_bytes=None if file_size is None else parse_size(file_size, name="--file-size"),
        kafka_config=kafka_config,
        skip_lost=skip_lost,
        as_json=as_json,
        bootstrap=bootstrap,
        bootstrap_given=is_given(command, "bootstrap", "COMMANDLINE"),
    )
    run_async(run(options))


@app.command("list")
async def list_(bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION) -> None:
    """List copies into streams of this cluster, and how far they are.

    A copy out of a stream keeps its progress in its target.
    """
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
    """Return the name of each copy, and its last round."""
    from kera.connect.streams.journal import PREFIX, last_round

    names = [stream.name for stream in await client.admin.list_streams() if stream.name.startswith(PREFIX)]
    return [(name.removeprefix(PREFIX), await last_round(client, name)) for name in names]


@app.command()
async def forget(
    name: str = typer.Argument(..., metavar="NAME", help="Name of a copy, as kera connect list shows it."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Forget how far a copy into a stream is: started again, it copies everything anew."""
    from kera.connect.streams.journal import journal_stream, last_round
    from kera.core.errors import UnknownStream

    async with connected(bootstrap) as client:
        try:
            last = await last_round(client, journal_stream(name))
        except UnknownStream:
            raise UsageError(f"no copy {name!r} into a stream of this cluster; kera connect list shows them") from None
        question = f"Forget how far copy {name!r} is? The next start copies everything again."
        confirm("forgetting a copy", question, yes=yes)
        await client.admin.delete_stream(journal_stream(name))
    print(f"forgot {name}")
    if last is not None and (slots := _slots(last)):
        print(
            f"PostgreSQL keeps its log for {last.source} until its replication slot is dropped, or used again:"
            f" SELECT pg_drop_replication_slot('{slots[0]}'). Without slot= and publication=, the copy also made a"
            f" publication: DROP PUBLICATION {slots[0]}"
        )


def _slots(last: Round) -> list[str]:
    """Return the replication slots of a copy of changes."""
    return [place["slot"] for place in last.places.values() if isinstance(place, dict) and "slot" in place]
