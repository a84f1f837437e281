"""Schemas of Avro of every kind, changes of them, and values of a schema."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import fastavro
from hypothesis import strategies as st

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
NAMES = ("A", "B", "C", "D")
FIELDS = ("a", "b", "c", "d")
SYMBOLS = ("X", "Y", "Z")
DEPTH_MAX = 3
LOGICAL = (
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "int", "logicalType": "date"},
)
DEFAULTS: dict[str, Any] = {
    "null": None,
    "boolean": False,
    "int": 5,
    "long": -5,
    "float": 1.5,
    "double": 2,
    "bytes": "\u00ff",
    "string": "x",
}


class Maker:
    """Makes a schema from hypothesis's draws; a name is defined once, and may be used from then on."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._named: dict[str, Any] = {}
        self._taken: set[str] = set()

    def pick(self, *some: Any) -> Any:
        return self._draw(st.sampled_from(some))

    def kind(self, depth: int = 0, *, union: bool = True) -> Any:
        """A type."""
        choices = ["primitive", "logical", "named"]
        if depth < DEPTH_MAX:
            choices += ["array", "map", "record", "record", "enum", "fixed"] + ["union"] * union
        chosen = self.pick(*choices)
        if chosen == "named" and self._named:
            return self.pick(*sorted(self._named))
        if chosen in {"record", "enum", "fixed"}:
            return self._name(chosen, depth)
        if chosen in {"array", "map"}:
            return {"type": chosen, "items" if chosen == "array" else "values": self.kind(depth + 1)}
        if chosen == "union":
            return self._union(depth)
        return dict(self.pick(*LOGICAL)) if chosen == "logical" else self.pick(*PRIMITIVES)

    def _union(self, depth: int) -> Any:
        branches: dict[str, Any] = {}
        for _ in range(self.pick(1, 2, 3)):
            branch = self.kind(depth + 1, union=False)
            branches.setdefault(key_of(branch), branch)
        return sorted(branches.values(), key=lambda branch: branch == "string")  # see the rules about text before bytes

    def _name(self, what: str, depth: int) -> Any:
        free = [name for name in NAMES if name not in self._taken]
        if not free:
            return self.pick(*PRIMITIVES)
        name = self.pick(*free)
        made: dict[str, Any] = {"type": what, "name": name}
        self._taken.add(name)
        if what == "enum":
            made["symbols"] = list(SYMBOLS[: self.pick(1, 2, 3)])
        elif what == "fixed":
            made["size"] = self.pick(1, 2)
        else:
            # A record in itself needs a way out: without one it has no values.
            fields = [self._field(each, depth) for each in FIELDS[: self.pick(0, 1, 2, 3)]]
            if self.pick(True, False, False):
                fields.append({"name": "next", "type": ["null", name], "default": None})
            made["fields"] = fields
        self._named[name] = made
        return made

    def _field(self, name: str, depth: int) -> dict[str, Any]:
        kind = self.kind(depth + 1)
        made = {"name": name, "type": kind}
        if isinstance(kind, str) and kind in DEFAULTS and self.pick(True, False):
            made["default"] = DEFAULTS[kind]
        return made


def key_of(branch: Any) -> str:
    """The key of a branch: a union has each key at most once."""
    if isinstance(branch, str):
        return branch
    kind: str = branch["type"]
    return str(branch.get("name", kind))


@st.composite
def schemas(draw: Any) -> Any:
    """Any schema."""
    return Maker(draw).kind()


@st.composite
def evolved(draw: Any, schema: Any) -> Any:
    """A changed schema: the changes may be compatible or not."""

    def pick(*some: Any) -> Any:
        return draw(st.sampled_from(some))

    holder = [copy.deepcopy(schema)]
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(holder))
        owner, key = pick(*places) if len(places) < 200 else places[0]
        owner[key] = _changed(owner[key], pick)
    return holder[0]


def _places(node: Any) -> Any:
    """The places of types."""
    if isinstance(node, list):
        for at, each in enumerate(node):
            yield node, at
            yield from _places(each)
    elif isinstance(node, dict):
        for key in ("items", "values"):
            if key in node:
                yield node, key
                yield from _places(node[key])
        for field in node.get("fields", ()):
            yield field, "type"
            yield from _places(field["type"])


def _changed(kind: Any, pick: Any) -> Any:
    if isinstance(kind, list):
        return pick(kind[0], kind[1:] or kind, kind[::-1])
    if pick(True, False, False):
        return kind if kind == "null" else pick(["null", kind], [kind, "null"])
    if isinstance(kind, dict):
        _change_inside(kind, pick)
        return kind
    return pick(*PRIMITIVES) if kind in PRIMITIVES else kind


def _change_inside(kind: dict[str, Any], pick: Any) -> None:
    what = kind["type"]
    if what == "enum":
        kind["symbols"] = list(pick(SYMBOLS, SYMBOLS[:1], SYMBOLS[::-1]))
        if pick(True, False):
            kind["default"] = kind["symbols"][0]
    elif what == "fixed":
        kind["size"] = pick(1, 2)
    elif what == "record":
        fields = kind["fields"]
        change = pick("add", "remove", "turn", "rename", "alias")
        if change == "add":
            fields.append({"name": "new", "type": "int"} | ({"default": 7} if pick(True, True, False) else {}))
            kind["fields"] = list({field["name"]: field for field in fields}.values())
        elif fields and change == "remove":
            fields.pop()
        elif change == "turn":
            fields.reverse()
        elif fields and change == "rename":
            fields[0]["aliases"] = [fields[0]["name"]]
            fields[0]["name"] = "renamed"
            kind["fields"] = list({field["name"]: field for field in fields}.values())
        elif change == "alias":
            for field in fields[1:2]:
                field.setdefault("aliases", []).append("gone")


def named_in(node: Any, found: dict[str, Any] | None = None) -> dict[str, Any]:
    """The types that have names."""
    found = {} if found is None else found
    if isinstance(node, list):
        for each in node:
            named_in(each, found)
    elif isinstance(node, dict):
        if "name" in node and "type" in node and node["type"] in {"record", "enum", "fixed"}:
            found[node["name"]] = node
        for each in (node.get("items"), node.get("values"), *(field["type"] for field in node.get("fields", ()))):
            named_in(each, found)
    return found


def values(schema: Any, named: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a schema, as fastavro writes them."""
    if isinstance(schema, list):
        branches = schema if depth < 6 else schema[:1]
        return st.one_of([_branch(each, named, depth) for each in branches])
    if isinstance(schema, str) and schema in named:
        return values(named[schema], named, depth)
    if isinstance(schema, str):
        return OF_PRIMITIVES[schema]
    few = 2 if depth < 4 else 0
    inner = [values(schema[key], named, depth + 1) for key in ("items", "values") if key in schema]
    made: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
        "array": lambda: st.lists(inner[0], max_size=few),
        "map": lambda: st.dictionaries(st.text(max_size=2), inner[0], max_size=few),
        "enum": lambda: st.sampled_from(schema["symbols"]),
        "fixed": lambda: st.binary(min_size=schema["size"], max_size=schema["size"]),
        "record": lambda: st.fixed_dictionaries(
            {each["name"]: values(each["type"], named, depth + 1) for each in schema["fields"]}
        ),
    }
    if schema["type"] in made:
        return made[schema["type"]]()
    return st.integers(0, 9999 if schema["type"] == "int" else 1 << 40)  # of a logical type, such as dates


OF_PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "long": st.integers(-(1 << 63), (1 << 63) - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "bytes": st.binary(max_size=5),
    "string": st.text(max_size=5),
}


def _branch(branch: Any, named: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    found = values(branch, named, depth + 1)
    key = key_of(branch)
    return found.map(lambda value: (key, value)) if key in named else found


class CannotBeWritten(Exception):
    """Fastavro takes some texts for dates where a union has both."""


def written(schema: Any, value: Any) -> bytes:
    """The value in Avro's binary form. Raises `CannotBeWritten`."""
    out, parsed = io.BytesIO(), fastavro.parse_schema(copy.deepcopy(schema))
    try:
        fastavro.schemaless_writer(out, parsed, value)
    except ValueError as error:
        raise CannotBeWritten(str(error)) from error
    return out.getvalue()


def read(data: bytes, writer: Any, reader: Any) -> Any:
    """The value that a reader with another schema gets."""
    schema, own = (fastavro.parse_schema(copy.deepcopy(each)) for each in (writer, reader))
    return fastavro.schemaless_reader(io.BytesIO(data), schema, own)
