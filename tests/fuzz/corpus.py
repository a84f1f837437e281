"""Keeps inputs: those that found a defect, and those that together reach the lines that all inputs have reached.

Each target has a folder in ``tests/fuzz/corpus``. An input that found a defect is a file of its own, named after the
defect. The others are lines of ``reaching``, in base 64: the fewest of many thousand inputs that reach the same lines
of the modules that decode.

    python -m tests.fuzz.corpus              # how many lines the kept inputs reach
    python -m tests.fuzz.corpus --grow 5000  # choose anew, from 5000 inputs of each target and the kept ones
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kera.core.base.telemetry import configure_logging
from tests.fuzz.target import Target, outcome, random_of
from tests.fuzz.targets import TARGETS

FOLDER = Path(__file__).parent / "corpus"
REACHING = "reaching"
INPUT_BYTES_MAX = 6_000
"""Larger inputs are not kept for the lines that they reach."""
SEED = 1
Line = tuple[str, int]


class Kept(NamedTuple):
    """A kept input."""

    name: str
    data: bytes


def kept(target: str) -> Iterator[Kept]:
    """All kept inputs of a target."""
    folder = FOLDER / target
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name != REACHING:
            yield Kept(path.name, path.read_bytes())
        else:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                yield Kept(f"{REACHING}:{number}", base64.b64decode(line))


def keep(target: str, name: str, data: bytes) -> Path:
    """Keep an input that found a defect."""
    path = FOLDER / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# -- lines -------------------------------------------------------------------------------------------------------------


def lines_of(module: str) -> set[Line]:
    """The lines of a module's functions. Lines that run at import are not decoding."""
    path = str(importlib.import_module(module).__file__)
    found: set[Line] = set()

    def look(code: CodeType, *, is_function: bool) -> None:
        if is_function:
            found.update((path, line) for _, _, line in code.co_lines() if line is not None)
            found.discard((path, code.co_firstlineno))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                look(constant, is_function=is_function or bool(constant.co_flags & 2))

    look(compile(Path(path).read_text(), path, "exec"), is_function=False)
    return found


def reached(paths: set[str], do: Callable[[], object]) -> set[Line]:
    """The lines of some files that `do` reaches. Its exceptions do not matter."""
    found: set[Line] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in paths:
            return None
        if event == "line":
            found.add((name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(Exception):
            do()
    finally:
        sys.settrace(before)
    return found


def reached_by(target: Target, data: bytes, wanted: set[Line]) -> set[Line]:
    """The lines among `wanted` that an input reaches."""
    return reached({path for path, _ in wanted}, lambda: outcome(target, data)) & wanted


def fewest(found: Iterable[tuple[bytes, set[Line]]]) -> list[bytes]:
    """A small set that reaches the same lines: repeatedly the input that adds most, and among equals the shortest."""
    left = list(found)
    missing: set[Line] = set().union(*(lines for _, lines in left)) if left else set()
    chosen = []
    while missing:
        data, lines = max(left, key=lambda each: (len(each[1] & missing), -len(each[0])))
        chosen.append(data)
        missing -= lines
    return sorted(chosen)


def grow(target: Target, inputs: int) -> int:
    """Choose anew the inputs that are kept for the lines that they reach. Returns their number."""
    wanted = set().union(*map(lines_of, target.modules))
    known: set[Line] = set()
    found: list[tuple[bytes, set[Line]]] = []
    sources = [each.data for each in kept(target.name)]
    sources += [target.make(random_of(target.name, SEED, number)) for number in range(inputs)]
    for data in sources:
        if len(data) <= INPUT_BYTES_MAX:
            lines = reached_by(target, data, wanted)
            if not lines <= known:
                known |= lines
                found.append((data, lines))
    chosen = fewest(found)
    folder = FOLDER / target.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REACHING).write_text("".join(f"{base64.b64encode(data).decode()}\n" for data in chosen))
    return len(chosen)


def coverage() -> dict[str, tuple[int, int]]:
    """By module: how many lines of its functions the kept inputs of all targets reach, and how many it has."""
    found: set[Line] = set()
    wanted: dict[str, set[Line]] = {}
    for target in TARGETS.values():
        wanted |= {module: lines_of(module) for module in target.modules}
        of_target = set().union(*(wanted[module] for module in target.modules))
        for each in kept(target.name):
            found |= reached_by(target, each.data, of_target)
    return {module: (len(lines & found), len(lines)) for module, lines in sorted(wanted.items())}


def main() -> None:
    """Choose inputs anew if asked, then print the coverage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--grow", type=int, metavar="INPUTS")
    parser.add_argument("targets", nargs="*", default=[])
    arguments = parser.parse_args()
    configure_logging("critical")
    for name in (arguments.targets or TARGETS) if arguments.grow else ():
        print(f"{name}: {grow(TARGETS[name], arguments.grow)} inputs are kept")
    for module, (count, all_) in coverage().items():
        print(f"{module:<42}{count:>5} of {all_:>5} lines {100 * count / all_:>6.1f} %")


if __name__ == "__main__":
    main()
