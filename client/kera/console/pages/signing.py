"""Signing in and out."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.responses import Response

from kera.console.visits import Visit
from kera.core.access.passwords import REFUSED
from kera.core.errors import AuthenticationFailed, InvalidArgument

NEXT_MAX = 4096
PASSWORD_MAX = 1024


async def ask(visit: Visit) -> Response:
    """Show the sign-in page."""
    onward = way_on(visit.parameters.text("next", length_max=NEXT_MAX))
    if visit.user or not visit.house.secured:
        return visit.go(onward)
    return visit.page("sign_in.html", {"next": onward, "name": "", "error": ""})


async def sign_in(visit: Visit) -> Response:
    """Check a user's name and password, and begin a session."""
    form = await visit.form()
    onward = way_on(form.text("next", length_max=NEXT_MAX))
    if visit.user or not visit.house.secured:
        return visit.go(onward)
    name = form.text("user")
    password = form.text("password", length_max=PASSWORD_MAX)
    try:
        if not name or not password:
            raise AuthenticationFailed("Type a name and a password.")
        if not (name.isprintable() and password.isprintable()):
            raise AuthenticationFailed(REFUSED)  # no user has such a name or password, and the client rejects them
        session = await visit.house.sign_in(name, password)
    except (AuthenticationFailed, InvalidArgument) as error:
        context = {"next": onward, "name": name, "error": error.message}
        return visit.page("sign_in.html", context, status=401)
    visit.request.state.session = session.token
    return visit.go(onward)


async def sign_out(visit: Visit) -> Response:
    """End the user's session."""
    await visit.form()
    visit.leave()
    return visit.go("/sign-in" if visit.house.secured else "/")


def way_on(address: str) -> str:
    """Return where to go after signing in: `address` if it is one of our pages, otherwise the first page. Pure."""
    if not address.startswith("/") or address.startswith("//") or "\\" in address or not address.isprintable():
        return "/"
    parts = urlsplit(address)
    return "/" if parts.scheme or parts.netloc or parts.path.startswith("/sign-") else address
