"""The console and real daemons, seen by a browser: what it shows, what it changes, and what it hides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from kera.client import Client, SchemaType
from kera.client.serializers import AvroSerializer
from kera.core.access.rights import Operation
from kera.core.base.settings import KIB, MIB
from kera.core.security.issuing import Authority
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.console_support import Look, a_browser, a_console, needs_chromium
from tests.integration.secured_cluster import PASSWORD, Secured

pytestmark = pytest.mark.timeout(240)
SOON_S = 40
HOSTILE = '"><script>document.title = "owned"; alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A cluster for this module: streams have plain names here."""
    with LocalCluster.running(brokers=2, arena_bytes=128 * MIB, segment_bytes=512 * KIB) as running:
        yield running


@contextlib.asynccontextmanager
async def connected(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as client:
        yield client


async def produce(client: Client, stream: str, *values: bytes) -> None:
    async with client.producer() as producer:
        await producer.prepare(stream)
        for value in values:
            producer.send(stream, value)


async def submit(look: Look, form: str, name: str = "") -> None:
    """Send a form, by its only button or by the button with this name."""
    button = look.page.locator(f'form[action="{form}"] button', has_text=name or None)
    async with look.page.expect_navigation():
        await button.click()


async def unfold(look: Look, summary: str) -> None:
    await look.page.get_by_text(summary, exact=True).click()


@needs_chromium
async def test_a_stream_is_created_filled_browsed_moved_and_deleted_in_a_browser(cluster: RunningCluster) -> None:
    async with a_console("--admin", bootstrap=cluster.bootstrap) as console, a_browser() as look:
        page = look.page
        assert await look.go(console.url + "/streams") == 200
        await page.get_by_role("link", name="Create stream").click()
        await look.fill(name="seen", streamlets="2", retention="soon")
        await submit(look, "/streams/create", "Create stream")
        await expect(page.locator("#retention-error")).to_contain_text("is not a duration")
        await expect(page.locator("#name")).to_have_value("seen")
        await look.fill(retention="7d")
        await submit(look, "/streams/create", "Create stream")
        await expect(page.locator("[role=status]")).to_have_text("The stream was created.")
        await expect(page.locator("h1")).to_contain_text("seen")

        await page.get_by_role("link", name="Produce").click()
        await look.fill(key=HOSTILE, value=json.dumps({"text": HOSTILE}))
        for at, value in enumerate((HOSTILE, "twice")):
            await page.locator("[name=header_name]").nth(at).fill("note")
            await page.locator("[name=header_value]").nth(at).fill(value)
        await page.get_by_role("button", name="Produce", exact=True).click()
        await expect(page.locator("[role=status]")).to_have_text("The record is stored.")
        await expect(page.locator("h2")).to_contain_text("offset 0")
        await expect(page.locator(".pairs th")).to_have_text(["note", "note"])
        await page.get_by_role("link", name="Messages").click()
        await expect(page.locator("table.messages tbody tr")).to_have_count(1)
        await expect(page.locator(".key")).to_contain_text("<script>")
        await expect(page.locator(".headers")).to_contain_text("onerror")
        await page.locator("table.messages summary").click()
        await expect(page.locator("pre.json")).to_contain_text('"text": "')
        await page.locator("table.messages a").first.click()
        await expect(page.locator("h2")).to_contain_text("offset 0")
        async with page.expect_download() as downloading:
            await page.get_by_text("download").click()
        assert json.loads(Path(await (await downloading.value).path()).read_text()) == {"text": HOSTILE}

        await look.go(console.url + "/streams/seen")
        await expect(page.locator("dl.fields")).to_contain_text("7 d")
        owner = (
            await page.locator("section", has_text="Next offset").locator("tbody tr td:nth-child(3)").first.inner_text()
        )
        await page.get_by_role("link", name="Settings").click()
        await expect(page.locator("#retention")).to_have_value("7 d")
        await page.select_option("#broker", next(each for each in ("1", "2") if each != owner))
        await submit(look, "/streams/seen/move")
        await expect(page.locator("[role=status]")).to_have_text("The streamlet was moved.")

        await look.go(console.url + "/streams/seen/settings")
        await page.fill("#confirm", "seen")
        await submit(look, "/streams/seen/delete")
        await expect(page.locator("[role=status]")).to_have_text("The stream was deleted.")
        assert await look.go(console.url + "/streams/seen") == 404

        assert [each for each in look.complaints if "status of 40" not in each] == []
        assert all(each.startswith(console.url + "/") for each in look.asked), "nothing is fetched from elsewhere"
        assert "owned" not in await page.title()


@pytest.mark.slow
@needs_chromium
async def test_records_with_a_schema_are_produced_filtered_and_read_on_a_phone(cluster: RunningCluster) -> None:
    schema = {"type": "record", "name": "Ride", "fields": [{"name": "km", "type": "long"}]}
    async with (
        connected(cluster) as client,
        a_console("--admin", bootstrap=cluster.bootstrap) as console,
        a_browser() as look,
    ):
        page, address = look.page, console.url + "/streams/phone"
        await client.admin.create_stream("phone")
        await client.schemas.register("phone-value", SchemaType.AVRO, json.dumps(schema))
        await page.set_viewport_size({"width": 390, "height": 844})
        for typed in ('{"km": "far"}', '{"km": 123456789012}', '{"km": 7}'):
            await look.go(address + "/produce")
            await look.fill(key="a key", value=typed)
            await page.get_by_role("button", name="Produce", exact=True).click()
            if "far" in typed:
                await expect(page.locator("#value-error")).to_contain_text("km: ")
                await expect(page.locator("#value")).to_have_value(typed)
            else:
                await expect(page.locator("[role=status]")).to_have_text("The record is stored.")
        await look.go(address + "/messages")
        await look.fill(filter='value.km > 7 and key == "a key"')
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator("table.messages tbody tr")).to_have_count(1)
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, "nothing is beyond the edge"
        for text in (".messages .key code", ".messages .wide summary code", ".messages .num a"):
            box = await page.locator(text).first.bounding_box()
            assert box is not None
            assert 0 <= box["x"] < box["x"] + box["width"] <= 390
        await look.fill(filter="value.km = 7")
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator("#filter-error")).to_contain_text("column 10")
        await expect(page.locator("#filter")).to_have_value("value.km = 7")
        assert [each for each in look.complaints if "400" not in each] == []


@pytest.mark.slow
@needs_chromium
async def test_epochs_are_set_in_a_browser_and_the_next_one_shows_whom_it_waits_for(
    cluster: RunningCluster,
) -> None:
    async with (
        a_console("--admin", bootstrap=cluster.bootstrap) as console,
        a_browser() as look,
        connected(cluster) as client,
    ):
        page, address = look.page, console.url + "/streams/epochs"
        await look.go(console.url + "/stream/create")
        await unfold(look, "More settings")
        await look.fill(name="epochs", streamlets="2", epoch="2s", epoch_grace="250ms")
        await submit(look, "/streams/create", "Create stream")
        await expect(page.locator("[role=status]")).to_have_text("The stream was created.")
        config = (await client.admin.describe_stream("epochs")).config
        assert (config.epoch_ms, config.punctuation, config.epoch_grace_ms) == (2000, "clock", 250)
        await expect(page.locator("dl.fields")).to_contain_text("2 s, punctuation by the clock, grace 250 ms")
        await expect(page.get_by_text("its broker's clock")).to_have_count(2)
        await expect(page.get_by_text("should be further")).to_have_count(0)

        await page.get_by_role("link", name="Settings").click()
        await page.select_option("#punctuation", "producers")
        await look.fill(timestamp_ahead_max="0")
        await submit(look, "/streams/epochs/alter")
        await expect(page.locator("dl.fields")).to_contain_text("2 s, punctuation by producers")
        await expect(page.locator("section", has_text="Next epoch")).to_contain_text("Nothing was written yet.")
        async with client.producer() as producer:
            await producer.prepare("epochs")
            for streamlet, time_us in ((0, 9_000_000), (1, 5_000_000)):
                producer.send("epochs", b"x", timestamp_us=time_us, streamlet=streamlet)
        await look.go(address)
        rows = page.locator("section", has_text="Next epoch").locator("h2:has-text('Next epoch') ~ .scroll tbody tr")
        assert [(await rows.nth(at).inner_text()).split("\t")[::3] for at in range(2)] == [
            ["1", "1970-01-01 00:00:05.000"],
            ["0", "1970-01-01 00:00:09.000"],
        ]
        await look.go(console.url + "/stream/create")
        await unfold(look, "More settings")
        await look.fill(name="epochs-long", epoch="400d")
        await submit(look, "/streams/create", "Create stream")
        assert "epoch_ms" in await look.text()
        assert [each for each in look.complaints if "400" not in each] == []


@needs_chromium
async def test_lag_updates_without_a_reload_and_a_group_is_reset_after_a_preview(cluster: RunningCluster) -> None:
    async with connected(cluster) as client:
        await client.admin.create_stream("lagging")
        await produce(client, "lagging", *(b"%d" % at for at in range(30)))
        await client.admin.reset_consumer_group("late", "lagging", "latest")
        async with a_console("--admin", bootstrap=cluster.bootstrap) as console, a_browser() as look:
            page = look.page
            await look.go(console.url + "/groups")
            await page.get_by_role("link", name="late", exact=True).click()
            lag = page.locator(".tiles dd").first
            await expect(lag).to_contain_text("0 records")
            await produce(client, "lagging", *(b"%d" % at for at in range(7)))
            await expect(lag).to_contain_text("7 records", timeout=30_000)  # without a reload
            await page.get_by_role("link", name="Reset group").click()
            await page.select_option("#to", "earliest")
            await page.get_by_role("button", name="Preview").click()
            changes = page.locator("section", has_text="What changes in lagging")
            await expect(changes.locator("tbody tr")).to_have_text(re.compile(r"^\s*0\s*0\s*30\s*0\s*30\s*0\s"))
            await expect(changes.locator(".tiles")).to_contain_text("30 records")
            async with page.expect_navigation():
                await page.get_by_role("button", name="Reset group").click()
            await expect(page.locator("[role=status]")).to_have_text("The consumer group was reset.")
            await expect(lag).to_contain_text("37 records")
            assert look.complaints == []
        described = await client.admin.describe_consumer_group("late")
        assert sum(each.lag.records for each in described.entries if each.lag is not None) == 37


@pytest.mark.slow
@needs_chromium
async def test_no_page_is_wider_than_a_phone_and_numbers_stay_on_one_line(cluster: RunningCluster) -> None:
    async with connected(cluster) as client:
        name = "a-stream-with-a-long-name.of-a-warehouse.in-frankfurt-am-main"
        await client.admin.create_stream(name, entries=2, retention_bytes=1536 * MIB)
        await produce(client, name, *(b"%d" % at for at in range(1200)))
        await client.admin.reset_consumer_group("narrow", name, "earliest")
        async with a_console("--admin", bootstrap=cluster.bootstrap) as console, a_browser() as look:
            await look.page.set_viewport_size({"width": 390, "height": 844})
            stream, group = f"/streams/{name}", f"/group/reset?name=narrow&stream={name}&to=latest"
            lists = ("/", "/streams", "/groups", "/members", "/operations", "/schemas", "/schema/register")
            for address in (*lists, "/stream/create", stream, f"{stream}/settings", "/group?name=narrow", group):
                assert await look.go(console.url + address) == 200
                width = await look.page.evaluate("document.documentElement.scrollWidth")
                assert width == 390, address
            await look.go(console.url + "/streams")
            card = look.page.locator("tr", has_text=name)
            for label in ("Records", "Size", "Retention"):
                cell = card.locator(f'[data-label="{label}"]')
                height = await cell.evaluate("cell => cell.getClientRects().length && cell.offsetHeight")
                assert 0 < height < 30, f"{label} takes more than one line"
            assert look.complaints == []


@pytest.mark.slow
@needs_chromium
async def test_a_moving_streamlet_appears_without_a_reload(cluster: RunningCluster) -> None:
    async with connected(cluster) as client:
        stream = await client.admin.create_stream("moving")
        await produce(client, "moving", b"here")
        async with a_console(bootstrap=cluster.bootstrap) as console, a_browser(dark=True) as look:
            await look.go(console.url + "/operations")
            await expect(look.page.get_by_role("link", name="moving")).to_have_count(0)
            await client.admin.move_streamlet("moving", 0, 3 - stream.assignments[0].broker_id)
            await expect(look.page.get_by_role("link", name="moving")).to_have_count(1, timeout=60_000)
            assert look.complaints == []


HOSTILE_PAGE = """<!doctype html><title>hostile</title>
<form id="form" method="post" action="{console}/streams/create" target="there">
<input name="name" value="by-form"></form>
<iframe name="there"></iframe><iframe id="framed" src="{console}/streams"></iframe>
<script>
  const said = [];
  async function attempt(name, options) {
    try {
      const answer = await fetch("{console}/streams" + name, {{credentials: "include", ...options}});
      said.push(name + " read " + (await answer.text()).length);
    } catch (error) { said.push(name + " failed"); }
  }
  const body = new URLSearchParams({name: "by-fetch", csrf: "0".repeat(64)});
  (async () => {
    document.getElementById("form").submit();
    await attempt("", {});
    await attempt("/create", {method: "POST", body});
    await attempt("/create", {method: "POST", body, mode: "no-cors"});
    document.title = said.join(", ");
  })();
</script>"""


@contextlib.asynccontextmanager
async def a_hostile_site(console: str) -> AsyncIterator[str]:
    """The site of somebody who knows where a visitor's console is; it is at another port of the same host."""
    page = HOSTILE_PAGE.replace("{console}", console).replace("{{", "{").replace("}}", "}").encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n" + page)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


@needs_chromium
async def test_a_hostile_page_can_neither_change_nor_read_anything(cluster: RunningCluster) -> None:
    flag = "--host-resolver-rules=MAP rebound.example 127.0.0.1"
    async with connected(cluster) as client, a_console("--admin", bootstrap=cluster.bootstrap) as console:
        async with a_hostile_site(console.url) as site, a_browser(flag) as look:
            page = look.page
            assert await look.go(console.url + "/streams") == 200  # its cookies are set
            await look.go(site)
            await page.wait_for_function("document.title.includes(',')")
            assert await page.title() == "failed, /create failed, /create failed", "it sees no answer"
            for frame in page.frames[1:]:
                assert "Streams" not in await frame.evaluate("document.body ? document.body.innerText : ''")
            assert await look.go(f"http://rebound.example:{console.port}/streams") == 421
            assert "Streams" not in await look.text()
        names = {each.name for each in await client.admin.list_streams()}
        assert not names & {"by-form", "by-fetch"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        yield Secured(tmp_path_factory.mktemp("secured"), stack, brokers=1, backups=0, replication=0)


@pytest.fixture
def https(tmp_path: Path) -> tuple[str, ...]:
    authority, _ = Authority.open_or_make(tmp_path)
    one = authority.issue("127.0.0.1")
    return "--tls-cert", str(one.cert), "--tls-key", str(one.key)


@needs_chromium
async def test_a_signed_in_user_sees_only_what_it_has_rights_for(secured: Secured, https: tuple[str, ...]) -> None:
    await secured.make_user("admin")
    await secured.make_user("ada")
    async with await secured.client("admin") as admin:
        await admin.admin.create_stream("open")
        await admin.admin.create_stream("secret")
        await produce(admin, "secret", b"nobody's business")
        await produce(admin, "open", b"to be described, and not read")
    await secured.grant("user:ada", "stream:open", Operation.DESCRIBE)
    arguments = ("--admin", *https)
    async with (
        a_console(*arguments, bootstrap=secured.cluster.bootstrap, tls_ca=secured.ca) as console,
        a_browser() as look,
    ):
        page = look.page
        await look.go(console.url + "/streams/open")
        assert page.url == f"{console.url}/sign-in?next=/streams/open"
        await look.fill(user="ada", password="wrong")
        await submit(look, "/sign-in")
        await expect(page.locator("[role=alert]")).to_be_visible()
        await look.fill(user="ada", password=PASSWORD)
        await submit(look, "/sign-in")
        assert page.url == f"{console.url}/streams/open"
        await expect(page.locator(".who")).to_have_text("ada")
        cookies = {each["name"]: each for each in await page.context.cookies()}
        session = cookies["__Host-kera-console"]
        assert (session["httpOnly"], session["secure"], session["sameSite"]) == (True, True, "Strict")

        await expect_only_what_ada_may(look, console.url)

        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_url("**/sign-in")
        await page.context.add_cookies([{"name": session["name"], "value": session["value"], "url": console.url}])
        await look.go(console.url + "/streams")
        assert page.url.startswith(f"{console.url}/sign-in"), "a session that has ended does not come back"

        await look.fill(user="admin", password=PASSWORD)
        await submit(look, "/sign-in")
        await expect(page.locator("tbody tr")).to_have_count(2)
        async with await secured.client("admin") as admin:
            await admin.access.grant("user:*", ["write"], "stream:open*", deny=True)
            await admin.access.set_quota("ada", bytes_in_per_s=1 << 20, streams=7)
            await admin.access.issue_token(["stream:open"])
        await look.go(console.url + "/access")
        for text in ("ada", "may not", "bytes in 1 MiB/s, streams 7", "user:admin"):
            await expect(page.locator("main")).to_contain_text(text)
        await look.go(console.url + "/streams/secret/messages")
        await expect(page.locator("table.messages")).to_contain_text("nobody's business")
        assert [each for each in look.complaints if "status of 40" not in each] == []


async def expect_only_what_ada_may(look: Look, url: str) -> None:
    page = look.page
    await look.go(url + "/streams")
    await expect(page.locator("tbody tr")).to_have_count(1)
    assert "secret" not in await look.text()
    assert await look.go(url + "/streams/secret") == 404, "nor is it told that it is there"
    assert await look.go(url + "/streams/open/messages") == 403
    assert "Missing right: read on stream:open" in await look.text()
    assert await look.go(url + "/") == 200
    await expect(page.locator("main")).to_contain_text("You need the right to describe the cluster")
    assert await look.go(url + "/access") == 200
    await expect(page.locator("main")).to_contain_text("Missing right: administer on cluster")
    assert "admin" not in await page.inner_text("main table")
    await look.go(url + "/stream/create")
    await look.fill(name="mine")
    await submit(look, "/streams/create", "Create stream")
    await expect(page.locator("main")).to_contain_text("Missing right: create on stream:mine")


@pytest.mark.slow
async def test_visitors_do_not_get_the_credentials_of_the_consoles_environment(secured: Secured) -> None:
    """The environment has the credentials of its starter, but visitors have to authenticate themselves."""
    await secured.make_user("root-like", "boss")
    settings = {"tls_ca": secured.ca, "user": "root-like", "password": PASSWORD}
    async with a_console(bootstrap=secured.cluster.bootstrap, **settings) as console:
        head, body = await get(console.port, "/streams")
        assert "303 See Other" in head
        assert "location: /sign-in?next=/streams" in head
        assert body == ""


# -- without a browser -----------------------------------------------------------------------------------------------


async def get(port: int, address: str, *, host: str = "127.0.0.1") -> tuple[str, str]:
    """Head and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {address} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        return head, body
    finally:
        writer.close()


@pytest.mark.slow
async def test_paging_shows_each_record_once_in_every_mode(cluster: RunningCluster) -> None:
    """The streamlets have entries, and one streamlet has moved."""
    async with connected(cluster) as client:
        stream = await client.admin.create_stream("walked", streamlets=2, entries=2)
        for part in range(3):
            async with client.producer(linger_ms=0) as producer:
                await producer.prepare("walked")
                for at in range(part * 100, part * 100 + 100):
                    await producer.send("walked", b"value %03d" % at, timestamp_us=1_000_000 * at)
            if part == 1:
                await client.admin.move_streamlet("walked", 0, 3 - stream.assignments[0].broker_id)
    async with a_console(bootstrap=cluster.bootstrap) as console:
        for query, wanted in (
            ("from=oldest&count=23", range(300)),
            ("from=newest&count=23", range(300)),
            ("from=newest&count=11&text=7", [at for at in range(300) if "7" in str(at)]),
            ("from=time&count=50&time=1970-01-01T00:04:00", range(240, 300)),
            ("from=position&offset=0&count=200", range(300)),
        ):
            assert await walk(console.port, f"/streams/walked/messages?{query}") == list(wanted), query


async def walk(port: int, address: str) -> list[int]:
    """The records on all pages from this one on, sorted."""
    found: list[int] = []
    while address:
        head, page = await get(port, address)
        assert "200 OK" in head, page
        found += [int(part[:3]) for part in page.split(">value ")[1:] if part[:3].isdigit()]
        _, there, rest = page.partition('rel="next" href="')
        address = rest.partition('"')[0].replace("&amp;", "&") if there else ""
    return sorted(found)


async def test_values_are_decoded_with_the_schemas_that_they_name(cluster: RunningCluster) -> None:
    schema = {"type": "record", "name": "Ride", "fields": [{"name": "who", "type": "string"}]}
    async with connected(cluster) as client:
        await client.admin.create_stream("rides")
        async with client.producer(serializer=AvroSerializer(schema)) as producer:
            await producer.prepare("rides")
            await producer.send("rides", {"who": "<b>ada</b>"}, keys=b"\x00\x00\x00\xff\xffno schema")
        await client.schemas.register("rides-key-value", SchemaType.AVRO, json.dumps(schema))
    async with a_console(bootstrap=cluster.bootstrap) as console:
        _, page = await get(console.port, "/streams/rides/messages")
        assert '<span class="kind">avro</span>' in page
        assert "&#34;who&#34;: &#34;&lt;b&gt;ada&lt;/b&gt;&#34;" in page
        _, page = await get(console.port, "/streams/rides/record?streamlet=0&entry=0&offset=0")
        assert "/schema?subject=rides-value&amp;version=1" in page
        _, page = await get(console.port, "/streams/rides")
        assert "/schema?subject=rides-value" in page
        _, page = await get(console.port, "/schemas?q=RIDES")
        assert "rides-value" in page
        _, page = await get(console.port, "/schema?subject=rides-value&version=1")
        assert "&#34;name&#34;: &#34;Ride&#34;" in page
        _, page = await get(console.port, "/schema?subject=rides-key-value")
        assert 'href="/streams/rides-key"' in page
        for address in ("/schema?subject=none-value", "/schema?subject=rides-value&version=2"):
            head, page = await get(console.port, address)
            assert "404 Not Found" in head
        head, page = await get(console.port, "/schema?subject=" + "x" * 300)
        assert "400 Bad Request" in head


def test_the_console_refuses_unsafe_or_invalid_addresses(cluster: RunningCluster, tmp_path: Path) -> None:
    for arguments, text in (
        (("--listen", "0.0.0.0:0"), "security of the cluster is off"),
        (("--listen", "nowhere"), "write HOST:PORT"),
        (("--tls-cert", str(tmp_path / "cert")), "belong together"),
        (("--host", "a/b"), "is not a host name"),
    ):
        done = run_kera("console", *arguments, "--bootstrap", cluster.bootstrap)
        assert (done.returncode, done.stdout) == (2, b"")
        assert text in done.stderr.decode()


@pytest.mark.slow
async def test_a_taken_port_and_an_unreachable_cluster_are_reported(cluster: RunningCluster) -> None:
    async with a_console(bootstrap=cluster.bootstrap) as console:
        taken = ("console", "--listen", f"127.0.0.1:{console.port}", "--bootstrap", cluster.bootstrap)
        done = await asyncio.to_thread(_run, *taken)
        assert done[0] == 2
        assert "cannot listen at" in done[1]
        for host in ("no.such.host.invalid", "é" * 300):
            arguments = ("--listen", f"{host}:0", "--insecure", "--bootstrap", cluster.bootstrap)
            done = await asyncio.to_thread(_run, "console", *arguments)
            assert done[0] == 2
            assert "cannot listen at" in done[1]
            assert "Traceback" not in done[1]
    gone = await asyncio.to_thread(_run, "console", "--bootstrap", f"127.0.0.1:{console.port}")
    assert gone[0] == 1
    assert gone[1].startswith("kera: error: ")


def _run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "kera.cli", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


async def test_the_console_ends_at_a_signal_despite_an_unfinished_request(cluster: RunningCluster) -> None:
    async with a_console(bootstrap=cluster.bootstrap) as console:
        _, writer = await asyncio.open_connection("127.0.0.1", console.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # the rest never comes
        await writer.drain()
        console.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await console.process.wait() == 130
        assert console.process.stderr is not None
        assert "Traceback" not in (await console.process.stderr.read()).decode()
        writer.close()


@pytest.mark.slow
async def test_losses_drains_and_moves_are_shown_on_the_pages_about_them(tmp_path: Path) -> None:
    sizes = {"arena_bytes": 64 << 20, "backup_memory_bytes": 64 << 20, "segment_bytes": 1 << 20}
    with LocalCluster.running(brokers=3, backups=2, replication=1, data_dir=tmp_path / "cluster", **sizes) as cluster:
        async with connected(cluster) as client:
            stream = await client.admin.create_stream("orders", streamlets=3)
            async with client.producer() as producer:
                await producer.prepare("orders")
                for at in range(300):
                    producer.send("orders", b"%d" % at, streamlet=at % 3)
            async with client.group_consumer("shop", "orders", start="earliest") as consumer:
                async for _ in consumer:
                    break
                async with a_console(bootstrap=cluster.bootstrap) as console:
                    await client.admin.move_streamlet("orders", 0, stream.assignments[1].broker_id)
                    await client.admin.drain_broker(stream.assignments[2].broker_id)
                    await until(console.port, "/operations", "can be stopped")
                    await until(console.port, "/operations", 'href="/streams/orders"')
                    await until(console.port, "/members", "draining")
                    await until(console.port, "/group?name=shop", "/streams/orders")
                    lost = next(each for each in (1, 2, 3) if each != stream.assignments[2].broker_id)
                    os.kill(cluster.processes[f"broker-{lost}"], signal.SIGKILL)
                    await until(console.port, "/operations", f'<td class="num">{lost}</td><td><span class="state')
                    await until(console.port, "/", "degraded")
                    await until(console.port, "/members", "lost")
                    for address in ("/streams", "/streams/orders", "/groups", "/group?name=shop", "/operations"):
                        await until(console.port, address, "200 OK")
                    assert console.process.returncode is None
                    await client.admin.drain_backup(1)
                    await until(console.port, "/operations", "backup 1")


async def until(port: int, address: str, text: str) -> None:
    """Ask until a page has a text. An answer of 500 fails the test."""
    head = page = ""
    try:
        async with asyncio.timeout(SOON_S):
            while text not in head + page:
                await asyncio.sleep(0.1)
                head, page = await get(port, address)
                assert " 500 " not in head
    except TimeoutError:
        pytest.fail(f"{address} has no {text!r}: {head}\n{page}")


@pytest.mark.slow
async def test_pages_report_a_silent_coordinator_and_recover_with_it(tmp_path: Path) -> None:
    with LocalCluster.running(brokers=1, data_dir=tmp_path / "cluster") as cluster:
        async with a_console(bootstrap=cluster.bootstrap) as console:
            coordinator = cluster.processes["coordinator"]
            head, _ = await get(console.port, "/streams/none")
            assert "404 Not Found" in head
            os.kill(coordinator, signal.SIGSTOP)
            try:
                head, body = await get(console.port, "/streams/none")
                assert "503 Service Unavailable" in head
                assert "The cluster does not answer" in body
            finally:
                os.kill(coordinator, signal.SIGCONT)
            while "404 Not Found" not in head:
                head, _ = await get(console.port, "/streams/none")
                await asyncio.sleep(0.1)
