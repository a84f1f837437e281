"""Resets of a consumer group: a preview shows the changes, and the reset makes exactly these."""

import datetime
from typing import Any

import pytest

from kera.client import Admin, ConsumerGroupDescription, ConsumerLag, EntryProgress, MemberDescription
from kera.client.admin.reset_plan import CursorChange, ResetPlan, ResetTo, ShiftBy, ToOffset
from kera.client.admin.watching import Watch
from kera.client.testing import FakeCluster
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import InvalidArgument
from tests.unit.console.conftest import MakeBrowser
from tests.unit.console.test_pages import is_clear

PLAN = ResetPlan(
    "late",
    "clicks",
    77,
    (
        CursorChange(0, 0, Position(2, 1, 64), 1_500, EARLIEST, 1_000, 500, 0),
        CursorChange(3, 1, None, None, Position(4, 2, 128), 9_000, None, None, "offset 9001 is beyond the end, 9000"),
    ),
)
MEMBER = MemberDescription("m" * 32, "host/1", (), 10, 0, 100, 30_000, 300_000)
ADDRESS = "/group/reset?name=late&stream=clicks"


class Group:
    """A consumer group, and the requests about it."""

    def __init__(self) -> None:
        self.members: tuple[MemberDescription, ...] = ()
        self.planned: list[tuple[ResetTo, Any]] = []
        self.reset: list[tuple[ResetPlan, bool, Any]] = []
        self.error: InvalidArgument | None = None


@pytest.fixture
def group(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Stands in for the reset plans that the fake cluster lacks."""
    cluster.create_stream("clicks")
    found = Group()

    async def describe(_: Watch, name: str) -> ConsumerGroupDescription:
        entry = EntryProgress("clicks", 0, 0, Position(2, 1, 64), 1, "", ConsumerLag(5, 10, 0))
        return ConsumerGroupDescription(name, found.members, (entry,))

    async def plan(_: Admin, __: str, ___: str, to: ResetTo, *, streamlets: Any) -> ResetPlan:
        found.planned.append((to, streamlets))
        if found.error is not None:
            raise found.error
        return PLAN

    async def reset(_: Admin, __: str, ___: str, to: ResetPlan, *, force: bool, streamlets: Any) -> None:
        found.reset.append((to, force, streamlets))

    monkeypatch.setattr(Watch, "group", describe)
    monkeypatch.setattr(Admin, "plan_reset", plan)
    monkeypatch.setattr(Admin, "reset_consumer_group", reset)
    return found


@pytest.mark.parametrize(
    ("query", "to", "streamlets"),
    [
        ("to=earliest", "earliest", None),
        ("to=latest&streamlets=1,3-4", "latest", [1, 3, 4]),
        ("to=offset&offset=120", ToOffset(120), None),
        ("to=shift&records=-100", ShiftBy(-100), None),
        ("to=shift&records=%2B7", ShiftBy(7), None),
        ("to=time&time=2026-01-31T12:00", datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC), None),
    ],
)
async def test_a_preview_shows_the_changes_without_making_them(
    console: MakeBrowser, group: Group, query: str, to: ResetTo, streamlets: list[int] | None
) -> None:
    page = await (await console(admin=True)).get(f"{ADDRESS}&{query}")
    is_clear(
        page, 200, "What changes in clicks", "1\u202f500", "<b>1\u202f000</b>", "2/1/64", "4/2/128", "beyond the end"
    )
    is_clear(page, 200, "not read yet", "Reset group")
    assert group.planned == [(to, streamlets)]
    assert group.reset == []


async def test_the_reset_does_what_the_preview_showed(console: MakeBrowser, group: Group) -> None:
    """The cursors come from the page: the stream may have grown since."""
    browser = await console(admin=True)
    page = await browser.get(f"{ADDRESS}&to=earliest")
    cursors = page.text.partition('name="cursors" value="')[2].partition('"')[0]
    fields = {"name": "late", "stream": "clicks", "stream_id": "77", "cursors": cursors, "csrf": page.csrf}
    done = await browser.post("/group/reset", fields)
    assert (done.status, done.header("location")) == (303, "/group?name=late&done=reset")
    ((plan, force, streamlets),) = group.reset
    assert (plan.consumer_group, plan.stream, plan.stream_id) == ("late", "clicks", 77)
    assert [(each.streamlet, each.entry, each.new, each.new_offset) for each in plan.changes] == [
        (0, 0, EARLIEST, 1_000),
        (3, 1, Position(4, 2, 128), 9_000),
    ]
    assert (force, streamlets) == (False, [0, 3])
    assert len(group.planned) == 1


@pytest.mark.parametrize("cursors", ["", "x", "0,0,1,1,1", "0,0,1,1,1,-1", "0,0,1,1,1," + "9" * 30, "0,0,1,1,1,1;;2"])
async def test_invalid_cursors_are_refused(console: MakeBrowser, group: Group, cursors: str) -> None:
    browser = await console(admin=True)
    fields = {"name": "late", "stream": "clicks", "stream_id": "77", "cursors": cursors}
    is_clear(await browser.send(f"{ADDRESS}&to=earliest", "/group/reset", fields), 400, "cursors")
    assert group.reset == []


@pytest.mark.parametrize(
    ("query", "field", "text"),
    [
        ("to=offset", "offset", "offset is missing"),
        ("to=offset&offset=-1", "offset", "takes a number from 0"),
        ("to=shift&records=many", "records", "is not a number of records"),
        ("to=shift&records=%2B-1", "records", "is not a number of records"),
        ("to=time&time=noon", "time", "takes a time in UTC like"),
        ("to=nowhere", "to", "takes one of"),
        ("to=latest&streamlets=all", "streamlets", "is not a streamlet"),
    ],
)
async def test_an_error_is_shown_beside_its_field(
    console: MakeBrowser, group: Group, query: str, field: str, text: str
) -> None:
    page = await (await console(admin=True)).get(f"{ADDRESS}&{query}")
    assert page.status == 400
    assert text in page.text.partition(f'id="{field}-error">')[2].partition("</small>")[0]
    assert group.planned == []


async def test_the_reason_for_an_impossible_reset_is_shown_on_the_form(console: MakeBrowser, group: Group) -> None:
    group.error = InvalidArgument("consumer group 'late' has no cursor to shift")
    page = await (await console(admin=True)).get(f"{ADDRESS}&to=shift&records=-5")
    is_clear(page, 400, "no cursor to shift", 'value="-5"')
    assert "cursors" not in page.text


async def test_a_reset_with_active_consumers_needs_confirmation(console: MakeBrowser, group: Group) -> None:
    browser = await console(admin=True)
    assert 'name="force"' not in (await browser.get(f"{ADDRESS}&to=latest")).text
    group.members = (MEMBER,)
    page = await browser.get(f"{ADDRESS}&to=latest")
    is_clear(page, 200, 'name="force" type="checkbox" value="1" required', "1 consumer of this group is active")


async def test_a_read_only_console_plans_no_reset(console: MakeBrowser, group: Group) -> None:
    page = await (await console()).get(f"{ADDRESS}&to=latest")
    is_clear(page, 200, "kera console --admin", "kera group reset")
    assert group.planned == []


@pytest.mark.usefixtures("group")
async def test_deleting_a_group_needs_its_name_as_confirmation(
    console: MakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []

    async def delete(_: Admin, name: str) -> None:
        deleted.append(name)

    monkeypatch.setattr(Admin, "delete_consumer_group", delete)
    browser = await console(admin=True)
    assert (await browser.send("/group?name=late", "/group/delete", {"name": "late", "confirm": "x"})).status == 400
    done = await browser.send("/group?name=late", "/group/delete", {"name": "late", "confirm": "late"})
    assert done.header("location") == "/groups?done=group-deleted"
    assert deleted == ["late"]
