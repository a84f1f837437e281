"""A client for commands: its answers pass as any type that a command expects, and it notes each call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any, Self

from kera.cli._client import connecting_by
from kera.client import Position
from kera.client.admin.access import User
from kera.client.admin.quotas import Quota
from kera.connect.importing import ImportedCursor

MANY = 200
"""Elements of an asynchronous iteration: more than a command prints by default."""
ANSWERS: dict[str, Any] = {
    "_client.access.default_quota()": Quota(),
    "_client.access.users()": [User("limited", quota=Quota(streams=1))],
    "_client.admin.backup_metadata()": b"copy",
    "_client.producer().punctuate()": (1, 1),
    "_client.schemas.check()": [],
    "kera.cli.group.importing._translated()": ([ImportedCursor(0, 7, 0, Position(1, 1, 64), 1)], 1),
}
"""The answers whose type matters, by path."""
FALSE = (".done", ".members")
"""Ends of the paths that are false, so that commands go on."""


class Anything(str):
    """A string that is its own path; as a number it is 1, its one element is itself, and it equals everything.

    The path begins with an underscore, so as a name it is internal.
    """

    __slots__ = ("did",)
    did: list[str]

    def __new__(cls, did: list[str], path: str = "_client") -> Self:
        made = super().__new__(cls, path)
        made.did = did
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(self.did, f"{self}.{name}")

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.did.append(f"{self} {given} {named}")
        return Anything(self.did, f"{self}()")

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return ANSWERS.get(str(self), self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(MANY):
            yield self

    def __iter__(self) -> Iterator[Any]:
        if not self.endswith(".items()"):
            return iter([self])
        element = Anything(self.did, f"{self}[]")
        return iter([(element, element)])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: Any) -> Any:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    __delitem__ = __getitem__

    def __bool__(self) -> bool:
        return not self.endswith(FALSE)

    def __int__(self) -> int:
        return 1

    __index__ = __int__

    def __float__(self) -> float:
        return 1.0

    def __format__(self, _: str) -> str:
        return str(self)

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __le__ = __ge__ = __eq__
    __lt__ = __gt__ = __ne__

    def __hash__(self) -> int:
        return 0


def _of_one(name: str) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if type(other) is str:
            return str(self)
        return getattr(1.0 if isinstance(other, float) else 1, name)(1 if isinstance(other, Anything) else other)

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "divmod", "mod", "radd", "rsub", "rtruediv"):
    setattr(Anything, f"__{_name}__", _of_one(f"__{_name}__"))


def run_with_anything(did: list[str], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a command with a client that answers anything, and note what the command does with the client."""

    @contextlib.asynccontextmanager
    async def connect(bootstrap: str, **options: Any) -> AsyncIterator[Any]:
        did.append(f"connects to {bootstrap} {options}")
        yield Anything(did)

    with connecting_by(connect):
        return asyncio.run(coroutine)
