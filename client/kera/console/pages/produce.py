"""The page that stores a record in a stream whose values are bytes.

What does not fit is said beside its field, and what was typed stays. A record that was stored is shown where it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from starlette.responses import Response

from kera.client import Delivery, RegisteredSchema, StreamDescription
from kera.client.headers import Header
from kera.console import limits
from kera.console.browsing.encoding import BY_SCHEMA, KINDS, encode, reason_of
from kera.console.rendering import address, stream_path
from kera.console.visits import DONE, Visit
from kera.console.web.parameters import Parameters
from kera.console.web.problems import Problem, Refused, problem_of
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
"""Empty rows for headers that the form begins with, and that are added."""
_ADD = "add"


@dataclass(frozen=True)
class Typed:
    """What the form says."""

    key: str = ""
    kind: str = "text"
    value: str = ""
    subject: str = ""
    version: str = ""
    """Empty: the newest."""
    headers: tuple[tuple[str, str], ...] = (("", ""),) * _ROWS_AT_ONCE
    """Names and values, empty ones included."""


@dataclass
class _Wrong:
    """What kept a record from being stored."""

    fields: dict[str, str] = field(default_factory=dict)
    """Texts by the names of fields."""
    problem: Problem | None = None
    """Of the cluster."""

    @property
    def status(self) -> int:
        """Of the page."""
        if self.fields:
            return 400
        return self.problem.status if self.problem is not None else 200


class _Record(NamedTuple):
    """What is stored."""

    key: bytes | None
    value: bytes | None
    headers: list[Header]


async def ask(visit: Visit) -> Response:
    """The empty form."""
    if not visit.house.admin:
        raise Refused(403, "This console only shows", "It changes nothing unless it was started with --admin.")
    stream = await _stream(visit)
    subjects = await _subjects(visit, stream)
    own = f"{stream.name}-value"
    typed = Typed(kind=BY_SCHEMA, subject=own) if own in subjects else Typed()
    return _page(visit, stream, typed, _Wrong(), subjects)


async def store(visit: Visit) -> Response:
    """Store what the form says, or show the form again."""
    form = await visit.change()
    typed = _typed(form)
    stream = await _stream(visit)
    wrong = _Wrong()
    if form.has(_ADD):
        more = min(len(typed.headers) + _ROWS_AT_ONCE, limits.PRODUCED_HEADERS_MAX) - len(typed.headers)
        typed = replace(typed, headers=(*typed.headers, *[("", "")] * more))
        return _page(visit, stream, typed, wrong, await _subjects(visit, stream))
    record = await _record(visit, stream, typed, wrong)
    if record is not None:
        try:
            return visit.go(_place_of(stream, await _sent(visit, stream, record)))
        except AuthenticationFailed:
            raise
        except RecordTooLarge as error:
            wrong.fields["value"] = error.message
        except KeraError as error:
            wrong.problem = problem_of(error, changes=True)
    return _page(visit, stream, typed, wrong, await _subjects(visit, stream))


async def _stream(visit: Visit) -> StreamDescription:
    stream = await visit.view.client.admin.describe_stream(visit.name())
    if stream.typed:
        raise InvalidArgument(
            f"stream {stream.name} has columns of its own; store rows in it with kera produce --json",
            stream=stream.name,
        )
    return stream


async def _subjects(visit: Visit, stream: StreamDescription) -> list[str]:
    """Subjects of values that the form offers, that of the stream first; empty if none may be seen."""
    found: list[str] = []
    with contextlib.suppress(KeraError):
        found = [each for each in await visit.view.subjects.get() if each.endswith("-value")]
    own = f"{stream.name}-value"
    return sorted(found, key=lambda each: each != own)[: limits.SUBJECTS_OFFERED_MAX]


def _typed(form: Parameters) -> Typed:
    names, values = form.several("header_name"), form.several("header_value")
    if len(names) != len(values) or len(names) > limits.PRODUCED_HEADERS_MAX:
        raise InvalidArgument(f"a form has at most {limits.PRODUCED_HEADERS_MAX} headers, each a name and a value")
    return Typed(
        key=form.text("key", length_max=limits.FORM_BYTES_MAX),
        kind=form.choice("as", KINDS, "text"),
        # Browsers end lines with \r\n; text that is typed here has the line ends of this system.
        value=form.text("value", length_max=limits.FORM_BYTES_MAX).replace("\r\n", "\n"),
        subject=form.text("subject", length_max=SUBJECT_MAX).strip(),
        version=form.text("version").strip(),
        headers=tuple(zip(names, values, strict=True)) or Typed().headers,
    )


async def _record(visit: Visit, stream: StreamDescription, typed: Typed, wrong: _Wrong) -> _Record | None:
    """What is to be stored; None: something does not fit, and `wrong` has it."""
    headers: list[Header] = []
    for name, value in typed.headers:
        if name.strip():
            headers.append((name.strip(), value.encode()))
        elif value:
            wrong.fields["headers"] = f"a header with the value {value[:40]!r} has no name"
    schema = await _schema(visit, typed, wrong) if typed.kind == BY_SCHEMA else None
    value_bytes: bytes | None = None
    if not wrong.fields.keys() & {"subject", "version"}:
        try:
            value_bytes = await encode(typed.kind, typed.value, schema, stream.name)
        except (InvalidArgument, CannotEncode, CannotDecode) as error:
            wrong.fields["value"] = reason_of(error)
    return None if wrong.fields else _Record(typed.key.encode() if typed.key else None, value_bytes, headers)


async def _schema(visit: Visit, typed: Typed, wrong: _Wrong) -> RegisteredSchema | None:
    schemas = visit.view.client.schemas
    try:
        number = Parameters([("version", typed.version)]).optional("version", 1)
    except InvalidArgument as error:
        wrong.fields["version"] = error.message
        return None
    try:
        return await (schemas.latest(typed.subject) if number is None else schemas.version(typed.subject, number))
    except UnknownSchema as error:
        wrong.fields["version"] = error.message
    except (UnknownSubject, InvalidArgument) as error:
        wrong.fields["subject"] = error.message if typed.subject else "choose the subject of a schema"
    return None


async def _sent(visit: Visit, stream: StreamDescription, record: _Record) -> Delivery:
    """Store the record; returns where it is."""
    timeout_ms = int(limits.PRODUCE_TIMEOUT_S * 1000)
    async with visit.view.client.producer(delivery_timeout_ms=timeout_ms) as producer:
        await producer.prepare(stream.name)
        keys = () if record.key is None else record.key
        return await producer.send(stream.name, record.value, keys=keys, headers=record.headers)


def _place_of(stream: StreamDescription, delivery: Delivery) -> str:
    """The page that shows the record; if it is not known where it is, the newest records."""
    if delivery.record is None:
        return address(stream_path(stream.name, "messages"), **{"from": "newest", DONE: "produced"})
    return address(
        stream_path(stream.name, "record"),
        streamlet=delivery.entry.streamlet_id,
        entry=delivery.entry.entry,
        offset=delivery.record,
        **{DONE: "produced"},
    )


def _page(visit: Visit, stream: StreamDescription, typed: Typed, wrong: _Wrong, subjects: list[str]) -> Response:
    return visit.page(
        "produce.html",
        {
            "stream": stream,
            "typed": typed,
            "kinds": KINDS,
            "subjects": subjects,
            "errors": wrong.fields,
            "problem": wrong.problem,
            "may_add": len(typed.headers) < limits.PRODUCED_HEADERS_MAX,
            "add": _ADD,
        },
        status=wrong.status,
    )
