"""Settings of the SDK, and how a client merges them."""

from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings, ConsumerSettings, ProducerSettings
from kera.core.base.settings import MIB, InvalidSettings
from kera.core.errors import InvalidArgument


def test_the_environment_counts_and_a_flag_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_PRODUCER_CHUNK_BYTES_MAX", "1MiB")
    monkeypatch.setenv("KERA_PRODUCER_LINGER_MS", "2.5")
    settings = ProducerSettings.load(linger_ms=7)
    assert (settings.chunk_bytes_max, settings.linger_ms) == (MIB, 7.0)


def test_a_file_has_a_section_for_each_part(tmp_path: Path) -> None:
    path = tmp_path / "kera.toml"
    path.write_text('[client]\ntransport = "tcp"\n[consumer]\nshared_memory = "never"\n')
    assert ClientSettings.load(path).transport == "tcp"
    assert ConsumerSettings.load(path).shared_memory == "never"
    assert ProducerSettings.load(path) == ProducerSettings()


@pytest.mark.parametrize(
    "wrong",
    [{"transport": "pigeon"}, {"request_timeout_ms": 0}, {"retry_timeout_ms": -1}, {"no_such": 1}],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        ClientSettings.load(**wrong)


async def test_a_producer_takes_settings_and_overrides() -> None:
    async with await Client.connect("127.0.0.1:1") as client:
        assert client.producer(linger_ms=3).settings.linger_ms == 3
        assert client.producer().settings.durability is None
        assert client.producer(durability="replicated").settings.durability == "replicated"
        with pytest.raises(InvalidSettings, match="durability"):
            client.producer(durability="eternal")
        given = ProducerSettings(linger_ms=3, requests_in_flight_max=2)
        assert client.producer(given).settings is given
        merged = client.producer(given, linger_ms=4).settings
        assert (merged.linger_ms, merged.requests_in_flight_max) == (4, 2)
        with pytest.raises(InvalidSettings, match="no_such"):
            client.producer(no_such=1)


@pytest.mark.parametrize("bootstrap", ["", ",", "localhost", ":7400", "localhost:", "localhost:port", "a:1,b"])
async def test_a_bootstrap_address_is_host_and_port(bootstrap: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        await Client.connect(bootstrap)


@pytest.mark.parametrize(
    ("settings", "name"), [(ConsumerSettings, "prefetch_bytes_max"), (ProducerSettings, "buffer_bytes_max")]
)
def test_no_room_at_all_is_refused(settings: Any, name: str) -> None:
    """Nothing would ever be read, or be sent."""
    with pytest.raises(InvalidSettings, match=name):
        settings.load(**{name: 0})
