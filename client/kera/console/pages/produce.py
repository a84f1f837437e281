"""The page that stores a record in a stream whose values are bytes.

Errors are shown beside their fields, and the user's input stays. After storing, the page of the record is shown.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from starlette.responses import Response

from kera.client import Delivery, RegisteredSchema, StreamDescription
from kera.client.headers import Header
from kera.console import limits
from kera.console.browsing.encoding import BY_SCHEMA, KINDS, encode, reason_of
from kera.console.rendering import address, stream_path
from kera.console.visits import DONE, Visit
from kera.console.web.forms import Form
from kera.console.web.parameters import Parameters
from kera.console.web.problems import Refused, problem_of
from kera.core.errors import (
    AuthenticationFailed,
    CannotDecode,
    CannotEncode,
    InvalidArgument,
    KeraError,
    RecordTooLarge,
    UnknownSchema,
    UnknownSubject,
)

SUBJECT_MAX = 256
_ROWS_AT_ONCE = 3
"""Number of empty rows for headers in a new form, and of rows that are added at once."""
_ADD = "add"


_FIELDS = {"key": "", "as": "text", "value": "", "subject": "", "version": ""}
"""The fields with their defaults. An empty version means the newest one."""

Headers = tuple[tuple[str, str], ...]
"""Names and values as the user typed them, including empty ones."""


class _Record(NamedTuple):
    """The record to store."""

    key: bytes | None
    value: bytes | None
    headers: list[Header]


async def ask(visit: Visit) -> Response:
    """Show the empty form."""
    if not visit.house.admin:
        raise Refused(403, "This console only shows", "It changes nothing unless it was started with --admin.")
    stream = await _stream(visit)
    subjects = await _subjects(visit, stream)
    own = f"{stream.name}-value"
    form = Form(_FIELDS | ({"as": BY_SCHEMA, "subject": own} if own in subjects else {}))
    return _page(visit, stream, form, (("", ""),) * _ROWS_AT_ONCE, subjects)


async def store(visit: Visit) -> Response:
    """Store the record of the form, or show the form again."""
    sent = await visit.change()
    form, headers = Form(_FIELDS, sent), _headers(sent)
    stream = await _stream(visit)
    if sent.has(_ADD):
        more = min(len(headers) + _ROWS_AT_ONCE, limits.PRODUCED_HEADERS_MAX) - len(headers)
        return _page(visit, stream, form, (*headers, *[("", "")] * more), await _subjects(visit, stream))
    record = await _record(visit, stream, form, headers, sent)
    if record is not None:
        try:
            return visit.go(_place_of(stream, await _sent(visit, stream, record)))
        except AuthenticationFailed:
            raise
        except RecordTooLarge as error:
            form.errors["value"] = error.message
        except KeraError as error:
            form.problem = problem_of(error, changes=True)
    return _page(visit, stream, form, headers, await _subjects(visit, stream))


async def _stream(visit: Visit) -> StreamDescription:
    stream = await visit.view.client.admin.describe_stream(visit.name())
    if stream.typed:
        raise InvalidArgument(
            f"stream {stream.name} has columns of its own; store rows in it with kera produce --json",
            stream=stream.name,
        )
    return stream


async def _subjects(visit: Visit, stream: StreamDescription) -> list[str]:
    """Return the subjects of values that the form offers, the stream's first; empty if the user may see none."""
    found: list[str] = []
    with contextlib.suppress(KeraError):
        found = [each for each in await visit.view.subjects.get() if each.endswith("-value")]
    own = f"{stream.name}-value"
    return sorted(found, key=lambda each: each != own)[: limits.SUBJECTS_OFFERED_MAX]


def _headers(sent: Parameters) -> Headers:
    names, values = sent.several("header_name"), sent.several("header_value")
    if len(names) != len(values) or len(names) > limits.PRODUCED_HEADERS_MAX:
        raise InvalidArgument(f"a form has at most {limits.PRODUCED_HEADERS_MAX} headers, each a name and a value")
    return tuple(zip(names, values, strict=True)) or (("", ""),) * _ROWS_AT_ONCE


async def _record(
    visit: Visit, stream: StreamDescription, form: Form, headers: Headers, sent: Parameters
) -> _Record | None:
    """Return the record to store; None: the form is wrong, and has the errors."""
    named: list[Header] = []
    for name, value in headers:
        if name.strip():
            named.append((name.strip(), value.encode()))
        elif value:
            form.errors["headers"] = f"a header with the value {value[:40]!r} has no name"
    key = form.read("key", lambda: sent.text("key", length_max=limits.FORM_BYTES_MAX))
    # Browsers end lines with \r\n; the stored text has the line ends of this system.
    text = form.read("value", lambda: sent.text("value", length_max=limits.FORM_BYTES_MAX).replace("\r\n", "\n"))
    kind = form.read("as", lambda: sent.choice("as", KINDS, "text"))
    schema = await _schema(visit, form, sent) if kind == BY_SCHEMA else None
    value_bytes: bytes | None = None
    if text is not None and kind is not None and not form.errors.keys() & {"subject", "version"}:
        try:
            value_bytes = await encode(kind, text, schema, stream.name)
        except (InvalidArgument, CannotEncode, CannotDecode) as error:
            form.errors["value"] = reason_of(error)
    return None if form.is_wrong else _Record(key.encode() if key else None, value_bytes, named)


async def _schema(visit: Visit, form: Form, sent: Parameters) -> RegisteredSchema | None:
    schemas = visit.view.client.schemas
    subject = form.read("subject", lambda: sent.text("subject", length_max=SUBJECT_MAX).strip())
    version = Parameters([("version", form.values["version"].strip())])
    number = form.read("version", lambda: version.optional("version", 1))
    if form.errors.keys() & {"subject", "version"} or subject is None:
        return None
    try:
        return await (schemas.latest(subject) if number is None else schemas.version(subject, number))
    except UnknownSchema as error:
        form.errors["version"] = error.message
    except (UnknownSubject, InvalidArgument) as error:
        form.errors["subject"] = error.message if subject else "choose the subject of a schema"
    return None


async def _sent(visit: Visit, stream: StreamDescription, record: _Record) -> Delivery:
    """Store the record, and return its place."""
    timeout_ms = int(limits.PRODUCE_TIMEOUT_S * 1000)
    async with visit.view.client.producer(delivery_timeout_ms=timeout_ms) as producer:
        await producer.prepare(stream.name)
        keys = () if record.key is None else record.key
        return await producer.send(stream.name, record.value, keys=keys, headers=record.headers)


def _place_of(stream: StreamDescription, delivery: Delivery) -> str:
    """Return the address of the record's page; if its place is unknown, that of the newest records."""
    if delivery.record is None:
        return address(stream_path(stream.name, "messages"), **{"from": "newest", DONE: "produced"})
    return address(
        stream_path(stream.name, "record"),
        streamlet=delivery.entry.streamlet_id,
        entry=delivery.entry.entry,
        offset=delivery.record,
        **{DONE: "produced"},
    )


def _page(visit: Visit, stream: StreamDescription, form: Form, headers: Headers, subjects: list[str]) -> Response:
    status = 400 if form.errors else form.problem.status if form.problem is not None else 200
    return visit.page(
        "produce.html",
        {
            "stream": stream,
            "form": form,
            "headers": headers,
            "kinds": KINDS,
            "subjects": subjects,
            "may_add": len(headers) < limits.PRODUCED_HEADERS_MAX,
            "add": _ADD,
        },
        status=status,
    )
