"""The tables of methods agree with ``proto/kera/v1``."""

from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from kera.core.rpc import Method
from kera.core.rpc.api import (
    BACKUP_METHODS,
    BROKER_METHODS,
    CONSUMER_GROUPS_METHODS,
    COORDINATOR_METHODS,
    DAEMON_METHODS,
    LATENCY_METHODS,
)
from kera.v1 import backup_pb2, broker_pb2, consumer_group_pb2, coordinator_pb2, daemon_pb2, latency_pb2

ALL: tuple[Method[Any, Any], ...] = (
    *BROKER_METHODS,
    *COORDINATOR_METHODS,
    *BACKUP_METHODS,
    *CONSUMER_GROUPS_METHODS,
    *DAEMON_METHODS,
    *LATENCY_METHODS,
)
SERVICES: list[ServiceDescriptor] = [
    *broker_pb2.DESCRIPTOR.services_by_name.values(),
    *coordinator_pb2.DESCRIPTOR.services_by_name.values(),
    *backup_pb2.DESCRIPTOR.services_by_name.values(),
    *consumer_group_pb2.DESCRIPTOR.services_by_name.values(),
    *daemon_pb2.DESCRIPTOR.services_by_name.values(),
    *latency_pb2.DESCRIPTOR.services_by_name.values(),
]


def declared(method: Method[Any, Any]) -> MethodDescriptor:
    (service,) = (service for service in SERVICES if service.full_name == method.service)
    return service.methods_by_name[method.name]


def test_every_declared_method_is_in_a_table() -> None:
    names = {f"/{service.full_name}/{name}" for service in SERVICES for name in service.methods_by_name}

    assert len(names) > 10
    assert {method.path for method in ALL} == names


def test_the_numbers_in_frames_are_unique() -> None:
    assert len({method.number for method in ALL}) == len(ALL)


def test_the_numbers_in_frames_never_change() -> None:
    assert {method.name: method.number for method in ALL} == {
        "MultiWriteChunks": 1,
        "MultiReadChunks": 2,
        "GetNextGroups": 3,
        "GetNextSegments": 4,
        "GetAvailableGroups": 5,
        "GetAvailableSegments": 6,
        "DescribeStreamlets": 7,
        "OpenStreamlets": 8,
        "DropStream": 9,
        "TruncateStreamlets": 10,
        "CommitCursors": 11,
        "MeasureLag": 12,
        "SealStreamlets": 13,
        "TakeOver": 14,
        "ListGroups": 15,
        "LocateChunks": 16,
        "ListSegments": 17,
        "Punctuate": 18,
        "CreateStream": 101,
        "GetStreamId": 102,
        "DescribeStream": 103,
        "ListStreams": 104,
        "DeleteStream": 105,
        "DescribeCluster": 106,
        "InitProducer": 107,
        "RegisterBroker": 108,
        "Heartbeat": 109,
        "AlterStream": 110,
        "RegisterBackup": 111,
        "BackupHeartbeat": 112,
        "ReportBroker": 113,
        "MoveStreamlet": 114,
        "Rebalance": 115,
        "Drain": 116,
        "ListRecoveries": 117,
        "PrepareRestart": 118,
        "ForgetMember": 119,
        "AdoptStream": 120,
        "ReadMetadata": 121,
        "FindProducers": 122,
        "Replicate": 201,
        "ReadReplica": 202,
        "ListReplicas": 203,
        "FreeReplicas": 204,
        "FenceBroker": 205,
        "ConsumeRound": 301,
        "KeepAlive": 302,
        "Leave": 303,
        "FetchConsumerGroup": 304,
        "ListConsumerGroups": 305,
        "DescribeConsumerGroup": 306,
        "ResetConsumerGroup": 307,
        "DeleteConsumerGroup": 308,
        "DescribeDaemon": 401,
        "ReadFigures": 402,
        "CreateLatencyConstraint": 801,
        "AlterLatencyConstraint": 802,
        "ListLatencyConstraints": 803,
        "DeleteLatencyConstraint": 804,
        "DescribeLatencyConstraint": 805,
    }


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
def test_the_table_agrees_with_the_declaration_of_each_method(method: Method[Any, Any]) -> None:
    descriptor = declared(method)

    assert descriptor.input_type is method.request.DESCRIPTOR
    assert descriptor.output_type is method.response.DESCRIPTOR
    assert descriptor.client_streaming is descriptor.server_streaming is method.bulk


@pytest.mark.parametrize("method", ALL, ids=lambda method: method.name)
def test_exactly_the_bulk_methods_have_the_fields_of_bulk_streams(method: Method[Any, Any]) -> None:
    request, response = method.request.DESCRIPTOR.fields_by_name, method.response.DESCRIPTOR.fields_by_name

    assert ("chunks" in request or "chunks" in response) is method.bulk
    assert ("request_id" in request and "request_id" in response and "error" in response) is method.bulk
