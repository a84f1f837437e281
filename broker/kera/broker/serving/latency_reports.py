"""Latency reports that clients attach to requests, and the advice that answers carry back."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from time import perf_counter

from kera.broker.latency.manager import LatencyManager
from kera.broker.serving.hooks import ReadCall, RequestHooks, WriteCall
from kera.broker.serving.pending_write import PendingWrite
from kera.broker.serving.stream_access import CheckGroup
from kera.core.access.rights import Operation
from kera.core.errors import KeraError
from kera.core.latency.report import check, samples_of, stream_ids
from kera.core.rpc.method import Peer
from kera.v1 import broker_pb2, latency_pb2

Usable = Callable[[Peer, Operation, int], Container[int]]
"""Returns the streamlets of a stream that are here; raises if the peer lacks the right, or the stream is not here."""


class LatencyReports(RequestHooks):
    """Checks the latency reports of requests, hands them to the manager, and returns the advice for the answer."""

    def __init__(self, manager: LatencyManager, usable: Usable, may_use_group: CheckGroup) -> None:
        self._manager = manager
        self._usable = usable
        self._may_use_group = may_use_group

    def on_write(self, call: WriteCall) -> None:
        """Check the report. Its limit on holding chunks back applies to this request already.

        Raises `InvalidArgument`; samples that the broker does not measure are not checked.
        """
        if not call.message.HasField("latency"):
            return
        report = call.message.latency
        check(report, self._measured)
        if report.HasField("held_us_max"):
            for stream_id in self._watched(report, call.peer, Operation.WRITE):
                self._manager.replicate.limit(stream_id, report.held_us_max)

    def on_written(self, write: PendingWrite) -> None:
        """Evaluate the report, and add advice to the response."""
        if not write.request.HasField("latency"):
            return
        manager, report, response = self._manager, write.request.latency, write.response
        watched = self._watched(report, write.peer, Operation.WRITE)
        if watched:

            def counts(sample: latency_pb2.HopSample) -> bool:
                here = watched.get(sample.stream_id, ())
                return sample.hop < latency_pb2.HOP_HAND_OVER and sample.streamlet_id in here

            samples = samples_of(report, counts)
            manager.reported(
                samples, report.clock_ahead_us, error_us=report.clock_error_us, own_linger_us=report.own_linger_us
            )
            if write.request.chunk_count and not write.refused:  # a report may come without any chunk
                manager.replicated(watched, perf_counter() - write.begun_s)
            response.advice.extend(manager.advise_writer(watched))
        response.broker_time_us = manager.now_us()

    def on_read(self, call: ReadCall) -> None:
        """Check the report. Raises as `on_write`."""
        if call.message.HasField("latency"):
            check(call.message.latency, self._measured)

    def on_read_answered(self, call: ReadCall, response: broker_pb2.MultiReadChunksResponse) -> None:
        """Evaluate the report, and add advice to the response."""
        if not call.message.HasField("latency"):
            return
        report, peer = call.message.latency, call.peer
        watched = self._watched(report, peer, Operation.READ)
        if watched:
            groups = self._groups(report, peer)

            def counts(sample: latency_pb2.HopSample) -> bool:
                here = watched.get(sample.stream_id, ())
                return (
                    sample.hop >= latency_pb2.HOP_HAND_OVER
                    and sample.consumer_group in groups
                    and sample.streamlet_id in here
                    and self._measured(sample)
                )

            self._manager.reported(samples_of(report, counts), report.clock_ahead_us, error_us=report.clock_error_us)
            response.advice.extend(self._manager.advise_reader(watched, groups))
        response.broker_time_us = self._manager.now_us()

    def _measured(self, sample: latency_pb2.HopSample) -> bool:
        return self._manager.measures(sample.stream_id, sample.hop, sample.consumer_group)

    def _groups(self, report: latency_pb2.LatencyReport, peer: Peer) -> set[str]:
        """Return the measured consumer groups of a report that the peer may use: it cannot report for others."""
        found = set()
        measures, reads = self._manager.measures, latency_pb2.HOP_HAND_OVER
        named = {(sample.stream_id, sample.consumer_group) for sample in report.samples}
        for name in {group for stream_id, group in named if measures(stream_id, reads, group)}:
            try:
                if name:
                    self._may_use_group(peer, name)
            except KeraError:
                continue
            found.add(name)
        return found

    def _watched(
        self, report: latency_pb2.LatencyReport, peer: Peer, operation: Operation
    ) -> Mapping[int, Container[int]]:
        """Return the streams of a report, with their streamlets, that have a budget and allow the peer `operation`."""
        found: dict[int, Container[int]] = {}
        for stream_id in stream_ids(report):
            if self._manager.watches(stream_id):
                try:
                    found[stream_id] = self._usable(peer, operation, stream_id)
                except KeraError:
                    continue
        return found
