"""Tokens for executors: how the driver is found, and which streams a token is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kera.core.errors import Unavailable
from kera.spark_connector.connection import Connection, Secret
from kera.spark_connector.delegation import asking
from kera.spark_connector.delegation.asking import for_tasks, resources_of
from kera.spark_connector.delegation.driver import Driver, driver_of
from kera.spark_connector.delegation.protocol import settings_from_json, settings_to_json
from kera.spark_connector.portal import settings_of

WITH_PASSWORD = Connection("127.0.0.1:1", (("user", "alice"), ("password_file", "/nowhere/password")))


def process(folder: Path, number: int, parent: int, started: int, *command: str, state: str = "S") -> None:
    """Write a process into a folder that stands in for /proc."""
    of_one = folder / str(number)
    of_one.mkdir()
    behind = [state, str(parent), *("0" * 17), str(started), "0"]
    (of_one / "stat").write_text(f"{number} (java) (sh) {' '.join(behind)}\n")
    (of_one / "cmdline").write_text("".join(f"{word}\0" for word in command))


def test_the_driver_is_the_parent_of_sparks_python(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 500, "java", "-cp", "x")
    process(tmp_path, 11, 10, 501, "python3", "-m", "pyspark.daemon", "pyspark.sql.worker.plan_data_source_read")
    process(tmp_path, 12, 11, 502, "python3", "-m", "pyspark.daemon")
    process(tmp_path, 13, 10, 503, "python3", "-m", "kera.spark_connector.service")

    assert driver_of(12, tmp_path) == driver_of(13, tmp_path) == Driver(10, "500")
    assert Driver(10, "500").lives(tmp_path)
    assert not Driver(10, "499").lives(tmp_path)
    assert not Driver(99, "500").lives(tmp_path)


def test_asking_for_the_driver_fails_after_it_has_ended(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 500, "java", state="Z")
    process(tmp_path, 11, 10, 501, "python3", "-m", "pyspark.daemon")

    with pytest.raises(Unavailable, match="the driver of this Spark application has ended"):
        driver_of(11, tmp_path)


def test_a_token_is_narrowed_to_its_streams_or_to_a_common_prefix_of_many() -> None:
    assert resources_of(["b", "a", "b"]) == ("stream:a", "stream:b")
    assert resources_of(None) == ("stream:*",)
    assert resources_of([f"sensor-{number}" for number in range(100)]) == ("stream:sensor-*",)
    assert resources_of([*"abc", *(f"sensor-{number}" for number in range(100))]) == ("stream:*",)


def test_client_settings_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERA_CLIENT_PASSWORD", "secret")
    monkeypatch.setenv("KERA_CLIENT_USER", "alice")
    monkeypatch.setenv("KERA_CLIENT_TLS_CA", "/ca")
    here = settings_of(Connection("h:1"))
    monkeypatch.delenv("KERA_CLIENT_PASSWORD")

    assert settings_from_json(settings_to_json(here)) == here


def test_no_token_is_requested_without_a_secret_to_protect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "connected", lambda _: pytest.fail("somebody was asked"))

    assert for_tasks(Connection("h:1"), ["a"]) is None
    assert for_tasks(Connection("h:1", (("tls_ca", "/ca"), ("tls_cert", "/c"), ("tls_key", "/k"))), ["a"]) is None
    assert for_tasks(WITH_PASSWORD, []) is None


def test_the_repr_of_a_partition_hides_its_token() -> None:
    from kera.spark_connector.reading.partition import KeraPartition

    token = Connection("h:1", token=Secret("kera_1_do-not-show"))
    shown = repr(KeraPartition(None, token))  # type: ignore[arg-type]
    assert "do-not-show" not in shown
    assert "Secret()" in shown
