"""The committed cursors of a consumer group at the coordinator, for consumers that are alone in their group."""

from __future__ import annotations

from collections.abc import Mapping

from kera.client.cluster.batches import CURSORS_MAX, RESET_STREAMLETS_MAX, batched
from kera.client.cluster.cluster import Cluster
from kera.client.types import StreamDescription, fill_cursor, position_of
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.v1 import consumer_group_pb2


async def report_cursors(
    cluster: Cluster,
    name: str,
    stream: StreamDescription,
    positions: Mapping[EntryId, Position],
    *,
    unnamed: bool = False,
) -> None:
    """Report to the coordinator how far a consumer that is alone in its group has read. Cursors never go back.

    Raises `InvalidArgument` when consumers that share the stream are active in the consumer group.
    """
    streamlet_ids = sorted({entry.streamlet_id for entry in positions})
    for some in batched(streamlet_ids, streamlets_max(stream)):
        request = consumer_group_pb2.ResetConsumerGroupRequest(consumer_group=name, forward_only=True, unnamed=unnamed)
        for streamlet_id in some:
            start = request.starts.add(stream_id=stream.stream_id, streamlet_id=streamlet_id)
            for number in range(stream.config.entries):
                entry = EntryId(stream.stream_id, streamlet_id, number)
                fill_cursor(start.cursors.add(), entry, positions.get(entry, EARLIEST))
        await cluster.ask(api.RESET_CONSUMER_GROUP, request)


def streamlets_max(stream: StreamDescription) -> int:
    """Return the maximum number of streamlets in one request that resets a consumer group."""
    return max(1, min(RESET_STREAMLETS_MAX, CURSORS_MAX // stream.config.entries))


async def committed_cursors(cluster: Cluster, name: str, stream: StreamDescription) -> dict[EntryId, Position]:
    """Return the cursors of a consumer group in a stream, without entries that it has not begun.

    Raises `InvalidArgument` if `name` is empty.
    """
    if not name:
        raise InvalidArgument("commits belong to a consumer group; name it with consumer_group")
    request = consumer_group_pb2.FetchConsumerGroupRequest(consumer_group=name, stream_id=stream.stream_id)
    answer = await cluster.ask(api.FETCH_CONSUMER_GROUP, request)
    return {
        EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry): position_of(cursor) for cursor in answer.cursors
    }
