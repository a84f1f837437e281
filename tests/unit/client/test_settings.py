"""Settings of the SDK, and how a client combines them."""

from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings, ConsumerSettings, ProducerSettings
from kera.core.base.settings import MIB, InvalidSettings
from kera.core.errors import InvalidArgument


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_error_names_a_wrong_setting(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        ClientSettings.load(**wrong)


async def test_a_producer_combines_settings_and_overrides() -> None:
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
async def test_a_bootstrap_address_without_host_or_port_is_refused(bootstrap: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        await Client.connect(bootstrap)


@pytest.mark.parametrize(
    ("settings", "name"), [(ConsumerSettings, "prefetch_bytes_max"), (ProducerSettings, "buffer_bytes_max")]
)
def test_a_buffer_of_0_bytes_is_refused(settings: Any, name: str) -> None:
    """Such a client could never read or send a record."""
    with pytest.raises(InvalidSettings, match=name):
        settings.load(**{name: 0})
