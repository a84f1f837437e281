"""The planner can be used by another engine: none of its modules needs Spark."""

import ast
from pathlib import Path

import pytest

from kera.spark_connector import admission, offsets, options, places, planning

FILES = [
    *(Path(str(module.__file__)) for module in (admission, offsets, options, places)),
    *sorted(Path(str(planning.__file__)).parent.glob("*.py")),
]


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_module_of_the_planner_imports_spark_or_the_client(path: Path) -> None:
    found = imports(path)

    assert found
    assert not [name for name in found if name.split(".")[0] == "pyspark" or name.startswith("kera.client")]
