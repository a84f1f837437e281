"""Setup for all tests: profiles of hypothesis, the distribution and order of tests on workers, and their cost.

Property tests (hypothesis) have two profiles:

* ``ci``, the default and that of `make test`: few examples, and the same in each run, so a red run is red again.
* ``full``, that of `make test-all`: more examples, and others each time, from a printed seed; a failure also prints a
  blob for `@reproduce_failure`.
"""

import gc
import random
from collections.abc import Generator, Iterator

import kazoo.protocol.connection
import kazoo.retry
import opentelemetry.exporter.otlp.common.http
import pytest
import structlog

from kera.core.native import native, reason
from tests import daemon_logs
from tests.budget import Budget
from tests.examples import register_profiles
from tests.failures import Failures
from tests.forked_programs import forked_programs
from tests.hanging import Hanging
from tests.order import put_in_order, recorded

register_profiles()

# Threads of ZooKeeper sessions and of trace exporters draw the lengths of their waits from the program's own random
# numbers, and hypothesis would report such an example as not reproducible: here they draw from separate ones.
for module in (kazoo.protocol.connection, kazoo.retry, opentelemetry.exporter.otlp.common.http):
    module.random = random.Random()  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def logging_ends_with_the_test() -> Iterator[None]:
    """Commands and daemons in this process direct logs to a standard error that is closed with their test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session", autouse=True)
def nobody_has_contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands ignore the contexts of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("KERA_CONTEXT", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def programs_are_forked() -> Iterator[None]:
    """Programs of KerA start without their imports; this fixture comes first, so that it outlives all others."""
    with forked_programs():
        yield


@pytest.fixture(
    scope="module",
    params=["native", pytest.param("python", marks=[] if native is None else [pytest.mark.slow])],
)
def either_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the tests of a module twice: with the extension in C, and with its equivalent in Python.

    Quick tests use only one of them: ``tests/property/test_native.py`` compares both.
    """
    if request.param == "native":
        if native is None:
            pytest.skip(f"without native core: {reason}")
        yield
    else:
        from tests.native_twins import python_only

        with python_only(request.module):
            yield


def pytest_configure(config: pytest.Config) -> None:
    # The marker of pytest-xdist is also known without that plugin: tests can run one after the other.
    config.addinivalue_line("markers", "xdist_group(name): run on one worker")
    config.pluginmanager.register(daemon_logs)
    config.pluginmanager.register(Hanging())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget(config.rootpath))
        config.pluginmanager.register(Failures(config.rootpath))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests live until the end: the garbage collector skips them, now and in tests that call it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items, recorded())
