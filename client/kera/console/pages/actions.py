"""Changes to the cluster: each requires one of our forms, and ``--admin``."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

from kera.console.rendering import address, stream_path
from kera.console.visits import DONE, Visit
from kera.console.web.parameters import Parameters
from kera.console.web.problems import Refused

_UINT32_MAX = (1 << 32) - 1


async def delete_stream(visit: Visit) -> Response:
    """Delete a stream; the user has to type its name."""
    form, name = await visit.change(), visit.name()
    _confirm(form, name)
    await visit.view.client.admin.delete_stream(name)
    visit.view.changed()
    return visit.go(address("/streams", **{DONE: "deleted"}))


async def truncate_stream(visit: Visit) -> Response:
    """Delete all present records of a stream; the user has to type its name."""
    form, name = await visit.change(), visit.name()
    _confirm(form, name)
    await visit.view.client.admin.truncate_stream(name, "latest")
    visit.view.changed()
    return visit.go(address(stream_path(name), **{DONE: "truncated"}))


async def move(visit: Visit) -> Response:
    """Move a streamlet to another broker."""
    form, name = await visit.change(), visit.name()
    streamlet, broker = form.whole("streamlet", None, 0, _UINT32_MAX), form.whole("broker", None, 1, _UINT32_MAX)
    await visit.view.client.admin.move_streamlet(name, streamlet, broker)
    visit.view.changed()
    return visit.go(address(stream_path(name), **{DONE: "moved"}))


async def delete_group(visit: Visit) -> Response:
    """Delete a consumer group and its cursors; the user has to type its name."""
    form = await visit.change()
    name = form.text("name", None, length_max=1024)
    _confirm(form, name)
    await visit.view.client.admin.delete_consumer_group(name)
    visit.view.changed()
    return visit.go(address("/groups", **{DONE: "group-deleted"}))


async def drain(visit: Visit) -> Response:
    """Begin to drain a member, or cancel the drain."""
    form = await visit.change()
    kind: Literal["broker", "backup"] = form.choice("kind", ("broker", "backup"))  # type: ignore[assignment]
    member_id, undo = form.whole("id", None, 1, _UINT32_MAX), form.flag("undo")
    if not undo:
        _confirm(form, f"{kind}-{member_id}")
    admin = visit.view.client.admin
    await (admin.drain_broker if kind == "broker" else admin.drain_backup)(member_id, undo=undo)
    visit.view.changed()
    return visit.go(address("/operations", **{DONE: "undrain" if undo else "drain"}))


def _confirm(form: Parameters, name: str) -> None:
    if form.text("confirm", length_max=1024) != name:
        raise Refused(400, "Nothing was done", f"To confirm, type {name} into the field beside the button.", "Go back.")
