"""The registry of schemas: its subjects, the versions of a subject, and a form to register another version."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response

from kera.console import limits
from kera.console.browsing.decoding import plain
from kera.console.browsing.registered import readable
from kera.console.pages.paging import paged
from kera.console.rendering import address
from kera.console.visits import DONE, Visit
from kera.console.web.forms import Form
from kera.core.base.internal_names import is_internal
from kera.core.errors import IncompatibleSchema, InvalidArgument, InvalidSchema, UnknownSubject
from kera.core.schemas.kinds import Compatibility, SchemaType
from kera.core.schemas.limits import stream_of

KINDS = {SchemaType.AVRO: "Avro", SchemaType.JSON: "JSON Schema"}
"""The kinds that a form can take. Definitions of Protobuf are binary, and `kera schema register` registers them."""
SUBJECT_MAX = 256
VERSIONS_SHOWN_MAX = 100


async def list_subjects(visit: Visit) -> Response:
    """Show a page of the subjects with a text in their name."""
    wanted = visit.parameters.text("q").strip()
    number = visit.parameters.whole("page", 1, 1, 1_000_000)
    subjects = await visit.view.subjects.get()
    shown = subjects if visit.internal else [each for each in subjects if not is_internal(each)]
    found = [each for each in shown if wanted.casefold() in each.casefold()] if wanted else shown
    return visit.page(
        "schemas.html",
        {
            "page": paged(found, number),
            "q": wanted,
            "query": {"q": wanted, **visit.kept},
            "all": len(shown),
            "internal_subjects": sum(map(is_internal, subjects)),
        },
    )


async def describe(visit: Visit) -> Response:
    """Show the versions of a subject, and one version in full."""
    subject = visit.parameters.text("subject", None, length_max=SUBJECT_MAX)
    number = visit.parameters.optional("version", 1)
    schemas = visit.view.client.schemas
    latest = schemas.latest(subject) if number is None else schemas.version(subject, number)
    versions, compatibility, schema = await asyncio.gather(
        schemas.describe_versions(subject), schemas.compatibility(subject), latest
    )
    text = plain(readable(schema))
    return visit.page(
        "schema.html",
        {
            "subject": subject,
            "schema": schema,
            "definition": text[: limits.RECORD_SHOWN_MAX],
            "cut": len(text) > limits.RECORD_SHOWN_MAX,
            "versions": versions[::-1][:VERSIONS_SHOWN_MAX],
            "versions_left_out": max(0, len(versions) - VERSIONS_SHOWN_MAX),
            "compatibility": compatibility,
            "modes": list(Compatibility),
            "stream": stream_of(subject),
        },
    )


async def ask_register(visit: Visit) -> Response:
    """Show the form for a new version; for an existing subject it begins with the newest definition."""
    subject = visit.parameters.text("subject", length_max=SUBJECT_MAX)
    values = {"subject": subject, "kind": SchemaType.AVRO.value, "definition": ""}
    if subject:
        with contextlib.suppress(UnknownSubject):
            newest = await visit.view.client.schemas.latest(subject)
            if newest.schema_type in KINDS:
                values |= {"kind": newest.schema_type.value, "definition": plain(readable(newest))}
    return _register_page(visit, Form(values))


async def register(visit: Visit) -> Response:
    """Register a version, or show the form again if the schema is invalid or incompatible."""
    sent = await visit.change()
    form = Form({"subject": "", "kind": "", "definition": ""}, sent)
    subject = form.read("subject", lambda: sent.text("subject", None, length_max=SUBJECT_MAX))
    kind = form.read("kind", lambda: sent.choice("kind", list(KINDS)))
    definition = form.read("definition", lambda: sent.text("definition", None, length_max=limits.FORM_BYTES_MAX))
    if subject and kind and definition:
        try:
            # Browsers end lines with \r\n; a definition has the line ends of this system.
            text = definition.replace("\r\n", "\n")
            done = await visit.view.client.schemas.register(subject, SchemaType(kind), text)
        except (InvalidSchema, IncompatibleSchema) as error:
            form.errors["definition"] = error.message
        except InvalidArgument as error:
            form.errors["subject"] = error.message
        else:
            visit.view.changed()
            return visit.go(address("/schema", subject=subject, version=done.version, **{DONE: "registered"}))
    return _register_page(visit, form, status=400)


async def set_compatibility(visit: Visit) -> Response:
    """Set which changes a subject allows."""
    form = await visit.change()
    subject = form.text("subject", None, length_max=SUBJECT_MAX)
    await visit.view.client.schemas.set_compatibility(subject, form.choice("mode", list(Compatibility)))
    return visit.go(address("/schema", subject=subject, **{DONE: "compatibility"}))


def _register_page(visit: Visit, form: Form, *, status: int = 200) -> Response:
    return visit.page("schema_register.html", {"form": form, "kinds": KINDS}, status=status)
