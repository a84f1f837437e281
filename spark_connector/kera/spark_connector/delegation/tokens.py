"""The tokens of one driver: issued when a query needs one, renewed in time, and revoked when no query needs it.

    asked for ─► issued ─► (half of its life) renewed ─► … ─► (can no longer be renewed in full) another one issued
                    └─► the last holder releases it ─► revoked

Promises:

* a token that `Tokens.token` returns is valid, if the coordinator can be asked, and usually for half of its life;
* it is renewed while it is held, at half of its life; if that fails, the renewal is retried until the token ends;
* a replaced token stays valid until its own end, because tasks may still use it; it is revoked with the last one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

from kera.core.access.accounts import TOKEN_PREFIX, Token
from kera.core.access.credentials import secret_in
from kera.core.errors import AuthenticationFailed, InvalidArgument, KeraError
from kera.spark_connector.connection import TOKEN_LIFETIME_MS

if TYPE_CHECKING:
    from kera.client import Client, ClientSettings

LOOK_AGAIN_S = 5.0
"""Minimum interval of the checks whether a token was revoked; a check happens when a holder begins to need it."""
TRY_AGAIN_S = 30.0
"""The longest pause before a failed renewal is retried."""
CLOSE_TIMEOUT_S = 10.0
"""Maximum time for revoking tokens at the end."""

log = logging.getLogger(__name__)


class Owner(NamedTuple):
    """The owner of tokens."""

    bootstrap: str
    settings: ClientSettings

    @property
    def own_token(self) -> str:
        """The owner's delegation token, if that is its credential; empty: it has another one.

        Raises the errors of reading the token's file.
        """
        settings = self.settings
        text = "" if settings.token is None else settings.token.get_secret_value().strip()
        if settings.token_file is not None:
            text = secret_in("token_file", settings.token_file)
        return text if text.startswith(TOKEN_PREFIX) else ""


class Need(NamedTuple):
    """The use of a token."""

    owner: Owner
    resources: tuple[str, ...]
    """The resources that the token is restricted to, in the form of access rules."""
    lifetime_ms: int = TOKEN_LIFETIME_MS


class Tokens:
    """The tokens of one driver: each is renewed while a query holds it, and revoked afterwards.

    Belongs to an event loop.
    """

    def __init__(
        self,
        connect: Callable[[Owner], Awaitable[Client]],
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connect = connect
        self._now_s = now_s
        self._sleep = sleep
        self._clients: dict[Owner, asyncio.Task[Client]] = {}
        self._kept: dict[Need, _Kept] = {}
        self._held: dict[Hashable, list[_Kept]] = {}
        """The tokens of each holder, in the order in which it first asked for them."""

    async def token(self, need: Need, holder: Hashable) -> str:
        """Return the token for `need`, which `holder` holds from now on, too. Raises the cluster's error.

        A holder that asks for another token than before needs the earlier one only for a while: the earlier token is no
        longer renewed for it, and is revoked when the holder releases its tokens. If `holder` is the need itself, only
        `close` releases it, and each call counts as the begin of a new use.
        """
        kept = self._kept.get(need)
        if kept is None:
            client = await self._client(need.owner)
            kept = self._kept.setdefault(need, _Kept(need, client, self._now_s, self._sleep))
        held = self._held.setdefault(holder, [])
        begins = kept not in held
        if begins:
            held.append(kept)
            kept.holders.add(holder)
        text = await kept.text(look=begins or holder == need)
        for earlier in held:
            if earlier is not kept and not earlier.shared:
                earlier.rest()
        return text

    async def release(self, holder: Hashable) -> None:
        """Release all tokens of `holder`, and revoke those without other holders."""
        free = []
        for kept in self._held.pop(holder, []):
            kept.holders.discard(holder)
            if not kept.holders:
                self._kept.pop(kept.need, None)
                free.append(kept)
        await asyncio.gather(*(kept.revoke() for kept in free))

    async def close(self) -> None:
        """Release and revoke all tokens, and close the clients."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*(self.release(holder) for holder in list(self._held)))
        except TimeoutError:
            log.warning("some tokens of executors could not be revoked in time: they end by themselves")
        for connecting in self._clients.values():
            connecting.cancel()
        clients = await asyncio.gather(*self._clients.values(), return_exceptions=True)
        await asyncio.gather(
            *(client.close() for client in clients if not isinstance(client, BaseException)), return_exceptions=True
        )

    async def _client(self, owner: Owner) -> Client:
        connecting = self._clients.get(owner)
        if connecting is None:
            connecting = self._clients[owner] = asyncio.ensure_future(self._connect(owner))
        try:
            return await asyncio.shield(connecting)
        except Exception:
            if self._clients.get(owner) is connecting:
                del self._clients[owner]
            raise


class _Kept:
    """The token that is kept for one need."""

    def __init__(
        self, need: Need, client: Client, now_s: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self.need = need
        self.holders: set[Hashable] = set()
        self._client = client
        self._now_s = now_s
        self._sleep = sleep
        self._changing = asyncio.Lock()
        self._text = ""
        """The token's secret; empty: there is no valid token."""
        self._token_id = ""
        self._own = False
        """Whether this process issued the token, and so has to revoke it."""
        self._lifetime_ms = 0
        """The lifetime with which the token was issued."""
        self._until_s = 0.0
        self._looked_s = 0.0
        """When the token was last known not to be revoked."""
        self._former: list[str] = []
        """Ids of the tokens that were replaced."""
        self._renewing: asyncio.Task[None] | None = None
        self._pausing = False
        """Whether `_renewing` waits for the time of the next renewal."""

    @property
    def shared(self) -> bool:
        """Whether the token has several holders."""
        return len(self.holders) > 1

    async def text(self, *, look: bool) -> str:
        """Return the token's secret. `look`: whether to check for a revocation, unless that was done just now."""
        async with self._changing:
            owners = self.need.owner.own_token
            if self._now_s() >= self._until_s or (owners and owners != self._text):
                self._text = ""
            if self._text and look and self._now_s() >= self._looked_s + LOOK_AGAIN_S:
                await self._look()
            if not self._text:
                await self._get(owners)
            if self._renewing is None:
                self._renewing = asyncio.ensure_future(self._keep_good())
            return self._text

    def rest(self) -> None:
        """Stop renewing the token, because no holder asks for it now. A renewal that is under way goes on to its end.

        Otherwise nobody would revoke the token that it gets.
        """
        if self._renewing is not None and self._pausing:
            self._renewing.cancel()
        self._renewing = None

    async def revoke(self) -> None:
        """Stop renewing the token, and revoke it and those that it replaced, if they were issued here."""
        self.rest()
        async with self._changing:
            ids = [*self._former, self._token_id] if self._own else self._former
            for token_id in filter(None, ids):
                try:
                    await self._client.access.revoke_token(token_id)
                except InvalidArgument:
                    pass  # it was revoked elsewhere, or has expired
                except KeraError as error:
                    log.warning("token %s was not revoked, it ends by itself: %s", token_id, error.message)
            self._text, self._token_id, self._former = "", "", []

    async def _look(self) -> None:
        try:
            known = await self._client.access.tokens()
        except KeraError as error:
            if not error.retriable:
                raise
            return  # the token is presumably still valid
        self._looked_s = self._now_s()
        if not any(token.token_id == self._token_id for token in known):
            self._text = ""

    async def _get(self, owners: str) -> None:
        """Get another token: `owners`, the owner's own token, if it has one to pass on; otherwise a new one."""
        sent_s, access = self._now_s(), self._client.access
        if owners:
            token = Token.parse(owners)
            token_id = "" if token is None else token.token_id
            try:
                good_ms = (await access.renew_token(token_id)).expires_in_ms
            except InvalidArgument as error:
                raise AuthenticationFailed(
                    f"the driver's token for executors is not valid any more: {error.message}"
                ) from error
            text = owners
        else:
            issued = await access.issue_token(self.need.resources, lifetime_ms=self.need.lifetime_ms)
            text, token_id, good_ms = issued.secret, issued.token_id, issued.expires_in_ms
        if self._own and self._token_id:
            self._former.append(self._token_id)
        self._text, self._token_id, self._own = text, token_id, not owners
        self._until_s, self._looked_s = sent_s + good_ms / 1000, sent_s
        self._lifetime_ms = good_ms

    async def _keep_good(self) -> None:
        """Renew the token whenever half of its life has passed; give up when it ends."""
        renewing, failed = asyncio.current_task(), ""
        while self._renewing is renewing:
            left_s = max(self._until_s - self._now_s(), 0)
            if failed:
                log.warning("token %s was not renewed, it is valid for %.0f s: %s", self._token_id, left_s, failed)
            await self._pause(min(left_s / 4 + 0.1, TRY_AGAIN_S) if failed else left_s / 2)
            async with self._changing:
                if self._renewing is not renewing:  # it has been told to rest meanwhile
                    return
                failed = await self._renewed()
                if failed and self._now_s() >= self._until_s:
                    self._text = ""
                    self._renewing = None

    async def _pause(self, seconds: float) -> None:
        self._pausing = True
        try:
            await self._sleep(seconds)
        finally:
            self._pausing = False

    async def _renewed(self) -> str:
        """Renew the token, and return the problem if that fails; empty: it was renewed."""
        try:
            sent_s = self._now_s()
            good_ms = (await self._client.access.renew_token(self._token_id)).expires_in_ms
            self._until_s, self._looked_s = sent_s + good_ms / 1000, sent_s
            if self._own and good_ms < self._lifetime_ms * 3 // 4:  # it nears its final end, and needs a successor
                await self._get("")
        except InvalidArgument as error:
            self._until_s = self._now_s()  # it no longer exists: the next call of `text` gets another one
            return error.message
        except KeraError as error:
            return error.message
        except Exception as error:  # a defect must not end the renewals
            log.exception("token %s was not renewed", self._token_id)
            return type(error).__name__
        return ""
