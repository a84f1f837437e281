from pathlib import Path
from typing import Any

import pytest

from kera.coordinator.settings import CoordinatorSettings
from kera.core.base.settings import GIB, InvalidSettings


def test_every_setting_has_a_description() -> None:
    assert [name for name, field in CoordinatorSettings.model_fields.items() if not field.description] == []


def test_settings_come_from_flags_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kera.toml"
    file.write_text(
        '[coordinator]\nport = 1\nheartbeat_interval_ms = 20\nmetadata_bytes_max = "2GiB"\n[broker]\nport = 9\n'
    )
    monkeypatch.setenv("KERA_COORDINATOR_PORT", "3")
    monkeypatch.setenv("KERA_COORDINATOR_METRICS_PORT", "0")

    settings = CoordinatorSettings.load(file, data_dir=tmp_path, port=None)

    assert (settings.port, settings.heartbeat_interval_ms, settings.metrics_port) == (3, 20, 0)
    assert settings.metadata_bytes_max == 2 * GIB
    assert settings.data_dir == tmp_path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65536),
        ("heartbeat_interval_ms", 0),
        ("log_level", "loud"),
        ("metadata_bytes_max", 4096),
        ("default_replication", 17),
    ],
)
def test_the_error_of_an_invalid_value_names_the_setting(field: str, value: Any) -> None:
    with pytest.raises(InvalidSettings, match=field):
        CoordinatorSettings.load(**{field: value})


def test_presets_make_settings(tmp_path: Path) -> None:
    assert CoordinatorSettings.dev().metrics_port == 0
    testing = CoordinatorSettings.for_testing(tmp_path)
    assert (testing.port, testing.data_dir) == (0, tmp_path)
