"""Parses filter expressions.

::

    expression  = and { "or" and }
    and         = not { "and" not }
    not         = "not" not | comparison
    comparison  = operand [ ( "==" | "!=" | "<" | "<=" | ">" | ">=" ) operand | "in" "[" literal { "," literal } "]" ]
    operand     = literal | field | call | "(" expression ")"
    field       = root { "." name | "[" text "]" | "[" number "]" }
    root        = "value" | "key" | "keys" | "headers" | "streamlet" | "entry" | "offset" | "time"
    call        = function "(" expression { "," expression } ")"
    literal     = number | text | "true" | "false" | "null"

Texts have double or single quotes, with the escapes of JSON. Text that is compared with ``time`` is parsed as a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, TypeVar

from kera.console.web.words import parse_moment
from kera.core.errors import InvalidArgument

LENGTH_MAX: Final = 1000
"""Maximum number of characters of an expression."""
DEPTH_MAX: Final = 32
PARTS_MAX: Final = 100
"""Maximum number of literals, fields, calls and operators of an expression."""
ROOTS: Final = ("value", "key", "keys", "headers", "streamlet", "entry", "offset", "time")
FUNCTIONS: Final = {"contains": 2, "starts_with": 2, "ends_with": 2, "lower": 1, "length": 1}
"""Names of functions, with their numbers of arguments."""
OPERATORS: Final = ("==", "!=", "<=", ">=", "<", ">")
_PATH_OF: Final = {"value", "key", "keys", "headers"}
"""Roots that have fields."""
_DIGITS_MAX: Final = 40
_NAMES_SHOWN_MAX: Final = 40


class FilterError(InvalidArgument):
    """An invalid expression; `column` counts characters from 1."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(f"column {column}: {message}", column=column)
        self.column = column


class Literal(NamedTuple):
    """A number, a text, true, false or null."""

    value: str | int | float | bool | None


class Field(NamedTuple):
    """A place in a record."""

    root: str
    path: tuple[str | int, ...]
    """Names of fields, and indexes of elements of lists."""


class Call(NamedTuple):
    """A function and its arguments."""

    function: str
    arguments: tuple[Node, ...]


class Compare(NamedTuple):
    """Two operands and one of `OPERATORS`."""

    operator: str
    left: Node
    right: Node


class In(NamedTuple):
    """The condition that an operand equals one of some literals."""

    operand: Node
    among: tuple[Literal, ...]


class Not(NamedTuple):
    """The negation of a condition."""

    condition: Node


class Every(NamedTuple):
    """The condition that all of some conditions hold."""

    conditions: tuple[Node, ...]


class Some(NamedTuple):
    """The condition that at least one of some conditions holds."""

    conditions: tuple[Node, ...]


Node: TypeAlias = Literal | Field | Call | Compare | In | Not | Every | Some
NodeT = TypeVar("NodeT", bound=Node)


def parse(text: str) -> Node:
    """Parse an expression into a tree. Raises only `FilterError`, whatever the text is."""
    if len(text) > LENGTH_MAX:
        raise FilterError(f"the filter has {len(text)} characters; at most {LENGTH_MAX} are allowed", LENGTH_MAX + 1)
    return _Parser(text).whole()


def roots_of(tree: Node) -> set[str]:
    """Return the roots of all fields in an expression."""
    match tree:
        case Field(root, _):
            return {root}
        case Call(_, parts) | Every(parts) | Some(parts):
            pass
        case Compare(_, left, right):
            parts = (left, right)
        case In(operand, _):
            parts = (operand,)
        case Not(condition):
            parts = (condition,)
        case _:
            parts = ()
    return set().union(*map(roots_of, parts))


class _Token(NamedTuple):
    kind: str
    """``number``, ``text``, ``name``, ``sign`` or ``end``."""
    text: str
    column: int


_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:
      (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<name>[^\W\d][\w-]*)
    | (?P<sign>==|!=|<=|>=|[<>().,\[\]])
    | (?P<end>$)
    )""",
    re.VERBOSE | re.DOTALL,
)
_WRONG_SIGNS = {
    "=": "write == to compare",
    "&": "write `and`",
    "|": "write `or`",
    "!": "write `not`, or != to compare",
    '"': "this text has no closing quote",
    "'": "this text has no closing quote",
}


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while not found or found[-1].kind != "end":
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
            sign = text[at]
            raise FilterError(_WRONG_SIGNS.get(sign, f"{sign!r} means nothing here"), at + 1)
        kind = match.lastgroup
        found.append(_Token(kind, match[kind], match.start(kind) + 1))
        at = match.end()
    return found


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0
        self._parts = 0

    def whole(self) -> Node:
        """Parse the whole expression."""
        if self._now.kind == "end":
            raise FilterError("the filter is empty", self._now.column)
        tree = self._either()
        if self._now.kind != "end":
            raise FilterError(f"{self._shown()} is not expected here; join conditions with and, or", self._now.column)
        return tree

    # -- tokens ----------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._now
        if token.kind != "end":
            self._at += 1
        return token

    def _takes(self, *texts: str) -> str:
        """Consume and return the next token if it is one of these words or signs; otherwise return an empty text."""
        token = self._now
        if token.kind in {"name", "sign"} and token.text in texts:
            return self._next().text
        return ""

    def _needs(self, sign: str, after: str) -> None:
        if not self._takes(sign):
            raise FilterError(f"{sign} is missing after {after}, before {self._shown()}", self._now.column)

    def _shown(self) -> str:
        token = self._now
        if token.kind == "end":
            return "the end"
        return token.text if len(token.text) <= _NAMES_SHOWN_MAX else token.text[:_NAMES_SHOWN_MAX] + "…"

    def _counted(self, column: int) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise FilterError(f"the filter has more than {PARTS_MAX} parts", column)

    # -- conditions ------------------------------------------------------------------------------------------------

    def _either(self) -> Node:
        return self._joined("or", self._all, Some)

    def _all(self) -> Node:
        return self._joined("and", self._not, Every)

    def _joined(
        self, word: str, operand: Callable[[], Node], joined: Callable[[tuple[Node, ...]], Some | Every]
    ) -> Node:
        first = operand()
        others = []
        while self._takes(word):
            self._counted(self._now.column)
            others.append(operand())
        return joined((first, *others)) if others else first

    def _not(self) -> Node:
        if not self._takes("not"):
            return self._comparison()
        self._counted(self._now.column)
        return Not(self._deeper(self._not))

    def _deeper(self, rule: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise FilterError(f"the filter is nested more than {DEPTH_MAX} deep", self._now.column)
        try:
            return rule()
        finally:
            self._depth -= 1

    def _comparison(self) -> Node:
        column = self._now.column
        left = self._operand()
        if self._takes("in"):
            self._counted(column)
            listed = self._list()
            return In(left, tuple(_as_time(*each) if _is_time(left) else each[0] for each in listed))
        operator = self._takes(*OPERATORS)
        if not operator:
            return left
        self._counted(column)
        right_column = self._now.column
        right = self._operand()
        if self._now.kind == "sign" and self._now.text in OPERATORS:
            raise FilterError("comparisons do not chain; join two of them with and", self._now.column)
        if _is_time(left):
            right = _as_time(right, right_column)
        elif _is_time(right):
            left = _as_time(left, column)
        return Compare(operator, left, right)

    def _list(self) -> list[tuple[Literal, int]]:
        self._needs("[", "in")
        found = [self._listed()]
        while self._takes(","):
            found.append(self._listed())
        self._needs("]", "the list")
        return found

    def _listed(self) -> tuple[Literal, int]:
        column = self._now.column
        node = self._literal()
        if node is None:
            raise FilterError(
                f"a list has numbers, texts, true, false and null, and not {self._shown()}", self._now.column
            )
        return node, column

    # -- operands --------------------------------------------------------------------------------------------------

    def _operand(self) -> Node:
        literal = self._literal()
        if literal is not None:
            return literal
        if self._takes("("):
            node = self._deeper(self._either)
            self._needs(")", "the expression in parentheses")
            return node
        token = self._now
        if token.kind != "name" or token.text in {"and", "or", "not", "in"}:
            raise FilterError(f"a field or a value is expected, and not {self._shown()}", token.column)
        self._next()
        self._counted(token.column)
        return self._call(token) if self._takes("(") else self._field(token)

    def _literal(self) -> Literal | None:
        token = self._now
        match token.kind:
            case "number":
                value: str | float | bool | None = _number(token)
            case "text":
                value = _text(token)
            case "name" if token.text in _WORDS:
                value = _WORDS[token.text]
            case _:
                return None
        self._next()
        self._counted(token.column)
        return Literal(value)

    def _call(self, name: _Token) -> Node:
        wanted = FUNCTIONS.get(name.text)
        if wanted is None:
            raise FilterError(
                f"there is no function {_short(name.text)}; there are {', '.join(FUNCTIONS)}", name.column
            )
        arguments: list[Node] = []
        if not self._takes(")"):
            arguments.append(self._deeper(self._either))
            while self._takes(","):
                arguments.append(self._deeper(self._either))
            self._needs(")", f"the arguments of {name.text}")
        if len(arguments) != wanted:
            takes = "1 argument" if wanted == 1 else f"{wanted} arguments"
            raise FilterError(f"{name.text} takes {takes}, and is given {len(arguments)}", name.column)
        return Call(name.text, tuple(arguments))

    def _field(self, root: _Token) -> Node:
        if root.text not in ROOTS:
            raise FilterError(
                f"there is no field {_short(root.text)}; begin with one of {', '.join(ROOTS)},"
                " and put text into quotes",
                root.column,
            )
        path: list[str | int] = []
        while True:
            token = self._now
            if self._takes("."):
                name = self._next()
                if name.kind != "name":
                    raise FilterError('a name is expected after the dot; write others as ["…"]', name.column)
                path.append(name.text)
            elif self._takes("["):
                path.append(self._step())
                self._needs("]", "the name or number")
            else:
                break
            if root.text not in _PATH_OF:
                raise FilterError(f"{root.text} has no fields", token.column)
            self._counted(token.column)
        return Field(root.text, tuple(path))

    def _step(self) -> str | int:
        token = self._next()
        if token.kind == "text":
            return _text(token)
        if token.kind == "number" and token.text.isdigit() and len(token.text) < _DIGITS_MAX:
            return int(token.text)
        raise FilterError("brackets take a name in quotes, or the number of an element from 0", token.column)


_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


def _short(name: str) -> str:
    return name if len(name) <= _NAMES_SHOWN_MAX else name[:_NAMES_SHOWN_MAX] + "…"


def _number(token: _Token) -> int | float:
    if not token.text.isascii() or len(token.text) > _DIGITS_MAX:
        raise FilterError(f"a number has at most {_DIGITS_MAX} characters, all of them ASCII", token.column)
    try:
        return int(token.text)
    except ValueError:
        return float(token.text)


def _text(token: _Token) -> str:
    inside = token.text[1:-1]
    if token.text[0] == "'":
        inside = inside.replace("\\'", "'").replace('"', '\\"')
    try:
        text: str = json.loads(f'"{inside}"', strict=False)
        text.encode()
    except ValueError:
        raise FilterError("this text has an escape that JSON does not have", token.column) from None
    return text


def _is_time(node: Node) -> bool:
    return isinstance(node, Field) and node.root == "time"


def _as_time(node: NodeT, column: int) -> NodeT | Literal:
    """Convert text that is compared with ``time`` into microseconds since the epoch; leave other operands unchanged."""
    if not isinstance(node, Literal) or not isinstance(node.value, str):
        return node
    try:
        return Literal(parse_moment(node.value))
    except ValueError:
        raise FilterError("time takes a time like 2026-01-31T12:00, in UTC unless it says otherwise", column) from None
