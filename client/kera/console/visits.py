"""One request, as a page sees it: the user, the parameters, and the means to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kera.console import limits
from kera.console.web.parameters import Parameters
from kera.console.web.problems import Refused
from kera.console.web.tokens import FIELD

if TYPE_CHECKING:
    from kera.console.house import House
    from kera.console.watching.view import View

_FORM = "application/x-www-form-urlencoded"
DONE = "done"
"""Parameter with the change that led to the page."""
INTERNAL = "internal"
"""Parameter of all lists, to show internal streams as well."""
_DONE = {
    "created": "The stream was created.",
    "altered": "The settings were changed.",
    "unchanged": "Nothing was changed: no field was edited.",
    "truncated": "The records were deleted.",
    "deleted": "The stream was deleted.",
    "produced": "The record is stored.",
    "reset": "The consumer group was reset.",
    "group-deleted": "The consumer group was deleted.",
    "registered": "The schema is registered.",
    "compatibility": "The compatibility was set.",
    "moved": "The streamlet was moved.",
    "drain": "The drain has started.",
    "undrain": "The drain was cancelled.",
}
"""The texts by change. An address can only choose one of these texts, and not add any."""


class Visit:
    """One request with its user, its form and the means to answer it."""

    def __init__(self, house: House, request: Request, cookie: str, view: View | None, user: str) -> None:
        self.house, self.request = house, request
        self.user = user
        """The signed-in user; empty: nobody is signed in, or the cluster does not require it."""
        self.parameters = Parameters.parse(request.scope["query_string"])
        self._cookie = cookie
        self._view = view

    @property
    def internal(self) -> bool:
        """Whether lists show internal streams. Raises `InvalidArgument`."""
        return self.parameters.flag(INTERNAL)

    @property
    def kept(self) -> dict[str, str]:
        """The parameters that links to other lists keep."""
        return {INTERNAL: "1"} if self.internal else {}

    @property
    def view(self) -> View:
        """The cluster as the signed-in user sees it. Raises `Refused` without a signed-in user, if one is required."""
        if self._view is None:
            raise Refused(401, "Not signed in", "This cluster requires you to sign in.", "Sign in.")
        return self._view

    def name(self, parameter: str = "name") -> str:
        """Return the name in the path."""
        return str(self.request.path_params[parameter])

    def page(self, template: str, context: Mapping[str, Any], *, status: int = 200) -> Response:
        """Answer with a page."""
        done = self.parameters.text(DONE) if self.request.method == "GET" and status == 200 else ""
        shared = {
            "admin": self.house.admin,
            "csrf": self.house.tokens.token(self._cookie),
            "csrf_field": FIELD,
            "done": _DONE.get(done, ""),
            "kept": self.kept if status == 200 else {},
            "path": self.request.url.path,
            "secured": self.house.secured,
            "user": self.user,
        }
        return HTMLResponse(self.house.templates.render(template, {**shared, **context}), status)

    @staticmethod
    def go(address: str) -> Response:
        """Answer with a redirect to another page, after a change."""
        return RedirectResponse(address, 303)

    def leave(self) -> None:
        """End the user's session, if there is one."""
        if self.user:
            self.house.sign_out(self._cookie)

    async def form(self) -> Parameters:
        """Read the submitted form, and check that it is one of ours. Raises `Refused`, `InvalidArgument`."""
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _FORM:
            raise Refused(415, "Invalid form", f"A change is sent as {_FORM}.")
        form = Parameters.parse(await self._body(), fields_max=limits.FORM_FIELDS_MAX)
        if not self.house.tokens.is_good(self._cookie, form.text(FIELD)):
            raise Refused(
                403,
                "This form has expired",
                "It belongs to another session, or the console has restarted since.",
                "Go back, load the page again, and send it from there.",
            )
        return form

    async def change(self) -> Parameters:
        """Read a form that changes the cluster, which requires --admin. Raises `Refused`, `InvalidArgument`."""
        if not self.house.admin:
            raise Refused(403, "This console only shows", "It changes nothing unless it was started with --admin.")
        return await self.form()

    async def _body(self) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(limits.REQUEST_TIMEOUT_S):
                async for part in self.request.stream():
                    body += part
                    if len(body) > limits.FORM_BYTES_MAX:
                        raise Refused(413, "Form too large", f"A form has at most {limits.FORM_BYTES_MAX >> 20} MiB.")
        except TimeoutError:
            raise Refused(
                408, "Form too slow", f"A form has to arrive within {limits.REQUEST_TIMEOUT_S:.0f} s."
            ) from None
        except ClientDisconnect:
            raise Refused(400, "Incomplete form", "The connection ended before the form did.") from None
        return bytes(body)
