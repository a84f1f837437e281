from pathlib import Path
from typing import Any

import pytest

from kera.broker.settings import BrokerSettings
from kera.core.base.settings import KIB, MIB, InvalidSettings


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"segment_bytes": 4 * KIB, "arena_bytes": 16 * KIB},
        {"segment_bytes": "1MiB", "arena_bytes": "1GiB"},
        {"segment_bytes": 512 * MIB, "arena_bytes": 2048 * MIB, "message_bytes_max": 512 * MIB + 128},
    ],
)
def test_settings_that_fit_each_other_are_accepted(values: dict[str, Any]) -> None:
    assert BrokerSettings.load(**values).segment_bytes > 0


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"segment_bytes": 2 * KIB}, "segment_bytes must be a multiple of 4096, at least 4096"),
        ({"segment_bytes": 5 * KIB}, "segment_bytes must be a multiple of 4096"),
        ({"segment_bytes": 8 * MIB, "arena_bytes": 15 * MIB}, "arena_bytes must have room for 2 segments"),
        ({"segment_bytes": 8 * MIB, "message_bytes_max": 8 * MIB}, "message_bytes_max must have room for a chunk"),
        (
            {"segment_bytes": 1024 * MIB, "arena_bytes": 4096 * MIB, "message_bytes_max": 1024 * MIB},
            "segment_bytes must be at most 536870912",
        ),
        ({"message_bytes_max": 2048 * MIB}, "message_bytes_max must be at most 1073741824"),
        ({"port": 65536}, "port"),
        ({"idle_close_ms": 99}, "idle_close_ms"),
        ({"coordinator_timeout_ms": -1}, "coordinator_timeout_ms"),
        ({"shm_directory": "/dev/shm"}, "shm_directory"),
    ],
)
def test_the_error_for_invalid_settings_names_them(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidSettings) as raised:
        BrokerSettings.load(**values)

    assert problem in raised.value.message


@pytest.mark.parametrize("preset", [BrokerSettings.dev, BrokerSettings.for_testing])
def test_presets_are_consistent_and_differ_from_the_default(preset: Any) -> None:
    settings = preset(Path("/data"), "coordinator:1")

    assert (settings.data_dir, settings.coordinator) == (Path("/data"), "coordinator:1")
    assert settings.arena_bytes < BrokerSettings().arena_bytes


def test_a_broker_for_tests_is_ephemeral() -> None:
    assert BrokerSettings.for_testing(Path("/data"), "c:1").ephemeral
    assert not BrokerSettings().ephemeral
