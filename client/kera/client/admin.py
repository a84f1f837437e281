"""Administration: streams and the cluster."""

from __future__ import annotations

import pyarrow as pa

from kera.client.cluster import Cluster
from kera.client.types import ClusterDescription, StreamDescription
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.core.schema import schema_to_bytes
from kera.v1 import common_pb2, coordinator_pb2

GROUP_SEGMENTS_DEFAULT = 16


class Admin:
    """Creates, lists, describes and deletes streams. Get it as `Client.admin`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create_stream(  # noqa: PLR0913 - what a stream is made of, each named by the caller
        self,
        name: str,
        *,
        streamlets: int = 1,
        brokers: int = 0,
        entries: int = 1,
        group_segments: int = GROUP_SEGMENTS_DEFAULT,
        durability: str = "leader",
        codec: str = "none",
        schema: pa.Schema | None = None,
        key_column: str | None = None,
        timestamp_column: str | None = None,
    ) -> StreamDescription:
        """Create a stream (thesis table 6.1, createStream).

        `streamlets` (M) is fixed for ever; they are spread over `brokers` (N; 0: all). `entries` (Q) is the number of
        append lanes per streamlet: 1 gives a total order per streamlet, more let more producers append side by side.
        A group has `group_segments` (P) segments. With a `schema`, the stream takes batches of it; `key_column`
        partitions them, `timestamp_column` gives their time.

        Raises `StreamExists`, `InvalidArgument`, `SchemaMismatch`, `Unavailable`.
        """
        request = coordinator_pb2.CreateStreamRequest(
            name=name,
            config=common_pb2.StreamConfig(
                streamlets=streamlets,
                brokers=brokers,
                entries=entries,
                group_segments=group_segments,
                durability=_enum(common_pb2.Durability, "DURABILITY_", durability),  # type: ignore[arg-type]
                codec=_enum(common_pb2.Codec, "CODEC_", codec),  # type: ignore[arg-type]
            ),
        )
        if schema is not None:
            request.schema.arrow_schema = schema_to_bytes(schema)
            request.schema.key_column = key_column or ""
            request.schema.timestamp_column = timestamp_column or ""
        elif key_column or timestamp_column:
            raise InvalidArgument("key_column and timestamp_column go with a schema")
        await self._cluster.ask(api.CREATE_STREAM, request)
        self._cluster.forget(name)
        return await self._cluster.stream(name)

    async def stream_id(self, name: str) -> int:
        """The id of a stream (thesis table 6.1, getStreamId). Raises `UnknownStream`."""
        return (await self._cluster.ask(api.GET_STREAM_ID, coordinator_pb2.GetStreamIdRequest(name=name))).stream_id

    async def list_streams(self) -> list[StreamDescription]:
        """All streams, by name."""
        answer = await self._cluster.ask(api.LIST_STREAMS, coordinator_pb2.ListStreamsRequest())
        return sorted((StreamDescription.from_message(info) for info in answer.streams), key=lambda stream: stream.name)

    async def describe_stream(self, name: str) -> StreamDescription:
        """A stream as it is now. Raises `UnknownStream`."""
        self._cluster.forget(name)
        return await self._cluster.stream(name)

    async def delete_stream(self, name: str) -> None:
        """Delete a stream and its data. Raises `UnknownStream`."""
        await self._cluster.ask(api.DELETE_STREAM, coordinator_pb2.DeleteStreamRequest(name=name))
        self._cluster.forget(name)

    async def describe_cluster(self) -> ClusterDescription:
        """The cluster's id and its brokers."""
        return await self._cluster.describe()


def _enum(kind: object, prefix: str, name: str) -> int:
    names: list[str] = [full.removeprefix(prefix).lower() for full in kind.keys()]  # type: ignore[attr-defined]  # noqa: SIM118
    if name not in names or name == "unspecified":
        choices = ", ".join(choice for choice in names if choice != "unspecified")
        raise InvalidArgument(f"{prefix.rstrip('_').lower()} {name!r} is none of {choices}")
    return int(kind.Value(prefix + name.upper()))  # type: ignore[attr-defined]
