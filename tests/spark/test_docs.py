"""The example of docs/spark.md runs as it is written, but for the addresses."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import Kera

DOCUMENT = Path(__file__).parents[2] / "docs" / "spark.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_of_the_documentation_runs(kera: Kera, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kera.create("clicks", streamlets=4)
    kera.send("clicks", range(10))
    code = "\n".join(PYTHON.findall(DOCUMENT.read_text()))
    for said, here in (("127.0.0.1:7400", kera.bootstrap), ("/tmp/clicks-checkpoint", str(tmp_path))):
        assert said in code
        code = code.replace(said, here)

    names: dict[str, Any] = {}
    exec(compile(code, DOCUMENT, "exec"), names)

    assert names["query"].lastProgress["numInputRows"] == 10
    assert capsys.readouterr().out.endswith("10\n")
