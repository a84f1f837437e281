"""``kera console``: errors about missing libraries and invalid options, and the pages that it ships with."""

import re
import sys
from pathlib import Path

import pytest

import kera.console
from kera.cli.__main__ import main

HERE = Path(kera.console.__path__[0])


@pytest.mark.parametrize("module", ["jinja2", "starlette", "uvicorn"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in sys.modules if each.startswith(("kera.console", module))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["console", "--bootstrap", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kera: error: {module}")
    assert error.endswith(" is missing; install it with: pip install 'kera[console]'\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--listen", ""), "write HOST:PORT"),
        (("--listen", "::1:7480"), "in brackets"),
        (("--tls-key", "key.pem"), "belong together"),
        (("--tls-cert", ""), "is empty"),
    ],
)
def test_invalid_options_are_refused(arguments: tuple[str, str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["console", "--bootstrap", "127.0.0.1:1", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_pages_load_nothing_external_and_escape_all_values() -> None:
    files = [each for folder in ("templates", "static") for each in (HERE / folder).iterdir()]
    assert len(files) > 15
    for each in files:
        text = each.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, each
        assert "https:" not in text, each
        assert "|safe" not in text.replace(" ", ""), f"{each} would not escape something"
        assert "autoescape" not in text, each
        assert "innerHTML" not in text, each
        assert "style=" not in text, each
        assert " on" + "click" not in text, each


def test_each_field_of_a_form_has_a_label() -> None:
    for each in (HERE / "templates").iterdir():
        text = each.read_text()
        labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', text))
        for tag in re.findall(r"<(?:input|select|textarea)\b[^>]*>", text):
            if 'type="hidden"' in tag or ' aria-label="' in tag:
                continue
            found = re.search(r' id="([^"]+)"', tag)
            assert found is not None, f"{each.name}: {tag}"
            assert found[1] in labelled, f"{each.name}: {tag}"
