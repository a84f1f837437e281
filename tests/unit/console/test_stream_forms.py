"""Forms that create streams and change their settings."""

from typing import Any

import pyarrow as pa
import pytest

from kera.client import Admin
from kera.client.testing import FakeCluster
from kera.console import limits
from kera.core.errors import TooFewBackups
from tests.unit.console.conftest import MakeBrowser

CREATE = ("/stream/create", "/streams/create")


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Notes the changes of streams; the fake cluster does not support retention."""
    changes: list[dict[str, Any]] = []

    async def alter(_: Admin, __: str, **settings: Any) -> None:
        changes.append(settings)

    monkeypatch.setattr(Admin, "alter_stream", alter)
    return changes


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Notes the settings of created streams."""
    arguments: list[dict[str, Any]] = []

    async def create(_: Admin, name: str, **settings: Any) -> None:
        arguments.append({"name": name, **settings})

    monkeypatch.setattr(Admin, "create_stream", create)
    return arguments


async def test_the_form_creates_a_stream_with_readable_units_and_columns(
    console: MakeBrowser, created: list[dict[str, Any]]
) -> None:
    fields = {
        "name": "trips",
        "streamlets": "4",
        "codec": "zstd",
        "retention": "7d",
        "retention_size": "1.5 GiB",
        "retention_groups": "billing, audit",
        "epoch": "10s",
        "column_name_0": "id",
        "column_type_0": "int64",
        "column_required_0": "1",
        "column_name_2": "at",
        "column_type_2": "timestamp[us, UTC]",
        "key_column": "0",
        "timestamp_column": "2",
    }
    answer = await (await console(admin=True)).send(*CREATE, fields)
    assert (answer.status, answer.header("location")) == (303, "/streams/trips?done=created")
    (made,) = created
    assert made["schema"] == pa.schema(
        [pa.field("id", pa.int64(), nullable=False), pa.field("at", pa.timestamp("us", "UTC"))]
    )
    assert {name: made[name] for name in ("streamlets", "codec", "retention_ms", "retention_bytes", "epoch_ms")} == {
        "streamlets": 4,
        "codec": "zstd",
        "retention_ms": 604_800_000,
        "retention_bytes": 3 << 29,
        "epoch_ms": 10_000,
    }
    assert made["retention_consumer_groups"] == ["billing", "audit"]
    assert (made["key_column"], made["timestamp_column"]) == ("id", "at")


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"name": ""}, "name", "name is missing"),
        ({"streamlets": "0"}, "streamlets", "takes a number from 1"),
        ({"retention": "7 moons"}, "retention", "is not a duration; write 7d"),
        ({"retention": "1000"}, "retention", "is not a duration"),
        ({"retention": "0.2ms"}, "retention", "less than a millisecond"),
        ({"retention_size": "many"}, "retention_size", "is not a size; write 512 MiB"),
        ({"retention_size": "9999999 PiB"}, "retention_size", "is too large"),
        ({"durability": "sometimes"}, "durability", "takes one of"),
        ({"epoch": "-1s"}, "epoch", "is not a duration"),
        ({"punctuation": "sun"}, "punctuation", "takes one of"),
        ({"memory_priority": "10"}, "memory_priority", "from 0 to 9"),
        ({"column_name_1": "fare"}, "column_type_1", "column_type_1 is missing"),
        ({"column_name_1": "fare", "column_type_1": "money"}, "column_type_1", "Arrow has no type"),
        ({"column_type_1": "int64"}, "column_name_1", "column_name_1 is missing"),
        ({"key_column": "2"}, "column_name_2", "this row has no column"),
        (
            {"column_name_0": "a", "column_type_0": "int64", "column_name_1": "a", "column_type_1": "bool"},
            "column_name_1",
            "another column is called",
        ),
    ],
)
async def test_an_error_is_shown_beside_its_field_and_inputs_are_kept(
    console: MakeBrowser, created: list[dict[str, Any]], fields: dict[str, str], field: str, text: str
) -> None:
    typed = {"name": "kept-name", "streamlets": "17", "retention_size": "12 MiB", **fields}
    answer = await (await console(admin=True)).send(*CREATE, typed)
    assert answer.status == 400
    beside = answer.text.partition(f'id="{field}-error">')[2].partition("</small>")[0]
    assert text in beside
    for name, value in typed.items():
        if not name.startswith(("durability", "punctuation", "key_column")):
            assert f'name="{name}" value="{value}"' in answer.text
    assert created == []


async def test_the_error_of_a_taken_name_is_shown_beside_it(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    answer = await (await console(admin=True)).send(*CREATE, {"name": "s"})
    assert answer.status == 409
    assert 'id="name-error"' in answer.text


async def test_a_refusal_of_the_cluster_is_shown_on_the_form_and_inputs_are_kept(
    console: MakeBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(_: Admin, __: str, **___: Any) -> None:
        raise TooFewBackups("3 backups are needed, and 1 is alive")

    monkeypatch.setattr(Admin, "create_stream", create)
    answer = await (await console(admin=True)).send(*CREATE, {"name": "kept", "replication": "3"})
    assert answer.status >= 400
    assert "3 backups are needed" in answer.text
    assert 'name="replication" value="3"' in answer.text


async def test_a_button_adds_rows_for_columns_up_to_a_limit(
    console: MakeBrowser, created: list[dict[str, Any]]
) -> None:
    browser = await console(admin=True)
    fields = {"name": "wide", "rows": "4", "column_name_3": "fare", "more": "1"}
    answer = await browser.send(*CREATE, fields)
    assert answer.status == 200
    assert 'name="column_name_7"' in answer.text
    assert 'name="column_name_8"' not in answer.text
    assert 'name="column_name_3" value="fare"' in answer.text
    last = await browser.send(*CREATE, {**fields, "rows": str(limits.FORM_COLUMNS_MAX)})
    assert 'name="more"' not in last.text
    assert (await browser.send(*CREATE, {**fields, "rows": "100000"})).status == 400
    assert created == []


async def test_only_edited_fields_are_changed(
    console: MakeBrowser, cluster: FakeCluster, altered: list[dict[str, Any]]
) -> None:
    """Settings may have changed since the form was made; unedited ones keep their current values."""
    cluster.create_stream("s")
    browser = await console(admin=True)
    was = {"was_retention": "1 d", "retention": "1 d", "was_durability": "leader", "durability": "leader"}
    numbers = {"virtual_logs": "1", "memory_priority": "0", "replication_priority": "0", "punctuation": "clock"}
    same = {**was, **numbers, **{f"was_{name}": value for name, value in numbers.items()}}
    answer = await browser.send("/streams/s/settings", "/streams/s/alter", same)
    assert answer.header("location") == "/streams/s?done=unchanged"
    assert altered == []
    await browser.send("/streams/s/settings", "/streams/s/alter", {**same, "retention": "36h", "retention_size": "1GB"})
    await browser.send("/streams/s/settings", "/streams/s/alter", {**same, "retention": ""})
    await browser.send("/streams/s/settings", "/streams/s/alter", {**same, "retention_consumed": "1"})
    assert altered == [
        {"retention_ms": 129_600_000, "retention_bytes": 1_000_000_000},
        {"retention_ms": 0},
        {"retention_consumed": True},
    ]


async def test_the_error_of_a_setting_is_shown_beside_its_field(
    console: MakeBrowser, cluster: FakeCluster, altered: list[dict[str, Any]]
) -> None:
    cluster.create_stream("s")
    browser = await console(admin=True)
    answer = await browser.send("/streams/s/settings", "/streams/s/alter", {"retention": "soon", "was_retention": ""})
    assert answer.status == 400
    assert 'id="retention-error"' in answer.text
    assert 'name="retention" value="soon"' in answer.text
    assert altered == []


async def test_deleting_the_records_of_a_stream_needs_its_name_as_confirmation(
    console: MakeBrowser, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.create_stream("s")
    truncated: list[tuple[str, object]] = []

    async def truncate(_: Admin, name: str, to: object) -> None:
        truncated.append((name, to))

    monkeypatch.setattr(Admin, "truncate_stream", truncate)
    browser = await console(admin=True)
    address = "/streams/s/truncate"
    assert (await browser.send("/streams/s/settings", address, {"confirm": "x"})).status == 400
    assert truncated == []
    assert (await browser.send("/streams/s/settings", address, {"confirm": "s"})).status == 303
    assert truncated == [("s", "latest")]


async def test_forms_of_a_read_only_console_name_the_admin_option(console: MakeBrowser, cluster: FakeCluster) -> None:
    cluster.create_stream("s")
    browser = await console()
    for address in ("/stream/create", "/streams/s/settings"):
        answer = await browser.get(address)
        assert "kera console --admin" in answer.text
        assert "csrf" not in answer.text
