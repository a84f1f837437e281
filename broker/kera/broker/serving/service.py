"""The broker's remote operations: thesis tables 6.1 and 6.2, and the coordinator's calls.

This module maps each call to the part that handles it: ``write``, ``fetch`` and ``read_sessions``, ``lookups``,
``cursors``, ``descriptions``, ``thesis_api``, and ``kera.broker.ownership.orders`` for the coordinator's calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from kera.broker.counters import Counters, Latencies
from kera.broker.ownership.clock_offset import ClockOffset
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.orders import Orders
from kera.broker.ownership.producer_owners import ProducerOwners
from kera.broker.ownership.streams import Streams
from kera.broker.replication.manager import Replication
from kera.broker.serving.cursors import CursorChanges
from kera.broker.serving.descriptions import Descriptions
from kera.broker.serving.fetch import READ_BYTES_MAX, Fetches, ReadReply
from kera.broker.serving.hooks import ReadCall, RequestHooks, Write
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.lookups import Lookups
from kera.broker.serving.punctuations import Punctuations
from kera.broker.serving.read_sessions import ReadSessions
from kera.broker.serving.stream_access import checking
from kera.broker.serving.thesis_api import ThesisApi
from kera.broker.serving.write import Writer
from kera.broker.serving.write_access import WriteAccess
from kera.broker.storage.persistence import PersistenceManager
from kera.core.base.turns import Turns
from kera.core.errors import Unavailable
from kera.core.rpc import Call, Reply, Service, api
from kera.core.rpc.method import Handler, Method
from kera.core.rpc.taking import Taker
from kera.server.access.guard import Door, Guard
from kera.v1 import broker_pb2, common_pb2


class BrokerService:
    """All handlers of one broker; `service()` gives them to the transports."""

    def __init__(  # noqa: PLR0913 - what a broker is made of
        self,
        streams: Streams,
        memory: PersistenceManager,
        replication: Replication,
        counters: Counters,
        *,
        pump: Callable[[], None],
        read_bytes_max: int = READ_BYTES_MAX,
        orders: Orders | None = None,
        check_payloads: bool = True,
        limits: ServingLimits | None = None,
        turns: Turns | None = None,
        lease: Lease | None = None,
        clock_offset: ClockOffset | None = None,
        guard: Door | None = None,
        hooks: Sequence[RequestHooks] = (),
    ) -> None:
        """Create the handlers.

        `pump`: starts the requests to backups that are due; `check_payloads`: whether payloads must hold records.
        `guard`: checks the rights of callers; None: everybody may do everything.
        `hooks`: the plugged-in request hooks, the last one outermost.
        `orders`: by default, orders of any coordinator are carried out unless its epoch is older than one seen before,
        and nothing is taken over.
        """
        limits = limits or ServingLimits()
        self._guard = guard = guard or Door()
        self.orders = orders or Orders(streams, memory, coordinator=CoordinatorEpoch(confirmed=False))
        self.lease = lease or Lease()
        """The broker's lease; each answer of the coordinator renews it."""
        self.clock_offset = clock_offset or ClockOffset()
        """The offset of the broker's clock, measured by each answer of the coordinator."""
        self.producer_owners = ProducerOwners()
        """The owners of producer ids; another component asks the coordinator for unknown ones."""
        self.latencies = Latencies()
        check = checking(guard)
        self.writer = Writer(
            streams,
            memory,
            replication,
            counters,
            self.latencies,
            pump,
            self.lease,
            check_payloads=check_payloads,
            limits=limits,
            access=WriteAccess(guard, streams, self.producer_owners) if isinstance(guard, Guard) else None,
            hooks=hooks,
        )
        self._hooks = hooks
        self._write: Write = self.writer.write
        for each in hooks:
            self._write = each.around_write(self._write)
        self.turns = turns = turns or Turns()
        self.fetches = Fetches(
            streams, memory, counters, turns, read_bytes_max=read_bytes_max, limits=limits, check=check
        )
        self.sessions = ReadSessions(
            streams,
            memory,
            counters,
            turns,
            self.fetches.outgoing,
            read_bytes_max=self.fetches.read_bytes_max,
            limits=limits,
            check=check,
        )
        self._lookups = Lookups(streams, memory, turns, limits, check)
        self._cursors = CursorChanges(streams, memory, turns, limits, check)
        self._descriptions = Descriptions(
            streams,
            turns,
            limits,
            check,
            counters=counters,
            now_us=lambda: memory.now_us,
            may_promise=self.may_promise,
        )
        self._punctuations = Punctuations(streams, self.writer, memory, turns, limits)
        self._thesis = ThesisApi(streams, turns)
        self._registered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def may_promise(self, grace_us: int) -> bool:
        """Whether no other broker can own this broker's streamlets, and a later owner can keep a promise made now."""
        return self.lease.holds and self.clock_offset.is_within(grace_us)

    def registered(self, broker_id: int, owned: Iterable[common_pb2.StreamInfo], broker_epoch: int = 0) -> None:
        """Note that the coordinator has given this launch its id, epoch, and the streams that it stores parts of."""
        self.orders.registered(broker_id, broker_epoch, owned)
        self._registered.set_result(broker_id)

    async def close(self) -> None:
        """End the coordinator's orders that are under way."""
        await self.orders.close()

    def service(self) -> Service:
        """The handlers by method."""
        described, thesis = self._descriptions, self._thesis
        handlers: Service = {
            api.MULTI_WRITE_CHUNKS: self._write,
            api.MULTI_READ_CHUNKS: self._read,
            api.GET_NEXT_GROUPS: thesis.get_next_groups,
            api.GET_NEXT_SEGMENTS: thesis.get_next_segments,
            api.GET_AVAILABLE_GROUPS: thesis.get_available_groups,
            api.GET_AVAILABLE_SEGMENTS: thesis.get_available_segments,
            api.DESCRIBE_STREAMLETS: described.describe_streamlets,
            api.TRUNCATE_STREAMLETS: self._cursors.truncate_streamlets,
            api.COMMIT_CURSORS: self._cursors.commit_cursors,
            api.MEASURE_LAG: described.measure_lag,
            api.SEAL_STREAMLETS: self._seal_streamlets,
            api.TAKE_OVER: self._take_over,
            api.LIST_GROUPS: described.list_groups,
            api.LOCATE_CHUNKS: self._lookups.locate,
            api.LIST_SEGMENTS: self._lookups.list_segments,
            api.PUNCTUATE: self._punctuations.punctuate,
        }
        others: Service = {
            api.OPEN_STREAMLETS: self._open_streamlets,
            api.DROP_STREAM: self._drop_stream,
            **self._guard.service(),
        }
        # This check comes before the guard: until the registration, the guard would report each stream as unknown.
        served = {method: self._once_registered(handler) for method, handler in self._guard.guarded(handlers).items()}
        return {**served, **self._guard.guarded(others)}

    def takers(self) -> Mapping[Method[Any, Any], Taker]:
        """The takers of methods whose requests are many and small, for connections of frames."""
        writes = self.writer.native
        return {} if writes is None else {api.MULTI_WRITE_CHUNKS: self._guard.taker(writes.take, of_daemons=False)}

    def _once_registered(self, handler: Handler) -> Handler:
        """Refuse calls before the registration, or clients from before a restart would see their stream as unknown."""

        def checked(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            if not self._registered.done():
                raise Unavailable("the broker is starting and does not know its streams yet; try again")
            return handler(call)

        return checked

    def _read(self, call: ReadCall) -> ReadReply | Awaitable[ReadReply]:
        """Read from the ranges of the request, or from the ranges of its session."""
        begun_s = perf_counter()
        for hooks in self._hooks:
            hooks.on_read(call)
        answer = (self.sessions if call.message.session_id else self.fetches).read(call)
        if not isinstance(answer, Reply):
            return self._read_later(call, answer, begun_s)
        self.latencies.reads.observe(perf_counter() - begun_s)
        for hooks in self._hooks:
            hooks.on_read_answered(call, answer.message)
        return answer

    async def _read_later(self, call: ReadCall, answer: Awaitable[ReadReply], begun_s: float) -> ReadReply:
        reply = await answer
        self.latencies.reads_waited.observe(perf_counter() - begun_s)
        for hooks in self._hooks:
            hooks.on_read_answered(call, reply.message)
        return reply

    # -- from the coordinator ----------------------------------------------------------------------------------

    async def _seal_streamlets(
        self, call: Call[broker_pb2.SealStreamletsRequest]
    ) -> Reply[broker_pb2.SealStreamletsResponse]:
        """Stop taking chunks for streamlets; return where they end, once all their data is durable."""
        return Reply(broker_pb2.SealStreamletsResponse(states=await self.orders.seal(call.message)))

    async def _take_over(self, call: Call[broker_pb2.TakeOverRequest]) -> Reply[broker_pb2.TakeOverResponse]:
        """Find out from backups where streamlets of a lost broker end that this broker is to own."""
        return Reply(await self.orders.take_over(call.message))

    async def _open_streamlets(
        self, call: Call[broker_pb2.OpenStreamletsRequest]
    ) -> Reply[broker_pb2.OpenStreamletsResponse]:
        """Open the streamlets assigned to this broker, with the stream's current configuration.

        This request may arrive before the coordinator's answer to the registration; it then waits for that answer.
        """
        await asyncio.shield(self._registered)
        return Reply(broker_pb2.OpenStreamletsResponse(lacking=await self.orders.open(call.message)))

    async def _drop_stream(self, call: Call[broker_pb2.DropStreamRequest]) -> Reply[broker_pb2.DropStreamResponse]:
        """Forget a stream, and free its memory and its disk.

        Waits like `_open_streamlets`: the answer to the registration, if it comes later, may still name the stream.
        """
        await asyncio.shield(self._registered)
        await self.orders.drop(call.message)
        return Reply(broker_pb2.DropStreamResponse())
