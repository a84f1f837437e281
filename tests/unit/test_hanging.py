"""Reports of where a test hangs, with and without workers of pytest-xdist."""

import pytest

HANGING = """
import asyncio

async def waits_for_what_never_comes():
    await asyncio.Event().wait()

def test_that_hangs():
    asyncio.run(waits_for_what_never_comes())
"""
PLUGIN = """
from tests.hanging import Hanging

def pytest_configure(config):
    config.pluginmanager.register(Hanging())
"""


@pytest.mark.parametrize(
    "workers",
    [pytest.param([], marks=pytest.mark.slow), ["-n", "1", "--max-worker-restart", "0"]],
    ids=["alone", "worker"],
)
def test_the_place_where_a_test_hangs_is_reported_before_its_time_out(
    pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, workers: list[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(HANGING)
    result = pytester.runpytest_subprocess("--timeout", "2", "--timeout-method", "thread", *workers, timeout=60)
    told = result.stderr.str()
    assert "test_that_hangs is not done after almost 2 s" in told
    assert "waits_for_what_never_comes" in told
    assert "run_forever" in told, "where threads are"
