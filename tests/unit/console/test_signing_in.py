"""Signing in, and the rights and the end of sessions. A fake cluster stands in for one with security on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kera.client import Client, ClientSettings
from kera.client.testing import FakeCluster
from kera.console import limits
from kera.console.application import application
from kera.console.house import Cluster, House
from kera.console.watching.view import View
from kera.core.errors import AuthenticationFailed, ProtocolError, Unavailable
from tests.unit.console.browser import Browser
from tests.unit.console.conftest import all_is_well
from tests.unit.console.test_pages import is_clear

PASSWORDS = {"ada": "correct horse", "eve": "battery staple"}
SESSION = "kera-console"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def house(cluster: FakeCluster, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """A console that requires users to sign in."""

    async def connect(_: House, settings: ClientSettings, user: str = "") -> View:
        password = "" if settings.password is None else settings.password.get_secret_value()

        async def check(*_: object) -> None:
            if PASSWORDS.get(settings.user) != password:
                raise AuthenticationFailed("the user name or the password is not right")

        monkeypatch.setattr("kera.client.admin.access.Access.check", check)
        # A fake coordinator knows no users, so the client sends no credentials.
        client = await Client.connect(cluster.bootstrap, cluster.settings())
        return View(client, settings, all_is_well, user)

    monkeypatch.setattr(House, "_connect", connect)
    monkeypatch.setattr(limits, "SIGN_IN_WARM_UP_S", 0.01)
    made = House(Cluster(cluster.bootstrap, cluster.settings(), all_is_well), admin=True, encrypted=False, now_s=clock)
    await made.open()
    made.has_become_secured()
    yield made
    await made.close()


@pytest.fixture
def browser(house: House) -> Browser:
    return Browser(application(house, ("localhost",)))


async def sign_in(browser: Browser, user: str, password: str = "", to: str = "/streams") -> Any:
    fields = {"user": user, "password": password or PASSWORDS.get(user, ""), "next": to}
    return await browser.send("/sign-in", "/sign-in", fields)


async def test_a_visitor_is_redirected_to_sign_in_and_back(browser: Browser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    answer = await browser.get("/streams/s?page=1")
    assert (answer.status, answer.header("location")) == (303, "/sign-in?next=/streams/s%3Fpage%3D1")
    asked = (await browser.get("/sign-in")).text
    assert "/streams" not in asked
    assert "commit" not in asked, "nor is the version told"
    done = await sign_in(browser, "ada", to="/streams/s?page=1")
    assert (done.status, done.header("location")) == (303, "/streams/s?page=1")
    is_clear(await browser.get("/streams/s?page=1"), 200, '<span class="who">ada</span>')
    cookies = [value for name, value in done.headers if name == "set-cookie"]
    assert len(cookies) == 1
    assert "httponly" in cookies[0].lower()
    assert "samesite=strict" in cookies[0].lower()


@pytest.mark.parametrize(("user", "password"), [("ada", "wrong"), ("nobody", "correct horse"), ("", ""), ("ada", "")])
async def test_a_wrong_password_starts_no_session(browser: Browser, house: House, user: str, password: str) -> None:
    fields = {"user": user, "password": password}
    answer = await browser.send("/sign-in", "/sign-in", fields)
    is_clear(answer, 401, 'role="alert"')
    assert password == "" or password not in answer.text
    assert len(house.sessions) == 0
    assert (await browser.get("/streams")).status == 303


@pytest.mark.parametrize(("user", "password"), [("a\x00b", "x"), ("a\u202eb", "x"), ("ada", "correct horse\x00")])
async def test_an_impossible_name_or_password_gets_the_usual_refusal(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, user: str, password: str
) -> None:
    async def refused_by_the_client(*_: object) -> None:
        raise ProtocolError(f"user {user!r} at 10.0.0.1:7400")

    monkeypatch.setattr(House, "sign_in", refused_by_the_client)
    page = await sign_in(browser, user, password)
    assert page.status == 401
    assert "10.0.0.1" not in page.text
    assert "the user name or the password is not right" in page.text


async def test_a_form_token_of_one_session_is_refused_in_another(browser: Browser, house: House) -> None:
    other = Browser(browser.app)
    await sign_in(browser, "ada")
    await sign_in(other, "eve")
    csrf = (await other.get("/streams")).csrf
    is_clear(await browser.post("/streams/create", {"name": "x", "csrf": csrf}), 403, "has expired")
    anonymous = Browser(browser.app)
    csrf = (await anonymous.get("/sign-in")).csrf
    is_clear(await browser.post("/streams/create", {"name": "x", "csrf": csrf}), 403, "has expired")
    assert len(house.sessions) == 2


async def test_signing_out_invalidates_all_copies_of_the_cookie(browser: Browser, house: House) -> None:
    await sign_in(browser, "ada")
    thief = Browser(browser.app, cookies=dict(browser.cookies))
    assert (await thief.get("/streams")).status == 200
    is_clear(await browser.post("/sign-out", {}), 403, "has expired")
    assert (await browser.send("/streams", "/sign-out", {})).header("location") == "/sign-in"
    assert SESSION not in browser.cookies
    assert len(house.sessions) == 0
    answer = await thief.get("/streams")
    assert answer.status == 303
    assert SESSION not in thief.cookies


async def test_a_visit_extends_a_session_and_an_automatic_refresh_does_not(browser: Browser, clock: Clock) -> None:
    await sign_in(browser, "ada")
    clock.now_s = limits.SESSION_IDLE_S - 1
    assert (await browser.get("/streams")).status == 200
    clock.now_s += limits.SESSION_IDLE_S - 1
    assert (await browser.get("/streams", x_kera_by_itself="1")).status == 200
    clock.now_s += 2
    assert (await browser.get("/streams", x_kera_by_itself="1")).status == 303


async def test_a_session_token_chosen_by_the_client_is_not_accepted(browser: Browser, house: House) -> None:
    for token in ("", "x", "../..", "é", "0" * 5000):
        browser.cookies[SESSION] = token
        assert (await browser.get("/streams")).status == 303
    browser.cookies[SESSION] = "chosen"
    await sign_in(browser, "ada")
    assert browser.cookies[SESSION] != "chosen"
    assert house.sessions.find("chosen") is None


async def test_a_session_does_not_keep_the_password(browser: Browser, house: House) -> None:
    await sign_in(browser, "ada")
    session = house.sessions.find(browser.cookies[SESSION])
    assert session is not None
    assert "horse" not in repr(vars(session))
    assert "horse" not in repr(session.view._settings)
    assert session.view._settings.user == "ada"


async def test_the_credentials_of_the_operator_are_not_used_for_users(cluster: FakeCluster) -> None:
    settings = cluster.settings(user="operator", password="secret")
    house = House(Cluster(cluster.bootstrap, settings, all_is_well), admin=False, encrypted=False)
    assert (house._settings.user, house._settings.password) == ("", None)


async def test_sign_ins_beyond_the_limits_are_refused(
    browser: Browser, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.sessions._sessions_max, house.sessions._per_user_max = 2, 2
    for _ in range(3):
        assert (await sign_in(Browser(browser.app), "ada")).status == 303
    assert len(house.sessions) == 2
    is_clear(await sign_in(browser, "eve"), 503, "Too many people are signed in")
    monkeypatch.setattr(limits, "SIGN_INS_MAX", 0)
    is_clear(await sign_in(browser, "ada"), 503, "Too many people sign in now")


async def test_a_cancelled_sign_in_closes_its_connection(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[View] = []
    close = View.close

    async def noted(view: View) -> None:
        await close(view)
        closed.append(view)

    monkeypatch.setattr(View, "close", noted)
    house.sessions._per_user_max = 1
    first = await house.sign_in("ada", PASSWORDS["ada"])
    waiting = asyncio.Event()

    async def start(*_: object) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(View, "start", start)
    second = asyncio.ensure_future(house.sign_in("ada", PASSWORDS["ada"]))
    await waiting.wait()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(house.sessions) == 0
    await asyncio.gather(*house._closing)
    assert len(closed) == 2
    assert first.view in closed


async def test_a_failed_authentication_ends_the_session(browser: Browser, house: House, cluster: FakeCluster) -> None:
    await sign_in(browser, "ada")
    cluster.coordinator.refuse_all(AuthenticationFailed("the password has changed"))
    answer = await browser.get("/streams/s")
    assert (answer.status, answer.header("location")) == (303, "/sign-in?next=/streams/s")
    assert len(house.sessions) == 0
    is_clear(await browser.get("/sign-in"), 200, "Sign in")


async def test_a_sign_in_without_a_reachable_cluster_gets_status_503(
    browser: Browser, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object) -> View:
        raise Unavailable("no coordinator can be reached")

    monkeypatch.setattr(House, "_connect", connect)
    is_clear(await sign_in(browser, "ada"), 503, "The cluster does not answer")
    assert len(house.sessions) == 0


async def test_a_signed_in_user_is_redirected_from_the_sign_in_page(browser: Browser) -> None:
    await sign_in(browser, "ada")
    answer = await browser.get("/sign-in?next=//evil.example")
    assert (answer.status, answer.header("location")) == (303, "/")


async def test_a_console_notices_that_security_was_turned_on(cluster: FakeCluster) -> None:
    house = House(Cluster(cluster.bootstrap, cluster.settings(), all_is_well), admin=False, encrypted=False)
    await house.open()
    browser = Browser(application(house, ("localhost",)))
    assert (await browser.get("/streams")).status == 200
    cluster.coordinator.refuse_all(AuthenticationFailed("who are you?"))
    assert (await browser.get("/streams/s")).status == 303
    assert house.secured
    await house.close()
