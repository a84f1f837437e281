"""The application: the addresses of pages, and the handling of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from kera.console import limits
from kera.console.house import House
from kera.console.pages import (
    access,
    actions,
    group_reset,
    groups,
    latency,
    members,
    messages,
    operations,
    overview,
    produce,
    schemas,
    signing,
    stream_forms,
    streams,
)
from kera.console.rendering import HERE
from kera.console.visits import Visit
from kera.console.web.gate import App, Gate
from kera.console.web.problems import Problem, problem_of, too_slow
from kera.core.base.telemetry import get_logger
from kera.core.errors import AuthenticationFailed, KeraError

log = get_logger("kera.console")

Page = Callable[[Visit], Awaitable[Response]]
SESSION_COOKIE = "kera-console"
FORM_COOKIE = "kera-console-form"
BY_ITSELF = "x-kera-by-itself"
"""Header of requests that an open page makes without a user's action."""

PAGES: tuple[tuple[str, Page], ...] = (
    ("/", overview.overview),
    ("/streams", streams.list_streams),
    ("/stream/create", stream_forms.ask_create),
    ("/streams/{name}", streams.describe),
    ("/streams/{name}/settings", stream_forms.ask_alter),
    ("/streams/{name}/messages", messages.browse_messages),
    ("/streams/{name}/record", messages.show_record),
    ("/streams/{name}/value", messages.download),
    ("/streams/{name}/produce", produce.ask),
    ("/groups", groups.list_groups),
    ("/group", groups.describe),
    ("/group/reset", group_reset.ask),
    ("/latency", latency.list_constraints),
    ("/latency/constraint", latency.describe),
    ("/members", members.list_members),
    ("/operations", operations.show),
    ("/schemas", schemas.list_subjects),
    ("/schema", schemas.describe),
    ("/schema/register", schemas.ask_register),
    ("/access", access.show),
)
CHANGES: tuple[tuple[str, Page], ...] = (
    ("/streams/create", stream_forms.create_stream),
    ("/streams/{name}/alter", stream_forms.alter_stream),
    ("/streams/{name}/delete", actions.delete_stream),
    ("/streams/{name}/truncate", actions.truncate_stream),
    ("/streams/{name}/produce", produce.store),
    ("/streams/{name}/move", actions.move),
    ("/group/reset", group_reset.reset),
    ("/group/delete", actions.delete_group),
    ("/members/drain", actions.drain),
    ("/schema/register", schemas.register),
    ("/schema/compatibility", schemas.set_compatibility),
)
_OF_STATUS = {
    404: ("There is no such page", "Nothing is at this address."),
    405: ("That cannot be done here", "This address takes another kind of request."),
}
DEFECT = Problem(500, "This is a defect of the console", "What went wrong is in its log.")


def application(house: House, names: Collection[str]) -> App:
    """Return the application with all pages of `house`, for a server with these `names`."""
    endpoints = _Endpoints(house)
    routes = [
        *(Route(path, endpoints.of(page), methods=["POST"]) for path, page in CHANGES),
        *(Route(path, endpoints.of(page), methods=["GET"]) for path, page in PAGES),
        Route("/sign-in", endpoints.of(signing.ask, anybody=True), methods=["GET"]),
        Route("/sign-in", endpoints.of(signing.sign_in, anybody=True), methods=["POST"]),
        Route("/sign-out", endpoints.of(signing.sign_out, anybody=True), methods=["POST"]),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]

    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: endpoints.http_error},
    )
    return Gate(app, names, endpoints.refusal)


class _Endpoints:
    """Turns pages into endpoints of Starlette."""

    def __init__(self, house: House) -> None:
        self._house = house
        prefix = "__Host-" if house.encrypted else ""
        self._session_cookie, self._form_cookie = prefix + SESSION_COOKIE, prefix + FORM_COOKIE

    def of(self, page: Page, *, anybody: bool = False) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a page. `anybody`: whether users may ask for it without signing in."""

        async def endpoint(request: Request) -> Response:
            token = request.cookies.get(self._session_cookie, "")
            # An open page makes requests without a user's action, and these must not keep its session alive.
            view, user = self._house.view_of(token, used=BY_ITSELF not in request.headers)
            # A form is valid only for the session that it was made for.
            form_cookie = request.cookies.get(self._form_cookie, "")
            cookie = token if user else form_cookie or self._house.tokens.new_cookie()
            try:
                visit = Visit(self._house, request, cookie, view, user)
                if view is None and not anybody:
                    response = _to_sign_in(request)
                else:
                    response = await self._made(page, visit)
            except KeraError as error:
                response = await self._problem(request, problem_of(error), cookie)
            except Exception as error:  # a page may have a defect, which must affect only that page; it is logged
                log.error("a page could not be made", path=repr(request.url.path), exc_info=error)
                response = await self._problem(request, DEFECT, cookie)
            if not user and cookie != form_cookie:
                self._set(response, self._form_cookie, cookie)
            return self._with_session(request, response, token)

        return endpoint

    async def _made(self, page: Page, visit: Visit) -> Response:
        try:
            async with asyncio.timeout(limits.PAGE_TIMEOUT_S):
                return await page(visit)
        except TimeoutError:
            return _problem_page(visit, too_slow(limits.PAGE_TIMEOUT_S))
        except AuthenticationFailed as error:
            if visit.request.url.path == "/sign-in":
                return _problem_page(visit, problem_of(error))
            # Security was turned on meanwhile, or the user's credentials are no longer valid.
            if self._house.secured:
                self._house.sign_out(visit.request.cookies.get(self._session_cookie, ""))
            else:
                self._house.has_become_secured()
            return _to_sign_in(visit.request)
        except KeraError as error:
            return _problem_page(visit, problem_of(error, changes=visit.request.method == "POST"))

    def _with_session(self, request: Request, response: Response, token: str) -> Response:
        """Set or delete the browser's session cookie if its session has changed."""
        begun = getattr(request.state, "session", None)
        if begun is not None:
            self._set(response, self._session_cookie, begun)
        elif token and self._house.sessions.find(token, used=False) is None:
            response.delete_cookie(self._session_cookie, secure=self._house.encrypted, httponly=True, samesite="strict")
        return response

    def _set(self, response: Response, name: str, value: str) -> None:
        response.set_cookie(name, value, secure=self._house.encrypted, httponly=True, samesite="strict")

    async def _problem(self, request: Request, problem: Problem, cookie: str = "") -> Response:
        """Return an error page for a request without a visit, because its parameters are invalid."""
        bare = Request({**request.scope, "query_string": b""})
        view, user = self._house.view_of(request.cookies.get(self._session_cookie, ""), used=False)
        return _problem_page(Visit(self._house, bare, cookie, view, user), problem)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Return the page for an error of Starlette."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        title, text = _OF_STATUS.get(status, ("Invalid request", "This server does not take that."))
        return await self._problem(request, Problem(status, title, text))

    def refusal(self, status: int, text: str) -> App:
        """Return the gate's answer: plain text, because the request may not come from one of our pages."""
        return Response(
            text + "\n", status, media_type="text/plain", headers={"retry-after": "1"} if status == 503 else {}
        )


def _problem_page(visit: Visit, problem: Problem) -> Response:
    response = visit.page("problem.html", {"problem": problem}, status=problem.status)
    if problem.status == 503:
        response.headers["retry-after"] = "1"
    return response


def _to_sign_in(request: Request) -> Response:
    """Redirect to the sign-in page, which leads back to the requested page."""
    if request.method != "GET":
        return RedirectResponse("/sign-in", 303)
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/sign-in?next={quote(path, safe='/')}" if path != "/" else "/sign-in", 303)
