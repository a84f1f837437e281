"""``kera schema``: the schemas of the values of streams, and which changes of them are compatible."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kera.cli._client import BOOTSTRAP_OPTION, connected
from kera.cli._commands import Commands
from kera.cli._confirming import YES_OPTION, confirm
from kera.cli._output import OUTPUT_OPTION, Output, show_document, show_list, show_result
from kera.cli._run import UsageError, ended_by_signals
from kera.cli._schema_files import COMPILED, definition_of, readable
from kera.cli._streams import EXIT_ERROR
from kera.cli._table import format_time, table
from kera.core.base.spelling import plural

if TYPE_CHECKING:
    from kera.client import RegisteredSchema, SchemaRegistry
    from kera.core.schemas import SchemaType

app = Commands(help="Register, show and compare schemas of values.", no_args_is_help=True)

KINDS = ("avro", "json", "protobuf", "arrow")
SUBJECT_ARGUMENT = typer.Argument(..., metavar="SUBJECT", help="STREAM-value or STREAM-key.")
FILE_ARGUMENT = typer.Argument(..., metavar="FILE", help="File with the schema; - for standard input.")
TYPE_OPTION = typer.Option(
    None, "--type", "-t", metavar="TYPE", help=f"{', '.join(KINDS)}. Default: by the file's name."
)
MESSAGE_OPTION = typer.Option(
    "", "--message", metavar="NAME", help="Message of Protobuf that values are. Default: the first of the file."
)
INCLUDE_OPTION = typer.Option(
    [],
    "--proto-path",
    "-I",
    metavar="DIRECTORY",
    help="Additional directory for imports of a .proto file; may be repeated.",
)


@app.command()
async def register(
    subject: str = SUBJECT_ARGUMENT,
    file: Path = FILE_ARGUMENT,
    kind: str | None = TYPE_OPTION,
    message: str = MESSAGE_OPTION,
    proto_path: list[Path] = INCLUDE_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Make a schema the next version of a subject. A schema that the subject has already keeps its version.

    A schema that would break readers is refused; kera schema check lists all reasons.
    """
    schema_type, definition = _definition(file, kind, message, proto_path)
    async with connected(bootstrap) as client:
        done = await client.schemas.register(subject, schema_type, definition, message=message)
    document = {"subject": done.subject, "version": done.version, "schema_id": done.schema_id}
    show_result(document, f"{done.subject}: version {done.version}, schema id {done.schema_id}", output)


@app.command()
async def check(
    subject: str = SUBJECT_ARGUMENT,
    file: Path = FILE_ARGUMENT,
    kind: str | None = TYPE_OPTION,
    message: str = MESSAGE_OPTION,
    proto_path: list[Path] = INCLUDE_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show what would break if a schema were registered; exit code 1 if anything would."""
    schema_type, definition = _definition(file, kind, message, proto_path)
    async with connected(bootstrap) as client:
        found = await client.schemas.check(subject, schema_type, definition, message=message)
        mode = await client.schemas.compatibility(subject)
    document = {"subject": subject, "compatibility": mode.value, "incompatibilities": found}
    show_result(document, "\n".join(found) or f"{subject}: nothing would break ({mode.value})", output)
    if found:
        raise typer.Exit(EXIT_ERROR)


@app.command("list")
async def list_(
    prefix: str = typer.Argument("", metavar="[PREFIX]", help="Only subjects whose names begin with this."),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """List subjects, with the newest schema of each."""
    from kera.core.errors import UnknownSubject

    found = []
    async with connected(bootstrap) as client:
        for subject in await client.schemas.subjects(prefix):
            try:
                newest = await client.schemas.latest(subject)
                mode = await client.schemas.compatibility(subject)
            except UnknownSubject:  # it was deleted meanwhile
                continue
            found.append((newest, mode.value))
    if output.is_document:
        rows = [
            {
                "subject": newest.subject,
                "version": newest.version,
                "schema_id": newest.schema_id,
                "type": newest.schema_type.value,
                "compatibility": mode,
            }
            for newest, mode in found
        ]
        show_document(rows, output)
    elif not found:
        print("no schemas" if not prefix else f"no subject begins with {prefix}")
    else:
        heading = ("SUBJECT", "VERSION", "ID", "TYPE", "COMPATIBILITY")
        cells = [(each.subject, each.version, each.schema_id, each.schema_type.value, mode) for each, mode in found]
        print(table(heading, cells))


@app.command()
async def versions(
    subject: str = SUBJECT_ARGUMENT, bootstrap: str = BOOTSTRAP_OPTION, output: Output = OUTPUT_OPTION
) -> None:
    """List the versions of a subject, from the oldest."""
    async with connected(bootstrap) as client:
        found = await client.schemas.describe_versions(subject)
    rows = [(each.version, each.schema_id, format_time(each.registered_us), each.registered_by) for each in found]
    show_list(map(dataclasses.asdict, found), ("VERSION", "ID", "REGISTERED", "BY"), rows, output)


@app.command()
async def show(
    subject: str | None = typer.Argument(None, metavar="[SUBJECT]", help="STREAM-value or STREAM-key."),
    version: int | None = typer.Option(None, "--version", min=1, metavar="N", help="Default: the newest."),
    schema_id: int | None = typer.Option(
        None, "--id", min=1, metavar="ID", help="The schema with this id, in place of a subject."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show a schema as text; Protobuf and Arrow are decoded. Documents have the registered definition."""
    if (subject is None) == (schema_id is None) or (schema_id is not None and version is not None):
        raise UsageError("give a SUBJECT, perhaps with --version, or --id")
    async with connected(bootstrap) as client:
        found = await _found(client.schemas, subject, version, schema_id)
    if output.is_document:
        show_document({**dataclasses.asdict(found), "schema_type": found.schema_type.value}, output)
    else:
        print(readable(found.schema_type, found.definition))


async def _found(
    schemas: SchemaRegistry, subject: str | None, version: int | None, schema_id: int | None
) -> RegisteredSchema:
    if schema_id is not None:
        return await schemas.by_id(schema_id)
    if version is not None:
        return await schemas.version(subject or "", version)
    return await schemas.latest(subject or "")


@app.command()
async def compatibility(
    subject: str | None = typer.Argument(None, metavar="[SUBJECT]", help="STREAM-value or STREAM-key."),
    mode: str | None = typer.Argument(
        None, metavar="[MODE]", help="none, backward, forward, full, each of the last three with _transitive, too."
    ),
    default: str | None = typer.Option(
        None, "--default", metavar="MODE", help="Set the default for subjects without a setting of their own."
    ),
    bootstrap: str = BOOTSTRAP_OPTION,
    output: Output = OUTPUT_OPTION,
) -> None:
    """Show or set which schemas may follow those of a subject; without a subject, the default of all others.

    backward: the new schema can read values written with the last one. forward: the last schema can read values written
    with the new one. full: both. transitive: the same holds for all earlier schemas.
    """
    if default is not None and subject is not None:
        raise UsageError("--default applies to all subjects: leave the subject out")
    if subject == "":
        raise UsageError("SUBJECT is empty: leave it out for the default, which --default sets")
    async with connected(bootstrap) as client:
        wanted = mode if default is None else default
        if wanted is not None:
            await client.schemas.set_compatibility(subject or "", wanted.lower())
        holds = await client.schemas.compatibility(subject or "")
    document = {"subject": subject or None, "compatibility": holds.value}
    show_result(document, f"{subject or 'default'}: {holds.value}", output)


@app.command()
async def delete(
    subject: str = SUBJECT_ARGUMENT,
    version: int | None = typer.Option(None, "--version", min=1, metavar="N", help="Only this one. Default: all."),
    yes: bool = YES_OPTION,
    bootstrap: str = BOOTSTRAP_OPTION,
) -> None:
    """Delete a version of a subject, or the subject; ids are not used again.

    Once no subject has a schema any more, values that were written with it can no longer be read.
    """
    what = subject if version is None else f"version {version} of {subject}"
    confirm(f"deleting {what}", f"Delete {what}? Values that were written with it may not be read any more.", yes=yes)
    async with connected(bootstrap) as client:
        gone = await client.schemas.versions(subject) if version is None else [version]
        await client.schemas.delete(subject, version)
    print(f"deleted {plural(len(gone), 'version')} of {subject}")


@ended_by_signals()  # as it may read standard input
def _definition(file: Path, kind: str | None, message: str, proto_path: list[Path]) -> tuple[SchemaType, str]:
    """Return the type and the definition of a schema. Raises `UsageError`, also for an option without effect."""
    schema_type, definition = definition_of(file, _kind(kind), proto_path)
    for option, given in {"--message": message, "--proto-path": proto_path}.items():
        if given and schema_type.value != "protobuf":
            raise UsageError(f"{option} is for Protobuf, and {file} is {schema_type.value}")
    if proto_path and file.suffix.lower() in COMPILED:
        raise UsageError(f"--proto-path is for a .proto file, and {file} is compiled already")
    return schema_type, definition


def _kind(kind: str | None) -> str | None:
    if kind is None or kind.lower() in KINDS:
        return kind and kind.lower()
    raise UsageError(f"--type: {kind!r} is not a schema type: {', '.join(KINDS)}")
