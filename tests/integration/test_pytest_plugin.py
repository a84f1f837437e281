"""The fixtures for users' tests, as a user runs them: in a pytest session of their own."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OPTIONS = """
import pytest


@pytest.fixture(scope="session")
def kera_dev_options():
    return {"brokers": 2}
"""

TESTS = """
async def test_a_fake_cluster_runs(kera_fake_cluster):
    kera_fake_cluster.create_stream("s")
    assert (await kera_fake_cluster.client().describe("s")).name == "s"


def test_the_real_cluster_is_what_was_asked_for(kera_dev):
    assert sorted(kera_dev.cluster.processes) == ["broker-1", "broker-2", "coordinator"]
"""


def test_both_fixtures_work_for_a_user(pytester: pytest.Pytester) -> None:
    documented = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing-your-code.md").read_text(), re.DOTALL)
    (real,) = [example for example in documented if "(kera_dev)" in example]
    pytester.makeconftest(OPTIONS)
    pytester.makepyfile(test_mine=TESTS, test_documented=real)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_subprocess("-p", "kera.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)


@pytest.mark.slow
def test_the_real_cluster_fixture_without_daemons_says_what_to_install(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import sys\nsys.modules['kera.local.cluster'] = None\n")
    pytester.makepyfile("def test_real(kera_dev): pass\n")
    result = pytester.runpytest_subprocess("-p", "kera.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*is missing; install it with: pip install 'kera[[]server,testing]'"])


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    """The name is the module's name: then `-p` and the entry point together load it once."""
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"].items()
    name, module = entry
    assert name == module
    assert import_module(module).kera_dev
