"""Lists: sorting by columns, and internal streams and groups, which are hidden by default."""

import re

import pytest

from kera.client.testing import FakeCluster
from kera.console import limits
from kera.console.pages.group_reset import parse_streamlets
from kera.console.pages.paging import Order, ordered, parse_order
from kera.core.errors import InvalidArgument
from tests.unit.console.conftest import MakeBrowser
from tests.unit.console.test_pages import is_clear, send


def names_of(text: str) -> list[str]:
    return re.findall(r'<td class="name"><a [^>]*>([^<]*)<', text)


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("", ["few", "many", "wide"]),
        ("-name", ["wide", "many", "few"]),
        ("records", ["wide", "few", "many"]),
        ("-records", ["many", "few", "wide"]),
        ("-size", ["many", "few", "wide"]),
        ("-streamlets", ["wide", "few", "many"]),
        ("created", ["many", "few", "wide"]),
    ],
)
async def test_streams_are_sorted_by_each_column(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, sort: str, names: list[str]
) -> None:
    monkeypatch.setattr(limits, "SORT_PATIENCE_S", 10)
    for name, streamlets in (("many", 1), ("few", 1), ("wide", 3)):
        cluster.create_stream(name, streamlets=streamlets)
    await send(cluster, "many", *[b"value"] * 9)
    await send(cluster, "few", b"value")
    page = await (await console()).get(f"/streams?sort={sort}")
    assert names_of(page.text) == names
    column = sort.removeprefix("-") or "name"
    (sorted_by,) = re.findall(r'aria-sort="(\w+)"><a href="/streams\?sort=-?(\w+)"', page.text)
    assert sorted_by == ("descending" if sort.startswith("-") else "ascending", column)


async def test_sorting_by_an_unknown_column_is_refused(console: MakeBrowser) -> None:
    browser = await console()
    for address in ("/streams?sort=colour", "/groups?sort=-records"):
        is_clear(await browser.get(address), 400, "takes one of name")


async def test_internal_streams_are_shown_only_on_request_and_links_keep_the_choice(
    console: MakeBrowser, cluster: FakeCluster
) -> None:
    for name in ("clicks", "_connect.clicks"):
        cluster.create_stream(name)
    browser = await console()
    page = await browser.get("/streams")
    assert names_of(page.text) == ["clicks"]
    is_clear(page, 200, "1 stream", "Show 1 internal stream", 'href="/streams?internal=1"')
    page = await browser.get("/streams?internal=1&q=c")
    assert names_of(page.text) == ["_connect.clicks", "clicks"]
    is_clear(page, 200, "Hide 1 internal stream", 'name="internal" value="1"', "q=c&amp;sort=-records&amp;internal=1")
    is_clear(page, 200, 'href="/groups?internal=1"')
    is_clear(await browser.get("/streams/_connect.clicks"), 200, 'href="/streams?internal=1">Streams')
    is_clear(await browser.get("/streams?internal=perhaps"), 400, "takes one of")


async def test_an_empty_list_shows_the_next_step(console: MakeBrowser) -> None:
    reader, writer = await console(), await console(admin=True)
    is_clear(await reader.get("/streams"), 200, "kera stream create NAME")
    is_clear(await writer.get("/streams"), 200, 'href="/stream/create"')
    is_clear(await reader.get("/groups"), 200, "kera consume STREAM --group NAME")


def test_rows_without_a_value_come_last_in_either_direction() -> None:
    values = {"a": 1, "b": None, "c": 2}
    assert ordered("abc", Order("x"), values.get) == ["a", "c", "b"]
    assert ordered("abc", Order("x", descending=True), values.get) == ["c", "a", "b"]
    assert str(parse_order("-size", ["size"], "name")) == "-size"


@pytest.mark.parametrize(
    ("text", "streamlets"), [("", None), ("0", [0]), ("2, 0,5-7", [0, 2, 5, 6, 7]), (" 3 - 4 ", [3, 4])]
)
def test_streamlets_are_numbers_and_ranges(text: str, streamlets: list[int] | None) -> None:
    assert parse_streamlets(text) == streamlets


@pytest.mark.parametrize("text", ["a", "-1", "3-1", "0-100000", "1-2-3", "9" * 20, "٣"])
def test_invalid_streamlets_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_streamlets(text)
