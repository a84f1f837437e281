"""The pieces of tasks as JSON for the columnar engine, with the preferred hosts of each task."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kera.core.base.home import expanded
from kera.core.base.settings import setting
from kera.core.errors import UnknownStream
from kera.core.format.schema import schema_to_bytes
from kera.spark_connector.connection import Connection, Secret
from kera.spark_connector.options.reading import ReadOptions, SharedMemory
from kera.spark_connector.planning import Piece, Tail
from kera.spark_connector.portal import ca_of, settings_of

if TYPE_CHECKING:
    from kera.client import BrokerDescription, Client, ClientSettings, StreamDescription

RESOLVE_TIMEOUT_S = 1.0
"""Maximum time that planning waits for the addresses of a host."""
_LOCAL_NAMES = {"", "localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}

RESOLVE_AGAIN_S = 60.0
"""Time after which a host without addresses is looked up again."""


def broker_as_json(broker: BrokerDescription) -> dict[str, Any]:
    """Return the addresses of a broker."""
    return {
        "broker_id": broker.broker_id,
        "node_id": broker.node_id,
        "frames_address": broker.frames_address,
        "frames_unix_path": broker.frames_unix_path,
        "push_unix_path": broker.push_unix_path,
    }


def settings(connection: Connection, shared_memory: SharedMemory) -> dict[str, Any]:
    """Return the client's settings for reading. Raises `InvalidSettings`."""
    from kera.client import ConsumerSettings

    client, consumer = settings_of(connection), ConsumerSettings.load(shared_memory=shared_memory)
    return {
        "fetch_bytes_max": int(consumer.fetch_bytes_max),
        "prefetch_bytes_max": int(consumer.prefetch_bytes_max),
        "request_timeout_ms": client.request_timeout_ms,
        "connect_timeout_ms": client.connect_timeout_ms,
        "verify_checksums": consumer.verify_checksums,
        "transport": client.transport,
        "consumer_group": consumer.consumer_group,
        "tls": tls_as_json(client),
    }


def connection_as_json(connection: Connection) -> dict[str, Any]:
    """Return the connection with which tasks ask the service beside them, without credentials."""
    ca = ca_of(settings_of(connection))
    return {"bootstrap": connection.bootstrap, "files": connection.files, "drivers_ca": ca}


def connection_from_json(params: Mapping[str, Any]) -> Connection:
    """Return the inverse of `connection_as_json`, with the token of the request if it has one."""
    connection, token = params["connection"], params.get("token")
    shown = None if token is None else Secret(str(token))
    files = tuple(dict(connection["files"]).items())
    return Connection(str(connection["bootstrap"]), files, shown, drivers_ca=str(connection.get("drivers_ca", "")))


def token_as_json(connection: Connection | None) -> str | None:
    """Return the token of tasks, which is kept apart from their other data because no log or plan may show it."""
    return None if connection is None or connection.token is None else connection.token.reveal()


def tls_as_json(client: ClientSettings) -> dict[str, str] | None:
    """Return a client's certificate files, which must be at the same paths on all hosts; None: it has none."""
    if client.tls_ca is None:
        return None
    files = {"ca": client.tls_ca, "cert": client.tls_cert, "key": client.tls_key}
    found = {}
    for name, path in files.items():
        with setting(f"tls_{name}"):
            found[name] = str(expanded(path)) if path else ""
    return found


class Hosts:
    """Names and addresses of hosts. Each is looked up once, and again after a while if it had no addresses."""

    def __init__(self, known: dict[str, tuple[str, ...]] | None = None, *, again_s: float = RESOLVE_AGAIN_S) -> None:
        self._known = {} if known is None else known
        self._again_s = again_s
        self._unknown_until_s: dict[str, float] = {}

    async def of(self, broker: BrokerDescription) -> list[str]:
        """Return the names and addresses under which Spark may know a broker's host, without local ones."""
        names = [_host(broker.frames_address), _host(broker.grpc_address), broker.node_id.partition("/")[0]]
        found = await asyncio.gather(*map(self._resolved, dict.fromkeys(names)))
        candidates = [*names, *(address for addresses in found for address in addresses)]
        return [host for host in dict.fromkeys(candidates) if not _is_local(host)]

    async def _resolved(self, host: str) -> tuple[str, ...]:
        if not host or _is_local(host):
            return ()
        if host not in self._known and self._unknown_until_s.get(host, 0.0) <= time.monotonic():
            try:
                async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except (OSError, TimeoutError, UnicodeError):
                self._unknown_until_s[host] = time.monotonic() + self._again_s
            else:
                self._known[host] = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
        return self._known.get(host, ())


_hosts = Hosts()
"""The hosts that this process has looked up."""


async def as_json(
    client: Client, pieces: Sequence[Piece | Tail], options: ReadOptions, known_hosts: Hosts = _hosts
) -> list[dict[str, Any]]:
    """Return `pieces` as JSON for the columnar engine, in the same order."""
    streams = {name: await _described(client, name) for name in {piece.stream for piece in pieces}}
    schemas = {name: _schema(stream) for name, stream in streams.items()}
    brokers = [_broker(piece, streams[piece.stream]) for piece in pieces]
    known = {broker.broker_id: broker for broker in brokers if broker is not None}
    hosts = dict(zip(known, await asyncio.gather(*map(known_hosts.of, known.values())), strict=True))
    shared = {
        "shared_memory": options.shared_memory,
        "connection": connection_as_json(options.connection),
        "settings": settings(options.connection, options.shared_memory),
    }
    return [
        _document(piece)
        | schemas[piece.stream]
        | shared
        | {
            "broker": None if broker is None else broker_as_json(broker),
            "hosts": [] if broker is None else hosts[broker.broker_id],
        }
        for piece, broker in zip(pieces, brokers, strict=True)
    ]


async def _described(client: Client, name: str) -> StreamDescription | None:
    # Planning has just asked the coordinator for it. If the stream was deleted since, the tasks find out.
    try:
        return await client.describe(name)
    except UnknownStream:
        return None


def _schema(stream: StreamDescription | None) -> dict[str, Any]:
    if stream is None:
        return {"schema": "", "schema_id": 0, "earlier_schemas": {}}
    return {
        "memory_domain": stream.config.memory_domain,
        "schema": _encoded(stream.schema),
        "schema_id": stream.schema_id,
        "earlier_schemas": {str(number): _encoded(schema) for number, schema in stream.earlier_schemas.items()},
    }


def _encoded(schema: pa.Schema) -> str:
    return base64.b64encode(schema_to_bytes(schema)).decode()


def _broker(piece: Piece | Tail, stream: StreamDescription | None) -> BrokerDescription | None:
    if stream is None or stream.stream_id != piece.entry.stream_id:
        return None
    return stream.broker_of(piece.entry.streamlet_id, piece.start)


def _document(piece: Piece | Tail) -> dict[str, Any]:
    if isinstance(piece, Piece):
        stop = None if piece.stop is None else [*piece.stop.position, piece.stop.record]
        bounds = {"end": list(piece.end), "stop": stop, "records": piece.records, "bytes": piece.length_bytes}
        if piece.epoch is not None:
            bounds |= {"epoch": piece.epoch}
    else:
        bounds = {"end": None, "stop": None, "records": 0, "bytes": 0}
    return bounds | {
        "stream": piece.stream,
        "stream_id": piece.entry.stream_id,
        "streamlet": piece.entry.streamlet_id,
        "entry": piece.entry.entry,
        "start": list(piece.start),
        "first_record": piece.first_record,
        "typed": piece.typed,
        "fail_on_data_loss": piece.fail_on_data_loss,
    }


def _host(address: str) -> str:
    """Return the host of ``host:port``."""
    return address.rpartition(":")[0].strip("[]")


def _is_local(host: str) -> bool:
    if host.lower() in _LOCAL_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or address.is_link_local
