"""The coordinator's service: messages in and out, and a hook that sees each request with its outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from kera.coordinator.cluster.changing import REQUESTER
from kera.coordinator.consumer_groups.service import ConsumerGroups
from kera.coordinator.coordinator import Coordinator
from kera.core.errors import InvalidArgument, KeraError
from kera.core.rpc import api
from kera.core.rpc.method import Call, Handler, Method, Reply, Service
from kera.v1 import coordinator_pb2 as messages

PAGE_BYTES_MAX = 64 << 10
"""Of streams in one answer of ListStreams, unless a single one takes more: some 2 ms."""

Observe = Callable[[str, str], None]
"""Called once per request: the method's name, and ``ok``, the code of the error, or ``cancelled``."""


def coordinator_service(
    coordinator: Coordinator, observe: Observe, consumer_groups: ConsumerGroups | None = None
) -> Service:
    """What `kera.core.rpc` serves for `coordinator` and the `consumer_groups` of its cluster."""
    handlers = _Handlers(coordinator)
    by_method: dict[Method[Any, Any], Callable[[Any], Any]] = {
        api.CREATE_STREAM: handlers.create_stream,
        api.GET_STREAM_ID: handlers.get_stream_id,
        api.DESCRIBE_STREAM: handlers.describe_stream,
        api.LIST_STREAMS: handlers.list_streams,
        api.DELETE_STREAM: handlers.delete_stream,
        api.DESCRIBE_CLUSTER: handlers.describe_cluster,
        api.INIT_PRODUCER: handlers.init_producer,
        api.REGISTER_BROKER: handlers.register_broker,
        api.HEARTBEAT: handlers.heartbeat,
        api.ALTER_STREAM: handlers.alter_stream,
        api.REGISTER_BACKUP: handlers.register_backup,
        api.BACKUP_HEARTBEAT: handlers.backup_heartbeat,
        api.REPORT_BROKER: handlers.report_broker,
        api.MOVE_STREAMLET: handlers.move_streamlet,
        api.REBALANCE: handlers.rebalance,
        api.DRAIN: handlers.drain,
        api.LIST_RECOVERIES: handlers.list_recoveries,
        api.PREPARE_RESTART: handlers.prepare_restart,
        api.FORGET_MEMBER: handlers.forget_member,
        api.ADOPT_STREAM: handlers.adopt_stream,
        api.READ_METADATA: handlers.read_metadata,
    }
    if consumer_groups is not None:
        by_method.update(consumer_groups.handlers())
    return {method: _observed(method, handle, observe) for method, handle in by_method.items()}


def _observed(method: Method[Any, Any], handle: Callable[[Any], Any], observe: Observe) -> Handler:
    async def serve(call: Call[Any]) -> Reply[Any]:
        outcome = "cancelled"
        REQUESTER.set(call.peer.address)  # a call is answered in a task of its own
        try:
            result = handle(call.message)
            message: Message = await result if inspect.isawaitable(result) else result
            outcome = "ok"
        except KeraError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            observe(method.name, outcome)
        return Reply(message)

    return serve


class _Handlers:
    """One method per remote operation: a request in, a response out."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def create_stream(self, request: messages.CreateStreamRequest) -> messages.CreateStreamResponse:
        stream = await self._coordinator.create_stream(
            request.name, request.config, request.schema, request.creation_id
        )
        return messages.CreateStreamResponse(stream=stream)

    def get_stream_id(self, request: messages.GetStreamIdRequest) -> messages.GetStreamIdResponse:
        return messages.GetStreamIdResponse(stream_id=self._coordinator.stream(request.name).stream_id)

    def describe_stream(self, request: messages.DescribeStreamRequest) -> messages.DescribeStreamResponse:
        match request.WhichOneof("stream"):
            case "name":
                stream = self._coordinator.stream(request.name)
            case "stream_id":
                stream = self._coordinator.stream_with_id(request.stream_id)
            case _:
                raise InvalidArgument("DescribeStream needs the stream's name or id")
        return messages.DescribeStreamResponse(stream=stream, brokers=self._coordinator.brokers_of(stream))

    def list_streams(self, request: messages.ListStreamsRequest) -> messages.ListStreamsResponse:
        streams, more = self._coordinator.page_of_streams(request.after, PAGE_BYTES_MAX)
        return messages.ListStreamsResponse(streams=streams, more=more)

    async def alter_stream(self, request: messages.AlterStreamRequest) -> messages.AlterStreamResponse:
        return messages.AlterStreamResponse(stream=await self._coordinator.alter_stream(request))

    async def delete_stream(self, request: messages.DeleteStreamRequest) -> messages.DeleteStreamResponse:
        return messages.DeleteStreamResponse(stream_id=await self._coordinator.delete_stream(request.name))

    def describe_cluster(self, _: messages.DescribeClusterRequest) -> messages.DescribeClusterResponse:
        return messages.DescribeClusterResponse(
            cluster_id=self._coordinator.cluster_id,
            brokers=self._coordinator.brokers(),
            backups=self._coordinator.backups(),
            unknown_streams=self._coordinator.unknown(),
            catching_up=self._coordinator.catching_up,
        )

    async def init_producer(self, request: messages.InitProducerRequest) -> messages.InitProducerResponse:
        producer_id, producer_epoch = await self._coordinator.init_producer(request.name)
        return messages.InitProducerResponse(producer_id=producer_id, producer_epoch=producer_epoch)

    async def register_broker(self, request: messages.RegisterBrokerRequest) -> messages.RegisterBrokerResponse:
        broker, streams = await self._coordinator.register_broker(request)
        elsewhere = await self._coordinator.elsewhere(broker.broker_id, request.held_streams, streams)
        response = messages.RegisterBrokerResponse(
            cluster_id=self._coordinator.cluster_id,
            broker_id=broker.broker_id,
            broker_epoch=broker.broker_epoch,
            heartbeat_interval_ms=self._coordinator.heartbeat_interval_ms,
            backups=self._coordinator.backups(),
            lease_ms=self._coordinator.lease_ms,
            coordinator_epoch=self._coordinator.coordinator_epoch,
            recovered_before_epoch=self._coordinator.recovered_before_epoch(broker.broker_id),
            fences=self._coordinator.fences(),
            elsewhere_stream_ids=elsewhere,
        )
        pace = self._coordinator.state.pace()
        for stream in streams:
            await pace.step()
            response.streams.append(stream)
        return response

    async def heartbeat(self, request: messages.HeartbeatRequest) -> messages.HeartbeatResponse:
        await self._coordinator.heartbeat(request)
        unknown = await self._coordinator.unknown_of(request)
        return messages.HeartbeatResponse(
            backups=self._coordinator.backups(),
            lease_ms=self._coordinator.lease_ms,
            coordinator_epoch=self._coordinator.coordinator_epoch,
            fences=self._coordinator.fences(request.fences_version),
            unknown_stream_ids=unknown,
        )

    async def register_backup(self, request: messages.RegisterBackupRequest) -> messages.RegisterBackupResponse:
        backup = await self._coordinator.register_backup(request)
        return messages.RegisterBackupResponse(
            cluster_id=self._coordinator.cluster_id,
            backup_id=backup.backup_id,
            backup_epoch=backup.backup_epoch,
            heartbeat_interval_ms=self._coordinator.heartbeat_interval_ms,
        )

    def backup_heartbeat(self, request: messages.BackupHeartbeatRequest) -> messages.BackupHeartbeatResponse:
        self._coordinator.backup_heartbeat(request)
        return messages.BackupHeartbeatResponse()

    def report_broker(self, request: messages.ReportBrokerRequest) -> messages.ReportBrokerResponse:
        self._coordinator.report_broker(request)
        return messages.ReportBrokerResponse()

    async def move_streamlet(self, request: messages.MoveStreamletRequest) -> messages.MoveStreamletResponse:
        moved = await self._coordinator.move_streamlet(request.stream, request.streamlet_id, request.broker_id)
        return messages.MoveStreamletResponse(stream=moved.stream, stall_us=moved.stall_us)

    async def rebalance(self, request: messages.RebalanceRequest) -> messages.RebalanceResponse:
        return await self._coordinator.rebalance(dry_run=request.dry_run)

    async def drain(self, request: messages.DrainRequest) -> messages.DrainResponse:
        return await self._coordinator.drain(request)

    async def prepare_restart(self, request: messages.PrepareRestartRequest) -> messages.PrepareRestartResponse:
        return await self._coordinator.prepare_restart(request)

    async def read_metadata(self, _: messages.ReadMetadataRequest) -> messages.ReadMetadataResponse:
        return messages.ReadMetadataResponse(copy=await self._coordinator.copy_metadata())

    async def adopt_stream(self, request: messages.AdoptStreamRequest) -> messages.AdoptStreamResponse:
        return messages.AdoptStreamResponse(stream=await self._coordinator.adopt_stream(request.stream, request.name))

    async def forget_member(self, request: messages.ForgetMemberRequest) -> messages.ForgetMemberResponse:
        return await self._coordinator.forget_member(request)

    def list_recoveries(self, _: messages.ListRecoveriesRequest) -> messages.ListRecoveriesResponse:
        return messages.ListRecoveriesResponse(recoveries=self._coordinator.recoveries())
