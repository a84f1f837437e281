"""The schema registry of a real cluster: what survives its coordinators, access rights, and the command line."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from kera.client import Client, ClientSettings, Compatibility, SchemaType
from kera.client.sync import Client as SyncClient
from kera.core.access.rights import Operation
from kera.core.errors import (
    IncompatibleSchema,
    InvalidArgument,
    InvalidSchema,
    KeraError,
    NotAllowed,
    UnknownSchema,
    UnknownStream,
    UnknownSubject,
)
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.local.cluster import LocalCluster, RunningCluster
from kera.v1 import schema_pb2 as messages
from tests.examples import first_quick
from tests.integration.command_line import run_kera
from tests.integration.secured_cluster import Secured
from tests.integration.test_restored_metadata import kera
from tests.integration.zookeeper import ZooKeeper

pytestmark = pytest.mark.timeout(180)

ORDER = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'
WIDER = (
    '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, {"name": "zip", "type": "int"}]}'
)
PROTO = """syntax = "proto3";
package shop.v1;
import "google/protobuf/timestamp.proto";
message Order { int64 id = 1; google.protobuf.Timestamp at = 2; }
message Return { int64 id = 1; }
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster that keeps its data."""
    with LocalCluster.running(brokers=1, arena_bytes=32 << 20, data_dir=tmp_path_factory.mktemp("schemas")) as cluster:
        yield cluster


@pytest.fixture
async def client(kept: RunningCluster) -> Any:
    async with await Client.connect(kept.bootstrap) as client:
        yield client


async def test_registered_schemas_survive_a_kill_of_the_coordinator(kept: RunningCluster, client: Client) -> None:
    first = await client.schemas.register("kept-value", SchemaType.AVRO, ORDER)
    await client.schemas.set_compatibility("kept-value", Compatibility.FULL_TRANSITIVE)
    await client.schemas.register("gone-value", "json", '{"type": "string"}')
    await client.schemas.delete("gone-value")

    await asyncio.to_thread(kept.kill, "coordinator")
    await asyncio.to_thread(kept.restart, "coordinator")

    async with await Client.connect(kept.bootstrap) as other:
        assert await other.schemas.by_id(first.schema_id) == first
        assert await other.schemas.latest("kept-value") == first
        assert await other.schemas.subjects("kept-") == ["kept-value"]
        assert await other.schemas.compatibility("kept-value") == Compatibility.FULL_TRANSITIVE
        assert await other.schemas.register("kept-value", "avro", ORDER) == first
        with pytest.raises(IncompatibleSchema):
            await other.schemas.register("kept-value", "avro", WIDER)
        assert (await other.schemas.register("later-value", "avro", WIDER)).schema_id == first.schema_id + 2


@pytest.mark.slow
async def test_registered_schemas_survive_the_loss_of_the_leader(zookeeper: ZooKeeper) -> None:
    async with (
        LocalCluster(
            brokers=1,
            arena_bytes=32 << 20,
            coordinators=2,
            zookeeper=f"{zookeeper.address}/schemas",
            coordinator_settings={"zookeeper_session_timeout_ms": 2000},
        ) as cluster,
        await Client.connect(cluster.bootstrap, ClientSettings.load(retry_timeout_ms=60_000)) as client,
    ):
        registered = [await client.schemas.register(f"s{n}-value", "avro", ORDER) for n in range(3)]
        large = json.dumps({"type": "object", "description": "x" * 250_000})
        registered.append(await client.schemas.register("large-value", "json", large))
        leads = (await client.admin.describe_cluster()).coordinators[0]
        leader = next(name for name, ready in cluster.ready.items() if ready.get("grpc_address") == leads)

        more = [asyncio.create_task(client.schemas.register(f"t{n}-value", "avro", ORDER)) for n in range(20)]
        more += [asyncio.create_task(client.schemas.register("one-value", "avro", ORDER)) for _ in range(5)]
        await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
        await cluster.kill(leader)
        registered += await asyncio.gather(*more)

        async with await Client.connect(cluster.bootstrap) as other:
            for each in registered:
                assert await other.schemas.latest(each.subject) == each
            assert {each.schema_id for each in registered} == {1, 2}
            assert await other.schemas.versions("one-value") == [1]
            assert (await other.schemas.register("next-value", "avro", '"int"')).schema_id == 3
            await other.schemas.delete("large-value")
            with pytest.raises(UnknownSchema):
                await other.schemas.by_id(2)


@pytest.mark.slow
async def test_a_copy_of_the_metadata_has_the_schemas_and_no_id_is_given_twice_after_it(tmp_path: Path) -> None:
    copy = tmp_path / "metadata"

    with LocalCluster.running(brokers=1, arena_bytes=32 << 20, data_dir=tmp_path / "before") as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            kept = await client.schemas.register("kept-value", "avro", ORDER)
            done = await asyncio.to_thread(kera, "backup", str(copy), "--bootstrap", cluster.bootstrap)
            assert done.returncode == 0, done.stderr
            later = await client.schemas.register("later-value", "avro", WIDER)
    store = tmp_path / "before" / "coordinator"
    done = await asyncio.to_thread(kera, "restore", str(copy), "--data-dir", str(store), "--force")
    assert done.returncode == 0, done.stderr
    with LocalCluster.running(brokers=1, arena_bytes=32 << 20, data_dir=tmp_path / "before") as cluster:
        async with await Client.connect(cluster.bootstrap, ClientSettings.load(retry_timeout_ms=60_000)) as client:
            assert await client.schemas.by_id(kept.schema_id) == kept
            with pytest.raises(UnknownSchema):
                await client.schemas.by_id(later.schema_id)
            other = await client.schemas.register(
                "other-value", "avro", '"int"'
            )  # it waits until the metadata have caught up
            assert other.schema_id > 1_000_000
            assert (await client.schemas.register("same-value", "avro", ORDER)).schema_id == kept.schema_id


async def test_errors_of_the_registry_reach_the_client_with_their_details(client: Client) -> None:
    schemas = client.schemas
    await schemas.register("errors-value", "avro", ORDER)
    with pytest.raises(IncompatibleSchema) as caught:
        await schemas.register("errors-value", "avro", WIDER)
    assert caught.value.attributes["incompatibilities"] == await schemas.check("errors-value", "avro", WIDER)
    assert not caught.value.retriable
    with pytest.raises(InvalidSchema, match="is in another document, and nothing is fetched"):
        await schemas.register("errors-value", "json", '{"$ref": "http://127.0.0.1:1/a.json"}')
    with pytest.raises(UnknownSchema, match="no schema has the id 4000000000"):
        await schemas.by_id(4_000_000_000)
    with pytest.raises(UnknownSchema, match="has no version 9"):
        await schemas.version("errors-value", 9)
    with pytest.raises(UnknownSubject):
        await schemas.versions("nobody-value")
    wrong: list[Any] = [
        schemas.register("a b", "avro", ORDER),
        schemas.register("errors-value", "xml", ORDER),
        schemas.register("errors-value", "avro", b"{}"),  # type: ignore[arg-type]
        schemas.register("errors-value", "avro", ORDER, message="a.B"),
        schemas.version("errors-value", 0),
        schemas.version("errors-value", True),
        schemas.by_id("1"),  # type: ignore[arg-type]
        schemas.by_id(-1),
        schemas.subjects(5),  # type: ignore[arg-type]
        schemas.set_compatibility("errors-value", "sideways"),
        schemas.delete("errors-value", 0),
    ]
    for each in wrong:
        with pytest.raises(InvalidArgument):
            await each


async def test_a_client_requests_a_schema_only_once(kept: RunningCluster, client: Client) -> None:
    registered = await client.schemas.register("once-value", "avro", ORDER)
    async with await Client.connect(kept.bootstrap) as other:
        found = await asyncio.gather(*(other.schemas.by_id(registered.schema_id) for _ in range(50)))
        assert all(each is found[0] for each in found)
        await client.schemas.delete("once-value")
        assert (await other.schemas.by_id(registered.schema_id)) is found[0]


async def test_cancelling_the_first_of_two_requests_does_not_cancel_the_second(
    kept: RunningCluster, client: Client
) -> None:
    registered = await client.schemas.register("first-value", "avro", ORDER)
    async with await Client.connect(kept.bootstrap) as other:
        first, second = (asyncio.create_task(other.schemas.by_id(registered.schema_id)) for _ in range(2))
        await asyncio.sleep(0)  # sleep: both requests are under way
        first.cancel()
        assert (await second).schema_id == registered.schema_id


def test_the_synchronous_client_has_the_registry(kept: RunningCluster) -> None:
    with SyncClient(kept.bootstrap) as client:
        registered = client.schemas.register("sync-value", "json", '{"type": "object"}')
        assert client.schemas.by_id(registered.schema_id) == client.schemas.latest("sync-value") == registered
        assert client.schemas.check("sync-value", "json", '{"type": "object", "required": ["a"]}') == [
            "field a: is new, and is required now: it cannot read version 1"
        ]
        client.schemas.delete("sync-value")
        with pytest.raises(UnknownSubject):
            client.schemas.latest("sync-value")


HOSTILE = {
    "deep": (SchemaType.AVRO, "[" * 260_000),
    "deep objects": (SchemaType.JSON, '{"a":' * 50_000),
    "two names": (SchemaType.JSON, '{"a":1,' * 1 + '"a":2}'),
    "a large number": (SchemaType.JSON, "1" * 200_000),
    "many types": (SchemaType.AVRO, json.dumps([{"type": "fixed", "name": f"F{n}", "size": 1} for n in range(5_000)])),
    "multiplied": (
        SchemaType.JSON,
        json.dumps({"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(8)]} for i in range(40)]}),
    ),
    "in itself": (SchemaType.JSON, '{"$ref": "#"}'),
    "elsewhere": (SchemaType.JSON, '{"$ref": "file:///etc/passwd"}'),
    "groups": (SchemaType.PROTOBUF, base64.b64encode(b"\x1b" * 150_000).decode()),
    "no file": (SchemaType.PROTOBUF, ""),
    "no arrow": (SchemaType.ARROW, base64.b64encode(b"\xff" * 100_000).decode()),
    "a pattern": (
        SchemaType.JSON,
        json.dumps({"pattern": "(a+)+$", "properties": {"a" * 60 + "!": {"pattern": "(a|a)*$"}}}),
    ),
}


@pytest.mark.parametrize("name", first_quick(HOSTILE, 4))
async def test_a_hostile_schema_does_not_end_or_block_the_coordinator(
    kept: RunningCluster, client: Client, name: str
) -> None:
    kind, text = HOSTILE[name]
    subject = f"{name.replace(' ', '-')}-value"
    channel = GrpcChannel(kept.bootstrap)
    pid = kept.processes["coordinator"]
    definition = messages.SchemaDefinition(type=kind.wire, definition=text)

    async def send() -> None:
        with contextlib.suppress(KeraError):
            request = messages.RegisterSchemaRequest(subject=subject, schema=definition)
            await call(channel, api.REGISTER_SCHEMA, request, timeout_s=60)
        with contextlib.suppress(KeraError):
            other = messages.SchemaDefinition(type=kind.wire, definition=text.replace("a", "b"))
            await call(
                channel, api.CHECK_SCHEMA, messages.CheckSchemaRequest(subject=subject, schema=other), timeout_s=60
            )

    try:
        sending = [asyncio.create_task(send()) for _ in range(3)]
        while not all(each.done() for each in sending):
            await client.admin.describe_cluster()  # it answers meanwhile
            await asyncio.sleep(0.01)
    finally:
        await channel.close()
    assert kept.processes["coordinator"] == pid


# --- who may ask -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        yield Secured(tmp_path_factory.mktemp("secured"), stack, brokers=1, backups=0, replication=0)


async def test_schemas_of_streams_without_rights_are_hidden(secured: Secured) -> None:
    for user in ("alice", "bob", "admin"):
        await secured.make_user(user)
    await secured.grant("user:alice", "stream:orders", Operation.WRITE)
    await secured.grant("user:bob", "stream:payments", Operation.READ)
    async with (
        await secured.client("alice") as alice,
        await secured.client("bob") as bob,
        await secured.client("admin") as admin,
    ):
        order = await alice.schemas.register("orders-value", "avro", ORDER)
        secret = await admin.schemas.register("payments-value", "avro", WIDER)
        assert await alice.schemas.subjects() == ["orders-value"]
        assert await bob.schemas.subjects() == ["payments-value"]
        assert await admin.schemas.subjects() == ["orders-value", "payments-value"]
        assert (await bob.schemas.by_id(secret.schema_id)).definition == WIDER
        for hidden in (
            alice.schemas.latest("payments-value"),
            alice.schemas.versions("payments-value"),
            alice.schemas.check("payments-value", "avro", ORDER),
            alice.schemas.register("payments-value", "avro", WIDER),
            alice.schemas.compatibility("payments-value"),
            alice.schemas.delete("payments-value"),
            alice.schemas.latest("nothing-value"),
        ):
            with pytest.raises(UnknownStream):
                await hidden
        for schema_id in (secret.schema_id, 99):
            with pytest.raises(UnknownSchema, match=f"no schema has the id {schema_id}"):
                await alice.schemas.by_id(schema_id)
        with pytest.raises(NotAllowed, match="may not write stream:payments"):
            await bob.schemas.register("payments-value", "avro", ORDER)
        with pytest.raises(NotAllowed, match="may not delete stream:orders"):
            await alice.schemas.delete("orders-value")
        with pytest.raises(NotAllowed, match="may not alter stream:orders"):
            await alice.schemas.set_compatibility("orders-value", "none")
        with pytest.raises(NotAllowed, match="may not administer cluster"):
            await alice.schemas.set_compatibility("", "none")
        # The same text under a stream of hers shows the id, and reveals nothing about the other subject.
        own = await alice.schemas.register("orders-key", "avro", WIDER)
        assert own.schema_id == secret.schema_id
        assert (await alice.schemas.by_id(own.schema_id)).subject == "orders-key"
        assert order.version == 1
        await admin.schemas.set_compatibility("", "full")
        (described,) = await admin.schemas.describe_versions("orders-value")
        assert described.registered_by == "user:alice"


# --- the command line --------------------------------------------------------------------------------------------


class CommandLine:
    def __init__(self, bootstrap: str, directory: Path) -> None:
        self._environment = {"KERA_BOOTSTRAP": bootstrap}
        self.directory = directory

    def run(self, *arguments: str, stdin: bytes = b"") -> CompletedProcess[bytes]:
        return run_kera("schema", *arguments, stdin=stdin, env=self._environment)

    def well(self, *arguments: str, stdin: bytes = b"") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    def badly(self, *arguments: str, stdin: bytes = b"", code: int = 2) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == code, done
        assert done.stderr.decode().startswith("kera: error: ")
        return done.stderr.decode()

    def file(self, name: str, content: str | bytes) -> str:
        path = self.directory / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


@pytest.fixture
def command_line(kept: RunningCluster, tmp_path: Path) -> CommandLine:
    return CommandLine(kept.bootstrap, tmp_path)


def test_the_command_line_registers_shows_checks_and_deletes_schemas(command_line: CommandLine) -> None:
    order, wider = command_line.file("order.avsc", ORDER), command_line.file("wider.avsc", WIDER)
    said = command_line.well("register", "cli-value", order)
    assert said.startswith("cli-value: version 1, schema id ")
    assert command_line.well("check", "cli-value", order) == "cli-value: nothing would break (backward)\n"
    assert command_line.run("check", "cli-value", wider).returncode == 1
    assert command_line.run("check", "cli-value", wider).stdout.decode() == (
        "field zip: is new, and has no default: it cannot read version 1\n"
    )
    assert "cli-value: field zip: is new" in command_line.badly("register", "cli-value", wider, code=1)
    assert command_line.well("compatibility", "cli-value", "forward") == "cli-value: forward\n"
    document = json.loads(command_line.well("register", "cli-value", wider, "--output", "json"))
    assert (document["subject"], document["version"]) == ("cli-value", 2)
    assert command_line.well("show", "cli-value") == WIDER + "\n"
    assert command_line.well("show", "cli-value", "--version", "1") == ORDER + "\n"
    shown = json.loads(command_line.well("show", "--id", str(document["schema_id"]), "-o", "json"))
    assert (shown["schema_type"], shown["definition"]) == ("avro", WIDER)
    assert command_line.well("list", "cli-").split()[5:] == [
        "cli-value",
        "2",
        str(document["schema_id"]),
        "avro",
        "forward",
    ]
    assert [each["version"] for each in json.loads(command_line.well("versions", "cli-value", "-o", "json"))] == [1, 2]
    assert "VERSION" in command_line.well("versions", "cli-value")
    assert "schema_id:" in command_line.well("list", "cli-", "--output", "yaml")
    assert "needs --yes" in command_line.badly("delete", "cli-value")
    assert command_line.well("delete", "cli-value", "--version", "1", "--yes") == "deleted 1 version of cli-value\n"
    assert command_line.well("delete", "cli-value", "--yes") == "deleted 1 version of cli-value\n"
    assert "no schema is registered" in command_line.badly("show", "cli-value", code=1)
    assert command_line.well("list", "cli-") == "no subject begins with cli-\n"
    assert command_line.well("compatibility") == "default: backward\n"
    assert command_line.well("compatibility", "--default", "full") == "default: full\n"
    assert command_line.well("compatibility", "--default", "backward", "-o", "json").startswith("{")


def test_schemas_of_all_types_can_be_registered_from_files(command_line: CommandLine) -> None:
    command_line.well("register", "json-value", command_line.file("s.json", '{"type": "object"}'))
    command_line.well("register", "stdin-value", "-", "--type", "avro", stdin=b'"string"')
    command_line.well("register", "proto-value", command_line.file("order.proto", PROTO))
    shown = command_line.well("show", "proto-value")
    assert shown.index("google.protobuf") < shown.index('package: "shop.v1"')
    registered = json.loads(command_line.well("show", "proto-value", "-o", "json"))
    files = FileDescriptorSet.FromString(base64.b64decode(registered["definition"]))
    compiled = command_line.file("order.binpb", files.SerializeToString())
    command_line.well("register", "compiled-value", compiled, "--message", "shop.v1.Return")
    command_line.well("register", "piped-value", "-", "-t", "protobuf", stdin=b'syntax = "proto3"; message A {}')
    schema = pa.schema([("a", pa.int32())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    command_line.well("register", "stream-value", command_line.file("a.arrows", sink.getvalue().to_pybytes()))
    command_line.well("register", "message-value", command_line.file("a.arrow", schema.serialize().to_pybytes()))
    assert command_line.well("show", "stream-value") == command_line.well("show", "message-value") == "a: int32\n"


def test_a_typed_stream_can_be_created_from_a_file(kept: RunningCluster, tmp_path: Path) -> None:
    table = pa.table({"id": pa.array([1], pa.int64()), "fare": pa.array([1.5])})
    parquet, arrow, broken = (tmp_path / name for name in ("rides.parquet", "rides.arrow", "broken.parquet"))
    pq.write_table(table, parquet)
    with pa.ipc.new_file(arrow, table.schema):
        pass
    broken.write_bytes(b"PAR1")

    def create(name: str, *arguments: str) -> CompletedProcess[bytes]:
        return run_kera("stream", "create", name, *arguments, env={"KERA_BOOTSTRAP": kept.bootstrap})

    for name, path in (("by-parquet", parquet), ("by-arrow", arrow)):
        assert create(name, "--schema", str(path), "--key-column", "id").returncode == 0
        with SyncClient(kept.bootstrap) as client:
            described = client.describe(name)
        assert (described.schema.remove_metadata(), described.key_column) == (table.schema, "id")
    for said, *arguments in (
        ("not a Parquet file", "--schema", str(broken)),
        ("No such file", "--schema", str(tmp_path / "none.parquet")),
        ("No such file", "--schema", str(tmp_path / "none.arrow")),
        ("give no --column with it", "--schema", str(arrow), "--column", "a:int64"),
    ):
        done = create("never", *arguments)
        assert done.returncode == 2
        assert said in done.stderr.decode()


def test_an_invalid_schema_or_argument_is_reported_clearly(command_line: CommandLine) -> None:
    assert "give its type with --type" in command_line.badly("register", "bad-value", "-", stdin=b"{}")
    assert "'xml' is not a schema type" in command_line.badly("register", "bad-value", "-", "--type", "xml")
    missing = str(command_line.directory / "nothing.json")
    assert f"cannot read {missing}: No such file" in command_line.badly("register", "bad-value", missing)
    wrong = command_line.file("wrong.proto", 'syntax = "proto3";\nmessage {}')
    assert "wrong.proto:2:9: Expected message name" in command_line.badly("register", "bad-value", wrong)
    no_text = command_line.file("latin.json", b'{"title": "\xe9"}')
    assert "it is not UTF-8 text: byte 11" in command_line.badly("check", "bad-value", no_text)
    no_arrow = command_line.file("none.arrow", b"\xff" * 100)
    assert "it is neither an Arrow schema" in command_line.badly("register", "bad-value", no_arrow)
    assert "there is no type 'nope'" in command_line.badly(
        "register", "bad-value", "-", "-t", "avro", stdin=b'"nope"', code=1
    )
    assert "give a SUBJECT, perhaps with --version, or --id" in command_line.badly("show")
    assert "--default applies to all subjects" in command_line.badly("compatibility", "bad-value", "--default", "none")
    assert "'sideways' is not a compat" in command_line.badly("compatibility", "bad-value", "sideways", code=1)


def test_the_error_for_a_missing_protobuf_compiler_says_what_to_install(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    path = command_line.file("order.proto", PROTO)
    said = command_line.badly("register", "bad-value", path, code=1)
    assert said.startswith(
        "kera: error: a .proto file is compiled with grpcio-tools, which is missing: pip install grpcio-"
    )
    assert said.count("\n") == 1
