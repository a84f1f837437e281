"""Converts samples to messages and back, and checks the messages of peers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kera.core.errors import InvalidArgument
from kera.core.latency.buckets import BUCKETS
from kera.core.latency.hop import Hop
from kera.core.latency.sample import TIME_US_MAX, Sample
from kera.v1 import latency_pb2

INTERVAL_S = 1.0
"""Time between two reports of a sender."""
SAMPLES_MAX = 500
"""Maximum of samples in a report; the rest goes with the next report."""
CHUNKS_MAX = 1 << 32
"""Maximum of chunks in a sample."""
GROUP_BYTES_MAX = 1024


class Of(NamedTuple):
    """The subject of a sample."""

    stream_id: int
    streamlet_id: int
    hop: Hop
    consumer_group: str = ""


def add_sample(report: latency_pb2.LatencyReport, of: Of, sample: Sample) -> None:
    """Put a sample into a report. Empty buckets at the end are left out."""
    filled = max((index for index, count in enumerate(sample.buckets) if count), default=-1) + 1
    report.samples.add(
        stream_id=of.stream_id,
        streamlet_id=of.streamlet_id,
        hop=int(of.hop),
        count=sample.count,
        sum_us=sample.sum_us,
        max_us=sample.max_us,
        buckets=sample.buckets[:filled],
        consumer_group=of.consumer_group,
    )


Counts = Callable[[latency_pb2.HopSample], bool]
"""Returns whether a sample is relevant; other samples are ignored, whatever they contain."""


def checked(report: latency_pb2.LatencyReport) -> list[tuple[Of, Sample]]:
    """Return the samples of a peer's report that are not empty. Raises `InvalidArgument` if the report is invalid."""
    check(report, _everything)
    return list(samples_of(report, _everything))


def check(report: latency_pb2.LatencyReport, counts: Counts) -> None:
    """Check a peer's report and its relevant samples. Raises `InvalidArgument` if the report is invalid."""
    if len(report.samples) > SAMPLES_MAX:
        text = f"a latency report has {len(report.samples)} samples, and at most {SAMPLES_MAX} are taken"
        raise InvalidArgument(text, limit=SAMPLES_MAX)
    if max(report.clock_error_us, abs(report.clock_ahead_us)) > TIME_US_MAX:
        raise InvalidArgument(f"a latency report: clocks that are more than {TIME_US_MAX} us apart cannot be compared")
    if report.own_linger_us > TIME_US_MAX:
        raise InvalidArgument(
            f"a latency report: the linger {report.own_linger_us} us is over the limit of {TIME_US_MAX}"
        )
    if report.held_us_max > TIME_US_MAX:
        raise InvalidArgument(f"a latency report: the delay {report.held_us_max} us is over the limit of {TIME_US_MAX}")
    for message in report.samples:
        if (message.count or message.hop) and counts(message):
            wrong = _wrong_with(message)
            if wrong is not None:
                raise InvalidArgument(
                    f"a latency report: {wrong}", stream_id=message.stream_id, streamlet_id=message.streamlet_id
                )


def samples_of(report: latency_pb2.LatencyReport, counts: Counts) -> Iterator[tuple[Of, Sample]]:
    """Yield the relevant samples that are not empty; invalid ones are left out."""
    for message in report.samples:
        if (message.count or message.hop) and counts(message) and _wrong_with(message) is None:
            sample = Sample()
            sample.count, sample.sum_us, sample.max_us = message.count, message.sum_us, message.max_us
            sample.buckets[: len(message.buckets)] = array("Q", message.buckets)
            yield Of(message.stream_id, message.streamlet_id, Hop(message.hop), message.consumer_group), sample


def stream_ids(report: latency_pb2.LatencyReport) -> Iterable[int]:
    """Return the streams that a report names, each once."""
    return dict.fromkeys(sample.stream_id for sample in report.samples)


def _everything(_message: latency_pb2.HopSample) -> bool:
    return True


def _wrong_with(message: latency_pb2.HopSample) -> str | None:
    """Return why a sample is invalid; None: it is valid."""
    if message.hop not in Hop._value2member_map_:
        return f"there is no hop {message.hop}"
    hop, buckets, group, wrong = Hop(message.hop), list(message.buckets), message.consumer_group, None
    if len(buckets) > BUCKETS:
        wrong = f"{len(buckets)} buckets, of {BUCKETS}"
    elif message.count > CHUNKS_MAX:
        wrong = f"{message.count} chunks, of {CHUNKS_MAX} at most"
    elif sum(buckets) != message.count:
        wrong = f"{sum(buckets)} chunks in buckets, of {message.count}"
    elif message.max_us > TIME_US_MAX:
        wrong = f"a time of {message.max_us} us, of {TIME_US_MAX} at most"
    elif not message.max_us <= message.sum_us <= message.max_us * message.count:
        wrong = (
            f"{message.sum_us} us altogether, of {message.count} chunks of which none took more than {message.max_us}"
        )
    elif bool(group) and not hop.of_reader:
        wrong = "a consumer group, which writers are not in"
    elif len(group.encode()) > GROUP_BYTES_MAX:
        wrong = f"a consumer group of more than {GROUP_BYTES_MAX} bytes"
    if wrong is None:
        return None
    return f"{hop.word} of stream {message.stream_id}, streamlet {message.streamlet_id}, has {wrong}"
