"""The pages of the documentation's site: links, navigation and reference."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import api_reference, site

NAVIGATION = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_links_are_adapted_to_the_site_and_those_to_other_files_become_text(tmp_path: Path) -> None:
    page, other, image = (tmp_path / name for name in ("docs/a.md", "docs/b.md", "docs/images/c.svg"))
    page.parent.mkdir()
    page.write_text(
        "[b](b.md#there) [here](#here) [web](https://example.org) [code](../core/x.py)\n"
        "![c](images/c.svg)\n```text\n[b](b.md)\n```\n[dir](../deploy)\n"
    )
    deploy = tmp_path / "deploy" / "README.md"
    deploy.parent.mkdir()
    places = {page: "deep/a.md", other: "b.md", image: "images/c.svg", deploy: "deploy/README.md"}

    assert site._relinked(page, "deep/a.md", places) == (
        "[b](../b.md#there) [here](#here) [web](https://example.org) code\n"
        "![c](images/c.svg)\n```text\n[b](b.md)\n```\n[dir](../deploy/README.md)\n"
    )


def test_links_go_to_existing_files_and_sections() -> None:
    places = dict(site._places())
    texts = {
        source: site.FENCE.sub("", source.read_text(encoding="utf-8")) for source in places if source.suffix == ".md"
    }
    sections = {source: _sections(text) for source, text in texts.items()}
    links = [(source, to) for source, text in texts.items() for _, to in site.LINK.findall(text) if "#" in to]
    nowhere = [f"{each.relative_to(site.ROOT)}: {to}" for each, to in _links_to_no_file()]
    for source, to in links:
        path, _, section = to.partition("#")
        target = (source.parent / path).resolve() if path else source
        if "://" not in to and section not in sections.get(target, {section}):
            nowhere.append(f"{source.relative_to(site.ROOT)}: {to}")
    assert len(links) > 50
    assert nowhere == []


def _links_to_no_file() -> list[tuple[Path, str]]:
    """Links to missing files in pages and in notes beside the code; on the site, only links to pages are links."""
    pages = {source for source, _ in site._places() if source.suffix == ".md"} | set(
        (site.ROOT / "bench").rglob("*.md")
    )
    links = [
        (page, match[2])
        for page in sorted(pages)
        for match in site.LINK.finditer(site.FENCE.sub("", page.read_text(encoding="utf-8")))
    ]
    files = [(page, to, to.partition("#")[0]) for page, to in links if "://" not in to and not to.startswith("mailto:")]
    return [(page, to) for page, to, path in files if path and not (page.parent / path).exists()]


def _sections(page: str) -> set[str]:
    """The anchors of its headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("code", [0, 1])
def test_a_warning_fails_the_build_and_is_printed(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mkdocs does not count warnings that it does not print."""
    mkdocs = tmp_path / "mkdocs"
    mkdocs.write_text(f"""#!/bin/sh
case "$*" in *--strict*) ;; *) exit 0 ;; esac
case "$*" in *--quiet*) exit 0 ;; esac
echo "WARNING - a link to nowhere" >&2
exit {code}
""")
    mkdocs.chmod(0o755)

    assert site.build(mkdocs) == code
    assert ("a link to nowhere" in capsys.readouterr().err) is bool(code)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", NAVIGATION, re.MULTILINE))
    pages = {place for path, place in site._places() if path.suffix == ".md" and not place.startswith("deploy/")}
    assert pages | {"deploy/README.md"} == {each for each in named if not each.startswith("reference/")}


@pytest.mark.parametrize("package", api_reference.PACKAGES)
def test_the_python_api_has_every_public_name(package: str) -> None:
    lines = list(api_reference.page(package))

    names = importlib.import_module(package).__all__
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == names
    text = "\n".join(lines)
    assert " at 0x" not in text, "a default has the address of an object"
    assert "ForwardRef" not in text
    assert f": reference/python/{package}.md" in NAVIGATION


def test_the_python_api_has_signatures_fields_and_attributes() -> None:
    text = "\n".join(api_reference.page("kera.client"))

    assert "### Client.connect\n\n```python\nasync Client.connect(\n    bootstrap: str,\n" in text
    assert "### Client.admin\n\n```python\nClient.admin: Admin\n" in text
    assert "* `next: Position`: Start of the next chunk." in text
    assert "Its fields are in [Settings](../settings.md#producer)." in text
    assert "EARLIEST = Position(group_id=0, segment_id=0, offset=0)\n```\n\nThe start of an entry, " in text


@pytest.mark.parametrize("parameters", ["", "a, b=1, *, c, **d", "a, /, b, *c, d=None", "a: str, *, b: int = 1"])
def test_signatures_are_shown_as_written(parameters: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def f({parameters}): pass", names)

    assert api_reference._signature("f", names["f"], bound=False) == f"f({parameters})"


def test_the_reference_has_every_setting_error_and_command() -> None:
    settings, errors, commands = ("\n".join(pages()) for pages in (site._settings, site._errors, site._commands))
    assert "| `durability` |" in settings
    assert "`KERA_BROKER_BROKER_ID`" in settings
    assert "| `DataLost` | `NotAccepted` | `data_lost` |" in errors
    assert "### `kera stream create`" in commands
