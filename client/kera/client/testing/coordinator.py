"""The coordinator of a `FakeCluster`: it knows the streams and the brokers, over gRPC."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kera.client.testing.requests import Requests
from kera.client.testing.schemas import FakeSchemas
from kera.client.testing.streams import Changes, FakeStream
from kera.client.types import position_of
from kera.core.base.clock import SystemClock
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.errors import InvalidArgument, KeraError, StreamExists, StreamletOutOfRange, Unavailable, UnknownStream
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.rpc import Call, Method, Reply, api
from kera.core.rpc.grpc_server import GrpcServer
from kera.v1 import common_pb2, consumer_group_pb2, coordinator_pb2

HOST = "127.0.0.1"
FIRST_STREAM_ID = 7
_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
"""The form of names of streams and producers, the same as for a real coordinator."""


def _check_name(whose: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{whose} cannot be called {name[:250]!r}:"
            " a name has 1 to 249 letters, digits, dots, underscores and hyphens, and is not . or ..",
            name=name[:250],
        )


def _check_config(config: common_pb2.StreamConfig) -> None:
    if config.streamlets < 1 or config.entries != 1:
        raise InvalidArgument("streams of a fake cluster have streamlets of one entry each")
    kept = config.retention_ms or config.retention_bytes or config.retention_consumer_groups
    if kept or config.retention_consumed:
        raise InvalidArgument("a fake cluster has no retention: it deletes nothing; run the test against kera dev")
    if config.durability == common_pb2.DURABILITY_REPLICATED and not config.replication:
        raise InvalidArgument(
            'durability "replicated" needs replication of at least 1, which is fixed when a stream is created;'
            ' this one has 0, so use "leader" or "persisted"',
            durability="replicated",
            replication=0,
        )


class FakeCoordinator:
    """The coordinator of a `FakeCluster`."""

    def __init__(
        self, brokers: Mapping[int, common_pb2.BrokerInfo], streams: dict[int, FakeStream], changes: Changes
    ) -> None:
        methods: list[Method[Any, Any]] = [*api.COORDINATOR_METHODS, *api.CONSUMER_GROUPS_METHODS]
        methods += api.SCHEMA_REGISTRY_METHODS
        self.requests = Requests(methods)
        """The requests to the coordinator."""
        self.address = ""
        """The address at which it listens, ``host:port``."""
        self._brokers = brokers
        self._streams = streams
        self._changes = changes
        self._next_stream_id = FIRST_STREAM_ID
        self._producers: dict[str, tuple[int, int]] = {}
        """The id and the epoch of each named producer."""
        self._producer_ids = 0
        self._committed: dict[str, dict[tuple[int, int], common_pb2.Cursor]] = {}
        """The committed cursors, by consumer group, and by stream and streamlet."""
        self._described: dict[int, common_pb2.StreamInfo | None] = {}
        """Descriptions given instead of the present ones; see `describe_as`."""
        self._server: GrpcServer | None = None

    def refuse(self, *errors: KeraError) -> None:
        """Answer the next requests with these errors, one each."""
        self.requests.refuse(*errors)

    def refuse_all(self, error: KeraError | None) -> None:
        """Answer every request with `error`; None: handle requests again."""
        self.requests.refuse_all(error)

    def pause(self) -> None:
        """Make requests wait for `resume`."""
        self.requests.pause()

    def resume(self) -> None:
        """Handle the waiting requests, in order, and all new ones."""
        self.requests.resume()

    def describe_as(self, stream_id: int, info: common_pb2.StreamInfo | None) -> None:
        """Describe a stream by `info`, such as an earlier `FakeStream.info`; None: by its present state."""
        self._described[stream_id] = info

    async def start(self) -> None:
        """Listen on a free port."""
        coordinator = self.requests.service(
            api.COORDINATOR_METHODS,
            {
                api.CREATE_STREAM: self._create,
                api.GET_STREAM_ID: lambda call: Reply(
                    coordinator_pb2.GetStreamIdResponse(stream_id=self.stream(call.message.name).stream_id)
                ),
                api.DESCRIBE_STREAM: self._describe,
                api.LIST_STREAMS: self._list,
                api.ALTER_STREAM: self._alter,
                api.DELETE_STREAM: self._delete,
                api.DESCRIBE_CLUSTER: self._describe_cluster,
                api.INIT_PRODUCER: self._init_producer,
                api.REPORT_BROKER: lambda _: Reply(coordinator_pb2.ReportBrokerResponse()),
                api.MOVE_STREAMLET: self._move,
            },
        )
        groups = self.requests.service(
            api.CONSUMER_GROUPS_METHODS,
            {
                api.FETCH_CONSUMER_GROUP: self._fetch_group,
                api.RESET_CONSUMER_GROUP: self._reset_group,
                api.LIST_CONSUMER_GROUPS: self._list_groups,
            },
        )
        schemas = self.requests.service(api.SCHEMA_REGISTRY_METHODS, FakeSchemas().answers())
        self._server = GrpcServer([coordinator, groups, schemas])
        self.address = f"{HOST}:{await self._server.listen(HOST, 0)}"

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.close(grace_s=0)

    # -- streams -----------------------------------------------------------------------------------------------

    def stream(self, name: str) -> FakeStream:
        """Return the stream called `name`. Raises `UnknownStream`."""
        found = next((each for each in self._streams.values() if each.message.name == name), None)
        if found is None:
            raise UnknownStream(f"there is no stream {name!r}", stream=name)
        return found

    def delete(self, name: str) -> FakeStream:
        """Delete a stream. Raises `UnknownStream`."""
        found = self._streams.pop(self.stream(name).stream_id)
        self._changes.wake()
        return found

    def create(
        self, name: str, config: common_pb2.StreamConfig, schema: common_pb2.StreamSchema, creation_id: str = ""
    ) -> FakeStream:
        """Create a stream over the running brokers. Raises `StreamExists`, `InvalidArgument`, `Unavailable`."""
        _check_name("a stream", name)
        _check_config(config)
        known = next((each for each in self._streams.values() if each.message.name == name), None)
        if known is not None:
            if creation_id and known.message.creation_id == creation_id:
                return known
            raise StreamExists(f"there is a stream {name!r} already", stream=name)
        broker_ids = [info.broker_id for info in self._brokers.values() if info.alive][: config.brokers or None]
        if not broker_ids:
            raise Unavailable("no broker runs")
        message = common_pb2.StreamInfo(
            stream_id=self._next_stream_id,
            name=name,
            config=config,
            schemas=[schema],
            created_us=SystemClock().now_us(),
            config_version=1,
            creation_id=creation_id,
        )
        message.schemas[0].schema_id = 1
        message.schemas[0].typed = bool(schema.arrow_schema)
        if not schema.arrow_schema:
            message.schemas[0].arrow_schema = schema_to_bytes(DEFAULT_SCHEMA)
        if not config.durability:
            replicated = config.replication > 0
            message.config.durability = common_pb2.DURABILITY_REPLICATED if replicated else common_pb2.DURABILITY_LEADER
        self._next_stream_id += 1
        made = self._streams[message.stream_id] = FakeStream(message, broker_ids, self._changes, self._brokers)
        return made

    def _create(self, call: Call[coordinator_pb2.CreateStreamRequest]) -> Reply[Any]:
        request = call.message
        made = self.create(request.name, request.config, request.schema, request.creation_id)
        return Reply(coordinator_pb2.CreateStreamResponse(stream=made.info()))

    def _describe(self, call: Call[coordinator_pb2.DescribeStreamRequest]) -> Reply[Any]:
        if call.message.HasField("name"):
            stream = self.stream(call.message.name)
        elif call.message.stream_id in self._streams:
            stream = self._streams[call.message.stream_id]
        else:
            raise UnknownStream("there is no stream with this id", stream_id=call.message.stream_id)
        info = self._described.get(stream.stream_id) or stream.info()
        return Reply(coordinator_pb2.DescribeStreamResponse(stream=info, brokers=self._brokers.values()))

    def _list(self, call: Call[coordinator_pb2.ListStreamsRequest]) -> Reply[Any]:
        infos = sorted((each.info() for each in self._streams.values()), key=lambda info: info.name)
        return Reply(
            coordinator_pb2.ListStreamsResponse(streams=[info for info in infos if info.name > call.message.after])
        )

    def _alter(self, call: Call[coordinator_pb2.AlterStreamRequest]) -> Reply[Any]:
        request, stream = call.message, self.stream(call.message.name)
        if request.add_columns or request.HasField("brokers"):
            raise InvalidArgument("a fake cluster changes neither the columns of a stream nor its spread over brokers")
        config = common_pb2.StreamConfig()
        config.CopyFrom(stream.message.config)
        for name in ("durability", "retention_ms", "retention_bytes", "retention_consumed", "virtual_logs"):
            if request.HasField(name):
                setattr(config, name, getattr(request, name))
        config.retention_consumer_groups.extend(request.retention_consumer_groups.names)
        _check_config(config)
        stream.message.config.CopyFrom(config)
        stream.message.config_version += 1
        return Reply(coordinator_pb2.AlterStreamResponse(stream=stream.info()))

    def _delete(self, call: Call[coordinator_pb2.DeleteStreamRequest]) -> Reply[Any]:
        return Reply(coordinator_pb2.DeleteStreamResponse(stream_id=self.delete(call.message.name).stream_id))

    def _move(self, call: Call[coordinator_pb2.MoveStreamletRequest]) -> Reply[Any]:
        request, stream = call.message, self.stream(call.message.stream)
        if request.streamlet_id >= len(stream.streamlets):
            raise StreamletOutOfRange(f"the stream has no streamlet {request.streamlet_id}")
        if request.broker_id not in self._brokers or not self._brokers[request.broker_id].alive:
            raise Unavailable(f"broker {request.broker_id} does not run")
        stream.move(request.streamlet_id, request.broker_id)
        return Reply(coordinator_pb2.MoveStreamletResponse(stream=stream.info()))

    # -- the cluster, producers and consumer groups ------------------------------------------------------------

    def _describe_cluster(self, _: Call[coordinator_pb2.DescribeClusterRequest]) -> Reply[Any]:
        return Reply(
            coordinator_pb2.DescribeClusterResponse(
                cluster_id="fake", brokers=self._brokers.values(), coordinators=[self.address]
            )
        )

    def _init_producer(self, call: Call[coordinator_pb2.InitProducerRequest]) -> Reply[Any]:
        name = call.message.name
        if name:
            _check_name("a producer", name)
        if name in self._producers:
            producer_id, epoch = self._producers[name]
            epoch += PRODUCER_EPOCHS
        else:
            self._producer_ids += 1
            producer_id, epoch = self._producer_ids, 1
        if name:
            self._producers[name] = producer_id, epoch
        return Reply(coordinator_pb2.InitProducerResponse(producer_id=producer_id, producer_epoch=epoch))

    def _fetch_group(self, call: Call[consumer_group_pb2.FetchConsumerGroupRequest]) -> Reply[Any]:
        request = call.message
        committed = self._committed.get(request.consumer_group, {})
        cursors = [cursor for (stream_id, _), cursor in committed.items() if stream_id == request.stream_id]
        return Reply(consumer_group_pb2.FetchConsumerGroupResponse(cursors=cursors))

    def _reset_group(self, call: Call[consumer_group_pb2.ResetConsumerGroupRequest]) -> Reply[Any]:
        request = call.message
        committed = self._committed.setdefault(request.consumer_group, {})
        for start in request.starts:
            key, cursor = (start.stream_id, start.streamlet_id), start.cursors[0]
            if not request.forward_only or key not in committed or position_of(committed[key]) < position_of(cursor):
                committed[key] = cursor
        return Reply(consumer_group_pb2.ResetConsumerGroupResponse())

    def _list_groups(self, _: Call[consumer_group_pb2.ListConsumerGroupsRequest]) -> Reply[Any]:
        response = consumer_group_pb2.ListConsumerGroupsResponse()
        for name, committed in sorted(self._committed.items()):
            response.consumer_groups.add(consumer_group=name, stream_ids=sorted({key[0] for key in committed}))
        return Reply(response)
