"""Converts schema files of each kind into definitions for the registry, and definitions into readable text."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kera.cli._run import MissingExtra, UsageError
from kera.cli._streams import closed_stream

if TYPE_CHECKING:
    import pyarrow as pa

    from kera.core.schemas import SchemaType

STDIN = Path("-")
FILE_BYTES_MAX = 4 << 20
"""More than any file with a definition, or with the source of one, has."""
COMPILE_S = 60.0
SUFFIXES = {
    ".avsc": "avro",
    ".json": "json",
    ".proto": "protobuf",
    ".binpb": "protobuf",
    ".desc": "protobuf",
    ".arrow": "arrow",
    ".arrows": "arrow",
}
COMPILED = (".binpb", ".desc")
"""Suffixes of Protobuf files that protoc has made."""


def definition_of(path: Path, kind: str | None, includes: Sequence[Path]) -> tuple[SchemaType, str]:
    """Return the type and the definition of the schema in a file or in standard input. Raises `UsageError`."""
    from kera.core.schemas import SchemaType

    known = kind or SUFFIXES.get(path.suffix.lower())
    if known is None:
        kinds, suffixes = ", ".join(SchemaType), ", ".join(SUFFIXES)
        raise UsageError(f"{path}: give its type with --type: {kinds}. Files that end in {suffixes} need no --type")
    schema_type = SchemaType(known)
    data = _read(path)
    if schema_type is SchemaType.PROTOBUF:
        is_source = path == STDIN or path.suffix.lower() not in COMPILED
        return schema_type, _base64(_compiled(path, data, includes) if is_source else data)
    if schema_type is SchemaType.ARROW:
        return schema_type, _base64(_arrow(path, data).serialize().to_pybytes())
    try:
        return schema_type, data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: it is not UTF-8 text: byte {error.start}") from None


def readable(schema_type: SchemaType, definition: str) -> str:
    """Return a definition for people: its text, or the decoded form of its bytes."""
    import base64

    from kera.core.schemas import SchemaType

    if schema_type is SchemaType.ARROW:
        from kera.core.format.schema import schema_from_bytes

        return str(schema_from_bytes(base64.b64decode(definition)))
    if schema_type is SchemaType.PROTOBUF:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet

        files = FileDescriptorSet.FromString(base64.b64decode(definition)).file
        return "\n".join(f"# {file.name}\n{file}" for file in files).rstrip("\n")
    return definition


def _read(path: Path) -> bytes:
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        if closed_stream(error):
            raise
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {FILE_BYTES_MAX} bytes, and is not a schema")
    return data


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def arrow_schema_of(path: Path) -> pa.Schema:
    """Return the schema in a file of Arrow's IPC format, or of Parquet. Raises `UsageError`."""
    import pyarrow as pa

    if path.suffix.lower() != ".parquet":
        return _arrow(path, _read(path))
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise UsageError(f"{path}: it is not a Parquet file: {error}") from None


def _arrow(path: Path, data: bytes) -> pa.Schema:
    """Read the schema of an IPC message, stream or file. Raises `UsageError`."""
    import pyarrow as pa

    for read in (pa.ipc.read_schema, _schema_of_stream, _schema_of_file):
        try:
            return read(pa.py_buffer(data))
        except (pa.ArrowException, OSError, EOFError):
            continue
    raise UsageError(f"{path}: it is neither an Arrow schema nor a stream or file of the Arrow IPC format")


def _schema_of_stream(buffer: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(buffer).schema


def _schema_of_file(buffer: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(buffer).schema


def _compiled(path: Path, data: bytes, includes: Sequence[Path]) -> bytes:
    """Compile a .proto file into descriptors of it and of all its imports. Raises `MissingExtra` or `UsageError`."""
    import importlib.util

    if importlib.util.find_spec("grpc_tools") is None:
        raise MissingExtra(
            "a .proto file is compiled with grpcio-tools, which is missing: pip install grpcio-tools; or give what"
            " protoc --include_imports -o FILE.binpb makes of it"
        )
    with tempfile.TemporaryDirectory(prefix="kera-schema-") as directory:
        source, made = Path(directory) / "stdin.proto", Path(directory) / "made.binpb"
        if path == STDIN:
            source.write_bytes(data)
        else:
            source = path
        roots = [source.parent, *includes]
        command = [sys.executable, "-m", "grpc_tools.protoc", "--include_imports", f"--descriptor_set_out={made}"]
        command += [f"--proto_path={root}" for root in roots]
        try:
            done = subprocess.run(  # noqa: S603 - the compiler, with a file that was named
                [*command, source.name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"{path}: it is compiled for more than {COMPILE_S:.0f} s") from None
        if done.returncode or not made.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise UsageError(lines[0] if lines else f"{path} cannot be compiled")
        return made.read_bytes()
