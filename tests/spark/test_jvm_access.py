"""The JVM on a secured cluster: it authenticates with its token, and reports why a broker refuses it.

The readers and writers are the real ones, and so is the cluster; there is no Spark.
"""

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from kera.client import BrokerDescription, Client, ClientSettings
from kera.core.base.settings import KIB, MIB
from tests.spark.jvm_harness import Threads, outcome, threads
from tests.spark.secured import SecuredCluster, secrets_in, secured_cluster
from tests.spark.test_jvm_reading import SETTINGS, Jvm, as_read, piece

TIMEOUT_S = 60
VALUES = sorted(b"%03d" % number * 300 for number in range(1000))
"""They fill chunks that are larger than a record of TLS."""
over_each = pytest.mark.parametrize("transport", ["tcp", pytest.param("unix", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("secured")) as made:
        made.make_user("alice")
        for stream in ("mine", "written", "others", "revoked"):
            made.create(stream, streamlets=1)
        for stream in ("mine", "written", "revoked"):
            made.grant("alice", f"stream:{stream}", "read", "write")
        made.grant("alice", "stream:others", "describe")
        for stream in ("mine", "others", "revoked"):
            made.send(stream, VALUES)
        yield made


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERA_CLIENT_RETRY_TIMEOUT_MS", "1000")
        yield


@pytest.fixture(scope="module")
def reading(_environment: None) -> Iterator[Jvm]:
    with threads("kera.spark.read.Reading") as process:
        yield Jvm(process)


@pytest.fixture(scope="module")
def writing(_environment: None) -> Iterator[Threads]:
    with threads("kera.spark.write.Writing") as process:
        yield Threads(process)


class Range(NamedTuple):
    """The chunks of a stream."""

    chunks: list[Any]
    stream_id: int
    broker: dict[str, Any]


def range_of(secured: SecuredCluster, stream: str) -> Range:
    async def look(client: Client) -> Range:
        description = await client.admin.describe_stream(stream)
        (broker,) = description.brokers.values()
        consumer = client.consumer(stream, start="earliest", end="latest", shared_memory="never", joined_bytes_max=0)
        return Range([each async for each in consumer.batches()], description.stream_id, broker_of(broker))

    return secured.run(look)


def broker_of(broker: BrokerDescription) -> dict[str, Any]:
    return {
        "broker_id": broker.broker_id,
        "node_id": broker.node_id,
        "frames_address": broker.frames_address,
        "frames_unix_path": broker.frames_unix_path,
    }


def issued(secured: SecuredCluster, *streams: str) -> str:
    async def issue(client: Client) -> str:
        return (await client.access.issue_token([f"stream:{stream}" for stream in streams])).secret

    return secured.run(issue, "alice")


def files_of(secured: SecuredCluster) -> dict[str, str]:
    return {"tls_ca": str(secured.ca)}


def tls_of(secured: SecuredCluster) -> dict[str, str]:
    return {"ca": str(secured.ca), "cert": "", "key": ""}


def piece_with(secured: SecuredCluster, stream: str, token: str | None, transport: str) -> tuple[Range, dict[str, Any]]:
    found = range_of(secured, stream)
    made = piece(
        found.chunks[0].start,
        found.chunks[-1].next,
        stream=stream,
        stream_id=found.stream_id,
        schema_id=1,
        records=len(VALUES),
        broker=found.broker,
        shared_memory="never",
        transport=transport,
    )
    made["connection"] = {"bootstrap": secured.bootstrap, "files": files_of(secured)}
    made["settings"] = {**SETTINGS, "transport": transport, "tls": tls_of(secured)}
    return found, made | {"token": token}


@over_each
def test_a_token_reads_its_stream_over_new_and_kept_connections(
    reading: Jvm, secured: SecuredCluster, transport: str
) -> None:
    for _ in range(2):  # the second time over a kept connection
        found, made = piece_with(secured, "mine", issued(secured, "mine"), transport)
        reader = reading.open(made)
        assert reader.next().chunks == as_read(found.chunks)
        reader.close()


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=text) as caught:
        yield
    assert not secrets_in(str(caught.value).encode())


@over_each
def test_a_token_does_not_read_other_streams_over_a_kept_connection(
    reading: Jvm, secured: SecuredCluster, transport: str
) -> None:
    others = issued(secured, "mine", "others")
    for stream, token, text in (
        ("others", others, "NotAllowed: user:alice may not read stream:others: no rule allows it"),
        ("others", issued(secured, "mine"), "UnknownStream: there is no stream 'others'"),
        ("mine", issued(secured, "written"), "UnknownStream: there is no stream 'mine'"),
    ):
        found, right = piece_with(secured, "mine", others, transport)
        reader = reading.open(right)
        assert reader.next().chunks == as_read(found.chunks)
        reader.close()
        reader = reading.open(piece_with(secured, stream, token, transport)[1])
        with refused(text):
            reader.next()
        reader.close()


def test_a_missing_or_unknown_token_is_refused(reading: Jvm, secured: SecuredCluster) -> None:
    for token, text in (
        ("kera_0123456789abcdef_0123456789abcdef", "AuthenticationFailed: the token is not known"),
        (None, "AuthenticationFailed: nobody has authenticated over this connection"),
    ):
        reader = reading.open(piece_with(secured, "mine", token, "tcp")[1])
        with refused(text):
            reader.next()
        reader.close()


def test_a_revoked_right_is_refused_over_kept_and_new_connections(reading: Jvm, secured: SecuredCluster) -> None:
    token = issued(secured, "revoked")
    found, made = piece_with(secured, "revoked", token, "tcp")
    reader = reading.open(made)
    assert reader.next().chunks == as_read(found.chunks)
    reader.close()
    secured.revoke("alice", "stream:revoked", "read")
    for _ in range(2):
        reader = reading.open(made)
        with refused("NotAllowed: user:alice may not read stream:revoked"):
            reader.next()
        reader.close()


def target_of(secured: SecuredCluster, stream: str, token: str | None, transport: str) -> dict[str, Any]:
    found = secured.run(lambda client: client.admin.describe_stream(stream))
    (broker,) = found.brokers.values()
    settings = ClientSettings()
    return {
        "connection": {"bootstrap": secured.bootstrap, "files": files_of(secured)},
        "token": token,
        "stream": stream,
        "stream_id": found.stream_id,
        "schema_id": found.schema_id,
        "codec": 0,
        "streamlets": 1,
        "chunk_bytes": 256 * KIB,
        "chunk_bytes_max": 2 * MIB,
        "epoch_us": 0,
        "room": "a segment",
        "request_timeout_ms": settings.request_timeout_ms,
        "connect_timeout_ms": settings.connect_timeout_ms,
        "transport": transport,
        "tls": tls_of(secured),
        "brokers": [broker_of(broker)],
        "owners": [broker.broker_id],
    }


def write(writing: Threads, target: dict[str, Any], producer_id: int) -> int:
    def do(op: str, **arguments: Any) -> dict[str, Any]:
        return outcome(writing.ask(f"writer-{producer_id}", op, **arguments), TIMEOUT_S)

    common = {"columns": "value BINARY", "producer_epoch": 1, "keyless": 0, "python": sys.executable}
    do("open", **common, target=target, producer_id=producer_id)
    do("write", rows=[[base64.b64encode(value).decode()] for value in VALUES])
    return int(do("commit")["appended"])


@over_each
def test_rows_are_written_with_a_token(writing: Threads, secured: SecuredCluster, transport: str) -> None:
    before = len(secured.values("written"))
    target = target_of(secured, "written", issued(secured, "written"), transport)
    assert write(writing, target, producer_id=-7 if transport == "tcp" else -8) == len(VALUES)
    assert len(secured.values("written")) == before + len(VALUES)


@over_each
def test_rows_are_not_written_without_the_right(writing: Threads, secured: SecuredCluster, transport: str) -> None:
    for number, (token, text) in enumerate(
        [
            (issued(secured, "others"), "NotAllowed: user:alice may not write stream:others"),
            ("kera_0123456789abcdef_0123456789abcdef", "AuthenticationFailed: the token is not known"),
        ]
    ):
        with refused(text):
            write(writing, target_of(secured, "others", token, transport), -20 - 2 * number)
    assert secured.values("others") == VALUES
