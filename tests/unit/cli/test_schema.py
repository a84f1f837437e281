"""`kera schema`: requests and output. The tests against a real coordinator are in tests/integration/test_schemas.py."""

from __future__ import annotations

import json

import pytest

from kera.cli._run import run_app
from kera.cli.app import app
from kera.client import Compatibility, RegisteredSchema
from kera.core.schemas import SchemaType
from tests.unit.cli.fake_client import FakeClient


@pytest.mark.parametrize(
    ("arguments", "set_"), [(["s-value", ""], ("s-value", "")), (["--default", ""], ("", "")), (["s-value"], None)]
)
def test_an_empty_compatibility_is_sent_and_not_taken_as_missing(
    arguments: list[str], set_: tuple[str, str] | None
) -> None:
    client = FakeClient(compatibility=Compatibility.BACKWARD)
    client.answers = {"set_compatibility": None}
    with client.answering():
        run_app(app, ["schema", "compatibility", *arguments])
    assert client.asked == ([] if set_ is None else [("set_compatibility", *set_)])


def test_an_empty_subject_does_not_set_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    with client.answering():
        assert run_app(app, ["schema", "compatibility", "", "none"]) == 2
    assert "SUBJECT is empty" in capsys.readouterr().err
    assert client.asked == []


def test_a_document_shows_an_undecodable_definition_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    stored = RegisteredSchema("s-value", 1, 7, SchemaType.ARROW, "no base64")
    with FakeClient(latest=stored).answering():
        assert run_app(app, ["schema", "show", "s-value", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["definition"] == "no base64"
