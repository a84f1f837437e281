"""Pages of the console of a cluster in this process: contents, refusals, and security."""

import asyncio
import dataclasses
import json
from urllib.parse import urlencode

import pyarrow as pa
import pytest

from kera.client import Admin, ChunkPlace, Client, EntryBounds, Position, Rebalancing, RecoveryDescription
from kera.client.admin.watching import Watch
from kera.client.testing import FakeCluster
from kera.console import limits
from kera.console.browsing import formats, reading
from kera.console.pages import messages, streams
from kera.core.base.ids import EARLIEST
from kera.core.errors import NotAllowed, Unavailable
from tests.unit.console.browser import Answer
from tests.unit.console.conftest import MakeBrowser

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'


async def send(cluster: FakeCluster, stream: str, *values: bytes | None, **record: object) -> None:
    async with cluster.client().producer() as producer:
        await producer.prepare(stream)
        for value in values:
            await producer.send(stream, value, **record)  # type: ignore[arg-type]


def next_of(answer: Answer) -> str:
    """The address of the next page."""
    return answer.text.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")


def is_clear(answer: Answer, status: int, *texts: str) -> None:
    assert answer.status == status, answer.text
    assert "Traceback" not in answer.text
    for text in texts:
        assert text in answer.text


async def test_each_answer_has_security_headers(console: MakeBrowser) -> None:
    browser = await console()
    for address in ("/streams", "/nothing", "/static/console.css", "/streams?page=x"):
        answer = await browser.get(address)
        policy = answer.header("content-security-policy")
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("x-frame-options") == "DENY"
        assert (answer.header("cache-control") == "no-store") is not address.startswith("/static")


async def test_pages_have_no_inline_scripts_or_styles(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b"x")
    browser = await console(admin=True)
    for address in ("/streams", "/streams/s", "/streams/s/messages", "/groups", "/nothing"):
        text = (await browser.get(address)).text
        assert text.count("<script") == text.count('<script src="/static/console.js" defer></script>') == 1
        assert "<style" not in text
        assert "style=" not in text
        assert "http://" not in text.replace("http://www.w3.org", "")


async def test_html_in_records_and_parameters_is_escaped(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    hostile = HOSTILE.encode()
    await send(cluster, "s", hostile, json.dumps({HOSTILE: HOSTILE}).encode(), keys=hostile, headers={HOSTILE: hostile})
    browser = await console()
    for address in (
        "/streams/s/messages",
        "/streams/s/messages?" + "key=%22%3E%3Cscript%3E&text=%3Cimg",
        "/streams/s/record?streamlet=0&entry=0&offset=0",
        "/streams/s/record?streamlet=0&entry=0&offset=1",
        "/streams?q=%22%3E%3Cscript%3Ealert(1)%3C/script%3E",
        "/groups?q=%3Cimg%20src=x%3E",
        "/streams/%3Cimg%20src=x%3E",
        "/streams/s/messages?from=%3Cimg%20src=x%3E",
    ):
        text = (await browser.get(address)).text
        assert "<img" not in text
        assert "<script>" not in text
        assert "<b>" not in text.replace("<b>&#34;", "").replace("<b>&gt;", "")


async def test_a_record_shows_repeated_headers_and_the_number_of_omitted_ones(
    console: MakeBrowser, cluster: FakeCluster
) -> None:
    cluster.create_stream("s")
    others = [("none", None)] * (limits.ROWS_MAX - 2)
    await send(cluster, "s", b"v", headers=[("hop", b"first"), ("hop", b"second"), *others, ("hop", b"third")])
    text = (await (await console()).get("/streams/s/record?streamlet=0&entry=0&offset=0")).text
    assert text.count(">hop</th>") == 2
    assert text.index("first") < text.index("second")
    assert "1 more not shown" in text
    assert "third" not in text


async def test_a_value_is_downloaded_as_an_attachment(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b"<html>", None)
    browser = await console()
    answer = await browser.get("/streams/s/value?streamlet=0&entry=0&offset=0")
    assert (answer.status, answer.body) == (200, b"<html>")
    assert answer.header("content-type") == "application/octet-stream"
    assert answer.header("content-disposition").startswith("attachment;")
    is_clear(await browser.get("/streams/s/value?streamlet=0&entry=0&offset=1"), 404, "There is no value")


async def test_requests_for_another_host_are_refused(console: MakeBrowser) -> None:
    browser = await console(names=("localhost", "console.example"))
    for host, status in (("console.example", 200), ("localhost:7480", 200), ("rebound.example", 421), ("", 421)):
        browser.host = host
        answer = await browser.get("/streams")
        assert answer.status == status
        assert "rebound" not in answer.text


async def test_the_list_of_streams_has_a_search_and_pages(console: MakeBrowser, cluster: FakeCluster) -> None:
    for at in range(120):
        cluster.create_stream(f"tenant-{at:03}")
    browser = await console()
    first = await browser.get("/streams")
    is_clear(first, 200, "tenant-000", "1–50 of 120", "page 1 of 3")
    assert "tenant-050" not in first.text
    is_clear(await browser.get("/streams?page=3"), 200, "tenant-119", "101–120 of 120")
    is_clear(await browser.get("/streams?page=999"), 200, "tenant-119")
    is_clear(await browser.get("/streams?q=TENANT-07"), 200, "tenant-079", "1–10 of 10")
    is_clear(await browser.get("/streams?q=none"), 200, "No stream has")


@pytest.mark.parametrize(
    ("settled_us", "is_late", "told"),
    [(90_000_000, False, "10 s behind"), (None, True, "–"), (80_000_000, True, "20 s behind")],
)
async def test_late_epochs_of_an_entry_are_shown(
    cluster: FakeCluster, settled_us: int | None, *, is_late: bool, told: str
) -> None:
    cluster.create_stream("s")
    stream = await cluster.client().describe("s")
    config = dataclasses.replace(stream.config, epoch_ms=1000, epoch_grace_ms=9000)
    bounds = {0: [EntryBounds(EARLIEST, EARLIEST, 0, 0, 0, settled_us=settled_us)]}
    epochs = streams.epochs_of(dataclasses.replace(stream, config=config), bounds, 100_000_000)
    assert epochs is not None
    assert (epochs.is_late, epochs.told(0, 0), epochs.told(9, 0)) == (is_late, told, "–")
    history = dataclasses.replace(stream, config=dataclasses.replace(config, punctuation="producers"))
    epochs = streams.epochs_of(history, bounds, 100_000_000)
    assert epochs is not None
    assert not epochs.is_late, "of times that are not now nobody is late"
    assert streams.epochs_of(stream, bounds, 100_000_000) is None


INVALID_ADDRESSES = [
    ("/streams?page=0", 400, "page is &#39;0&#39;"),
    ("/streams?page=99999999999999999999999", 400, "takes a number"),
    ("/streams?page=1&page=2", 400, "given twice"),
    ("/streams?q=%ff", 400, "UTF-8"),
    ("/streams?" + "&".join(f"a{n}=" for n in range(50)), 400, "more than 32 parameters"),
    ("/streams?q=" + "x" * 9000, 414, "too long"),
    ("/streams/unknown", 404, "unknown"),
    ("/streams/unknown/messages", 404, "unknown"),
    ("/streams/s/messages?from=time", 400, "time is missing"),
    ("/streams/s/messages?from=time&time=99999-01-01", 400, "takes a time"),
    ("/streams/s/messages?from=never", 400, "takes one of"),
    ("/streams/s/messages?streamlet=1", 400, "takes a number from 0 to 0"),
    ("/streams/s/messages?count=0", 400, "count"),
    ("/streams/s/messages?count=201", 400, "count"),
    ("/streams/s/messages?marks=junk", 400, "start with the first page"),
    ("/streams/s/record", 400, "streamlet is missing"),
    ("/streams/s/record?streamlet=0&entry=0&offset=5", 404, "There is no such record"),
    ("/streams/s/record?streamlet=0&entry=0&offset=9223372036854775807", 400, "offset"),
    ("/group", 400, "name is missing"),
    ("/access", 404, "Security is off"),
    ("/nothing/at/all", 404, "There is no such page"),
    ("/static/../house.py", 404, "There is no such page"),
    ("/static/%2e%2e/house.py", 404, "There is no such page"),
    ("/streams/create", 404, "create"),
]
"""Addresses, with the status of the answer and a part of its text."""


async def test_invalid_addresses_give_clear_error_pages(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    browser = await console()
    for address, status, text in INVALID_ADDRESSES:
        is_clear(await browser.get(address), status, text)


async def test_pages_from_either_end_show_each_record_once(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s", streamlets=2)
    await send(cluster, "s", *(b"value-%02d" % at for at in range(30)))
    browser = await console()
    for start in ("oldest", "newest"):
        address, seen = f"/streams/s/messages?from={start}&count=8", list[str]()
        while address:
            page = (await browser.get(address)).text
            seen += [part.partition("<")[0] for part in page.split('<pre class="value text">')[1:]]
            _, there, rest = page.partition('rel="next" href="')
            address = rest.partition('"')[0].replace("&amp;", "&") if there else ""
        assert sorted(seen) == [f"value-{at:02d}" for at in range(30)], start


@pytest.mark.parametrize("start", [pytest.param("oldest", marks=pytest.mark.slow), "newest"])
async def test_pages_of_large_records_are_bounded_and_omit_no_record(
    console: MakeBrowser, cluster: FakeCluster, start: str
) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", *(b"%04d" % at + bytes(700_000) for at in range(40)))
    browser = await console()
    address, seen, pages = f"/streams/s/messages?from={start}", list[str](), 0
    while address:
        page = (await browser.get(address)).text
        found = [part.partition("</td>")[0].partition('">')[2].partition("<")[0] for part in page.split("offset=")[1:]]
        assert len(found) <= limits.BROWSE_BYTES_MAX // 700_000 + 3, "two more may have been on their way"
        seen += found
        _, there, rest = page.partition('rel="next" href="')
        address = rest.partition('"')[0].replace("&amp;", "&") if there else ""
        pages += 1
    assert sorted(map(int, seen)) == list(range(40))
    assert pages > 1


async def test_a_page_from_a_time_names_streamlets_with_losses_right_before_it(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s", streamlets=2)

    async def positions_at(*_: object) -> dict[int, list[ChunkPlace]]:
        place = ChunkPlace(Position(2, 1, 0), 0, 0)
        return {0: [place], 1: [place._replace(lost_from=Position(1, 1, 0))]}

    monkeypatch.setattr(Client, "positions_at", positions_at)
    browser = await console()
    told = "Records right before the first one are lost, and may have been of that time: streamlet 1."
    is_clear(await browser.get("/streams/s/messages?from=time&time=2026-01-31"), 200, told)
    assert "are lost" not in (await browser.get("/streams/s/messages?from=oldest")).text


async def test_records_are_filtered_by_key_and_by_text(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b"Apple", b"pear", keys=b"k1")
    await send(cluster, "s", b"apple pie", keys=b"k2", headers={"h": b"Needle"})
    browser = await console()
    is_clear(await browser.get("/streams/s/messages?text=APPLE"), 200, "Apple", "apple pie", "2 records of 3")
    is_clear(await browser.get("/streams/s/messages?text=apple&key=k2"), 200, "1 record of 3")
    is_clear(await browser.get("/streams/s/messages?key=k"), 200, "0 records of 3", "no record here matches")
    is_clear(await browser.get("/streams/s/messages?text=needle"), 200, "1 record of 3")


async def test_records_are_filtered_by_an_expression(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s", streamlets=2)
    for at in range(6):
        await send(cluster, "s", json.dumps({"total": at}).encode(), keys=b"k%d" % at, headers={"at": b"%d" % at})
    browser = await console()
    for expression, count in (
        ("value.total >= 4", 2),
        ('key == "k1" or headers.at == "2"', 2),
        ("value.total > 1 and not key in ['k5']", 3),
        ("streamlet == 9", 0),
        ("value.none", 0),
    ):
        for start in ("newest", "oldest"):
            page = await browser.get("/streams/s/messages?" + urlencode({"from": start, "filter": expression}))
            is_clear(page, 200, f"{count} record{'s' if count != 1 else ''} of 6")
    page = await browser.get("/streams/s/messages?" + urlencode({"filter": "value.total < 4", "count": 3}))
    is_clear(await browser.get(next_of(page)), 200, "1 record of")


async def test_a_filter_uses_the_chosen_format_of_values(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b"17", b"18", b"x")
    browser = await console()
    is_clear(await browser.get("/streams/s/messages?filter=value+%3E+17"), 200, "0 records of 3")
    page = await browser.get("/streams/s/messages?filter=value+%3E+17&value=json")
    is_clear(page, 200, "1 record of 3", "offset=1&amp;value=json")
    is_clear(await browser.get("/streams/s/record?streamlet=0&offset=2&value=json"), 200, "not JSON: ", ">x</pre>")
    is_clear(await browser.get("/streams/s/record?streamlet=0&offset=2&value=xml"), 400, "takes one of")


async def test_an_invalid_filter_is_shown_with_the_column_and_reads_no_records(
    console: MakeBrowser, cluster: FakeCluster
) -> None:
    cluster.create_stream("s")
    for broker in cluster.brokers.values():
        broker.pause()
    page = await (await console()).get("/streams/s/messages?" + urlencode({"filter": "key = '<b>'", "count": 7}))
    is_clear(page, 400, "a mistake at column 5: write == to compare", "key <mark>=</mark> &#39;&lt;b&gt;&#39;")
    assert 'aria-invalid="true"' in page.text


async def test_a_page_shows_the_number_of_values_that_a_filter_did_not_decode(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reading, formats):
        monkeypatch.setattr(module, "TAKEN_APART_BYTES_MAX", 1024)
    cluster.create_stream("s")
    await send(cluster, "s", b'{"a":1}', b'{"a":1,"b":"' + b"x" * 1024 + b'"}')
    page = await (await console()).get("/streams/s/messages?filter=value.a+%3D%3D+1")
    is_clear(page, 200, "1 record of 2", "The filter does not see the fields of 1 value of more than 1 KiB.")


async def test_a_filter_can_use_the_columns_of_a_typed_stream(console: MakeBrowser, cluster: FakeCluster) -> None:
    client = cluster.client()
    schema = pa.schema([("id", pa.int64()), ("who", pa.string())])
    await client.admin.create_stream("t", schema=schema)
    async with client.producer() as producer:
        await producer.prepare("t")
        await producer.send_batch("t", pa.record_batch({"id": [1, 2], "who": ["ada", None]}, schema=schema))
    browser = await console()
    is_clear(await browser.get("/streams/t/messages?filter=value.id+%3D%3D+2"), 200, "1 record of 2")
    is_clear(await browser.get("/streams/t/messages?filter=not+value.who"), 200, "1 record of 2")


async def test_a_record_links_to_its_neighbours_and_to_the_list(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b"a", b"b", b"c")
    browser = await console()
    first, middle, last = [
        (await browser.get(f"/streams/s/record?streamlet=0&entry=0&offset={at}")).text for at in range(3)
    ]
    assert ['rel="prev"' in page for page in (first, middle, last)] == [False, True, True]
    assert ['rel="next"' in page for page in (first, middle, last)] == [True, True, False]
    assert "/streams/s/messages?from=offset&amp;streamlet=0&amp;offset=1" in middle
    for word in ("offset", "position"):  # bookmarks may still have the older name
        page = await browser.get(f"/streams/s/messages?from={word}&streamlet=0&offset=1")
        is_clear(page, 200, "2 records,", ">b</pre>", ">c</pre>")


async def test_values_are_shown_by_their_kind(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b'{"a":1}', b"\xff\xfe\x00", b"", None, "grüße".encode())
    page = await (await console()).get("/streams/s/messages?from=oldest")
    is_clear(page, 200, "grüße", "ff fe 00", ">null<", ">empty<", "&#34;a&#34;: 1")


async def test_a_change_needs_a_form_of_the_console_with_its_token_and_origin(console: MakeBrowser) -> None:
    browser, other = await console(admin=True), await console(admin=True)
    csrf = (await browser.get("/stream/create")).csrf
    fields = {"name": "new", "csrf": csrf}
    is_clear(await browser.post("/streams/create", {"name": "new"}), 403, "has expired")
    is_clear(await browser.post("/streams/create", {"name": "new", "csrf": "0" * 64}), 403, "has expired")
    is_clear(await other.post("/streams/create", fields), 403, "has expired")
    is_clear(await browser.post("/streams/create", fields, origin="http://evil.example"), 403, "page of the console")
    is_clear(await browser.post("/streams/create", fields, origin="http://127.0.0.1:9999"), 403, "page of the console")
    is_clear(await browser.post("/streams/create", fields, origin=""), 403, "page of the console")
    is_clear(await browser.post("/streams/create", fields, content_type="text/plain"), 415, "Invalid form")
    is_clear(await browser.post("/streams/create", [*fields.items(), ("name", "b")]), 400, "name is given twice")
    is_clear(await browser.get(f"/streams/create?name=new&csrf={csrf}"), 404)
    assert (await browser.post("/streams/create", fields)).status == 303
    is_clear(await browser.post("/streams/create", fields), 409, "new")


async def test_forms_are_bounded(console: MakeBrowser) -> None:
    browser = await console(admin=True)
    csrf = (await browser.get("/stream/create")).csrf
    huge = {"name": "x" * limits.FORM_BYTES_MAX, "csrf": csrf}
    is_clear(await browser.post("/streams/create", huge), 413, "1 MiB")
    many = {"csrf": csrf, **{f"f{at}": "" for at in range(limits.FORM_FIELDS_MAX)}}
    is_clear(await browser.post("/streams/create", many), 400, f"more than {limits.FORM_FIELDS_MAX}")


async def test_deleting_a_stream_needs_its_name_as_confirmation(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    browser = await console(admin=True)
    is_clear(await browser.send("/streams/s/settings", "/streams/s/delete", {"confirm": "S"}), 400, "Nothing was done")
    assert cluster.stream("s").values() == []
    done = await browser.send("/streams/s/settings", "/streams/s/delete", {"confirm": "s"})
    assert done.header("location") == "/streams?done=deleted"
    assert "There are no streams yet." in (await browser.get("/streams")).text, "what is shown is what is so now"


async def test_a_streamlet_is_moved(console: MakeBrowser, cluster: FakeCluster) -> None:
    stream = cluster.create_stream("s")
    browser = await console(admin=True)
    owner = stream.info().assignments[0].broker_id
    done = await browser.send("/streams/s/settings", "/streams/s/move", {"streamlet": "0", "broker": str(3 - owner)})
    assert done.status == 303
    assert stream.info().assignments[0].broker_id == 3 - owner
    for fields, text in (({"streamlet": "0"}, "broker is missing"), ({"streamlet": "x", "broker": "1"}, "streamlet")):
        is_clear(await browser.send("/streams/s/settings", "/streams/s/move", fields), 400, text)


async def test_a_note_in_an_address_is_shown_only_if_it_is_known(console: MakeBrowser) -> None:
    browser = await console()
    assert 'role="status"' in (await browser.get("/streams?done=deleted")).text
    assert 'role="status"' not in (await browser.get("/streams?done=Send+your+password+to+evil.example")).text


async def test_a_missing_coordinator_gives_an_error_page_until_it_is_back(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    browser = await console()
    monkeypatch.setattr(limits, "PAGE_TIMEOUT_S", 0.05)
    cluster.coordinator.refuse_all(Unavailable("the coordinator is away"))
    answer = await browser.get("/streams/s")
    is_clear(answer, 503, "The cluster does not answer")
    assert answer.header("retry-after")
    cluster.coordinator.refuse_all(None)
    monkeypatch.setattr(limits, "PAGE_TIMEOUT_S", 10.0)
    is_clear(await browser.get("/streams/s"), 200)


async def test_a_refusal_names_the_missing_right(console: MakeBrowser, cluster: FakeCluster) -> None:
    browser = await console()
    error = NotAllowed("user:ada may not read", principal="user:ada", operation="describe", resource="stream:s")
    cluster.coordinator.refuse_all(error)
    is_clear(await browser.get("/streams/s"), 403, "You may not do this", "Missing right: describe on stream:s")


async def test_the_number_of_concurrent_requests_is_limited(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    browser = await console()
    await browser.get("/streams")
    monkeypatch.setattr(limits, "REQUESTS_MAX", 3)
    cluster.coordinator.pause()
    waiting = [asyncio.ensure_future(browser.get("/streams/s")) for _ in range(3)]
    await asyncio.sleep(0)
    answer = await browser.get("/streams")
    assert (answer.status, answer.header("retry-after")) == (503, "1")
    cluster.coordinator.resume()
    assert {each.status for each in await asyncio.gather(*waiting)} == {200}
    assert (await browser.get("/streams")).status == 200


async def test_rows_of_typed_streams_are_shown_in_columns(console: MakeBrowser, cluster: FakeCluster) -> None:
    client = cluster.client()
    schema = pa.schema(
        [("id", pa.int64()), ("at", pa.timestamp("us")), ("who", pa.string()), ("parts", pa.list_(pa.string()))]
    )
    await client.admin.create_stream("t", schema=schema, key_column="who", timestamp_column="at")
    async with client.producer() as producer:
        await producer.prepare("t")
        rows = {
            "id": [1, 2],
            "at": pa.array([10**15, 2**62], pa.timestamp("us")),
            "who": [HOSTILE, None],
            "parts": [["a"], None],
        }
        await producer.send_batch("t", pa.record_batch(rows, schema=schema))
    browser = await console(admin=True)
    page = await browser.get("/streams/t/messages?from=oldest")
    is_clear(page, 200, "<th>who</th>", "[&#34;a&#34;]", "&lt;script&gt;", "null")
    is_clear(await browser.get("/streams/t/record?streamlet=0&entry=0&offset=1"), 200, "4611686018427387904")
    is_clear(await browser.get("/streams/t"), 200, "list&lt;item: string&gt;")
    assert "/streams/t/produce" not in page.text
    is_clear(await browser.get("/streams/t/produce"), 400, "columns of its own")
    refused = await browser.send("/stream/create", "/streams/t/produce", {"value": "x"})
    is_clear(refused, 400, "columns of its own")


async def test_an_internal_error_gives_a_page_without_details(
    console: MakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = await console()
    monkeypatch.setattr(streams, "paged", lambda *_: 1 / 0)
    answer = await browser.get("/streams")
    is_clear(answer, 500, "This is a defect of the console")
    assert "ZeroDivision" not in answer.text


async def test_a_silent_broker_delays_only_its_part_of_a_page(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    browser = await console()
    monkeypatch.setattr(limits, "BOUNDS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(messages, "READ_TIMEOUT_S", 0.05)
    for broker in cluster.brokers.values():
        broker.pause()
    is_clear(await browser.get("/streams/s"), 200, "Not all brokers have answered")
    is_clear(await browser.get("/streams/s/messages"), 503, "The cluster does not answer")
    is_clear(await browser.get("/streams/s/record?streamlet=0&entry=0&offset=0"), 503, "The cluster does not answer")
    for broker in cluster.brokers.values():
        broker.resume()
    monkeypatch.setattr(messages, "READ_TIMEOUT_S", 10)
    is_clear(await browser.get("/streams/s/messages"), 200)


async def test_a_reader_beyond_the_limit_of_browsers_is_refused(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    browser = await console()
    monkeypatch.setattr(messages, "BROWSE_WAIT_S", 0.01)
    for broker in cluster.brokers.values():
        broker.pause()
    asked = [asyncio.ensure_future(browser.get("/streams/s/messages")) for _ in range(limits.BROWSINGS_MAX + 1)]
    (refused,), reading = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    is_clear(refused.result(), 503, "Too many people read records now")
    for broker in cluster.brokers.values():
        broker.resume()
    assert {each.status for each in await asyncio.gather(*reading)} == {200}


async def test_a_list_shows_the_last_known_sizes_of_streams_with_silent_brokers(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    await send(cluster, "s", b"x", b"y", b"z")
    browser = await console()
    monkeypatch.setattr(limits, "SIZES_PATIENCE_S", 10)
    record_count = 'data-label="Records">3</td>'
    is_clear(await browser.get("/streams"), 200, record_count)
    monkeypatch.setattr(limits, "SIZES_PATIENCE_S", 0.01)
    monkeypatch.setattr(limits, "SIZES_FRESH_S", 0.0)
    for broker in cluster.brokers.values():
        broker.pause()
    is_clear(await browser.get("/streams"), 200, record_count)
    other = await console()
    assert record_count not in (await other.get("/streams")).text
    for broker in cluster.brokers.values():
        broker.resume()


async def test_a_page_is_shown_without_a_slow_answer_of_the_coordinator(
    console: MakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def recoveries(_: Watch) -> list[RecoveryDescription]:
        return []

    async def rebalance(_: Admin, **__: object) -> Rebalancing:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Watch, "recoveries", recoveries)
    monkeypatch.setattr(Admin, "rebalance", rebalance)
    monkeypatch.setattr(limits, "PATIENCE_S", 0.01)
    browser = await console()
    is_clear(await browser.get("/operations"), 200, "The coordinator is being asked.", "No member is being drained.")
