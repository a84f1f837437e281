"""Clients of Kafka, without a broker."""

from __future__ import annotations

import confluent_kafka
import pytest

from kera.connect.kafka.connection import admin_of, settings_of


def test_an_admin_client_writes_nothing_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    admin = admin_of(settings_of("127.0.0.1:1", {}, group_id="readers", enable_auto_commit=False))

    with pytest.raises(confluent_kafka.KafkaException):
        admin.list_topics(timeout=0.2)
    del admin

    assert capfd.readouterr().err == ""
