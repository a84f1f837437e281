"""The examples of docs/spark.md run as they are, with other addresses."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import Kera

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "spark.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_of_the_documentation_runs(kera: Kera, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kera.create("clicks", streamlets=4)
    kera.create("visits")
    kera.send("clicks", range(10))
    code = "\n".join(PYTHON.findall(DOCUMENT.read_text()))
    for said, here in (("127.0.0.1:7400", kera.bootstrap), ("/tmp/", f"{tmp_path}/")):
        assert said in code
        code = code.replace(said, here)

    names: dict[str, Any] = {}
    try:
        exec(compile(code, DOCUMENT, "exec"), names)
        visits = [bytes(row.value).decode() for row in kera.read("visits").collect()]
    finally:
        for stream in ("clicks", "visits"):
            kera.delete(stream)

    assert names["query"].lastProgress["numInputRows"] == 10
    assert sorted(visits) == [f"V{number}" for number in range(10)]
    output = capsys.readouterr().out
    assert output.startswith("10\n")  # the count of a batch
    assert "|clicks|" in output.replace(" ", "")  # the list of streams
    assert "|access|" in output.replace(" ", "")
