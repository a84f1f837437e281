"""The templates, and the functions that they may call. All text is escaped; a misspelled name is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kera.console import limits
from kera.console.browsing.decoding import brief, plain
from kera.console.web import words
from kera.core.base.build import describe
from kera.core.base.internal_names import is_internal
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms, format_span

HERE = Path(__file__).parent


def address(path: str, /, **query: object) -> str:
    """Return a path with the parameters that are neither None nor empty."""
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(given)}" if given else path


def stream_path(name: str, page: str = "") -> str:
    """Return the path of a page of a stream."""
    path = f"/streams/{quote(name, safe='')}"
    return f"{path}/{page}" if page else path


def unbroken(words_of: Callable[[float], str]) -> Callable[[float], str]:
    """Return a function with the same text without line breaks, so that a number and its unit stay together."""
    return lambda value: words_of(value).replace(" ", "\u00a0")


class Templates:
    """All templates of the console."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "size": unbroken(format_size),
            "number": words.number,
            "span": unbroken(format_span),
            "ms": unbroken(format_ms),
            "us": unbroken(words.microseconds),
            "moment": words.moment,
            "second": words.second,
            "iso": words.iso,
            "brief": brief,
            "plain": plain,
        }
        self._environment.globals |= {
            "address": address,
            "is_internal": is_internal,
            "stream_path": stream_path,
            "plural": words.plural,
            "limits": limits,
            "version": describe(),
        }

    def render(self, name: str, context: Mapping[str, Any]) -> str:
        """Render a template into a page."""
        return self._environment.get_template(name).render(context)
