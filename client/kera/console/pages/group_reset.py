"""Resets of consumer groups: first a preview of the changes, then exactly the reset that was previewed."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from kera.client import ConsumerGroupDescription
from kera.client.admin.reset_plan import CursorChange, ResetPlan, ResetTo, ShiftBy, ToOffset
from kera.console import limits
from kera.console.rendering import address
from kera.console.visits import DONE, Visit
from kera.console.web.forms import Form
from kera.console.web.parameters import NUMBER_MAX, Parameters
from kera.console.web.problems import Problem
from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument, InvalidCursor, StreamletOutOfRange, UnknownStream

PLACES: Final[Mapping[str, str]] = {
    "earliest": "the earliest record",
    "latest": "the end (latest)",
    "time": "a time",
    "offset": "an offset",
    "shift": "shift by records",
}
NAME_LENGTH_MAX = 1024
_FIELDS = {"stream": "", "to": "", "time": "", "offset": "", "records": "", "streamlets": ""}
_STREAMLETS_MAX = 10_000
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_CURSOR_NUMBERS = 6


async def ask(visit: Visit) -> Response:
    """Show the form, and, after the user has chosen a place, the changes of the reset."""
    asked = visit.parameters
    name = asked.text("name", None, length_max=NAME_LENGTH_MAX)
    group = await visit.view.describe_group(name)
    form = Form(_FIELDS, asked)
    plan = await _plan(visit, form, name) if asked.has("to") and visit.house.admin else None
    return _page(visit, form, group, plan)


async def reset(visit: Visit) -> Response:
    """Carry out the plan that the user has previewed."""
    sent = await visit.change()
    plan = _sent_plan(sent)
    await visit.view.client.admin.reset_consumer_group(
        plan.consumer_group, plan.stream, plan, force=sent.flag("force"), streamlets=_streamlets_of(plan)
    )
    visit.view.changed()
    return visit.go(address("/group", name=plan.consumer_group, **{DONE: "reset"}))


async def _plan(visit: Visit, form: Form, name: str) -> ResetPlan | None:
    """Return the plan that the form asks for; None: the form is wrong, and has the errors."""
    asked = visit.parameters
    stream = form.read("stream", lambda: asked.text("stream", None))
    to = form.read("to", lambda: asked.choice("to", PLACES))
    place = _place(form, asked, to) if to else None
    streamlets = form.read("streamlets", lambda: parse_streamlets(asked.text("streamlets")))
    if form.is_wrong or stream is None or place is None:
        return None
    try:
        return await visit.view.client.admin.plan_reset(name, stream, place, streamlets=streamlets)
    except (InvalidArgument, InvalidCursor, StreamletOutOfRange, UnknownStream) as error:
        form.problem = Problem(400, "This reset is not possible", error.message)
        return None


def _place(form: Form, asked: Parameters, to: str) -> ResetTo | None:
    if to == "time":
        moment_us = form.read("time", lambda: asked.moment("time"))
        return None if moment_us is None else _EPOCH + datetime.timedelta(microseconds=moment_us)
    if to == "offset":
        offset = form.read("offset", lambda: asked.whole("offset", None))
        return None if offset is None else ToOffset(offset)
    if to == "shift":
        records = form.read("records", lambda: _signed(asked.text("records", None)))
        return None if records is None else ShiftBy(records)
    return "earliest" if to == "earliest" else "latest"


def _signed(text: str) -> int:
    digits = text.strip().lstrip("+-").replace("_", "")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and len(text.strip()) - len(digits) <= 1):
        raise InvalidArgument(f"{text[:40]!r} is not a number of records; write -100 to go back, 100 to skip")
    return -int(digits) if text.strip().startswith("-") else int(digits)


def parse_streamlets(text: str) -> list[int] | None:
    """Parse numbers such as ``0, 2, 5-7``; None: all streamlets. Raises `InvalidArgument`."""
    found: set[int] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = (each.strip() for each in part.partition("-"))
        bounds = (first, last) if dash else (first, first)
        if not all(each.isascii() and each.isdigit() and len(each) <= 9 for each in bounds):
            raise InvalidArgument(f"{part[:40]!r} is not a streamlet; write numbers such as 0, 2, 5-7")
        low, high = map(int, bounds)
        if high < low or high - low >= _STREAMLETS_MAX or len(found) + high - low >= _STREAMLETS_MAX:
            raise InvalidArgument(f"{part[:40]!r} is not a range of at most {_STREAMLETS_MAX} streamlets")
        found.update(range(low, high + 1))
    return sorted(found) or None


def _streamlets_of(plan: ResetPlan) -> list[int]:
    return sorted({change.streamlet for change in plan.changes})


def plan_text(plan: ResetPlan) -> str:
    """Return the cursors of a plan for a form's field: streamlet, entry, cursor and offset of each."""
    return ";".join(
        ",".join(map(str, (each.streamlet, each.entry, *each.new, each.new_offset))) for each in plan.changes
    )


def _sent_plan(sent: Parameters) -> ResetPlan:
    """Parse the plan that a form of ours has. Raises `InvalidArgument`."""
    changes = []
    for part in filter(None, sent.text("cursors", None, length_max=limits.FORM_BYTES_MAX).split(";")):
        numbers = part.split(",")
        if len(numbers) != _CURSOR_NUMBERS or not all(
            each.isascii() and each.isdigit() and len(each) <= 19 and int(each) <= NUMBER_MAX for each in numbers
        ):
            raise InvalidArgument("cursors are not those of a preview: go back and preview again", parameter="cursors")
        streamlet, entry, group, segment, offset, record = map(int, numbers)
        changes.append(CursorChange(streamlet, entry, None, None, Position(group, segment, offset), record, None, None))
    return ResetPlan(
        sent.text("name", None, length_max=NAME_LENGTH_MAX),
        sent.text("stream", None),
        sent.whole("stream_id", None),
        tuple(changes),
    )


def _page(visit: Visit, form: Form, group: ConsumerGroupDescription, plan: ResetPlan | None) -> Response:
    streams = sorted({each.stream for each in group.entries} | ({form.values["stream"]} - {""}))
    shown = () if plan is None else plan.changes[: limits.ROWS_MAX]
    return visit.page(
        "group_reset.html",
        {
            "form": form,
            "group": group,
            "streams": streams,
            "places": PLACES,
            "plan": plan,
            "changes": shown,
            "left_out": 0 if plan is None else len(plan.changes) - len(shown),
            "cursors": "" if plan is None else plan_text(plan),
        },
        status=400 if form.is_wrong else 200,
    )
