"""Writes the synchronous faces of `Admin` and others: a method for each of theirs, which waits for its result.

``python -m scripts.sync_sdk`` writes them in place; ``--check`` ends with 1 if the files differ from its output.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client/kera/client"
ARGUMENTS_MAX = 8
"""ruff requires a ``noqa`` for more arguments."""
FACES = {
    "Admin": ("admin/admin.py", "admin"),
    "Access": ("admin/access.py", "access"),
    "SchemaRegistry": ("schemas/registry.py", "schemas"),
    "Latency": ("admin/latency.py", "latency"),
}
"""By class, the module of the asynchronous class, and the attribute of a client with an instance."""


def main() -> int:
    """Write or check the files, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.sync_sdk", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and end with 1 if they are not current")
    arguments = parser.parse_args()
    for name, (module, attribute) in FACES.items():
        path = CLIENT / "sync" / f"{attribute}.py"
        text = face_of(name, module, attribute)
        if not arguments.check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.stderr.write(f"{path} is not current: python -m scripts.sync_sdk\n")
            return 1
    return 0


def face_of(name: str, module: str, attribute: str) -> str:
    """Return the text of a module with the synchronous face of a class."""
    tree = ast.parse((CLIENT / module).read_text())
    (of,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [node for node in of.body if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_")]
    body = "\n\n".join(_method(node, attribute) for node in methods)
    source = "kera.client." + module.removesuffix(".py").replace("/", ".")
    used = {
        node.id
        for method in methods
        for part in _types(method)
        for node in ast.walk(part)
        if isinstance(node, ast.Name)
    }
    imports = [*_imports(tree, used, source), f"from {source} import {name} as Async{name}"]
    head = (ast.get_docstring(of) or "").splitlines()[0]
    text = f'''"""`kera.client.{name}` without asyncio: calls wait for their results. Made by `scripts.sync_sdk`."""

from __future__ import annotations

{chr(10).join(sorted(imports))}
from kera.client.sync.loop_thread import LoopThread


class {name}:
    """{head.partition(" Get it as")[0]} Get it as `Client.{attribute}`.

    Its methods do the same as those of `kera.client.{name}`; the docstrings there name the errors.
    """

    def __init__(self, thread: LoopThread, {attribute}: Async{name}) -> None:
        self._thread = thread
        self._{attribute} = {attribute}

{body}
'''
    return _formatted(text)


def _method(node: ast.AsyncFunctionDef, attribute: str) -> str:
    given = [each.arg for each in node.args.args[1:]]
    given += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    given += [f"{each.arg}={each.arg}" for each in node.args.kwonlyargs]
    arguments = ast.unparse(node.args)
    said = (ast.get_docstring(node) or "").splitlines()[0]
    returns = "None" if node.returns is None else ast.unparse(node.returns)
    result = "" if returns == "None" else "return "
    many = len(node.args.args) + len(node.args.kwonlyargs) > ARGUMENTS_MAX
    begin = "  # noqa: PLR0913 - as many as the other one has\n        " if many else ""
    return (
        f"    def {node.name}({begin}{arguments}) -> {returns}:\n"
        f'        """{said.partition(". ")[0].removesuffix(".")}."""\n'
        f"        {result}self._thread.run(self._{attribute}.{node.name}({', '.join(given)}))"
    )


def _types(node: ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the parts of a signature with names that have to be imported."""
    for each in (*node.args.args, *node.args.kwonlyargs):
        if each.annotation is not None:
            yield each.annotation
    yield from (default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None)
    if node.returns is not None:
        yield node.returns


def _imports(tree: ast.Module, used: set[str], source: str) -> Iterator[str]:
    """Yield imports of the used names: those of the module, or from the module if it defines the names."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = [each.name for each in node.names if (each.asname or each.name) in used]
            if names:
                yield f"from {node.module} import {', '.join(names)}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                if (each.asname or each.name) in used:
                    yield f"import {each.name}" + (f" as {each.asname}" if each.asname else "")
        elif own := _defined(node) & used:
            yield f"from {source} import {', '.join(sorted(own))}"


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines, without functions."""
    if isinstance(node, ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _formatted(text: str) -> str:
    for command in (["check", "--fix-only", "--select", "I", "-q"], ["format", "-q"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", "client/kera/client/sync/_.py", "-"],
            input=text,
            text=True,
            capture_output=True,
            check=True,
            cwd=ROOT,
        )
        text = done.stdout
    return text


if __name__ == "__main__":
    sys.exit(main())
