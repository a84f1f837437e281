"""The registry of schemas: which subjects there are, and the versions of one."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from kera.console import limits
from kera.console.browsing.decoding import plain
from kera.console.browsing.registered import readable
from kera.console.pages.paging import paged
from kera.console.visits import Visit
from kera.core.internal_names import is_internal
from kera.core.schemas.limits import stream_of

SUBJECT_MAX = 256
VERSIONS_SHOWN_MAX = 100


async def list_subjects(visit: Visit) -> Response:
    """Subjects with a text in their name, some at a time."""
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
    """The versions of a subject, and one of them in full."""
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
            "stream": stream_of(subject),
        },
    )
