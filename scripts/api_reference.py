"""The pages of the Python API on the site: every public name with its signature and docstring.

A page covers one package: the names of its ``__all__``, in that order. The members of a class are the public ones that
it and its base classes in KerA define. Names, defaults and docstrings come from the imported package; only texts below
fields and constants, which Python does not keep, come from its source.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

PACKAGES = ("kera.client", "kera.client.sync", "kera.client.serializers", "kera.client.testing")
WIDTH = 88
"""Maximum columns of a signature; a longer signature has a line for each parameter."""
_NOT_CONSTRUCTED = re.compile(r"\b(Made by|Get it as|Get them from)\b")
"""Words in the docstrings of classes whose constructors are not part of the API."""


def page(package: str) -> Iterator[str]:
    """Yield the lines of the page of a package."""
    module = importlib.import_module(package)
    yield f"# {package}"
    yield ""
    yield _text(module.__doc__)
    for name in module.__all__:
        found = getattr(module, name)
        yield from ("", f"## {name}", "")
        if inspect.isclass(found):
            yield from _class(name, found)
        elif inspect.isfunction(found):
            yield from _function(name, found)
        else:
            yield from _code(f"{name} = {_type_text(found)}")
            yield _text(_constant_docs(package).get(name))


def _class(name: str, found: type) -> Iterator[str]:
    doc = found.__doc__ or ""
    fields = _fields(found)
    constructor = found.__dict__.get("__init__")
    is_constructed = not (
        _NOT_CONSTRUCTED.search(doc) or hasattr(found, "connect") or getattr(found, "_is_protocol", False)
    )
    if not fields and is_constructed and inspect.isfunction(constructor):
        yield from _code(_signature(name, constructor, bound=True))
        doc = f"{inspect.cleandoc(doc)}\n\n{inspect.cleandoc(constructor.__doc__ or '')}"
    yield _text(doc)
    if hasattr(found, "model_config"):
        yield f"\nIts fields are in [Settings](../settings.md#{found.section})."  # type: ignore[attr-defined]
        return
    if fields:
        yield ""
        yield from (f"* `{shown}`{': ' if text else ''}{text}" for shown, text in fields.values())
    if issubclass(found, enum.Enum):
        yield from ("", ", ".join(f"`{name}.{each.name}`" for each in found) + ".")
    for member, part in _parts(found):
        yield from ("", f"### {name}.{member}", "")
        yield from _code(f"{name}.{member}: {part.__name__}")
        yield _text(part.__doc__)
    for member, value in _members(found):
        if member in fields:
            continue
        yield from ("", f"### {name}.{member}", "")
        if isinstance(value, property | functools.cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            kind = "" if getter is None else _type_text(getter.__annotations__.get("return", ""))
            yield from _code(f"{name}.{member}: {kind}")
            yield _text(getter.__doc__)
        else:
            yield from _function(f"{name}.{member}", value)


def _parts(found: type) -> Iterator[tuple[str, type]]:
    """Yield attributes such as `Client.admin`, which a constructor makes, and whose classes say "Get it as"."""
    constructor = found.__dict__.get("__init__")
    if not inspect.isfunction(constructor) or dataclasses.is_dataclass(found):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(constructor)))):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=ast.Name(id=kind))):
                made = constructor.__globals__.get(kind)
                if isinstance(made, type) and "Get it as" in (made.__doc__ or ""):
                    yield name, made


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties, with the most derived definition of each, in the order of the source."""
    seen: dict[str, Any] = {}
    for base in found.__mro__:
        if base.__module__.partition(".")[0] != "kera":
            continue
        for name, value in vars(base).items():
            if not name.startswith("_") and isinstance(
                value, property | functools.cached_property | classmethod | staticmethod | type(page)
            ):
                seen.setdefault(name, value)
    yield from seen.items()


def _function(name: str, found: Any) -> Iterator[str]:
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    bound = "." in name and not isinstance(found, staticmethod)
    yield from _code(_signature(name, function, bound=bound))
    yield _text(function.__doc__)


def _code(text: str) -> Iterator[str]:
    yield from ("```python", text, "```", "")


def _signature(name: str, function: Any, *, bound: bool) -> str:
    """Return the signature of a function. `bound`: leave out the first parameter."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    parts, keywords_only = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keywords_only:
            parts.append("*")
        keywords_only = keywords_only or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        kind = "" if each.annotation is each.empty else f": {_type_text(each.annotation)}"
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        parts.append(f"{stars}{each.name}{kind}{default if kind else default.replace(' ', '')}")
        following = parameters[len([p for p in parts if p not in ("*", "/")]) :]
        if each.kind is each.POSITIONAL_ONLY and not (following and following[0].kind is each.POSITIONAL_ONLY):
            parts.append("/")
    kind = signature.return_annotation
    returned = "" if kind is signature.empty else f" -> {_type_text(kind)}"
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    head = ("async " if is_async else "") + name
    line = f"{head}({', '.join(parts)}){returned}"
    if len(line) <= WIDTH:
        return line
    return f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _type_text(kind: Any) -> str:
    kind = getattr(kind, "__forward_arg__", kind)
    if isinstance(kind, str):
        return kind.strip("'\"")
    return kind.__qualname__ if inspect.isclass(kind) else re.sub(r"\bkera(\.\w+)+\.(?=\w)|\btyping\.", "", repr(kind))


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "…" if text.startswith("<") or " at 0x" in text else text


def _fields(found: type) -> dict[str, tuple[str, str]]:
    """Return each field of a dataclass or a named tuple, with its type and default, and its text."""
    empty: object = dataclasses.MISSING
    if dataclasses.is_dataclass(found):
        named = {
            each.name: each.default if each.default_factory is empty else each.default_factory
            for each in dataclasses.fields(found)
        }
    elif issubclass(found, tuple) and hasattr(found, "_fields"):
        named = {name: found._field_defaults.get(name, empty) for name in found._fields}  # type: ignore[attr-defined]
    else:
        return {}
    kinds: dict[str, Any] = {}
    docs: dict[str, str] = {}
    for base in reversed(found.__mro__):
        if base.__module__.partition(".")[0] == "kera":
            kinds |= inspect.get_annotations(base)
            docs |= _field_docs(base)
    return {
        name: (
            f"{name}: {_type_text(kinds.get(name, ''))}" + ("" if default is empty else f" = {_default(default)}"),
            " ".join(docs.get(name, "").replace("``", "`").split()),
        )
        for name, default in named.items()
        if not name.startswith("_")
    }


def _field_docs(found: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    except (OSError, TypeError):
        return {}
    return _docs_in(tree.body[0].body)  # type: ignore[attr-defined]


def _docs_in(body: list[ast.stmt]) -> dict[str, str]:
    """Return the texts below assignments, by the assigned names."""
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [statement.target]
            if isinstance(statement, ast.AnnAssign)
            else []
        )
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs |= {each.id: str(following.value.value) for each in targets if isinstance(each, ast.Name)}
    return docs


@functools.cache
def _constant_docs(package: str) -> dict[str, str]:
    """Return the texts below constants in the modules from which a package imports its names."""
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    docs: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith("kera."):
            origin = importlib.import_module(statement.module)
            names = {each.name for each in statement.names}
            found = _docs_in(ast.parse(inspect.getsource(origin)).body)
            docs |= {name: text for name, text in found.items() if name in names}
    return docs


def _text(doc: str | None) -> str:
    """Return a docstring as Markdown. Diagrams in it are indented, and so become code."""
    return (
        re.sub(r"::$", ":", inspect.cleandoc(doc or ""), flags=re.MULTILINE).replace("``", "`").replace("\n:\n", "\n")
    )
