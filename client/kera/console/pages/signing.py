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
    """The page on which somebody signs in."""
    onward = way_on(visit.parameters.text("next", length_max=NEXT_MAX))
    if visit.user or not visit.house.secured:
        return visit.go(onward)
    return visit.page("sign_in.html", {"next": onward, "name": "", "error": ""})


async def sign_in(visit: Visit) -> Response:
    """Somebody says who they are."""
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
            raise AuthenticationFailed(REFUSED)  # nobody has such ones: the client would not even send them
        session = await visit.house.sign_in(name, password)
    except (AuthenticationFailed, InvalidArgument) as error:
        context = {"next": onward, "name": name, "error": error.message}
        return visit.page("sign_in.html", context, status=401)
    visit.request.state.session = session.token
    return visit.go(onward)


async def sign_out(visit: Visit) -> Response:
    """Somebody goes."""
    await visit.form()
    await visit.leave()
    return visit.go("/sign-in" if visit.house.secured else "/")


def way_on(address: str) -> str:
    """Where to go when signed in: a page of ours, whatever an address says. Pure."""
    if not address.startswith("/") or address.startswith("//") or "\\" in address or not address.isprintable():
        return "/"
    parts = urlsplit(address)
    return "/" if parts.scheme or parts.netloc or parts.path.startswith("/sign-") else address
