"""The examples run as they are, and print their documented results.

To save time all run in the session of the tests; one also runs in its own process, as for a user.
"""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.support import Kera

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

PRINTED = {
    "word_count": [
        """
|    word|count|
+--------+-----+
|      be|    2|
|      to|    2|
|      is|    1|
""",
        """
|       to|    6|
|       be|    2|
|    sleep|    2|
""",
    ],
    "fixed_window": [
        "0 windows are final\n",
        """
|             minute|sensor|readings|celsius|
+-------------------+------+--------+-------+
|2026-03-01 12:00:00|  hall|       2|   19.5|
|2026-03-01 12:00:00|  roof|       2|    8.5|
+-------------------+------+--------+-------+
""",
        """
|2026-03-01 12:00:00|  hall|       2|   19.5|
|2026-03-01 12:00:00|  roof|       2|    8.5|
|2026-03-01 12:01:00|  hall|       1|   21.0|
+-------------------+------+--------+-------+
""",
    ],
    "stream_join": [
        """
|order|what| how|            ordered|               paid|
+-----+----+----+-------------------+-------------------+
|    1| tea|card|2026-03-01 09:00:00|2026-03-01 09:04:00|
+-----+----+----+-------------------+-------------------+
""",
        """
|    1| tea|card|2026-03-01 09:00:00|2026-03-01 09:04:00|
|    2| jam|NULL|2026-03-01 09:01:00|               NULL|
|    3| pie|NULL|2026-03-01 09:02:00|               NULL|
|    4| tea|card|2026-03-01 10:00:00|2026-03-01 10:01:00|
+-----+----+----+-------------------+-------------------+
""",
    ],
    "typed_stream": [
        """
 |-- city: string (nullable = true)
 |-- started: timestamp (nullable = true)
 |-- km: double (nullable = true)
 |-- fare: double (nullable = true)
""",
        """
|  city|            started|fare_per_km|
+------+-------------------+-----------+
|Madrid|2026-03-01 08:00:00|        2.5|
|Madrid|2026-03-01 09:00:00|        2.0|
|Rennes|2026-03-01 09:00:00|        3.5|
|Rennes|2026-03-01 10:00:00|        3.0|
+------+-------------------+-----------+
""",
    ],
}
"""The output of each example, in this order, possibly with more in between."""


def not_printed(name: str, output: str) -> list[str]:
    """The expected parts that `output` lacks."""
    lacking, at = [], 0
    for part in PRINTED[name]:
        found = output.find(part, at)
        if found < 0:
            lacking.append(part)
        else:
            at = found + len(part)
    return lacking


def test_every_example_is_tested() -> None:
    elsewhere = {
        "lakehouse",  # it needs a library: see test_lakehouse.py
        *("top_routes", "click_sessions"),  # they need no Spark: see tests/integration/test_examples.py
    }
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED) | elsewhere


@pytest.mark.parametrize(
    "name", [name if name == "word_count" else pytest.param(name, marks=pytest.mark.slow) for name in PRINTED]
)
def test_an_example_prints_its_result_and_leaves_no_stream(
    name: str, kera: Kera, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kera.run(lambda client: client.admin.list_streams())
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--bootstrap", kera.bootstrap])

    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    output = capsys.readouterr().out
    assert not_printed(name, output) == [], output
    assert kera.run(lambda client: client.admin.list_streams()) == before


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.executable, reason="Spark does not look for data sources below a path with a space")
def test_an_example_runs_in_a_process_of_its_own(kera: Kera, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "word_count.py", "--bootstrap", kera.bootstrap],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert not_printed("word_count", done.stdout) == [], done.stdout
