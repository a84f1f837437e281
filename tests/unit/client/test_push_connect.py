"""Connecting to a broker that pushes: obstacles, and what a reader does about them."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kera.client.cluster import push_connect
from kera.client.consuming.consumer import Consumer
from kera.client.settings import ConsumerSettings, SharedMemory
from kera.core.errors import InvalidArgument, KeraError
from tests.unit.client.fake_support import MakeFleet
from tests.unit.client.push_broker import SOON, PushFleet
from tests.unit.client.support import WAIT_S
from tests.unit.client.test_fetcher import put

VALUES = [b"0", b"1"]


@pytest.fixture
async def fleet(make_fleet: MakeFleet, tmp_path: Path) -> AsyncIterator[PushFleet]:
    """Broker 1 pushes."""
    fleet = PushFleet(await make_fleet(timing=SOON), tmp_path)
    put(fleet, *VALUES)
    await fleet.pushing.start(fleet.info.push_unix_path)
    yield fleet
    await fleet.pushing.close()


async def read(fleet: PushFleet, shared_memory: SharedMemory = "auto") -> list[Any]:
    consumer = Consumer(
        fleet.cluster, ("s",), ConsumerSettings(shared_memory=shared_memory), start="earliest", end="latest"
    )
    async with asyncio.timeout(WAIT_S), consumer:
        return [value async for chunk in consumer.batches() for value in chunk.batch["value"].to_pylist()]


def wrong_path(fleet: PushFleet) -> None:
    fleet.info.push_unix_path += ".none"


def sent_away(fleet: PushFleet) -> None:
    fleet.pushing.refusing = True


def other_broker(fleet: PushFleet) -> None:
    fleet.pushing.hello.broker_id = 2


def other_version(fleet: PushFleet) -> None:
    fleet.pushing.hello.version = 99


def no_arena(fleet: PushFleet) -> None:
    fleet.pushing.send_fd = False
    fleet.pushing.arena_path.unlink()


def endless_arena(fleet: PushFleet) -> None:
    fleet.pushing.hello.arena_bytes = (1 << 64) - 1


def odd_arena(fleet: PushFleet) -> None:
    fleet.pushing.hello.slots += 1


async def test_a_broker_that_sends_its_memory_with_its_greeting_needs_no_user_check(
    fleet: PushFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure there would leave the descriptor of the memory open."""

    def gone(_: Any) -> int:
        raise OSError(errno.ENOTCONN, "not connected")

    monkeypatch.setattr(push_connect, "peer_user", gone)
    channel = await push_connect.connect(fleet.info.push_unix_path, timeout_s=WAIT_S)
    assert channel.broker_id == 1
    await channel.close()


@pytest.mark.parametrize(
    ("obstacle", "text"),
    [
        (wrong_path, "cannot connect to"),
        (sent_away, "at once"),
        (other_broker, "broker 2 is at"),
        (other_version, "not a push channel of version 2"),
        (no_arena, "cannot map the broker's memory"),
        (endless_arena, "cannot map the broker's memory"),
        (odd_arena, "not as it says"),
    ],
)
async def test_a_reader_pulls_from_a_broker_that_cannot_push_unless_pushing_is_required(
    fleet: PushFleet, obstacle: Callable[[PushFleet], None], text: str
) -> None:
    obstacle(fleet)
    assert await read(fleet) == VALUES
    assert fleet.pulled > 0
    fleet.cluster.settings = fleet.cluster.settings.model_copy(update={"retry_timeout_ms": 20})
    with pytest.raises(KeraError, match=text):
        await read(fleet, "always")


async def test_a_socket_of_another_user_fails_only_if_pushing_is_required(
    fleet: PushFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(push_connect, "_greeting", refused)
    assert await read(fleet) == VALUES
    with pytest.raises(InvalidArgument, match="run as the broker's user"):
        await read(fleet, "always")


async def test_the_arena_file_is_opened_when_no_descriptor_comes(fleet: PushFleet) -> None:
    fleet.pushing.send_fd = False
    fleet.pushing.serving = True
    assert await read(fleet, "always") == VALUES
    assert fleet.pulled == 0
