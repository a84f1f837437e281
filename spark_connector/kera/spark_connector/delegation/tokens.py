"""The tokens of one driver: got when somebody needs one, renewed in time, and revoked when nobody does any more.

    asked for ─► issued ─► (half of its life) renewed ─► … ─► (cannot be renewed in full any more) another one issued
                    └─► nobody holds it any more ─► revoked

Promises:

* a token that is given is good, as far as the coordinator can be asked, and for half of its life at least;
* it is renewed while it is held, at half of its life, and when that fails, again and again up to its end;
* what was replaced stays good up to its own end, as tasks may still show it; it is revoked with the last one.
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
"""Whether a token was revoked is asked when somebody begins to need it, and not again so soon."""
TRY_AGAIN_S = 30.0
"""The longest pause before a renewal that has failed is tried again."""
CLOSE_TIMEOUT_S = 10.0
"""The end waits no longer for tokens to be revoked."""

log = logging.getLogger(__name__)


class Owner(NamedTuple):
    """The owner of tokens."""

    bootstrap: str
    settings: ClientSettings

    @property
    def own_token(self) -> str:
        """The delegation token that is all that it has; empty: it has something better. Raises what reading it does."""
        settings = self.settings
        text = "" if settings.token is None else settings.token.get_secret_value().strip()
        if settings.token_file is not None:
            text = secret_in("token_file", settings.token_file)
        return text if text.startswith(TOKEN_PREFIX) else ""


class Need(NamedTuple):
    """The use of a token."""

    owner: Owner
    resources: tuple[str, ...]
    """That it is narrowed to, as in rules."""
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
        """By holder, the one that it has asked for last at the end."""

    async def token(self, need: Need, holder: Hashable) -> str:
        """The token to show, from now on held by `holder`, too. Raises the cluster's error.

        A holder that asks for something else than before does not need the earlier one for long: it is not renewed for
        it, and is revoked when the holder lets go of all that it has. A need that holds itself is let go of by
        nobody but the end, so each time that it asks something begins.
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
        """`holder` needs nothing any more: what nobody else holds is revoked."""
        free = []
        for kept in self._held.pop(holder, []):
            kept.holders.discard(holder)
            if not kept.holders:
                self._kept.pop(kept.need, None)
                free.append(kept)
        await asyncio.gather(*(kept.revoke() for kept in free))

    async def close(self) -> None:
        """Nobody needs anything any more."""
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
        except KeraError:
            self._clients.pop(owner, None)
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
        """The token to show; empty: there is no valid one."""
        self._token_id = ""
        self._own = False
        """It was issued here, and so is to be revoked here."""
        self._lifetime_ms = 0
        """That it was issued with."""
        self._until_s = 0.0
        self._looked_s = 0.0
        """When it was last known not to be revoked."""
        self._former: list[str] = []
        """Ids of those that it has replaced."""
        self._renewing: asyncio.Task[None] | None = None

    @property
    def shared(self) -> bool:
        """Whether more than one holds it."""
        return len(self.holders) > 1

    async def text(self, *, look: bool) -> str:
        """The token to show. `look`: whether to ask if it is still valid, if that was not known just now."""
        async with self._changing:
            owners = self.need.owner.own_token
            if self._now_s() >= self._until_s or (owners and owners != self._text):
                self._text = ""
            if self._text and look and self._now_s() >= self._looked_s + LOOK_AGAIN_S:
                await self._look()
            if not self._text:
                await self._get(owners)
            elif self._renewing is None:
                self._renew_later()
            return self._text

    def rest(self) -> None:
        """Do not renew it: nobody asks for it now."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def revoke(self) -> None:
        """End what was issued here."""
        self.rest()
        async with self._changing:
            ids = [*self._former, self._token_id] if self._own else self._former
            for token_id in filter(None, ids):
                try:
                    await self._client.access.revoke_token(token_id)
                except InvalidArgument:
                    pass  # somebody else did, or it has expired
                except KeraError as error:
                    log.warning("token %s was not revoked, it ends by itself: %s", token_id, error.message)
            self._text, self._token_id, self._former = "", "", []

    async def _look(self) -> None:
        try:
            known = await self._client.access.tokens()
        except KeraError as error:
            if not error.retriable:
                raise
            return  # it is good for all that is known
        self._looked_s = self._now_s()
        if not any(token.token_id == self._token_id for token in known):
            self._text = ""

    async def _get(self, owners: str) -> None:
        """Have another one; `owners`: the owner's own, which is all that it can hand on."""
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
        if self._renewing is None:
            self._renew_later()

    def _renew_later(self) -> None:
        self._renewing = asyncio.ensure_future(self._keep_good())

    async def _keep_good(self) -> None:
        """Renew it at half of its life, up to its end."""
        while True:
            await self._sleep(max((self._until_s - self._now_s()) / 2, 0))
            async with self._changing:
                failed = await self._renewed()
            while failed and self._now_s() < self._until_s:
                left_s = self._until_s - self._now_s()
                log.warning("token %s was not renewed, it is valid for %.0f s: %s", self._token_id, left_s, failed)
                await self._sleep(min(left_s / 4 + 0.1, TRY_AGAIN_S))
                async with self._changing:
                    failed = await self._renewed()
            if failed:
                self._text = ""
                self._renewing = None
                return

    async def _renewed(self) -> str:
        """Renew the token; returns the problem with that, empty: none."""
        try:
            sent_s = self._now_s()
            good_ms = (await self._client.access.renew_token(self._token_id)).expires_in_ms
            self._until_s, self._looked_s = sent_s + good_ms / 1000, sent_s
            if self._own and good_ms < self._lifetime_ms * 3 // 4:  # its end is near, whatever is done
                await self._get("")
        except InvalidArgument as error:
            self._until_s = self._now_s()  # it is gone: who asks next gets another one
            return error.message
        except KeraError as error:
            return error.message
        return ""
