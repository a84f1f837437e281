"""`kera node`: the planned brokers, errors before the first start, and shutdown."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kera.broker.registration import BrokerDirectory
from kera.core.errors import InvalidArgument, PathNotWritable
from kera.local.node import BROKERS_MAX, LocalNode, planned
from tests.integration.command_line import run_kera

GROUPS = [frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6})]


def test_each_group_of_cpus_gets_a_broker_with_consecutive_ports(tmp_path: Path) -> None:
    brokers = planned(GROUPS, 0, tmp_path, port=7401, metrics_port=9401)

    assert [(one.name, one.cpus) for one in brokers] == [(f"broker-{n + 1}", GROUPS[n]) for n in range(3)]
    assert [one.flags["cpus"] for one in brokers] == ["0,4", "1,5", "2,6"]
    assert [(one.flags["port"], one.flags["frames_port"]) for one in brokers] == [
        (7401, 7402),
        (7403, 7404),
        (7405, 7406),
    ]
    assert [one.flags["metrics_port"] for one in brokers] == [9401, 9402, 9403]
    assert brokers[1].flags["data_dir"] == tmp_path / "broker-2"


def test_brokers_use_any_ports_by_default_and_serve_metrics_only_on_request(tmp_path: Path) -> None:
    (first, second, _) = planned(GROUPS, 0, tmp_path)
    assert first.flags["port"] == second.flags["port"] == 0
    assert "metrics_port" not in first.flags
    assert [one.flags["metrics_port"] for one in planned(GROUPS, 0, tmp_path, metrics_port=0)] == [0, 0, 0]


def test_existing_brokers_can_be_started_on_fewer_cpus(tmp_path: Path) -> None:
    for number in (2, 5):
        (tmp_path / f"broker-{number}").mkdir()
    (tmp_path / "broker-old").mkdir()

    with pytest.raises(InvalidArgument, match="has data of 5 brokers, and 3 would be started: give --brokers 5"):
        planned(GROUPS, 0, tmp_path)
    assert [one.cpus for one in planned(GROUPS, 5, tmp_path)] == [*GROUPS, *GROUPS[:2]]


@pytest.mark.parametrize(
    ("count", "ports"), [(BROKERS_MAX + 1, {}), (3, {"port": 65531}), (3, {"metrics_port": 65534})]
)
def test_too_many_brokers_are_refused(count: int, ports: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="too many"):
        planned(GROUPS, count, tmp_path, **ports)


def test_an_unusable_directory_is_named() -> None:
    with pytest.raises(PathNotWritable, match=r"cannot use /x+: File name too long; choose another directory"):
        planned(GROUPS, 0, Path("/", "x" * 300))


def test_port_65535_can_be_used(tmp_path: Path) -> None:
    assert planned(GROUPS, 3, tmp_path, port=65530)[2].flags["frames_port"] == 65535
    assert planned(GROUPS, 3, tmp_path, metrics_port=65533)[2].flags["metrics_port"] == 65535


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--per", "socket"], "--per is core or numa, not socket"),
        (["--cpus", "0-"], "'0-' is not a list of CPUs; write it as 0-3,8"),
        (["--cpus", "8191"], "--cpus has CPUs on which this command may not run, or that there are not"),
        (["--brokers", "-1"], "--brokers"),
        (["--port", "65535", "--brokers", "2"], "too many"),
    ],
)
def test_invalid_flags_are_refused_before_anything_starts(flags: list[str], says: str, tmp_path: Path) -> None:
    done = run_kera("node", "--data-dir", str(tmp_path / "data"), *flags)

    assert done.returncode == 2
    assert says in done.stderr.decode()
    assert not list(tmp_path.iterdir())


def test_the_data_directory_of_a_broker_is_refused_as_that_of_a_node(tmp_path: Path) -> None:
    directory = BrokerDirectory(tmp_path)
    directory.store(3, "cluster")
    directory.close()

    done = run_kera("node", "--data-dir", str(tmp_path), "--brokers", "2")

    assert done.returncode == 2
    assert f"{tmp_path} has the data of broker 3; choose the directory that holds" in done.stderr.decode()
    assert not list(tmp_path.glob("broker-*"))


class Stub:
    """A broker that starts once, at once; a later start hangs. It clears up until the test sets `may_end`."""

    def __init__(self, name: str, *_: object, on_death: Callable[[Stub], None], **__: object) -> None:
        self.name = self.log_path = name
        self.die = functools.partial(on_death, self)
        self.starts = 0
        self.starts_again, self.stops, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def describe_exit(self) -> str:
        return "is gone"

    async def start(self, **_: object) -> None:
        self.starts += 1
        if self.starts > 1:
            self.starts_again.set()
            try:
                await asyncio.Event().wait()
            finally:
                await self.may_end.wait()

    async def stop(self, **_: object) -> bool:
        self.stops.set()
        await self.may_end.wait()
        return True


async def test_a_stop_ends_all_brokers_concurrently_and_restarts_none_that_dies_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs: list[Stub] = []

    def make(*arguments: Any, **named: Any) -> Stub:
        stubs.append(Stub(*arguments, **named))
        return stubs[-1]

    monkeypatch.setattr("kera.local.node.Child", make)
    monkeypatch.setattr("kera.local.node.RESTART_S", 0)
    said: list[str] = []
    running = LocalNode(planned(GROUPS, 0, tmp_path), tmp_path, env={}, say=said.append, stop_grace_s=1)
    await running.start()
    first, second, third = stubs
    first.die()
    await first.starts_again.wait()

    stopping = asyncio.create_task(running.stop())
    async with asyncio.timeout(30):
        await second.stops.wait()  # although the first one is still clearing up
    third.die()
    for each in stubs:
        each.may_end.set()

    assert await stopping == []
    assert [each.starts for each in stubs] == [2, 1, 1]
    assert said == ["broker-1 is gone, and is started again; its log is broker-1"]
