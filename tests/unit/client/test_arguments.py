"""Arguments of wrong types: each error names the parameter, the value and the accepted values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from kera.client import Client, ClientSettings, arguments
from kera.client.admin.locating import ChunkQuery
from kera.client.cluster.cluster import Cluster
from kera.client.producing.appender import Appender
from kera.client.producing.producer import Producer
from kera.core.base.ids import EARLIEST, PRODUCER_IDS, EntryId, Position
from kera.core.base.settings import InvalidSettings
from kera.core.errors import InvalidArgument
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import description

NOWHERE = "127.0.0.1:1"
NO_NUMBERS = ("3", 1.0, True, None)
NO_TEXTS = (5, b"s", None, True, ["s"], "\ud800")
NO_FLAGS = ("yes", 1, None)
Call = Callable[[Client, Any], Any]


def _create(parameter: str) -> Call:
    return lambda client, value: client.admin.create_stream("s", **{parameter: value})


def _alter(parameter: str) -> Call:
    return lambda client, value: client.admin.alter_stream("s", **{parameter: value})


def _given(value: Any) -> Any:
    """Replaces None, which stands for an absent argument there."""
    return "" if value is None else value


def _alter_given(parameter: str) -> Call:
    return lambda client, value: _alter(parameter)(client, _given(value))


async def _read(client: Client, **given: Any) -> None:
    place: dict[str, Any] = {"stream": "s", "streamlet_id": 0, "entry": 0, "start": EARLIEST, "end": None}
    async for _ in client.read_range(**place | given):
        pass


async def _outcome(call: Call, client: Client, value: Any) -> None:
    found = call(client, value)
    if isinstance(found, Awaitable):
        await found


async def _consume(client: Client, stream: Any) -> None:
    await client.consumer(stream).start()


NUMBERS: dict[str, tuple[str, Call]] = {
    **{
        f"create {name}": (name, _create(name))
        for name in (
            "streamlets", "brokers", "entries", "group_segments", "retention_ms", "retention_bytes", "virtual_logs",
        )
    },
    "create replication": (
        "replication",
        lambda client, value: client.admin.create_stream("s", replication=_given(value)),
    ),
    **{
        f"alter {name}": (name, _alter_given(name))
        for name in ("retention_ms", "retention_bytes", "virtual_logs", "brokers")
    },
    "move streamlet_id": ("streamlet_id", lambda client, value: client.admin.move_streamlet("s", value, 1)),
    "move broker_id": ("broker_id", lambda client, value: client.admin.move_streamlet("s", 0, value)),
    "drain broker_id": ("broker_id", lambda client, value: client.admin.drain_broker(value)),
    "drain backup_id": ("backup_id", lambda client, value: client.admin.drain_backup(value)),
    "forget broker_id": ("broker_id", lambda client, value: client.admin.forget_broker(value)),
    "forget backup_id": ("backup_id", lambda client, value: client.admin.forget_backup(value)),
    "delete idle_ms": ("idle_ms", lambda client, value: client.admin.delete_consumer_group("a", idle_ms=value)),
    "read bytes_max": ("bytes_max", lambda client, value: _read(client, bytes_max=value)),
}  # fmt: skip

TEXTS: dict[str, tuple[str, Call]] = {
    "create name": ("name", lambda client, value: client.admin.create_stream(value)),
    "alter name": ("name", lambda client, value: client.admin.alter_stream(value, virtual_logs=2)),
    "delete name": ("name", lambda client, value: client.admin.delete_stream(value)),
    "id of name": ("name", lambda client, value: client.admin.stream_id(value)),
    "describe": ("stream", lambda client, value: client.admin.describe_stream(value)),
    "move stream": ("stream", lambda client, value: client.admin.move_streamlet(value, 0, 1)),
    "adopt stream": ("stream", lambda client, value: client.admin.adopt_stream(value)),
    "adopt name": ("name", lambda client, value: client.admin.adopt_stream("s", value)),
    "truncate": ("stream", lambda client, value: client.admin.truncate_stream(value, {})),
    "describe consumer group": ("name", lambda client, value: client.admin.describe_consumer_group(value)),
    "reset consumer group": ("name", lambda client, value: client.admin.reset_consumer_group(value, "s", "latest")),
    "reset stream": ("stream", lambda client, value: client.admin.reset_consumer_group("a", value, "latest")),
    "delete consumer group": ("name", lambda client, value: client.admin.delete_consumer_group(value)),
    "prepare": ("stream", lambda client, value: client.producer().prepare(value)),
    "consume": ("streams", _consume),
    "group": ("consumer_group", lambda client, value: client.group_consumer(value, "s")),
    "group streams": ("streams", lambda client, value: client.group_consumer("a", [value])),
    "describe from cache": ("stream", lambda client, value: client.describe(value)),
    "bounds": ("stream", lambda client, value: client.bounds(value)),
    "positions at": ("stream", lambda client, value: client.positions_at(value, 1)),
    "positions of": ("stream", lambda client, value: client.positions_of(value, {0: [1]})),
    "locate": ("stream", lambda client, value: client.locate(value, [])),
    "segments": ("stream", lambda client, value: client.segments(value, 0, 0, EARLIEST)),
    "read stream": ("stream", lambda client, value: _read(client, stream=value)),
    "commit consumer group": ("consumer_group", lambda client, value: client.commit(value, "s", {})),
    "commit stream": ("stream", lambda client, value: client.commit("a", value, {})),
    "appender": (
        "stream",
        lambda client, value: client.appender(value, producer_id=1, producer_epoch=1, chunk_bytes_max=1),
    ),
}

FLAGS: dict[str, tuple[str, Call]] = {
    "create retention_consumed": ("retention_consumed", _create("retention_consumed")),
    "alter retention_consumed": (
        "retention_consumed",
        lambda client, value: client.admin.alter_stream("s", retention_consumed=_given(value)),
    ),
    "rebalance": ("dry_run", lambda client, value: client.admin.rebalance(dry_run=value)),
    "undo": ("undo", lambda client, value: client.admin.drain_broker(1, undo=value)),
    "ask": ("ask", lambda client, value: client.admin.drain_backup(1, ask=value)),
    "forget broker": ("force", lambda client, value: client.admin.forget_broker(1, force=value)),
    "forget backup": ("force", lambda client, value: client.admin.forget_backup(1, force=value)),
    "reset": ("force", lambda client, value: client.admin.reset_consumer_group("a", "s", "latest", force=value)),
    "commit": ("unnamed", lambda client, value: client.commit("a", "s", {}, unnamed=value)),
}

OTHERS: dict[str, tuple[str, Call]] = {
    "schema": ("schema", _create("schema")),
    "add_columns": ("add_columns", _alter("add_columns")),
    "key_column": ("key_column", _create("key_column")),
    "timestamp_column": ("timestamp_column", _create("timestamp_column")),
    "consumer groups of a new stream": ("retention_consumer_groups", _create("retention_consumer_groups")),
    "consumer groups of a stream": ("retention_consumer_groups", _alter("retention_consumer_groups")),
    "durability": ("durability", _create("durability")),
    "codec": ("codec", _create("codec")),
    "positions": ("positions", lambda client, value: client.commit("a", "s", value)),
}

CASES = [
    *((what, *case, (*NO_NUMBERS, -1, 1 << 64)) for what, case in NUMBERS.items()),
    *((what, *case, NO_TEXTS) for what, case in TEXTS.items()),
    *((what, *case, NO_FLAGS) for what, case in FLAGS.items()),
    *((what, *case, (5, True, 1.5)) for what, case in OTHERS.items()),
]


@pytest.mark.parametrize(("parameter", "call", "values"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_the_error_for_a_wrong_argument_names_the_parameter(
    parameter: str, call: Call, values: tuple[Any, ...]
) -> None:
    async with await Client.connect(NOWHERE, ClientSettings(retry_timeout_ms=0, connect_timeout_ms=1)) as client:
        for value in values:
            with pytest.raises(InvalidArgument, match=parameter):
                await _outcome(call, client, value)


@pytest.mark.parametrize("value", ["x", True, -1, float("nan"), [1]])
async def test_an_invalid_poll_timeout_is_refused(value: Any) -> None:
    async with await Client.connect(NOWHERE) as client:
        for consumer in (client.consumer("s"), client.group_consumer("a", "s"), client.ordered_consumer("s")):
            with pytest.raises(InvalidArgument, match=r"timeout_s is .*, and takes seconds from 0 on"):
                await consumer.poll(value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda client: client.group_consumer("a", "s", in_order="yes"), "in_order is 'yes', and takes True or False"),
        (lambda client: client.consumer("s", verify_checksums=1), "verify_checksums is 1, and takes True or False"),
        (lambda client: client.consumer("s", strt="earliest"), "strt: there is no .*did you mean 'start'"),
        (lambda client: client.producer(serialiser=str), "serialiser: there is no .*did you mean 'serializer'"),
        (lambda client: client.producer(durabilty="leader"), "durabilty: there is no .*did you mean 'durability'"),
        (lambda client: client.group_consumer("a", "s", deserialiser=str), "did you mean 'deserializer'"),
        (lambda client: client.producer("leader"), "settings is 'leader', and takes ProducerSettings"),
        (lambda client: client.consumer("s", settings={"a": 1}), "settings is .*, and takes ConsumerSettings"),
    ],
)
async def test_the_error_names_a_setting_that_is_misspelt_or_of_another_type(
    make: Callable[[Client], Any], said: str
) -> None:
    async with await Client.connect(NOWHERE) as client:
        with pytest.raises((InvalidArgument, InvalidSettings), match=said):
            make(client)


@pytest.mark.parametrize("value", [5, None, ["a:1"], True])
async def test_a_bootstrap_that_is_not_text_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"bootstrap is .*host:port"):
        await Client.connect(value)


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("parameter", ["producer_id", "producer_epoch", "chunk_bytes_max"])
async def test_the_error_names_a_number_of_an_appender_of_the_wrong_type(parameter: str, value: Any) -> None:
    given = {"producer_id": PRODUCER_IDS.start, "producer_epoch": 1, "chunk_bytes_max": 1000} | {parameter: value}
    with pytest.raises(InvalidArgument, match=f"{parameter} is {value!r}, and takes a whole number"):
        Appender(Cluster(NOWHERE, ClientSettings()), description(), **given)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_the_error_names_a_streamlet_or_entry_id_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"streamlet_id is {value!r}"):
        description().entry_id(value, 0)
    with pytest.raises(InvalidArgument, match=f"entry is {value!r}"):
        description().entry_id(0, value)
    assert description().entry_id(np.int64(0), 0) == EntryId(description().stream_id, 0, 0)  # type: ignore[arg-type]


async def test_the_error_names_the_wrong_part_of_a_query(make_cluster: MakeCluster) -> None:
    client = Client(make_cluster())  # type: ignore[arg-type]
    for given in (5, [(0, 0)], [None]):
        with pytest.raises(InvalidArgument, match="queries"):
            await client.locate("s", given)  # type: ignore[arg-type]
    for parameter in ("records_max", "bytes_max", "timestamp_us"):
        for value in ("3", 1.0, True):
            with pytest.raises(InvalidArgument, match=f"{parameter} is {value!r}"):
                await client.locate("s", [ChunkQuery(0, 0, Position(1, 1, 0), **{parameter: value})])  # type: ignore[arg-type]
    for value in ("3", 1.0, True):
        with pytest.raises(InvalidArgument, match=f"timestamp_us is {value!r}"):
            await client.positions_at("s", value)  # type: ignore[arg-type]


async def test_a_batch_with_a_streamlet_of_the_wrong_type_is_refused(
    make_cluster: MakeCluster, make_producer: MakeProducer
) -> None:
    producer: Producer = make_producer(make_cluster())
    for value in ("0", False, 0.0):
        with pytest.raises(InvalidArgument, match=f"streamlet is {value!r}"):
            await producer.send_batch("s", {"value": [b"a"]}, streamlet=value)  # type: ignore[arg-type]


def test_arguments_of_the_right_type_are_accepted() -> None:
    assert arguments.whole("n", np.uint32(7), 0, 7) == 7
    assert arguments.names("n", ("a", "b")) == ["a", "b"]
    assert arguments.text("n", "") == ""
    with pytest.raises(InvalidArgument, match="from 0 to 6") as refused:
        arguments.whole("n", 7, 0, 6)
    assert refused.value.attributes == {"field": "n", "value": "7"}
