"""Validation of the backup's settings."""

from pathlib import Path
from typing import Any

import pytest

from kera.backup.settings import BackupSettings
from kera.core.base.settings import KIB, MIB, InvalidSettings


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"segment_bytes": 0}, "segment_bytes"),
        ({"segment_bytes": 4096 + 512}, "multiple of 4096"),
        ({"segment_bytes": 1024 * MIB}, "at most"),
        ({"memory_bytes": 8 * MIB}, "memory_bytes"),
        ({"message_bytes_max": 4 * MIB}, "message_bytes_max"),
        ({"message_bytes_max": 2048 * MIB}, "message_bytes_max"),
        ({"log_dirs": ["/a", "/b", "/a"]}, "log_dirs"),
        ({"port": 70_000}, "port"),
    ],
)
def test_an_invalid_setting_is_refused_with_an_error_that_names_it(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSettings, match=named):
        BackupSettings.load(**values)


def test_log_dirs_and_sizes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_BACKUP_LOG_DIRS", '["/a", "/b"]')
    monkeypatch.setenv("KERA_BACKUP_DISK_BYTES_MAX", "1GiB")

    settings = BackupSettings.load()
    assert settings.log_dirs == [Path("/a"), Path("/b")]
    assert settings.disk_bytes_max == 1024 * MIB


def test_settings_for_development_and_for_tests_are_valid(tmp_path: Path) -> None:
    assert BackupSettings.dev(tmp_path, "here:1").memory_bytes == 128 * MIB
    for_testing = BackupSettings.for_testing(tmp_path, "here:1")
    assert (for_testing.segment_bytes, for_testing.ephemeral) == (64 * KIB, True)
