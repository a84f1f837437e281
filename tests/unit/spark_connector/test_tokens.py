"""Tokens of a driver: issued once, renewed in time, replaced, and revoked when the last user ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from kera.client import Client, ClientSettings
from kera.client.admin.access import Change, RenewedToken, Token
from kera.core.errors import AuthenticationFailed, InvalidArgument, NotAllowed, Unavailable
from kera.spark_connector.delegation.tokens import Need, Owner, Tokens

HOUR_MS = 3_600_000
RENEWABLE_MS = 10 * HOUR_MS
SETTINGS = ClientSettings(user="alice", password_file=Path("/password"))


class World:
    """A cluster that issues tokens, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.good: dict[str, tuple[float, float, int]] = {}
        """By id: the expiry, the end of renewals, and the lifetime of each renewal."""
        self.resources: dict[str, tuple[str, ...]] = {}
        self.issued = 0
        self.renewed: list[float] = []
        self.revoked: list[str] = []
        self.looked = 0
        self.error: Exception | None = None
        self.closed = 0
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    # -- the client --------------------------------------------------------------------------------------------

    @property
    def access(self) -> World:
        return self

    async def connect(self, _: Owner) -> Client:
        return cast("Client", self)

    async def close(self) -> None:
        self.closed += 1

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    async def issue_token(self, resources: Iterable[str], *, lifetime_ms: int) -> Token:
        self._fail()
        self.issued += 1
        name = f"t{self.issued}"
        self.add(name, lifetime_ms)
        self.resources[name] = tuple(resources)
        return Token(name, "", tuple(resources), lifetime_ms, f"kera_{name}_secret")

    def add(self, name: str, lifetime_ms: int) -> None:
        until_s = self.now_s + lifetime_ms / 1000
        self.good[name] = (until_s, self.now_s + RENEWABLE_MS / 1000, lifetime_ms)

    async def renew_token(self, token_id: str) -> RenewedToken:
        self._fail()
        if token_id not in self.good or self.good[token_id][0] <= self.now_s:
            raise InvalidArgument(f"there is no token {token_id!r}")
        _, end_s, lifetime_ms = self.good[token_id]
        until_s = min(self.now_s + lifetime_ms / 1000, end_s)
        self.good[token_id] = (until_s, end_s, lifetime_ms)
        self.renewed.append(self.now_s)
        return RenewedToken(round((until_s - self.now_s) * 1000), Change(()))

    async def revoke_token(self, token_id: str) -> None:
        self._fail()
        if self.good.pop(token_id, None) is None:
            raise InvalidArgument("it is gone")
        self.revoked.append(token_id)

    async def tokens(self) -> list[Token]:
        self._fail()
        self.looked += 1
        return [Token(name, "alice", (), 1) for name, (until_s, *_) in self.good.items() if until_s > self.now_s]

    # -- time --------------------------------------------------------------------------------------------------

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (self.now_s + seconds, future)
        self._sleeping.append(entry)
        try:
            await future
        finally:
            self._sleeping.remove(entry)

    async def passes(self, seconds: float) -> None:
        """Let time pass, and wake each sleeper in time."""
        end_s = self.now_s + seconds
        while True:
            await settled()
            due = min(self._sleeping, default=None, key=lambda entry: entry[0])
            if due is None or due[0] > end_s:
                break
            self.now_s = max(self.now_s, due[0])
            due[1].set_result(None)
        self.now_s = end_s

    def good_now(self, text: str) -> bool:
        name = text.split("_")[1]
        return name in self.good and self.good[name][0] > self.now_s


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)  # sleep: gives way to the others only


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def tokens(world: World) -> Tokens:
    return Tokens(world.connect, now_s=lambda: world.now_s, sleep=world.sleep)


def need(*streams: str, settings: ClientSettings = SETTINGS, lifetime_ms: int = HOUR_MS) -> Need:
    return Need(Owner("h:1", settings), tuple(f"stream:{name}" for name in streams), lifetime_ms)


async def test_equal_needs_share_one_token(world: World, tokens: Tokens) -> None:
    first = await tokens.token(need("a"), "query")
    assert await tokens.token(need("a"), "another") == first
    assert await tokens.token(need("a", "b"), "another") != first
    assert world.resources == {"t1": ("stream:a",), "t2": ("stream:a", "stream:b")}


async def test_a_token_is_renewed_at_half_of_its_lifetime_and_keeps_its_text(world: World, tokens: Tokens) -> None:
    text = await tokens.token(need("a"), "query")
    await world.passes(6 * 3600)

    assert await tokens.token(need("a"), "query") == text
    assert world.good_now(text)
    assert world.issued == 1
    assert {later - earlier for earlier, later in zip(world.renewed, world.renewed[1:], strict=False)} == {1800.0}


async def test_a_token_is_replaced_before_it_becomes_unrenewable_and_stays_valid(world: World, tokens: Tokens) -> None:
    texts = [await tokens.token(need("a"), "query")]
    while world.issued == 1:
        await world.passes(60)
        assert world.good_now(texts[0])
    texts.append(await tokens.token(need("a"), "query"))

    assert texts[0] != texts[1]
    assert all(map(world.good_now, texts))
    await tokens.release("query")
    assert sorted(world.revoked) == ["t1", "t2"]


async def test_every_issued_token_is_revoked_when_its_last_user_ends(world: World, tokens: Tokens) -> None:
    for query in ("one", "other"):
        await tokens.token(need("a"), query)
    await tokens.token(need("b"), "batch")

    await tokens.release("one")
    assert world.revoked == []
    await tokens.release("other")
    assert world.revoked == ["t1"]
    await tokens.close()
    assert world.revoked == ["t1", "t2"]
    assert world.closed == 1
    await world.passes(24 * 3600)
    assert world.renewed == []


async def test_a_failed_renewal_is_retried_while_the_token_is_valid(world: World, tokens: Tokens) -> None:
    text = await tokens.token(need("a"), "query")
    world.error = Unavailable("the coordinator is away")
    await world.passes(3000)
    assert world.renewed == []
    world.error = None
    await world.passes(60)

    assert len(world.renewed) == 1
    assert await tokens.token(need("a"), "query") == text


async def test_an_unexpected_error_does_not_end_the_renewals(world: World, tokens: Tokens) -> None:
    text = await tokens.token(need("a"), "query")
    world.error = ValueError("a defect")
    await world.passes(3000)
    world.error = None
    await world.passes(60)

    assert len(world.renewed) == 1
    assert await tokens.token(need("a"), "query") == text


async def test_a_token_issued_while_its_user_ends_is_revoked(
    world: World, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()
    issue = world.issue_token

    async def slowly(resources: Iterable[str], *, lifetime_ms: int) -> Token:
        issued = await issue(resources, lifetime_ms=lifetime_ms)
        await answers.wait()
        return issued

    await tokens.token(need("a"), "query")
    monkeypatch.setattr(world, "issue_token", slowly)
    while world.issued == 1:
        await world.passes(60)
    releasing = asyncio.ensure_future(tokens.release("query"))
    await settled()
    answers.set()
    await releasing

    assert sorted(world.revoked) == ["t1", "t2"]
    await world.passes(24 * 3600)
    assert world.issued == 2


async def test_an_expired_token_is_replaced_on_the_next_request(world: World, tokens: Tokens) -> None:
    text = await tokens.token(need("a"), "query")
    world.error = Unavailable("the coordinator is away")
    await world.passes(2 * 3600)
    with pytest.raises(Unavailable):
        await tokens.token(need("a"), "query")
    world.error = None

    assert await tokens.token(need("a"), "query") != text


async def test_a_revoked_token_is_not_given_to_another_query(world: World, tokens: Tokens) -> None:
    text = await tokens.token(need("a"), "query")
    assert await tokens.token(need("a"), "soon") == text
    assert world.looked == 0
    await world.passes(10)
    del world.good["t1"]

    assert await tokens.token(need("a"), "another") != text


async def test_each_batch_checks_whether_its_token_was_revoked(world: World, tokens: Tokens) -> None:
    for batches in (need("a"), need("b")):  # as holders these outlast each batch, so no holder is new
        text = await tokens.token(batches, batches)
        await world.revoke_token(text.split("_")[1])
        await world.passes(10)
        other = await tokens.token(batches, batches)
        assert other != text
        assert world.good_now(other)


async def test_a_token_that_a_query_no_longer_requests_expires_without_renewal(world: World, tokens: Tokens) -> None:
    before = await tokens.token(need("a"), "query")
    await tokens.token(need("a", "b"), "query")
    await world.passes(50 * 60)
    assert world.good_now(before)
    await world.passes(50 * 60)
    assert not world.good_now(before)
    assert world.good_now(await tokens.token(need("a", "b"), "query"))


async def test_connecting_to_the_cluster_is_retried_after_any_error(world: World) -> None:
    errors: list[Exception] = [OSError("no such file"), Unavailable("away")]

    async def connect(owner: Owner) -> Client:
        if errors:
            raise errors.pop()
        return await world.connect(owner)

    tokens = Tokens(connect, now_s=lambda: world.now_s, sleep=world.sleep)
    for kind in (Unavailable, OSError):
        with pytest.raises(kind):
            await tokens.token(need("a"), "query")
    assert await tokens.token(need("a"), "query")


async def test_a_refusal_of_the_cluster_is_raised(world: World, tokens: Tokens) -> None:
    world.error = NotAllowed("user:alice may not")
    with pytest.raises(NotAllowed, match="user:alice may not"):
        await tokens.token(need("a"), "query")
    world.error = None

    assert await tokens.token(need("a"), "query")


async def test_the_drivers_own_delegation_token_is_handed_on_renewed_and_not_revoked(
    world: World, tokens: Tokens, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    world.add("mine", HOUR_MS)
    file.write_text("kera_mine_secret\n")
    mine = need("a", settings=ClientSettings(token_file=file))

    assert await tokens.token(mine, "query") == "kera_mine_secret"
    await world.passes(3 * 3600)
    assert world.good_now("kera_mine_secret")
    world.add("newer", HOUR_MS)
    file.write_text("kera_newer_secret\n")
    assert await tokens.token(mine, "query") == "kera_newer_secret"
    await tokens.close()

    assert world.issued == 0
    assert world.revoked == []


async def test_a_token_of_another_issuer_is_not_handed_on(world: World, tokens: Tokens, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("eyJhbGciOi")

    assert await tokens.token(need("a", settings=ClientSettings(token_file=file)), "query") == "kera_t1_secret"
    assert world.issued == 1


async def test_the_error_for_an_expired_token_of_the_driver_says_so(tokens: Tokens, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("kera_gone_secret")
    with pytest.raises(AuthenticationFailed, match=r"the driver's token.*is not valid any more") as caught:
        await tokens.token(need("a", settings=ClientSettings(token_file=file)), "query")

    assert "secret" not in str(caught.value)


async def test_closing_warns_about_a_token_that_could_not_be_revoked(
    world: World, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    await tokens.token(need("a"), "query")
    world.error = Unavailable("away")
    await tokens.close()

    assert "token t1 was not revoked, it ends by itself: away" in caplog.text


def test_the_repr_of_a_need_hides_the_password() -> None:
    settings: Any = ClientSettings(user="alice", password="do-not-show")
    assert "do-not-show" not in repr(need("a", settings=settings))
