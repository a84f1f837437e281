"""The objects that all requests share: the cluster, the signed-in users, and the templates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import SecretStr

from kera.client import Client, ClientSettings
from kera.client.diagnosis.asking import examine
from kera.console import limits
from kera.console.rendering import Templates
from kera.console.watching.sessions import Session, Sessions
from kera.console.watching.view import Examine, View
from kera.console.web.problems import Refused
from kera.console.web.tokens import FormTokens
from kera.core.base.clock import boottime_s
from kera.core.errors import AuthenticationFailed

EXPIRY_INTERVAL_S = 15.0
IMPATIENCE = {"retry_timeout_ms": 2_000, "request_timeout_ms": 5_000, "recovery_timeout_ms": 2_000}
"""Short timeouts, because a user waits for the page."""
_NOBODY = {"user": "", "password": None, "password_file": None, "token": None, "token_file": None}


@dataclass(frozen=True)
class Cluster:
    """How to reach the cluster, and how to examine its health."""

    bootstrap: str
    settings: ClientSettings
    examine: Examine = examine


class House:
    """The console's cluster, signed-in users and templates, shared by all requests."""

    def __init__(
        self, cluster: Cluster, *, admin: bool, encrypted: bool, now_s: Callable[[], float] = boottime_s
    ) -> None:
        """`admin`: whether pages may change the cluster; `encrypted`: whether browsers connect with TLS."""
        self.admin, self.encrypted = admin, encrypted
        self.secured = False
        """Whether users have to sign in."""
        self.tokens = FormTokens()
        self.templates = Templates()
        self.browsing = asyncio.Semaphore(limits.BROWSINGS_MAX)
        self.downloads = asyncio.Semaphore(limits.DOWNLOADS_MAX)
        self.sessions: Sessions[View] = Sessions(now_s)
        self._cluster = cluster
        # Visitors must not get the rights of the user who started the console.
        settings = cluster.settings.model_copy(update={**IMPATIENCE, **_NOBODY})
        self._settings = settings
        self._shared: View | None = None
        self._signing_in = 0
        self._expiring: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """The tasks that close views whose sessions have ended."""

    async def open(self) -> None:
        """Connect, and find out whether the cluster requires authentication. Raises `KeraError`."""
        view = await self._connect(self._settings)
        try:
            self.secured = (await view.client.admin.describe_cluster()).security
        except AuthenticationFailed:
            self.secured = True
        except BaseException:
            await view.close()
            raise
        if self.secured:
            await view.close()
        else:
            self._shared = view
            await view.start(limits.WARM_UP_S)
        self._expiring = asyncio.ensure_future(self._expire())

    async def close(self) -> None:
        """End all sessions and connections."""
        if self._expiring is not None:
            self._expiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._expiring
        self._close_soon(each.view for each in self.sessions.end_all())
        if self._shared is not None:
            self._close_soon([self._shared])
        await asyncio.gather(*self._closing, return_exceptions=True)

    def view_of(self, token: str, *, used: bool = True) -> tuple[View | None, str]:
        """Return the view of a browser with this session, and its user; None: it has to sign in.

        `used`: see `Sessions.find`.
        """
        if not self.secured:
            return self._shared, ""
        session = self.sessions.find(token, used=used) if token else None
        return (None, "") if session is None else (session.view, session.user)

    def has_become_secured(self) -> None:
        """Require users to sign in from now on, because security was turned on while the console runs."""
        self.secured = True
        if self._shared is not None:
            shared, self._shared = self._shared, None
            self._close_soon([shared])

    async def sign_in(self, user: str, password: str) -> Session[View]:
        """Begin a session. Raises `AuthenticationFailed`, `Refused`, and errors of reaching the cluster."""
        self.sessions.check_room(user)
        if self._signing_in >= limits.SIGN_INS_MAX:
            raise Refused(503, "Too many people sign in now", "Try again in a moment.")
        self._signing_in += 1
        try:
            settings = self._settings.model_copy(update={"user": user, "password": SecretStr(password)})
            view = await self._connect(settings, user)
            try:
                await view.client.access.check("describe", "cluster")
                session, ended = self.sessions.begin(user, view)
            except BaseException:
                await view.close()
                raise
        finally:
            self._signing_in -= 1
        self._close_soon(each.view for each in ended)
        try:
            await view.start(limits.SIGN_IN_WARM_UP_S)
        except BaseException:  # the browser does not get this session's token
            self.sign_out(session.token)
            raise
        return session

    def sign_out(self, token: str) -> None:
        """End a session."""
        session = self.sessions.end(token)
        if session is not None:
            self._close_soon([session.view])

    async def _connect(self, settings: ClientSettings, user: str = "") -> View:
        client = await Client.connect(self._cluster.bootstrap, settings)
        return View(client, settings, self._cluster.examine, user)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self._close_soon(each.view for each in self.sessions.expire())

    def _close_soon(self, views: Iterable[View]) -> None:
        """Close views in tasks of their own, because the task that has ended their sessions may be cancelled."""
        for view in views:
            task = asyncio.ensure_future(view.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
