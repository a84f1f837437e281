"""Client settings and the translation of errors, for source and target."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kera.connect.errors import Refused, Unreachable
from kera.core.errors import InvalidArgument

ANSWER_S = 15.0
"""Time limit for the answers of brokers."""
OURS = frozenset(
    {
        *("bootstrap.servers", "group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof"),
        *("isolation.level", "transactional.id", "enable.idempotence", "enable.auto.offset.store"),
    }
)
"""Settings that users must not change, because copying each record once depends on them."""


AWAY = (
    *("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_MSG_TIMED_OUT", "_RESOLVE", "NETWORK_EXCEPTION"),
    *("REQUEST_TIMED_OUT", "BROKER_NOT_AVAILABLE", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION"),
    *("COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR", "CONCURRENT_TRANSACTIONS"),
    *("NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND"),
)
"""Errors of brokers that cannot be reached, or have just started."""

_SILENT = logging.getLogger("kera.connect.kafka.librdkafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


def read_settings(path: Path | None) -> dict[str, str]:
    """Read settings of librdkafka from a file of lines ``name=value``. Raises `InvalidArgument` that shows no value."""
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--kafka-config: {path} cannot be read: {error}", option="--kafka-config") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise InvalidArgument(f"--kafka-config: line {number} of {path} is not of the form name=value")
        if name.strip() in OURS:
            raise InvalidArgument(f"--kafka-config: {name.strip()} is not yours to set: copies depend on it")
        found[name.strip()] = value.strip()
    return found


def settings_of(bootstrap: str, given: Mapping[str, str], **ours: Any) -> dict[str, Any]:
    """Return all settings of a Kafka client; the names in `ours` have underscores instead of dots."""
    return {
        **given,
        "bootstrap.servers": bootstrap,
        "logger": _SILENT,  # librdkafka would log to standard error, and errors have the same information
        **{name.replace("_", "."): value for name, value in ours.items()},
    }


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate the errors of Kafka within this context. `what`: the subject of the calls, for messages."""
    import confluent_kafka as kafka

    try:
        yield
    except kafka.KafkaException as error:
        raise translate(what, error.args[0]) from error
    except (TypeError, ValueError) as error:  # an invalid setting
        raise InvalidArgument(f"{what}: {error}") from error


def translate(what: str, error: Any) -> Exception:
    """Translate an error of Kafka."""
    import confluent_kafka as kafka

    code = error.code()
    if code in {getattr(kafka.KafkaError, name) for name in AWAY}:
        return Unreachable(f"{what}: Kafka does not answer ({error.str()}); are the brokers the right ones?")
    if code == kafka.KafkaError._INVALID_ARG:  # noqa: SLF001 - settings
        return InvalidArgument(f"{what}: {error.str()}; see --kafka-config")
    return Refused(f"{what}: {error.str()} ({error.name()})")


def partitions_of(client: Any, topic: str) -> int:
    """Return the number of partitions of a topic; 0: there is no such topic. `client`: any client of Kafka's."""
    with translated(f"topic {topic}"):
        found = client.list_topics(timeout=ANSWER_S).topics.get(topic)  # asking for one topic may create it
    if found is None:
        return 0
    if found.error is not None:
        raise translate(f"topic {topic}", found.error)
    return len(found.partitions)


def admin_of(settings: Mapping[str, Any]) -> Any:
    """Return an admin client of Kafka with those settings of another client (`settings_of`) that apply to it."""
    import confluent_kafka.admin

    kept = {name: value for name, value in settings.items() if name not in OURS or name == "bootstrap.servers"}
    return confluent_kafka.admin.AdminClient(kept)


def identity_of(client: Any, settings: Mapping[str, Any], topic: str) -> str:
    """Return an id of the topic and its cluster, which changes if the topic is deleted and created again."""
    import confluent_kafka as kafka

    with translated(f"topic {topic}"):
        cluster = client.list_topics(timeout=ANSWER_S).cluster_id
        admin = admin_of(settings)
        described = admin.describe_topics(kafka.TopicCollection([topic]), request_timeout=ANSWER_S)[topic].result()
    return f"cluster {cluster}, id {described.topic_id}"
