"""Promises of all daemons. They start in stages: a failed stage leaves nothing of the stages before it running."""

import asyncio
import inspect
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kera.backup import application as backup
from kera.backup.settings import BackupSettings
from kera.broker import application as broker
from kera.broker.settings import BrokerSettings
from kera.coordinator import application as coordinator
from kera.coordinator.settings import CoordinatorSettings
from kera.core.errors import StaleEpoch, StartError
from kera.server.daemon import ExitCode
from tests.unit.broker.fake_coordinator import FakeCoordinator, serving

Start = Callable[[], AbstractAsyncContextManager[dict[str, Any]]]

STAGES = {
    broker: (
        "open_place",
        "start_engine",
        "build_service",
        "open_interfaces",
        "bind_push",
        "watch",
        "build_registration",
        "register",
        "own_streamlets",
        "stay_registered",
    ),
    backup: (
        "open_place",
        "start_engine",
        "build_service",
        "open_interfaces",
        "build_registration",
        "register",
        "stay_registered",
    ),
    coordinator: ("check_addresses", "open_place", "build_leadership", "run_for_leader"),
}
QUICK = {
    *((broker, stage) for stage in ("open_place", "start_engine", "bind_push", "register", "stay_registered")),
    *((backup, stage) for stage in ("open_interfaces", "stay_registered")),
    *((coordinator, stage) for stage in ("open_place", "run_for_leader")),
}
"""Stages that open a kind of thing: files, memory, sockets, a registration, or tasks."""


def name_of(module: ModuleType) -> str:
    """The name of a daemon."""
    return module.__name__.split(".")[1]


CASES = [
    pytest.param(
        module,
        stage,
        id=f"{name_of(module)}-{stage}",
        marks=[] if (module, stage) in QUICK else [pytest.mark.slow],
    )
    for module, stages in STAGES.items()
    for stage in stages
]
GROUPED = ("stay_registered", "run_for_leader")
"""The stages that open a group of tasks, which wraps the exception."""


class Broken(Exception):
    """Raised when a stage has done its work."""


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with serving(FakeCoordinator()) as fake:
        yield fake


@pytest.fixture
def starts(tmp_path: Path, memory: Path, fake: FakeCoordinator) -> dict[ModuleType, Start]:
    data_dir = tmp_path / "data"
    return {
        broker: lambda: broker.serve(
            BrokerSettings.for_testing(data_dir, fake.address).model_copy(update={"shm_dir": memory, "metrics_port": 0})
        ),
        backup: lambda: backup.serve(BackupSettings.for_testing(data_dir, fake.address)),
        coordinator: lambda: coordinator.serve(CoordinatorSettings.for_testing(data_dir)),
    }


def sockets_of(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_socket()]


def daemon_tasks() -> Counter[str]:
    """The tasks of our code, without those of gRPC: the fake coordinator has some too."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    codes = [each.cr_code for each in coroutines if inspect.iscoroutine(each)]
    return Counter(code.co_qualname for code in codes if "/kera/" in code.co_filename.removeprefix(str(Path.cwd())))


@pytest.mark.parametrize(("module", "stage"), CASES)
async def test_a_failed_stage_stops_the_stages_before_it(
    module: ModuleType, stage: str, starts: dict[ModuleType, Start], tmp_path: Path, memory: Path
) -> None:
    before, done = daemon_tasks(), getattr(module, stage)

    async def do_and_fail(*args: Any, **kwargs: Any) -> None:
        await done(*args, **kwargs)
        raise Broken

    def act_and_fail(*args: Any, **kwargs: Any) -> None:
        done(*args, **kwargs)
        raise Broken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, stage, do_and_fail if inspect.iscoroutinefunction(done) else act_and_fail)
        with pytest.RaisesExc(Broken) if stage not in GROUPED else pytest.RaisesGroup(Broken):
            async with starts[module]():
                pass

    assert sockets_of(tmp_path) == []
    assert list(memory.iterdir()) == []
    assert daemon_tasks() == before
    async with starts[module]() as ready:  # its data directory and its ports are free
        assert ready["grpc_address"]
        assert daemon_tasks() > before


@pytest.mark.parametrize("module", STAGES, ids=name_of)
def test_all_stages_are_tested(module: ModuleType) -> None:
    """`serve` calls functions of its module: they are the stages, and `STAGES` has all of them."""
    called = inspect.getclosurevars(inspect.unwrap(module.serve)).globals
    own = {name for name, value in called.items() if inspect.isfunction(value) and value.__module__ == module.__name__}
    assert own - {"hand_over", "_push_path", "_store"} == set(STAGES[module])


@pytest.mark.parametrize("module", [broker, backup], ids=name_of)
async def test_a_daemon_that_gets_stale_epoch_ends(
    module: ModuleType, starts: dict[ModuleType, Start], fake: FakeCoordinator, memory: Path
) -> None:
    fake.fence()
    with pytest.RaisesGroup(StaleEpoch):
        async with starts[module](), asyncio.timeout(30):
            await asyncio.Event().wait()
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("module", STAGES, ids=name_of)
async def test_two_daemons_cannot_share_a_data_directory(
    module: ModuleType, starts: dict[ModuleType, Start], memory: Path
) -> None:
    async with starts[module]():
        arenas = list(memory.iterdir())
        with pytest.raises(StartError, match=rf"another {name_of(module)} \(process \d+\) uses"):
            async with starts[module]():
                pass
        assert list(memory.iterdir()) == arenas, "the arena of the first is left alone"


@pytest.mark.parametrize("name", [name_of(module) for module in STAGES])
def test_a_wrong_setting_ends_the_start_with_an_error_that_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"KERA_{name.upper()}_PORT", "none")

    assert import_module(f"kera.{name}.__main__").main() == ExitCode.NOT_STARTED
    line = capsys.readouterr().err
    assert line.startswith("kera: error: ")
    assert "port" in line
