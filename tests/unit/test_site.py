"""The pages of the documentation's site: their links, and that each can be found."""

import re
from pathlib import Path

from scripts import site

NAVIGATION = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_links_go_to_pages_and_what_is_none_is_named_and_not_linked(tmp_path: Path) -> None:
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


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", NAVIGATION, re.MULTILINE))
    pages = {place for path, place in site._places() if path.suffix == ".md" and not place.startswith("deploy/")}
    assert pages | {"deploy/README.md"} == {each for each in named if not each.startswith("reference/")}


def test_the_reference_has_every_setting_error_and_command() -> None:
    settings, errors, commands = ("\n".join(pages()) for pages in (site._settings, site._errors, site._commands))
    assert "| `durability` |" in settings
    assert "`KERA_BROKER_COORDINATOR`" in settings
    assert "| `DataLost` | `NotAccepted` | `data_lost` |" in errors
    assert "### `kera stream create`" in commands
