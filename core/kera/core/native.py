"""The native core: the extension ``kera.core._native``, whose functions are faster twins of some functions in Python.

Only this module imports it. A Python function with a twin in C is decorated with `accelerated`, and its callers see no
difference. The function in Python defines the results and the errors: its twin calls it in every case that it does not
handle itself. So everything works without the extension, and in the same way.

The environment variable ``KERA_NATIVE=0`` turns it off. docs/native.md has more.
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
    """Return the extension, or why it is not used."""
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE}=0"
    try:
        from kera.core import _native  # noqa: PLC0415 - it may be missing, or turned off
    except ModuleNotFoundError:
        return None, "not built"
    except ImportError as error:
        return None, "not built" if "cannot import name" in str(error) else f"cannot be loaded: {error}"
    return _native, refused(_native.VERSION)


def refused(version: int) -> str:
    """Return why an extension of `version` is not used; empty: it is."""
    return "" if version == VERSION else f"built for another version: {version}, this is {VERSION}; run make setup"


native, reason = _load()
if reason and native is not None:
    native = None
    sys.stderr.write(f"kera: warning: without native core: {reason}\n")


def describe() -> str:
    """Return which core runs, for people."""
    return "native core" if native is not None else f"without native core: {reason}"


def accelerated(returned: type | None = None) -> Callable[[_FunctionT], _FunctionT]:
    """Replace a function by its twin of the same name in the extension, if there is an extension.

    `returned`: the type of the tuple that it returns, if that is not a plain ``tuple``.
    """

    def accelerate(function: _FunctionT) -> _FunctionT:
        if native is None:
            return function
        return cast("_FunctionT", native.bind(function.__name__, function, returned))

    return accelerate
