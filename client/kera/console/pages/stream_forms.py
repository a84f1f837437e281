"""Forms that create a stream and change its settings, in human units, with errors beside the fields.

A form that is wrong, or that the cluster refuses, is shown again with the user's input. A change sends only the edited
fields, so that other users' changes in the meantime stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from starlette.responses import Response

from kera.client import StreamConfig, StreamDescription
from kera.console import limits
from kera.console.pages.streams import targets
from kera.console.rendering import address, stream_path
from kera.console.visits import DONE, Visit
from kera.console.web.forms import Form
from kera.console.web.parameters import Parameters
from kera.console.web.problems import problem_of
from kera.core.base.sizes import exact_size
from kera.core.base.spans import exact_span
from kera.core.errors import AuthenticationFailed, InvalidArgument, KeraError, StreamExists
from kera.core.format.arrow_types import COMMON, arrow_type
from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS

DURABILITIES = ("", "leader", "replicated", "persisted")
CODECS = ("none", "lz4", "zstd")
PUNCTUATIONS = ("clock", "producers")
COLUMN_ROWS = 4
"""Number of rows for columns in a new form; a button adds as many."""
WAS = "was_"
"""Prefix of the hidden fields with the values at the time when the form was made."""
_UINT32_MAX = (1 << 32) - 1
_PRIORITY_MAX = 9


class _Setting(NamedTuple):
    """A setting that can be altered, with the functions that show it in a field, and read it from there."""

    shown: Callable[[StreamConfig], str]
    read: Callable[[Parameters, str], Any]
    argument: str
    """Name of the argument of `Admin.create_stream` and `Admin.alter_stream`."""


def _span(value_ms: int) -> str:
    return exact_span(value_ms) if value_ms else ""


SETTINGS: Mapping[str, _Setting] = {
    "durability": _Setting(
        lambda config: config.durability, lambda sent, name: sent.choice(name, DURABILITIES, "") or None, "durability"
    ),
    "retention": _Setting(
        lambda config: _span(config.retention_ms), lambda sent, name: sent.span_ms(name, 0), "retention_ms"
    ),
    "retention_size": _Setting(
        lambda config: exact_size(config.retention_bytes) if config.retention_bytes else "",
        lambda sent, name: sent.size_bytes(name, 0),
        "retention_bytes",
    ),
    "retention_groups": _Setting(
        lambda config: ", ".join(config.retention_consumer_groups),
        lambda sent, name: sent.names(name),
        "retention_consumer_groups",
    ),
    "retention_consumed": _Setting(
        lambda config: "1" if config.retention_consumed else "",
        lambda sent, name: sent.flag(name),
        "retention_consumed",
    ),
    "virtual_logs": _Setting(
        lambda config: str(config.virtual_logs), lambda sent, name: sent.whole(name, 1, 1, _UINT32_MAX), "virtual_logs"
    ),
    "memory_priority": _Setting(
        lambda config: str(config.memory_priority),
        lambda sent, name: sent.whole(name, 0, 0, _PRIORITY_MAX),
        "memory_priority",
    ),
    "replication_priority": _Setting(
        lambda config: str(config.replication_priority),
        lambda sent, name: sent.whole(name, 0, 0, _PRIORITY_MAX),
        "replication_priority",
    ),
    "epoch": _Setting(lambda config: _span(config.epoch_ms), lambda sent, name: sent.span_ms(name, 0), "epoch_ms"),
    "punctuation": _Setting(
        lambda config: config.punctuation, lambda sent, name: sent.choice(name, PUNCTUATIONS, "clock"), "punctuation"
    ),
    "epoch_grace": _Setting(
        lambda config: exact_span(config.epoch_grace_ms),
        lambda sent, name: sent.span_ms(name, EPOCH_GRACE_MS),
        "epoch_grace_ms",
    ),
    "timestamp_ahead_max": _Setting(
        lambda config: exact_span(config.timestamp_ahead_max_ms),
        lambda sent, name: sent.span_ms(name, TIMESTAMP_AHEAD_MAX_MS),
        "timestamp_ahead_max_ms",
    ),
}
"""The settings by the names of their fields."""
_NEW = {
    **dict.fromkeys(SETTINGS, ""),
    "name": "",
    "streamlets": "1",
    "entries": "1",
    "brokers": "",
    "replication": "",
    "codec": "none",
    "punctuation": "clock",
    "epoch_grace": exact_span(EPOCH_GRACE_MS),
    "timestamp_ahead_max": exact_span(TIMESTAMP_AHEAD_MAX_MS),
    "key_column": "",
    "timestamp_column": "",
    "rows": str(COLUMN_ROWS),
}
_COLUMN = ("column_name_", "column_type_", "column_required_")


async def ask_create(visit: Visit) -> Response:
    """Show the form for a new stream."""
    return _create_page(visit, Form(_with_columns(_NEW)), COLUMN_ROWS)


async def create_stream(visit: Visit) -> Response:
    """Create a stream, or show the form again if that is not possible, or if the user needs more rows for columns."""
    sent = await visit.change()
    rows = sent.whole("rows", COLUMN_ROWS, 1, limits.FORM_COLUMNS_MAX)
    form = Form(_with_columns(_NEW), sent)
    if sent.has("more"):
        return _create_page(visit, form, min(rows + COLUMN_ROWS, limits.FORM_COLUMNS_MAX))
    name, arguments = form.read("name", lambda: sent.text("name", None)), _of_new(form, sent, rows)
    if not form.is_wrong:
        try:
            await visit.view.client.admin.create_stream(name or "", **arguments)
        except StreamExists as error:
            form.errors["name"] = error.message
        except KeraError as error:
            _refused(form, error)
    if form.is_wrong:
        status = form.problem.status if form.problem else 409 if set(form.errors) == {"name"} and name else 400
        return _create_page(visit, form, rows, status=status)
    visit.view.changed()
    return visit.go(address(stream_path(name or ""), **{DONE: "created"}))


async def ask_alter(visit: Visit) -> Response:
    """Show the form with the settings of a stream."""
    stream = await visit.view.client.admin.describe_stream(visit.name())
    return await _alter_page(visit, stream, Form({**_shown(stream.config), "add_columns": ""}))


async def alter_stream(visit: Visit) -> Response:
    """Change the edited settings of a stream."""
    sent, name = await visit.change(), visit.name()
    stream = await visit.view.client.admin.describe_stream(name)
    form = Form({**_shown(stream.config), "add_columns": ""}, sent)
    changes: dict[str, Any] = {}
    for field, setting in SETTINGS.items():
        if sent.raw(field) != sent.raw(WAS + field):
            changes[setting.argument] = form.read(field, lambda s=setting, f=field: s.read(sent, f))  # type: ignore[misc]
    if sent.has("add_columns"):
        changes["add_columns"] = form.read("add_columns", lambda: _columns_of_lines(sent.raw("add_columns")))
    if not form.is_wrong and changes:
        try:
            await visit.view.client.admin.alter_stream(name, **changes)
        except KeraError as error:
            _refused(form, error)
    if form.is_wrong:
        return await _alter_page(visit, stream, form, sent, status=form.problem.status if form.problem else 400)
    visit.view.changed()
    return visit.go(address(stream_path(name), **{DONE: "altered" if changes else "unchanged"}))


def _create_page(visit: Visit, form: Form, rows: int, *, status: int = 200) -> Response:
    shown = {"form": form, "rows": rows, "rows_max": limits.FORM_COLUMNS_MAX, "types": COMMON, "codecs": CODECS}
    return visit.page("stream_create.html", shown, status=status)


async def _alter_page(
    visit: Visit, stream: StreamDescription, form: Form, sent: Parameters | None = None, *, status: int = 200
) -> Response:
    was = {field: form.values[field] if sent is None else sent.raw(WAS + field) for field in SETTINGS}
    cluster = await visit.view.cluster.get()
    shown = {"form": form, "stream": stream, "was": was, "targets": targets(cluster)}
    return visit.page("stream_settings.html", shown, status=status)


def _shown(config: StreamConfig) -> dict[str, str]:
    return {field: setting.shown(config) for field, setting in SETTINGS.items()}


def _with_columns(fields: Mapping[str, str]) -> dict[str, str]:
    columns = (f"{each}{at}" for at in range(limits.FORM_COLUMNS_MAX) for each in _COLUMN)
    return {**fields, **dict.fromkeys(columns, "")}


def _of_new(form: Form, sent: Parameters, rows: int) -> dict[str, Any]:
    """Return the arguments of `Admin.create_stream`; the form gets the errors, if any."""
    arguments: dict[str, Any] = {
        "streamlets": form.read("streamlets", lambda: sent.whole("streamlets", 1, 1, _UINT32_MAX)),
        "entries": form.read("entries", lambda: sent.whole("entries", 1, 1, _UINT32_MAX)),
        "brokers": form.read("brokers", lambda: sent.whole("brokers", 0, 0, _UINT32_MAX)),
        "replication": form.read("replication", lambda: sent.optional("replication", 0, _UINT32_MAX)),
        "codec": form.read("codec", lambda: sent.choice("codec", CODECS, "none")),
    }
    for field, setting in SETTINGS.items():
        if sent.has(field):
            arguments[setting.argument] = form.read(field, lambda s=setting, f=field: s.read(sent, f))  # type: ignore[misc]
    fields = _columns(form, sent, rows)
    if fields:
        arguments["schema"] = pa.schema(list(fields.values()))
    for field in ("key_column", "timestamp_column"):
        row = form.read(field, lambda f=field: sent.optional(f, 0, rows - 1))  # type: ignore[misc]
        if row is None:
            continue
        if row in fields:
            arguments[field] = fields[row].name
        elif f"column_name_{row}" not in form.errors and f"column_type_{row}" not in form.errors:
            form.errors[f"column_name_{row}"] = "this row has no column"
    return arguments


def _columns(form: Form, sent: Parameters, rows: int) -> dict[int, pa.Field]:
    """Return the columns by their rows in the form."""
    found: dict[int, pa.Field] = {}
    for row in range(rows):
        of_name, of_type, required = (f"{each}{row}" for each in _COLUMN)
        if not (sent.has(of_name) or sent.has(of_type)):
            continue
        name = form.read(of_name, lambda f=of_name: sent.text(f, None))  # type: ignore[misc]
        kind = form.read(of_type, lambda f=of_type: _type(sent.text(f, None)))  # type: ignore[misc]
        if name in {each.name for each in found.values()}:
            form.errors.setdefault(of_name, f"another column is called {name!r} as well")
        elif name and kind is not None:
            found[row] = pa.field(name, kind, nullable=not form.read(required, lambda f=required: sent.flag(f)))  # type: ignore[misc]
    return found


def _type(text: str) -> pa.DataType:
    found = arrow_type(text.strip())
    if found is None:
        raise InvalidArgument(f"Arrow has no type {text!r}; try {', '.join(COMMON[:5])}")
    return found


def _columns_of_lines(text: str) -> pa.Schema:
    """Parse columns, one per line: ``name: type``. Raises `InvalidArgument`."""
    fields = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, kind = line.partition(":")
        if not (colon and name.strip()):
            raise InvalidArgument(f"{line[:80]!r}: write a column as name: type, such as fare: float64")
        fields.append(pa.field(name.strip(), _type(kind)))
    return pa.schema(fields)


def _refused(form: Form, error: KeraError) -> None:
    """Set the form's problem, because the cluster has refused it. Raises `AuthenticationFailed` again."""
    if isinstance(error, AuthenticationFailed):
        raise error
    form.problem = problem_of(error, changes=True)
