"""The form that registers schemas, and its errors."""

import json

import pytest

from kera.client import SchemaRegistry
from kera.client.testing import FakeCluster
from kera.core.errors import IncompatibleSchema, InvalidSchema, KeraError
from tests.unit.console.conftest import MakeBrowser
from tests.unit.console.test_pages import is_clear

FORM = ("/schema/register", "/schema/register")
RIDE = json.dumps({"type": "record", "name": "Ride", "fields": [{"name": "who", "type": "string"}]}, indent=2)


async def test_a_registered_schema_prefills_the_form_of_its_next_version(
    console: MakeBrowser, cluster: FakeCluster
) -> None:
    browser = await console(admin=True)
    fields = {"subject": "rides-value", "kind": "avro", "definition": RIDE.replace("\n", "\r\n")}
    done = await browser.send(*FORM, fields)
    assert (done.status, done.header("location")) == (303, "/schema?subject=rides-value&version=1&done=registered")
    newest = await cluster.client().schemas.latest("rides-value")
    assert "\r" not in newest.definition
    is_clear(await browser.get("/schema/register?subject=rides-value"), 200, "&#34;Ride&#34;", 'value="rides-value"')


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"subject": ""}, "subject", "subject is missing"),
        ({"definition": ""}, "definition", "definition is missing"),
        ({"kind": "protobuf"}, "kind", "takes one of"),
        ({"subject": "no suffix"}, "subject", "no suffix"),
    ],
)
async def test_an_error_is_shown_beside_its_field_and_the_definition_is_kept(
    console: MakeBrowser, fields: dict[str, str], field: str, text: str
) -> None:
    typed = {"subject": "rides-value", "kind": "avro", "definition": RIDE, **fields}
    answer = await (await console(admin=True)).send(*FORM, typed)
    assert answer.status == 400
    assert f'id="{field}-error"' in answer.text
    assert text in answer.text
    assert field == "definition" or "&#34;Ride&#34;" in answer.text


@pytest.mark.parametrize("error", [IncompatibleSchema, InvalidSchema])
async def test_the_error_of_a_definition_is_shown_beside_it(
    console: MakeBrowser, monkeypatch: pytest.MonkeyPatch, error: type[KeraError]
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise error("the field who has another type")

    monkeypatch.setattr(SchemaRegistry, "register", refuse)
    fields = {"subject": "rides-value", "kind": "avro", "definition": RIDE}
    answer = await (await console(admin=True)).send(*FORM, fields)
    is_clear(answer, 400, 'id="definition-error"', "the field who has another type", "&#34;Ride&#34;")


async def test_the_compatibility_of_a_subject_is_set(console: MakeBrowser, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[str, str]] = []

    async def set_it(_: SchemaRegistry, subject: str, mode: str) -> None:
        wanted.append((subject, mode))

    monkeypatch.setattr(SchemaRegistry, "set_compatibility", set_it)
    browser = await console(admin=True)
    address = "/schema/compatibility"
    refused = await browser.send(FORM[0], address, {"subject": "rides-value", "mode": "some"})
    is_clear(refused, 400, "takes one of")
    assert (await browser.send(FORM[0], address, {"subject": "rides-value", "mode": "full"})).status == 303
    assert wanted == [("rides-value", "full")]


async def test_a_read_only_console_registers_no_schema(console: MakeBrowser) -> None:
    browser = await console()
    is_clear(await browser.get("/schema/register"), 200, "kera schema register")
    is_clear(await browser.post("/schema/register", {"subject": "a-value", "csrf": "x"}), 403, "only shows")
