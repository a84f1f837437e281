"""Functions of the extension in C, and their twins in Python: to run tests with either, and to compare them.

The twins define the right results. `python_only` makes all modules use them, so that none of them calls a function of
the extension.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from kera.client.consuming.delivering import records
from kera.client.producing.encoding import payloads as encoding
from kera.client.types import Record
from kera.core.errors import KeraError
from kera.core.format import checksum, chunk, combined_checksum, header_table, joining, key_hashes, many_chunks
from kera.core.format.chunk import ChunkHeader
from kera.core.native import native, reason
from kera.core.rpc import frames
from kera.core.rpc.frames import FrameHeader

lean_check = sys.modules["kera.core.format.lean.check"]  # the package has a function of this name
lean_encode, lean_decode = sys.modules["kera.core.format.lean.encode"], sys.modules["kera.core.format.lean.decode"]
MODULES = (
    *(checksum, chunk, combined_checksum, header_table, joining, many_chunks, lean_check, lean_encode),
    *(encoding, records, frames, key_hashes),
)
TYPES = {"verify_header": ChunkHeader, "verify_chunk": ChunkHeader, "records": Record, "decode_header": FrameHeader}

needs_native = pytest.mark.skipif(native is None, reason=f"without native core: {reason}")


def twin_of(function: Any) -> Callable[..., Any] | None:
    """The twin in Python of a function of the extension; None for any other object."""
    bound = getattr(function, "__self__", None) if isinstance(function, BuiltinFunctionType) else None
    return bound[0] if isinstance(bound, tuple) else None


def accelerated(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """Functions of the extension that modules define or import, by name; empty without the extension."""
    return {name: each for module in modules for name, each in vars(module).items() if twin_of(each) is not None}


@contextlib.contextmanager
def python_only(*modules: ModuleType) -> Iterator[None]:
    """Make the defining modules, and others, use the twins in Python."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (lean_decode, joining):
            patch.setattr(module, "native", None)
        for module in dict.fromkeys((*MODULES, sys.modules["kera.core.format.lean"], *modules)):
            for name, each in accelerated(module).items():
                patch.setattr(module, name, twin_of(each))
        yield


class Outcome(NamedTuple):
    """The result of a call: its value or its error."""

    value: Any
    error: tuple[Any, ...] | None


def outcome(function: Callable[..., Any], *arguments: Any, **named: Any) -> Outcome:
    """The outcome of a call: the value, or all that is visible of the error."""
    try:
        value = function(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - both must fail in the same way, whatever it is
        seen = error.attributes if isinstance(error, KeraError) else None
        return Outcome(None, (type(error), str(error), seen))
    return Outcome((type(value), value), None)


class Refused(Exception):
    """The extension leaves the call to its twin, because it is not sure that the arguments are fine."""


def alone(name: str) -> Callable[..., Any]:
    """A function of the extension that raises `Refused` instead of calling its twin."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused

    assert native is not None
    return native.bind(name, refuse, TYPES.get(name))  # type: ignore[no-any-return]
