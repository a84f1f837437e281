"""The native core: the extension ``kera.core._native``, whose functions do what some of Python do, in less time.

This is the one place that imports it. A function that it has a twin of is decorated with `accelerated`, and nobody who
calls it need know. The twin in Python says what is right, what is wrong, and how errors read: the one in C calls it
wherever it does not know that all is well. So everything works without the extension, and in the same way.

The environment variable ``KERA_NATIVE=0`` leaves it out. docs/native.md has more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

VERSION = 11
"""Version of the interface of the extension's functions; an extension with another version is not used."""
VARIABLE = "KERA_NATIVE"

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def _load() -> tuple[ModuleType | None, str]:
    """The extension, or why there is none."""
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE}=0"
    try:
        from kera.core import _native  # noqa: PLC0415 - it may not be there, or not be wanted
    except ModuleNotFoundError:
        return None, "not built"
    except ImportError as error:
        return None, "not built" if "cannot import name" in str(error) else f"cannot be loaded: {error}"
    return _native, refused(_native.VERSION)


def refused(version: int) -> str:
    """Why an extension of that version is not used; empty if it is."""
    return "" if version == VERSION else f"built for another version: {version}, this is {VERSION}; run make setup"


native, reason = _load()
if reason and native is not None:
    native = None
    sys.stderr.write(f"kera: warning: without native core: {reason}\n")


def describe() -> str:
    """Which core runs, for people."""
    return "native core" if native is not None else f"without native core: {reason}"


def accelerated(returned: type | None = None) -> Callable[[_FunctionT], _FunctionT]:
    """Let the twin of a function in the extension, of the same name, take its place.

    `returned`: the type of the tuple that it returns, if it is not one of Python's.
    """

    def accelerate(function: _FunctionT) -> _FunctionT:
        if native is None:
            return function
        return cast("_FunctionT", native.bind(function.__name__, function, returned))

    return accelerate
